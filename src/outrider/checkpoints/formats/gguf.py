"""Reads the headers of GGUF files: metadata, and where each tensor lies.

The layout is ggml's (docs/gguf.md there), versions 2 and 3, little-endian. The ``gguf`` package's
reader takes several seconds for a vocabulary of 128k; only its tensor types are used here.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from ...base.fields import Fields, check_plain, fill
from ...errors import ModelError

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
"""Types of fixed size in metadata, as ``struct`` codes."""
DIMENSIONS = 4
LARGEST_UNIT = 1 << 20
"""Bound on ``general.alignment``, the unit of tensors' offsets; its default is 32."""


def is_gguf(path: Path) -> bool:
    """Return whether ``path`` names a GGUF file; it need not exist."""
    return path.suffix == SUFFIX and not path.is_dir()


@dataclass(frozen=True)
class StoredTensor:
    """One tensor: its ``shape`` in torch's order, its type, and its bytes in the file."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    begin: int
    nbytes: int


@dataclass(frozen=True)
class GGUF:
    """A file's ``metadata`` by key, and its ``tensors`` by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]

    @property
    def fields(self) -> Fields:
        """The metadata, typed."""
        return Fields(self.metadata, str(self.path))

    def read(
        self, tensor: StoredTensor, begin: int = 0, nbytes: int | None = None
    ) -> npt.NDArray[np.uint8]:
        """Return ``nbytes`` of ``tensor`` from ``begin`` on, by default all: uint8 [nbytes]."""
        octets = np.empty(tensor.nbytes - begin if nbytes is None else nbytes, np.uint8)
        fill(octets, self.path, tensor.begin + begin)
        return octets


def open_gguf(path: Path) -> GGUF:
    """Return the file at ``path``, without reading its tensors."""
    try:
        state = path.stat()
    except OSError:
        raise ModelError(f"{path} is no file; give a .gguf file that exists.") from None
    check_plain(path, state)
    size = state.st_size
    if size < 24:
        raise ModelError(f"{path} is too short for a GGUF file; fetch it again.")
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelError(f"{path} is no GGUF file; fetch it again.")
            return _parsed(path, _Header(file, size), size)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}).") from None


def _parsed(path: Path, header: _Header, size: int) -> GGUF:
    version, num_tensors, num_entries = header.take("IQQ")
    if version not in VERSIONS:
        raise ModelError(f"{path} is GGUF of version {version}; versions 2 and 3 are read.")
    try:
        metadata = {header.text(): header.value() for _ in range(num_entries)}
        entries = [header.tensor() for _ in range(num_tensors)]
    except (struct.error, UnicodeDecodeError, KeyError, MemoryError, OverflowError):
        raise ModelError(f"{path}: the header is damaged; fetch the file again.") from None
    fields = Fields(metadata, str(path))
    parts = fields.whole("split.count", default=1)
    if parts > 1:
        remedy = "merge them into one file first (llama-gguf-split --merge)"
        raise ModelError(f"{path} is one of {parts} parts; {remedy}.")
    unit = fields.whole("general.alignment", high=LARGEST_UNIT, default=32) or 32
    start = -(-header.at // unit) * unit
    tensors = {
        name: _placed(path, name, shape, kind, start + offset, size)
        for name, shape, kind, offset in entries
    }
    if sum(t.nbytes for t in tensors.values()) > size:
        raise ModelError(f"{path}: tensors overlap in the file; fetch it again.")
    return GGUF(path, metadata, tensors)


def _placed(
    path: Path, name: str, shape: tuple[int, ...], kind: int, begin: int, size: int
) -> StoredTensor:
    """Return the tensor ``name`` at the byte ``begin`` of a file of ``size`` bytes."""
    try:
        type = GGMLQuantizationType(kind)
    except ValueError:
        raise ModelError(f"{path}: tensor {name!r} is of unknown type {kind}.") from None
    block, octets = GGML_QUANT_SIZES[type]
    length = prod(shape) // block * octets
    if not shape or 0 in shape or shape[-1] % block or begin + length > size:
        raise ModelError(f"{path}: tensor {name!r} is damaged or cut off; fetch the file again.")
    return StoredTensor(shape, type, begin, length)


class _Header:
    """Reads a header from start to end; ``at`` is the next byte."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size
        self.at = 4

    def _read(self, length: int) -> bytes:
        octets = self._file.read(length) if length <= self._size - self.at else b""
        if len(octets) != length:
            raise struct.error("the file ends inside its header")
        self.at += length
        return octets

    def take(self, form: str) -> tuple[Any, ...]:
        """Return the next numbers, by their ``struct`` codes."""
        return struct.unpack("<" + form, self._read(struct.calcsize("<" + form)))

    def text(self) -> str:
        """Return the next string."""
        (length,) = self.take("Q")
        return str(self._read(length), "utf-8")

    def value(self) -> Any:
        """Return the next value of metadata: a number, a string, or a list of one of these."""
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
        """Return the next tensor's name, shape, type and offset."""
        name = self.text()
        (dims,) = self.take("I")
        if dims > DIMENSIONS:
            raise struct.error("a tensor of too many dimensions")
        shape = self.take(f"{dims}Q")
        kind, offset = self.take("IQ")
        return name, tuple(reversed(shape)), kind, offset
