"""Quantised matrices in safetensors: the "pack-quantized" layout of compressed-tensors.

A matrix ``name.weight`` is stored as ``weight_packed``, int32 [out, words], codes from the lowest
bits of each word up; ``weight_scale`` [out, groups]; ``weight_shape``, int64 [out, in]; and with
zero points ``weight_zero_point``, int32 [words, groups], packed along the outputs. What the codes
mean is in config.json under ``quantization_config``. The layout is that of the library's
``compressors/pack_quantized``, so that others read these checkpoints as well.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from ..config import Recipe
from ..errors import ModelError
from .quantize import Quantized

METHOD, FORMAT = "compressed-tensors", "pack-quantized"
WORD = 32


class Tensors(Protocol):
    """Where tensors come from, see ``weights.Checkpoint``."""

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor ``name`` of ``shape``, in ``dtype``."""
        ...


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [rows, n], each below 2**bits, as int32 [rows, ceil(n * bits / 32)]; 4 or 8 bits."""
    rows, each = len(codes), WORD // bits
    spare = -codes.shape[1] % each
    bytes_ = F.pad(codes, (0, spare))
    if bits == 4:
        bytes_ = bytes_[:, ::2] | bytes_[:, 1::2] << 4
    return bytes_.flatten().view(torch.int32).view(rows, -1)


def unpack(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """What ``pack`` was given: uint8 [rows, count] of int32 [rows, words]."""
    codes = words.flatten().view(torch.uint8).view(len(words), -1)
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    return codes[:, :count].contiguous()


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
    head = "re:.*embed_tokens$" if tied else "re:.*lm_head$"
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


class Schemes:
    """Which matrices of a checkpoint are quantised, and how, from its ``quantization_config``."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._ignored = [str(target) for target in config.get("ignore") or ()]
        self._groups: list[tuple[list[str], Recipe]] = []
        for group in config["config_groups"].values():
            weights = group["weights"]
            size = weights["group_size"] if weights["strategy"] == "group" else None
            recipe = Recipe(int(weights["num_bits"]), size, not weights["symmetric"])
            self._groups.append(([str(target) for target in group["targets"]], recipe))

    def of(self, name: str) -> Recipe | None:
        """The recipe of the matrix ``name``, which ends in ".weight"; None where it has none.

        A target that names modules comes before one that means all of a class.
        """
        module = name.removesuffix(".weight")
        kind = "Embedding" if module.endswith("embed_tokens") else "Linear"
        if any(_means(target, module) for target in self._ignored):
            return None
        for named in (True, False):
            for targets, recipe in self._groups:
                for target in targets:
                    if _means(target, module) if named else target == kind:
                        return recipe
        return None


def read_schemes(folder: Path) -> Schemes | None:
    """How the checkpoint in ``folder`` is quantised; None where it is not, or in another layout.

    Raises:
        ModelError: its config.json contradicts the layout.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        found = config.get("quantization_config") or {}
        if (found.get("quant_method"), found.get("format")) != (METHOD, FORMAT):
            return None
        return Schemes(found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(
            f"{folder / 'config.json'}: its quantization_config cannot be read; fetch the "
            "checkpoint again."
        ) from None


def _means(target: str, module: str) -> bool:
    """Whether ``target`` is the name of ``module``, or an expression that finds it."""
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return target == module


def read_packed(source: Tensors, name: str, shape: tuple[int, int], recipe: Recipe) -> Quantized:
    """The matrix ``name`` of ``shape``, as stored in ``source`` by ``recipe``.

    Raises:
        ModelError: a tensor is missing or misshapen.
    """
    out, inputs = shape
    group = min(recipe.group or inputs, inputs)
    groups, each = -(-inputs // group), WORD // recipe.bits
    words = source.get(f"{name}_packed", (out, -(-inputs // each)), torch.int32)
    scales = source.get(f"{name}_scale", (out, groups), torch.float32)
    zeros = None
    if recipe.zeros:
        packed = source.get(f"{name}_zero_point", (-(-out // each), groups), torch.int32)
        zeros = unpack(packed.T, recipe.bits, out).T.contiguous()
    return Quantized(unpack(words, recipe.bits, inputs), scales, zeros, recipe.bits, group)
