"""Matrices whose codes stay in a GGUF file until a model reads them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.stored import StoredFile
from .dtypes import Array

UNIT = 16
"""Outputs that are side by side in the native step; a part of another type begins at a multiple."""


@dataclass(frozen=True)
class CodedPart:
    """Rows of a matrix in one tensor of a file.

    Args:
        file: the file.
        begin: where the tensor's first row is in it, in bytes.
        kind: ggml's number of the codes' type, and ``name`` its name.
        rows: how many the tensor has.
        width: the bytes of a row.
        order: the order of the rows, int64 [rows]; None is the file's.
        read: returns the tensor's rows, in the file's order, dequantised to a dtype.
    """

    file: StoredFile
    begin: int
    kind: int
    name: str
    rows: int
    width: int
    order: NDArray[np.int64] | None
    read: Callable[[np.dtype[Any]], Array]

    def dequantized(self, dtype: np.dtype[Any]) -> Array:
        """Return the rows [rows, in], computed in fp32 and rounded to ``dtype``."""
        tensor = self.read(dtype)
        return tensor if self.order is None else tensor[self.order]

    def within(self, rows: range) -> CodedPart:
        """Return a part with some of its rows, which must be in the file's order."""
        assert self.order is None

        def read(dtype: np.dtype[Any]) -> Array:
            return self.read(dtype)[rows.start : rows.stop]

        begin = self.begin + rows.start * self.width
        return replace(self, begin=begin, rows=len(rows), read=read)


@dataclass(frozen=True)
class Coded:
    """A matrix of ``inputs`` columns: the rows of ``parts``, one after the other."""

    parts: tuple[CodedPart, ...]
    inputs: int

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the matrix."""
        return sum(part.rows for part in self.parts), self.inputs

    def dequantized(self, dtype: np.dtype[Any]) -> Array:
        """Return the matrix [out, in], computed in fp32 and rounded to ``dtype``."""
        return np.concatenate([part.dequantized(dtype) for part in self.parts])

    def rows(self, order: NDArray[np.int64]) -> Coded:
        """Return it with its rows in ``order`` [out], which must not move rows between parts."""
        parts, begin = [], 0
        for part in self.parts:
            own = order[begin : begin + part.rows] - begin
            begin += part.rows
            parts.append(replace(part, order=own if part.order is None else part.order[own]))
        return replace(self, parts=tuple(parts))

    def ranges(self, parts: Sequence[range]) -> Coded:
        """Return some rows of it, which must be one part: those of ``parts``, in that order."""
        (whole,) = self.parts
        return replace(self, parts=tuple(whole.within(rows) for rows in parts))

    @staticmethod
    def stacked(matrices: Sequence[Coded]) -> Coded | None:
        """Return the outputs of ``matrices``; None if a type would change within a unit."""
        parts = tuple(part for matrix in matrices for part in matrix.parts)
        done = 0
        for part, after in itertools.pairwise(parts):
            done += part.rows
            if part.kind != after.kind and done % UNIT:
                return None
        return replace(matrices[0], parts=parts)
