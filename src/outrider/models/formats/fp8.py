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
from .base import FLOAT8, PLAIN, Tensors, block_size, read_scales, scaled, unread

BLOCK = (128, 128)


class Fp8:
    """Reads what a ``quantization_config`` of FP8 says: a ``base.Format``.

    Raises:
        ModelError: the config is damaged.
    """

    def __init__(self, options: Mapping[str, Any], where: Path) -> None:
        self.note = (
            f"{where}: FP8 weights are dequantised at load, and activations are not quantised."
        )
        self._block = block_size(Fields(options, str(where)), "weight_block_size") or BLOCK

    def matrix(
        self, source: Tensors, name: str, shape: tuple[int, int], dtype: torch.dtype
    ) -> Matrix:
        """See ``base.Format``."""
        found = source.raw(name, shape)
        if found.dtype in PLAIN:
            return found.to(dtype)
        if found.dtype not in FLOAT8:
            raise unread(source, name, found)
        suffix = "_scale_inv" if f"{name}_scale_inv" in source else "_scale"
        scales, group = read_scales(source, name + suffix, shape, (), self._block)
        return scaled(found, scales, group, dtype)
