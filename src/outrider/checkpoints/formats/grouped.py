"""AWQ and GPTQ checkpoints: int32 words of codes, with scales and zeros by group of inputs.

Tensors of a matrix [out, in], with n = 32 / bits; words are filled from their low bits:

* ``qweight`` int32. AWQ ("gemm", 4 bits): [in, out / n], the outputs of a word in ``AWQ_ORDER``.
  GPTQ: [in / n, out], input i in word i / n.
* ``qzeros`` int32 [groups, out / n], packed along the outputs, for AWQ in ``AWQ_ORDER``. The GPTQ
  format "gptq" stores each zero minus one, "gptq_v2" the zero itself.
* ``scales`` [groups, out].
* ``g_idx`` int32 [in], of GPTQ only: the group of each input.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base.fields import Fields
from ...errors import ModelError, shown
from ..dtypes import FLOAT32, cast
from ..quantize import BITS, Codes, Matrix, Quantized
from .shared import (
    REMEDY,
    Tensors,
    group_size,
    num_words,
    regrouped,
    stated_group,
    unless_symmetric,
    unpack,
)

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
AWQ_LAYOUTS = ("gemm", "exllama", "ipex", "marlin")
"""Kernels for the same tensors; "gemv" has different ones."""
SUBTRACTED = {"gptq": 1, "gptq_v2": 0}
"""Subtracted from each zero before it is stored, by GPTQ's formats."""
ONES = {4: 0x11111111, 8: 0x01010101}
"""1 in each code of a word."""


class Gptq:
    """A ``shared.Format``: GPTQ as AutoGPTQ, GPTQModel and transformers write it."""

    note: str | None = None
    keeps = True

    def __init__(self, options: Mapping[str, Any], where: Path) -> None:
        layout = str(options.get("checkpoint_format") or options.get("format") or "gptq").lower()
        if layout not in SUBTRACTED:
            what = f"laid out as {shown(layout)} are not read"
            remedy = f"save them in the format 'gptq' or 'gptq_v2', or {REMEDY}"
            raise ModelError(f"{where}: GPTQ weights {what}; {remedy}.")
        bits = options.get("bits")
        if bits not in BITS:
            what = f"GPTQ weights of {shown(bits)} bits are not read, only of 4 and 8"
            raise ModelError(f"{where}: {what}; {REMEDY}.")
        self._subtracted = SUBTRACTED[layout]
        self._group = stated_group(Fields(options, str(where)), "group_size")

    def matrix(
        self, source: Tensors, name: str, shape: tuple[int, int], dtype: np.dtype[Any]
    ) -> Matrix:
        base = name.removesuffix("weight")
        if f"{base}qweight" not in source:
            return source.get(name, shape, dtype)
        outputs, inputs = shape
        words = source.words(f"{base}qweight")
        bits = self._bits(words, shape)
        if bits is None:
            raise source.misshapen(f"{base}qweight", words, shape)
        scales = source.raw(f"{base}scales")
        if scales.ndim != 2 or scales.shape[1] != outputs:
            raise source.misshapen(f"{base}scales", scales, shape)
        groups = len(scales)
        zeros = source.words(f"{base}qzeros", (groups, num_words(outputs, bits)))
        matrix = Quantized(
            np.ascontiguousarray(self._codes(words, bits)[:outputs, :inputs]),
            np.ascontiguousarray(cast(scales.T, FLOAT32)),
            unless_symmetric(self._zeros(zeros, bits)[:outputs], bits),
            bits,
            group_size(groups, inputs, [self._group]) or 0,
        )
        if f"{base}g_idx" in source:
            index = source.raw(f"{base}g_idx", (inputs,))
            return regrouped(source, f"{base}g_idx", matrix, index, dtype)
        if not matrix.group:
            raise source.misshapen(f"{base}scales", scales, shape)
        return matrix

    def _bits(self, words: NDArray[np.int32], shape: tuple[int, int]) -> int | None:
        """Return the bits of a matrix, which GPTQModel's "dynamic" may set; None if none fit."""
        outputs, inputs = shape
        fitting = (b for b in BITS if words.shape == (num_words(inputs, b), outputs))
        return next(fitting, None)

    def _codes(self, words: NDArray[np.int32], bits: int) -> Codes:
        """Return uint8 [out, in], padded."""
        return unpack(words.T, bits)

    def _zeros(self, words: NDArray[np.int32], bits: int) -> Codes:
        """Return uint8 [out, groups], padded."""
        # Added to whole words, as GPTQModel subtracts it: a zero of 0 borrows from the next code.
        return unpack(words + self._subtracted * ONES[bits], bits).T


class Awq(Gptq):
    """A ``shared.Format``: AWQ in AutoAWQ's layout "gemm"."""

    def __init__(self, options: Mapping[str, Any], where: Path) -> None:
        layout = str(options.get("version") or options.get("format") or "gemm").lower()
        if layout not in AWQ_LAYOUTS or options.get("backend") == "llm-awq":
            raise ModelError(
                f"{where}: AWQ weights laid out as {shown(layout)} are not read; save them with "
                f"version 'gemm', or {REMEDY}."
            )
        bits = options.get("bits", options.get("w_bit", 4))
        if bits != 4:
            what = f"AWQ weights of {shown(bits)} bits are not read, only of 4"
            raise ModelError(f"{where}: {what}; {REMEDY}.")
        name = "group_size" if "group_size" in options else "q_group_size"
        self._group = stated_group(Fields(options, str(where)), name)

    def _bits(self, words: NDArray[np.int32], shape: tuple[int, int]) -> int | None:
        outputs, inputs = shape
        return 4 if words.shape == (inputs, num_words(outputs, 4)) else None

    def _codes(self, words: NDArray[np.int32], bits: int) -> Codes:
        return self._zeros(words, bits)

    def _zeros(self, words: NDArray[np.int32], bits: int) -> Codes:
        codes = unpack(words, bits)
        codes = codes.reshape(len(codes), -1, len(AWQ_ORDER))
        place = [AWQ_ORDER.index(i) for i in range(len(AWQ_ORDER))]
        return codes[..., place].reshape(len(codes), -1).T
