"""AWQ checkpoints in AutoAWQ's "gemm" layout.

Tensors of a matrix [out, in]: ``qweight`` int32 [in, out / 8], a word holding 8 outputs in the
order of ``ORDER``, low bits first; ``qzeros`` int32 [groups, out / 8], packed alike; ``scales``
[groups, out].
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...errors import ModelError, shown
from ...fields import Fields
from ..quantize import Matrix, Quantized
from .base import (
    REMEDY,
    Tensors,
    group_size,
    misshapen,
    stated_group,
    unpack,
    without_symmetry,
    words,
    words_for,
)

BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
LAYOUTS = ("gemm", "exllama", "ipex", "marlin")
"""transformers names a kernel here that reads the same tensors; "gemv" has others."""


class Awq:
    """Reads what a ``quantization_config`` of AWQ says: a ``base.Format``.

    Raises:
        ModelError: another layout, or bits other than 4.
    """

    note = None

    def __init__(self, options: Mapping[str, Any], where: Path) -> None:
        layout = str(options.get("version") or options.get("format") or "gemm").lower()
        if layout not in LAYOUTS or options.get("backend") == "llm-awq":
            raise ModelError(
                f"{where}: AWQ weights laid out as {shown(layout)} are not read; save them with "
                f"version 'gemm', or {REMEDY}."
            )
        bits = options.get("bits", options.get("w_bit", BITS))
        if bits != BITS:
            raise ModelError(
                f"{where}: AWQ weights of {shown(bits)} bits are not read, only of 4; {REMEDY}."
            )
        name = "group_size" if "group_size" in options else "q_group_size"
        self._group = stated_group(Fields(options, str(where)), name)

    def matrix(
        self, source: Tensors, name: str, shape: tuple[int, int], dtype: torch.dtype
    ) -> Matrix:
        """See ``base.Format``."""
        base = name.removesuffix("weight")
        if f"{base}qweight" not in source:
            return source.get(name, shape, dtype)
        outputs, inputs = shape
        wide = words_for(outputs, BITS)
        codes = _outputs(words(source, f"{base}qweight", (inputs, wide)), outputs)
        scales = source.raw(f"{base}scales")
        groups = scales.shape[0] if scales.dim() else 0
        group = group_size(groups, inputs, [self._group])
        if tuple(scales.shape) != (groups, outputs) or group is None:
            raise misshapen(source, f"{base}scales", scales, shape)
        zeros = _outputs(words(source, f"{base}qzeros", (groups, wide)), outputs)
        return Quantized(
            codes.contiguous(),
            scales.T.float().contiguous(),
            without_symmetry(zeros, BITS),
            BITS,
            group,
        )


def _outputs(packed: torch.Tensor, outputs: int) -> torch.Tensor:
    """uint8 [outputs, rows] of int32 ``packed`` [rows, outputs / 8]."""
    codes = unpack(packed, BITS).view(len(packed), -1, len(ORDER))
    place = [ORDER.index(i) for i in range(len(ORDER))]
    return codes[..., place].flatten(1)[:, :outputs].T
