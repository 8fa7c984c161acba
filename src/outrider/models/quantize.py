"""Weights of few bits: what a quantised matrix is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BITS = (4, 8)


@dataclass(frozen=True)
class Quantized:
    """A matrix w[o, i] = scales[o, i // group] * (codes[o, i] - zeros[o, i // group]).

    Args:
        codes: uint8 [out, in], each below 2**bits.
        scales: fp32 [out, groups].
        zeros: uint8 [out, groups]; None is 2**(bits - 1) everywhere: a symmetric recipe.
        bits: 4 or 8.
        group: inputs that share a scale, the last group may be short; a whole row at most
            ("per channel").
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in), as of the matrix that it stands for."""
        return (self.codes.shape[0], self.codes.shape[1])

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix, made in fp32 and rounded to ``dtype``: [out, in]."""
        spread = self.codes.shape[1]
        zeros = 1 << (self.bits - 1)
        offset: torch.Tensor | int = zeros
        if self.zeros is not None:
            offset = self.zeros.int().repeat_interleave(self.group, 1)[:, :spread]
        scales = self.scales.repeat_interleave(self.group, 1)[:, :spread]
        return ((self.codes.int() - offset) * scales).to(dtype)

    def rows(self, index: torch.Tensor) -> Quantized:
        """The outputs ``index``, in its order."""
        zeros = None if self.zeros is None else self.zeros[index]
        return Quantized(self.codes[index], self.scales[index], zeros, self.bits, self.group)

    @staticmethod
    def stacked(parts: list[Quantized]) -> Quantized:
        """The outputs of all ``parts``, which share bits and group and all or none have zeros."""
        first = parts[0]
        zeros = None
        if first.zeros is not None:
            zeros = torch.cat([p.zeros for p in parts if p.zeros is not None])
        return Quantized(
            torch.cat([p.codes for p in parts]),
            torch.cat([p.scales for p in parts]),
            zeros,
            first.bits,
            first.group,
        )
