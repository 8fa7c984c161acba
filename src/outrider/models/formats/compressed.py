"""Checkpoints of compressed-tensors, as llm-compressor writes them.

Tensors of a matrix [out, in]. "pack-quantized": ``weight_packed`` int32 [out, in * bits / 32],
codes plus 2**(bits - 1), low bits first; ``weight_scale`` [out, groups]; ``weight_zero_point`` int8
[out, groups], or packed along outputs as int32; ``weight_g_idx`` int32 [in]; ``weight_shape``. The
others: ``weight`` int8 or float8 [out, in] with ``weight_scale`` by tensor, output, group or block,
and ``weight_zero_point`` int8. Only weights are quantised here, whatever is asked of activations.
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
    FLOAT8,
    PLAIN,
    REMEDY,
    Tensors,
    block_size,
    in_order,
    misshapen,
    read_scales,
    say,
    scaled,
    stated_group,
    unpack,
    unread,
    without_symmetry,
    words,
    words_for,
)
from .patterns import matches, patterns

FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mixed-precision",
    "dense",
)


class Compressed:
    """Reads what a ``quantization_config`` of compressed-tensors says: a ``base.Format``.

    Raises:
        ModelError: the config is damaged, or its format, sparsity or transforms are not read.
    """

    def __init__(self, options: Mapping[str, Any], where: Path) -> None:
        fields = Fields(options, f"{where}: quantization_config")
        groups = fields.sections("config_groups")
        weights = [group.section("weights") for group in groups]
        sizes = [stated_group(scheme, "group_size") for scheme in weights]
        many = len({size for size in sizes if size > 0}) > 1  # else nobody asks for targets
        self._sizes = [
            (patterns(group, "targets") if many else [], size)
            for group, size in zip(groups, sizes, strict=True)
            if size > 0
        ]
        blocks = [block_size(scheme, "block_structure") for scheme in weights]
        self._block = next(filter(None, blocks), None)
        formats = {f.text("format", "") for f in (fields, *groups)} - {"", *FORMATS}
        sparsity = fields.section("sparsity_config").text("format", "dense")
        found = [shown(form) for form in sorted(formats)]
        if fields.section("transform_config").sections("config_groups"):
            found.append("'transforms'")
        if sparsity != "dense":
            found.append(shown(sparsity))
        if found:
            raise ModelError(
                f"{where}: compressed-tensors with {found[0]} are not read; {REMEDY}, or "
                "compressed as pack-quantized, int-quantized or float-quantized."
            )
        activations = any("input_activations" in group for group in groups)
        self.note = None
        if activations or options.get("kv_cache_scheme"):
            self.note = (
                f"{where} wants activations or the cache quantised as well: only its weights are."
            )

    def matrix(
        self, source: Tensors, name: str, shape: tuple[int, int], dtype: torch.dtype
    ) -> Matrix:
        """See ``base.Format``."""
        if f"{name}_packed" in source:
            return self._packed(source, name, shape, dtype)
        found = source.raw(name, shape)
        if found.dtype in PLAIN:
            return found.to(dtype)
        scales, group = read_scales(
            source, f"{name}_scale", shape, self._sizes_of(name), self._block
        )
        if found.dtype in FLOAT8:
            say(f"{source.folder}: FP8 weights are dequantised at load.")
            return scaled(found, scales, group, dtype)
        if found.dtype != torch.int8:
            raise unread(source, name, found)
        zeros = self._zeros(source, name, scales.shape, 8)
        return Quantized((found.int() + 128).to(torch.uint8), scales, zeros, 8, group)

    def _sizes_of(self, name: str) -> list[int]:
        """Group sizes that the matrix ``name`` may have, that of a scheme that names it first."""
        if len({size for _, size in self._sizes}) < 2:
            return [size for _, size in self._sizes]
        module = name.removesuffix(".weight")
        ordered = sorted(self._sizes, key=lambda e: not any(matches(t, module) for t in e[0]))
        return [size for _, size in ordered]

    def _packed(
        self, source: Tensors, name: str, shape: tuple[int, int], dtype: torch.dtype
    ) -> Matrix:
        outputs, inputs = shape
        packed = words(source, f"{name}_packed")
        fitting = [b for b in BITS if tuple(packed.shape) == (outputs, words_for(inputs, b))]
        if not fitting:
            raise misshapen(source, f"{name}_packed", packed, shape)
        bits = fitting[0]
        if f"{name}_shape" in source and source.raw(f"{name}_shape").tolist() != list(shape):
            raise misshapen(source, f"{name}_shape", packed, shape)
        scales, group = read_scales(
            source, f"{name}_scale", shape, self._sizes_of(name), self._block
        )
        zeros = self._zeros(source, name, scales.shape, bits)
        codes = unpack(packed, bits)[:, :inputs].contiguous()
        found = Quantized(codes, scales, zeros, bits, group)
        if f"{name}_g_idx" in source:
            index = source.raw(f"{name}_g_idx", (inputs,))
            # -1 throughout stands for none.
            if int(index.max()) >= 0:
                return in_order(source, f"{name}_g_idx", found, index, dtype)
        return found

    def _zeros(
        self, source: Tensors, name: str, shape: tuple[int, ...], bits: int
    ) -> torch.Tensor | None:
        """Zeros uint8 of ``shape`` [out, groups]; None where they are the middle."""
        full = f"{name}_zero_point"
        if full not in source:
            return None
        outputs, groups = shape
        found = source.raw(full)
        if found.dtype == torch.int32 and tuple(found.shape) == (words_for(outputs, bits), groups):
            return without_symmetry(unpack(found.T, bits)[:, :outputs].T, bits)
        signed = found.reshape(1, 1).expand(outputs, groups) if found.numel() == 1 else found
        if tuple(signed.shape) != (outputs, groups):
            raise misshapen(source, full, found, (outputs, groups))
        return without_symmetry((signed.int() + (1 << bits - 1)).to(torch.uint8), bits)
