"""GPTQ checkpoints, as AutoGPTQ, GPTQModel and transformers write them.

Tensors of a matrix [out, in], with n = 32 / bits: ``qweight`` int32 [in / n, out], input i in bits
(i mod n) * bits of word i / n; ``qzeros`` int32 [groups, out / n], packed alike along outputs;
``scales`` [groups, out]; ``g_idx`` int32 [in], the group of each input. In the format "gptq" a zero
is stored as one less, in "gptq_v2" as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...errors import ModelError, shown
from ...fields import Fields
from ..quantize import BITS, Matrix, Quantized
from .base import (
    REMEDY,
    Tensors,
    group_size,
    in_order,
    misshapen,
    stated_group,
    unpack,
    without_symmetry,
    words,
    words_for,
)

STORED_LESS = {"gptq": 1, "gptq_v2": 0}
ONES = {4: 0x11111111, 8: 0x01010101}
"""1 in each code of a word."""


class Gptq:
    """Reads what a ``quantization_config`` of GPTQ says: a ``base.Format``.

    Raises:
        ModelError: another layout, or bits other than 4 and 8.
    """

    note = None

    def __init__(self, options: Mapping[str, Any], where: Path) -> None:
        layout = str(options.get("checkpoint_format") or options.get("format") or "gptq").lower()
        if layout not in STORED_LESS:
            raise ModelError(
                f"{where}: GPTQ weights laid out as {shown(layout)} are not read; save them in the "
                f"format 'gptq' or 'gptq_v2', or {REMEDY}."
            )
        bits = options.get("bits")
        if bits not in BITS:
            raise ModelError(
                f"{where}: GPTQ weights of {shown(bits)} bits are not read, only of 4 and 8; "
                f"{REMEDY}."
            )
        self._less = STORED_LESS[layout]
        self._group = stated_group(Fields(options, str(where)), "group_size")

    def matrix(
        self, source: Tensors, name: str, shape: tuple[int, int], dtype: torch.dtype
    ) -> Matrix:
        """See ``base.Format``."""
        base = name.removesuffix("weight")
        if f"{base}qweight" not in source:
            return source.get(name, shape, dtype)
        outputs, inputs = shape
        packed = words(source, f"{base}qweight")
        # A matrix may have bits and a group size of its own (GPTQModel's "dynamic").
        fitting = [b for b in BITS if tuple(packed.shape) == (words_for(inputs, b), outputs)]
        if not fitting:
            raise misshapen(source, f"{base}qweight", packed, shape)
        bits = fitting[0]
        scales = source.raw(f"{base}scales")
        if scales.dim() != 2 or scales.shape[1] != outputs:
            raise misshapen(source, f"{base}scales", scales, shape)
        groups = scales.shape[0]
        zeros = words(source, f"{base}qzeros", (groups, words_for(outputs, bits)))
        # Added to whole words, as GPTQModel subtracts it: a zero of 0 borrows from the next code.
        offsets = unpack(zeros + self._less * ONES[bits], bits)[:, :outputs].T
        found = Quantized(
            unpack(packed.T, bits)[:, :inputs].contiguous(),
            scales.T.float().contiguous(),
            without_symmetry(offsets, bits),
            bits,
            group_size(groups, inputs, [self._group]) or 0,
        )
        if f"{base}g_idx" in source:
            index = source.raw(f"{base}g_idx", (inputs,))
            return in_order(source, f"{base}g_idx", found, index, dtype)
        if not found.group:
            raise misshapen(source, f"{base}scales", scales, shape)
        return found
