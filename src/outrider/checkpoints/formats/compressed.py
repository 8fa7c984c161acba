"""Checkpoints of compressed-tensors, as llm-compressor writes them, and of FP8.

Tensors of a matrix [out, in]. "pack-quantized": ``weight_packed`` int32 [out, in * bits / 32],
codes plus 2**(bits - 1), low bits first; ``weight_scale`` [out, groups]; ``weight_zero_point`` int8
[out, groups], or packed along outputs as int32; ``weight_g_idx`` int32 [in]; ``weight_shape``. The
others: ``weight`` int8 or float8 [out, in] with ``weight_scale`` per tensor, output, group or
block, and ``weight_zero_point`` int8. Activations are never quantised, whatever the config says.

FP8 checkpoints (``quant_method`` "fp8" and "fbgemm_fp8") are dequantised at load. A matrix is
``weight`` float8 [out, in] times ``weight_scale_inv`` (DeepSeek, Qwen, transformers: one for each
block) or ``weight_scale`` (one for the matrix or for each output).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...base.fields import Fields
from ...errors import ModelError, shown
from ..dtypes import PLAIN, cast
from ..quantize import BITS, Codes, Floats, Matrix, Quantized
from .patterns import matches, patterns
from .shared import (
    FLOAT8,
    REMEDY,
    Tensors,
    block_size,
    dequantized_float8,
    num_words,
    read_scales,
    regrouped,
    stated_group,
    unless_symmetric,
    unpack,
    warn_once,
)

METHOD = "compressed-tensors"
FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision",
    "dense",
)  # fmt: skip
BLOCK = (128, 128)


class Compressed:
    """A ``shared.Format``: the weights of a compressed-tensors config."""

    def __init__(self, options: Mapping[str, Any], where: Path) -> None:
        fields = Fields(options, f"{where}: quantization_config")
        groups = fields.sections("config_groups")
        weights = [group.section("weights") for group in groups]
        sizes = [stated_group(scheme, "group_size") for scheme in weights]
        several = len({size for size in sizes if size > 0}) > 1  # else targets are not needed
        self._schemes = [
            (patterns(group, "targets") if several else [], size)
            for group, size in zip(groups, sizes, strict=True)
            if size > 0
        ]
        blocks = (block_size(scheme, "block_structure") for scheme in weights)
        self._block = next(filter(None, blocks), None)
        self._refuse_unsupported(fields, groups, where)
        formats = {f.text("format", "") for f in (fields, *groups)} - {""}
        integers = any(scheme.text("type", "int") != "float" for scheme in weights)
        self.keeps = integers and formats != {"float-quantized"}
        activations = any("input_activations" in group for group in groups)
        more = activations or options.get("kv_cache_scheme")
        note = f"{where} wants activations or the cache quantised as well: only its weights are."
        self.note: str | None = note if more else None

    @staticmethod
    def _refuse_unsupported(fields: Fields, groups: list[Fields], where: Path) -> None:
        formats = {f.text("format", "") for f in (fields, *groups)} - {"", *FORMATS}
        unsupported = [shown(name) for name in sorted(formats)]
        if fields.section("transform_config").sections("config_groups"):
            unsupported.append("'transforms'")
        sparsity = fields.section("sparsity_config").text("format", "dense")
        if sparsity != "dense":
            unsupported.append(shown(sparsity))
        if unsupported:
            raise ModelError(
                f"{where}: compressed-tensors with {unsupported[0]} are not read; {REMEDY}, or "
                "compressed as pack-quantized, int-quantized or float-quantized."
            )

    def matrix(
        self, source: Tensors, name: str, shape: tuple[int, int], dtype: np.dtype[Any]
    ) -> Matrix:
        if f"{name}_packed" in source:
            return self._packed(source, name, shape, dtype)
        codes = source.raw(name, shape)
        if codes.dtype in PLAIN:
            return cast(codes, dtype)
        scales, group = self._scales(source, name, shape)
        if codes.dtype in FLOAT8:
            warn_once(f"{source.folder}: FP8 weights are dequantised at load.")
            return dequantized_float8(codes, scales, group, dtype)
        if codes.dtype != np.int8:
            raise source.unread(name, codes)
        zeros = self._zeros(source, name, scales.shape, 8)
        return Quantized(codes.view(np.uint8) ^ np.uint8(128), scales, zeros, 8, group)

    def _scales(self, source: Tensors, name: str, shape: tuple[int, int]) -> tuple[Floats, int]:
        """Return the scales of the matrix ``name``, see ``read_scales``.

        Group sizes are tried in the config's order, schemes that name the matrix first.
        """
        module = name.removesuffix(".weight")
        ordered = sorted(self._schemes, key=lambda s: not any(matches(t, module) for t in s[0]))
        sizes = [size for _, size in ordered]
        return read_scales(source, f"{name}_scale", shape, sizes, self._block)

    def _packed(
        self, source: Tensors, name: str, shape: tuple[int, int], dtype: np.dtype[Any]
    ) -> Matrix:
        outputs, inputs = shape
        words = source.words(f"{name}_packed")
        fitting = [b for b in BITS if words.shape == (outputs, num_words(inputs, b))]
        if not fitting:
            raise source.misshapen(f"{name}_packed", words, shape)
        bits = fitting[0]
        if f"{name}_shape" in source and source.raw(f"{name}_shape").tolist() != list(shape):
            raise source.misshapen(f"{name}_shape", words, shape)
        scales, group = self._scales(source, name, shape)
        zeros = self._zeros(source, name, scales.shape, bits)
        codes = np.ascontiguousarray(unpack(words, bits)[:, :inputs])
        matrix = Quantized(codes, scales, zeros, bits, group)
        if f"{name}_g_idx" in source:
            index = source.raw(f"{name}_g_idx", (inputs,))
            if int(index.max()) >= 0:  # all -1 means no index
                return regrouped(source, f"{name}_g_idx", matrix, index, dtype)
        return matrix

    def _zeros(self, source: Tensors, name: str, shape: tuple[int, ...], bits: int) -> Codes | None:
        """Return zeros uint8 of ``shape`` [out, groups], or None if all are the middle code."""
        full = f"{name}_zero_point"
        if full not in source:
            return None
        outputs, groups = shape
        stored = source.raw(full)
        if (stored.dtype, *stored.shape) == (np.int32, num_words(outputs, bits), groups):
            return unless_symmetric(unpack(stored.T, bits)[:, :outputs].T, bits)
        signed = np.broadcast_to(stored.reshape(1, 1), shape) if stored.size == 1 else stored
        if signed.shape != (outputs, groups):
            raise source.misshapen(full, stored, (outputs, groups))
        zeros = cast(signed, np.dtype(np.int32)) + (1 << bits - 1)
        return unless_symmetric(zeros.astype(np.uint8), bits)


class Fp8:
    """A ``shared.Format``: FP8 as fp8 and fbgemm_fp8 configs describe it."""

    keeps = False

    def __init__(self, options: Mapping[str, Any], where: Path) -> None:
        self.note: str | None = (
            f"{where}: FP8 weights are dequantised at load, those of experts to codes of 8 bits, "
            "and activations are not quantised."
        )
        self._block = block_size(Fields(options, str(where)), "weight_block_size") or BLOCK

    def matrix(
        self, source: Tensors, name: str, shape: tuple[int, int], dtype: np.dtype[Any]
    ) -> Matrix:
        codes = source.raw(name, shape)
        if codes.dtype in PLAIN:
            return cast(codes, dtype)
        if codes.dtype not in FLOAT8:
            raise source.unread(name, codes)
        suffix = "_scale_inv" if f"{name}_scale_inv" in source else "_scale"
        scales, group = read_scales(source, name + suffix, shape, (), self._block)
        return dequantized_float8(codes, scales, group, dtype)
