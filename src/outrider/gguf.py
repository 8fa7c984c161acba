"""GGUF files: metadata, and where each tensor lies.

The layout is ggml's (docs/gguf.md there), versions 2 and 3, little-endian. The header is read here
because the ``gguf`` package's reader takes several seconds for a vocabulary of 128k; types of
tensors and what they mean are that package's.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from mmap import ACCESS_READ, MADV_DONTNEED, mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from .errors import ModelError

SUFFIX = ".gguf"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""Metadata's types of fixed size, as ``struct`` spells them."""


def is_gguf(path: Path) -> bool:
    """Whether a user who gives ``path`` means a GGUF file."""
    return path.suffix == SUFFIX and not path.is_dir()


@dataclass(frozen=True)
class StoredTensor:
    """One tensor: its ``shape`` in torch's order, its type, and its uint8 [bytes] in the file."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class GGUF:
    """A file's ``metadata`` by key, and its ``tensors`` by name, which lie in ``mapped``."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]
    mapped: mmap

    def forget(self) -> None:
        """Let go of what was read; the next reader gets it from the file again."""
        self.mapped.madvise(MADV_DONTNEED)


def open_gguf(path: Path) -> GGUF:
    """The file at ``path``; its tensors are mapped, not read.

    Raises:
        ModelError: there is no such file, it is damaged, one of several parts, or holds what is not
            known.
    """
    try:
        state = path.stat()
    except OSError:
        raise ModelError(f"{path} is no file; give a .gguf file that exists.") from None
    return _open(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=4)
def _open(path: Path, changed: int, size: int) -> GGUF:
    if size < 24:
        raise ModelError(f"{path} is too short for a GGUF file; fetch it again.")
    with path.open("rb") as file:
        mapped = mmap(file.fileno(), 0, access=ACCESS_READ)
    data = np.frombuffer(mapped, np.uint8)
    if bytes(data[:4]) != b"GGUF":
        raise ModelError(f"{path} is no GGUF file; fetch it again.")
    header = _Header(data)
    version, num_tensors, num_entries = header.take("IQQ")
    if version not in VERSIONS:
        raise ModelError(f"{path} is GGUF of version {version}; versions 2 and 3 are read.")
    try:
        metadata = {header.text(): header.value() for _ in range(num_entries)}
        found = [header.tensor() for _ in range(num_tensors)]
    except (struct.error, UnicodeDecodeError, KeyError, MemoryError, OverflowError):
        raise ModelError(f"{path}: the header is damaged; fetch the file again.") from None
    if metadata.get("split.count", 1) > 1:
        raise ModelError(
            f"{path} is one of {metadata['split.count']} parts; merge them into one file first "
            "(llama-gguf-split --merge)."
        )
    unit = int(metadata.get("general.alignment", 32)) or 32
    start = -(-header.at // unit) * unit
    tensors = {}
    for name, shape, kind, offset in found:
        try:
            known = GGMLQuantizationType(kind)
        except ValueError:
            raise ModelError(f"{path}: tensor {name!r} is of unknown type {kind}.") from None
        block, octets = GGML_QUANT_SIZES[known]
        begin, length = start + offset, prod(shape) // block * octets
        if not shape or shape[-1] % block or begin + length > size:
            raise ModelError(
                f"{path}: tensor {name!r} is damaged or cut off; fetch the file again."
            )
        tensors[name] = StoredTensor(shape, known, data[begin : begin + length])
    return GGUF(path, metadata, tensors, mapped)


class _Header:
    """Reads a header from front to back; ``at`` is the next byte."""

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        self._data = data.data
        self.at = 4

    def take(self, form: str) -> tuple[Any, ...]:
        """The next numbers."""
        found = struct.unpack_from("<" + form, self._data, self.at)
        self.at += struct.calcsize("<" + form)
        return found

    def text(self) -> str:
        """The next string."""
        (length,) = self.take("Q")
        end = self.at + length
        if end > len(self._data):
            raise struct.error("a string beyond the end")
        found = str(self._data[self.at : end], "utf-8")
        self.at = end
        return found

    def value(self) -> Any:
        """The next entry's value: a number, a string, or a list of one of these."""
        (kind,) = self.take("I")
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.take(NUMBERS[kind])[0]
        kind, count = self.take("IQ")
        if kind == STRING:
            return [self.text() for _ in range(count)]
        return list(self.take(f"{count}{NUMBERS[kind]}"))

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """The next tensor's name, shape, type and offset."""
        name = self.text()
        (dims,) = self.take("I")
        shape = self.take(f"{dims}Q")
        kind, offset = self.take("IQ")
        return name, tuple(reversed(shape)), kind, offset
