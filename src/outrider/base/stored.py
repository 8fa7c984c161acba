"""A file of a checkpoint, opened once for its header and again for its weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError
from .fields import check_plain


@dataclass(frozen=True)
class StoredFile:
    """The file at ``path``, distinguished from any replacement by size and time.

    Inodes would be more precise, but some remote mounts give a file a new one at each opening.
    """

    path: Path
    size: int
    time: int

    @staticmethod
    def at(path: Path) -> StoredFile:
        """Return the file that ``path`` names now; refuse pipes, devices and folders."""
        state = path.stat()
        check_plain(path, state)
        return StoredFile(path, state.st_size, state.st_mtime_ns)

    @contextmanager
    def opened(self) -> Iterator[BufferedReader]:
        """Yield the file, open; refuse a replacement, and a file that changes meanwhile."""
        try:
            with self.path.open("rb") as file:
                self._check(file)
                yield file
                self._check(file)
        except OSError as error:
            raise ModelError(f"{self.path} cannot be read ({error.strerror}).") from None

    def fill(self, buffer: NDArray[np.uint8], begin: int) -> None:
        """Fill ``buffer`` with the file's bytes from ``begin`` on.

        They are read, not mapped: a mapped file that shrinks kills the process.
        """
        with self.opened() as file:
            file.seek(begin)
            if file.readinto(buffer.data) < len(buffer):
                raise ModelError(f"{self.path} is too short; fetch it again.")

    def _check(self, file: BufferedReader) -> None:
        state = os.fstat(file.fileno())
        if (state.st_size, state.st_mtime_ns) != (self.size, self.time):
            raise ModelError(f"{self.path} has changed since its header was read; load it again.")
