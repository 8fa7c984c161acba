"""Quantised matrices in safetensors: the "pack-quantized" layout of compressed-tensors.

A matrix ``name.weight`` is stored as ``weight_packed``, int32 [out, words], codes from the lowest
bits of each word up; ``weight_scale`` [out, groups]; ``weight_shape``, int64 [out, in]; and with
zero points ``weight_zero_point``, int32 [words, groups], packed along the outputs. What the codes
mean is in config.json under ``quantization_config``. The layout is that of the library's
``compressors/pack_quantized``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..config import Recipe
from .quantize import Quantized

METHOD, FORMAT = "compressed-tensors", "pack-quantized"
WORD = 32


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [rows, n], each below 2**bits, as int32 [rows, ceil(n * bits / 32)]; 4 or 8 bits."""
    rows, each = len(codes), WORD // bits
    spare = -codes.shape[1] % each
    bytes_ = F.pad(codes, (0, spare))
    if bits == 4:
        bytes_ = bytes_[:, ::2] | bytes_[:, 1::2] << 4
    return bytes_.flatten().view(torch.int32).view(rows, -1)


def as_tensors(name: str, matrix: Quantized) -> dict[str, torch.Tensor]:
    """The tensors that ``matrix`` is stored as; ``name`` ends in ".weight"."""
    halves = matrix.scales.half()
    exact = torch.equal(halves.float(), matrix.scales)
    found = {
        f"{name}_packed": pack(matrix.codes, matrix.bits),
        f"{name}_scale": halves if exact else matrix.scales,
        f"{name}_shape": torch.tensor(matrix.shape),
    }
    if matrix.zeros is not None:
        zeros = pack(matrix.zeros.T.contiguous(), matrix.bits)
        found[f"{name}_zero_point"] = zeros.T.contiguous()
    return found


def scheme(recipe: Recipe, targets: str) -> dict[str, Any]:
    """One group of ``quantization_config``: what ``targets`` were made to."""
    weights = {
        "num_bits": recipe.bits,
        "type": "int",
        "symmetric": not recipe.zeros,
        "strategy": "channel" if recipe.group is None else "group",
        "group_size": recipe.group,
        "dynamic": False,
    }
    return {"targets": [targets], "weights": weights, "format": FORMAT}


def quantization_config(recipe: Recipe, tied: bool) -> dict[str, Any]:
    """What config.json says of a checkpoint that was made by ``recipe``."""
    head = "re:.*embed_tokens$" if tied else "re:.*(embed_tokens|lm_head)$"
    return {
        "quant_method": METHOD,
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": scheme(recipe, "Linear"),
            "group_1": scheme(recipe.head, head),
        },
        "ignore": ["re:.*mlp\\.gate$"],
    }
