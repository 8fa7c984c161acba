"""FP8 checkpoints (``quant_method`` "fp8" and "fbgemm_fp8"): dequantised at load.

A matrix is ``weight`` float8 [out, in] times ``weight_scale_inv`` (DeepSeek, Qwen, transformers:
one for each block) or ``weight_scale`` (one for the matrix or for each output).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...fields import Fields
from ..quantize import Matrix
from .shared import (
    FLOAT8,
    PLAIN,
    Checkpoint,
    block_size,
    dequantized_float8,
    read_scales,
    unsupported_dtype,
)

BLOCK = (128, 128)


class Fp8:
    """A ``shared.Format``: FP8 as fp8 and fbgemm_fp8 configs describe it.

    Raises:
        ModelError: the config is damaged.
    """

    def __init__(self, options: Mapping[str, Any], where: Path) -> None:
        self.note: str | None = (
            f"{where}: FP8 weights are dequantised at load, and activations are not quantised."
        )
        self._block = block_size(Fields(options, str(where)), "weight_block_size") or BLOCK

    def matrix(
        self, source: Checkpoint, name: str, shape: tuple[int, int], dtype: torch.dtype
    ) -> Matrix:
        codes = source.raw(name, shape)
        if codes.dtype in PLAIN:
            return codes.to(dtype)
        if codes.dtype not in FLOAT8:
            raise unsupported_dtype(source, name, codes)
        suffix = "_scale_inv" if f"{name}_scale_inv" in source else "_scale"
        scales, group = read_scales(source, name + suffix, shape, (), self._block)
        return dequantized_float8(codes, scales, group, dtype)
