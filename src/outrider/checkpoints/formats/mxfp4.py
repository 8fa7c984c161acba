"""Experts of gpt-oss in MXFP4: codes of four bits, and a power of two for every 32 of them.

Their codes are those of GGUF's type of that name. They are written in its order to a file in
memory, and packed from there.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base.stored import StoredFile
from ..coded import Coded, CodedPart
from ..dtypes import Array, cast
from ..quantize import Matrix
from .gguf_types import SIZES, Kind
from .shared import Tensors

GROUP, BYTES = SIZES[Kind.MXFP4]
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
VALUES = np.concatenate((VALUES, -VALUES))
"""The numbers that codes stand for."""
BIAS = 127
"""Subtracted from a stored exponent."""
Octets = NDArray[np.uint8]


class Mxfp4:
    """The format of checkpoints whose experts are MXFP4; their other matrices are plain."""

    note: str | None = None
    keeps = False

    def __init__(self, options: Mapping[str, Any], where: Path) -> None:
        pass

    def matrix(
        self, source: Tensors, name: str, shape: tuple[int, int], dtype: np.dtype[Any]
    ) -> Matrix:
        """See ``Format``."""
        return source.get(name, shape, dtype)


class _InMemory(StoredFile):
    """A file that is in memory while it is open; its path is that of its bytes' source."""

    def __init__(self, path: Path, octets: Octets) -> None:
        super().__init__(path, octets.nbytes, 0)
        object.__setattr__(self, "_octets", octets)

    @contextmanager
    def opened(self) -> Iterator[BufferedReader]:
        """Yield the file."""
        octets: Octets = self._octets  # type: ignore[attr-defined]
        with _nowhere() as file:
            file.write(octets.data)
            file.flush()
            yield file


def _nowhere() -> Any:
    """Return an empty file without a name: in memory if the system can, else on disk."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("mxfp4"), "w+b")
    return tempfile.TemporaryFile()


def expert_codes(source: Tensors, name: str, shape: tuple[int, int, int], pairs: bool) -> Coded:
    """Return the matrices of all experts, one after the other.

    They are ``name``_blocks [experts, outputs, inputs / 32, 16] and ``name``_scales [experts,
    outputs, inputs / 32] of ``shape`` (experts, outputs, inputs). With ``pairs``, gate and up rows
    alternate there; the result has the gates of all experts first.
    """
    count, outputs, inputs = shape
    if inputs % GROUP:
        raise source.wrong(f"{name}_blocks", f"has rows of {inputs}, no multiple of {GROUP}")
    blocks = source.octets(f"{name}_blocks", (count, outputs, inputs // GROUP, GROUP // 2))
    scales = source.octets(f"{name}_scales", (count, outputs, inputs // GROUP))
    turns = (slice(0, None, 2), slice(1, None, 2)) if pairs else (slice(None),)
    path = source.folder
    parts = [_part(path, blocks[:, turn], scales[:, turn], inputs) for turn in turns]
    return Coded(tuple(parts), inputs)


def _part(path: Path, blocks: Octets, scales: Octets, inputs: int) -> CodedPart:
    rows = blocks.shape[0] * blocks.shape[1]
    low, high = blocks & 15, blocks >> 4  # of an even and of the next input
    codes = np.stack((low, high), -1).reshape(rows, inputs // GROUP, GROUP)
    stored = np.empty((rows, inputs // GROUP, BYTES), np.uint8)
    stored[..., 0] = scales.reshape(rows, -1)
    half = GROUP // 2
    stored[..., 1:] = codes[..., :half] | codes[..., half:] << 4
    exponents = stored[..., 0].astype(np.int32) - BIAS

    def read(dtype: np.dtype[Any]) -> Array:
        pairs = stored[..., 1:]
        numbers = VALUES[np.concatenate((pairs & 15, pairs >> 4), -1)]
        return cast(np.ldexp(numbers, exponents[..., None]).reshape(rows, inputs), dtype)

    file = _InMemory(path, stored.reshape(-1))
    width = inputs // GROUP * BYTES
    return CodedPart(file, 0, int(Kind.MXFP4), Kind.MXFP4.name, rows, width, None, read)
