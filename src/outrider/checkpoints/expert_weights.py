"""The matrices of a mixture's experts, stacked as a forward pass reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..base.config import Recipe
from .architecture import ExpertLayout, Mixture
from .dtypes import FLOAT32, Array
from .formats.gguf_weights import GGUFTensors
from .formats.mxfp4 import expert_codes
from .matrices import Source, by_recipe, plain, quantized, stacked
from .quantize import Matrix

PARTS = ("gate", "up", "down")
OF_FLOAT8 = Recipe(8, 128, False, False)
"""The recipe for experts in FP8: dequantised, a large mixture would need twice the memory."""


@dataclass(frozen=True)
class ExpertMatrices:
    """Reads the matrices of mixtures of ``hidden`` elements, quantised by a ``recipe`` if given.

    If matrices may keep codes (``keeps``), those in FP8 get codes of 8 bits. ``stacked`` and
    ``biases`` have the gates of all experts, followed by all ups; and the downs, one expert after
    the other.
    """

    source: Source
    layout: ExpertLayout
    mixture: Mixture
    hidden: int
    dtype: np.dtype[Any]
    recipe: Recipe | None
    keeps: bool

    def stacked(self, base: str) -> tuple[Matrix, Matrix]:
        """Return matrices [2 * experts * width, hidden] and [experts * hidden, width].

        Without gates the first one has half of these rows.
        """
        if isinstance(self.source, GGUFTensors):
            return self._of_file(base)
        both, down = (f"{base}{name}" for name in self.layout.fused)
        if f"{both}_blocks" in self.source:
            count, inner, width = self.mixture.experts, self.mixture.width, self.hidden
            coded = expert_codes(self.source, both, (count, 2 * inner, width), pairs=True)
            return coded, expert_codes(self.source, down, (count, width, inner), pairs=False)
        if both in self.source:
            return self._fused(base)
        numbers, layout = range(self.mixture.experts), self.layout
        inner, width = self.mixture.width, self.hidden
        first = [
            self._matrix(f"{base}{part.format(i)}.weight", inner, width)
            for part in filter(None, (layout.gate, layout.up))
            for i in numbers
        ]
        last = [
            self._matrix(f"{base}{layout.down.format(i)}.weight", width, inner) for i in numbers
        ]
        return stacked(first, self.dtype), stacked(last, self.dtype)

    def biases(self, base: str) -> tuple[Array, Array]:
        """Return the biases of both, fp32."""
        count, inner = self.mixture.experts, self.mixture.width
        if isinstance(self.source, GGUFTensors):
            gate, up, down = (
                self.source.get(f"{base}mlp.experts.{part}_proj.bias", (count, size), FLOAT32)
                for part, size in zip(PARTS, (inner, inner, self.hidden), strict=True)
            )
            return np.concatenate((gate.ravel(), up.ravel())), down.ravel()
        both, last = (f"{base}{name}_bias" for name in self.layout.fused)
        pairs = self.source.get(both, (count, 2 * inner), FLOAT32).reshape(count, inner, 2)
        down = self.source.get(last, (count, self.hidden), FLOAT32)
        return np.ascontiguousarray(pairs.transpose(2, 0, 1)).ravel(), down.ravel()

    def _of_file(self, base: str) -> tuple[Matrix, Matrix]:
        count, inner, width = self.mixture.experts, self.mixture.width, self.hidden
        firsts = PARTS[:2] if self.layout.gate else PARTS[1:2]
        made = [
            self._matrix(f"{base}mlp.experts.{part}_proj.weight", count * inner, width)
            for part in firsts
        ]
        last = self._matrix(f"{base}mlp.experts.down_proj.weight", count * width, inner)
        return stacked(made, self.dtype), last

    def _fused(self, base: str) -> tuple[Matrix, Matrix]:
        """Return them from tensors that have all experts."""
        count, inner, width = self.mixture.experts, self.mixture.width, self.hidden
        both, last = (f"{base}{name}" for name in self.layout.fused)
        if self.layout.turned:
            given = self.source.get(both, (count, width, 2 * inner), self.dtype)
            first = given.reshape(count, width, inner, 2).transpose(3, 0, 2, 1)
            down = self.source.get(last, (count, inner, width), self.dtype).swapaxes(1, 2)
        else:
            given = self.source.get(both, (count, 2 * inner, width), self.dtype)
            first = given.reshape(count, 2, inner, width).swapaxes(0, 1)
            down = self.source.get(last, (count, width, inner), self.dtype)
        made = first.reshape(-1, width), down.reshape(-1, inner)
        if self.recipe is None:
            return made
        recipe = self.recipe
        coded = (
            by_recipe(self.source, n, m, recipe) for n, m in zip((both, last), made, strict=True)
        )
        return next(coded), next(coded)

    def _matrix(self, name: str, outputs: int, inputs: int) -> Matrix:
        if self.recipe is not None:
            return quantized(self.source, name, (outputs, inputs), self.recipe)
        source = self.source
        if self.keeps and not isinstance(source, GGUFTensors) and source.is_float8(name):
            wide = plain(source.matrix(name, (outputs, inputs), FLOAT32), FLOAT32)
            return by_recipe(source, name, wide, OF_FLOAT8)
        return self.source.matrix(name, (outputs, inputs), self.dtype)
