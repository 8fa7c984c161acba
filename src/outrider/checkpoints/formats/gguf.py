"""Reads the headers of GGUF files: metadata, and the place of each tensor.

The layout is ggml's (docs/gguf.md there), versions 2 and 3, little-endian. The ``gguf`` package's
reader takes several seconds for a vocabulary of 128k.

A model may come in parts, ``NAME-00001-of-0000N.gguf``, as llama.cpp's ``llama-gguf-split`` writes
them: each is a complete GGUF file with its number and their count, and the first has all other
metadata. The first part stands for the model.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...base.fields import Fields
from ...base.stored import StoredFile
from ...errors import ModelError
from .gguf_header import AGAIN, Header, Metadata
from .gguf_types import SIZES, Kind

SUFFIX = ".gguf"
VERSIONS = (2, 3)
LARGEST_UNIT = 1 << 20
"""Bound on ``general.alignment``, the unit of tensors' offsets; its default is 32."""
NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
"""Keys of a part: its number from 0, the number of parts, and that of all tensors."""
MOST_PARTS = 99_999
"""Their numbers have five digits in names."""
PART = re.compile(rf"(.+)-(\d{{5}})-of-(\d{{5}}){re.escape(SUFFIX)}", re.DOTALL)


def is_gguf(path: Path) -> bool:
    """Return whether ``path`` names a GGUF file; it need not exist."""
    return path.suffix == SUFFIX and not path.is_dir()


@dataclass(frozen=True)
class StoredTensor:
    """One tensor: its ``shape`` in torch's order, its type, and its bytes in ``file``."""

    file: StoredFile
    shape: tuple[int, ...]
    kind: Kind
    begin: int
    nbytes: int


@dataclass(frozen=True)
class GGUF:
    """A model's ``metadata`` by key, and its ``tensors`` by name; ``kinds`` are those of values.

    ``path`` is the file, the first of ``files`` if there are several parts. A value's kind is its
    type's number in the format and, for a list, that of its items.
    """

    path: Path
    metadata: Metadata
    kinds: dict[str, tuple[int, int | None]]
    tensors: dict[str, StoredTensor]
    files: tuple[Path, ...]

    @property
    def fields(self) -> Fields:
        """The metadata, typed."""
        return Fields(self.metadata, str(self.path))

    def read(
        self, tensor: StoredTensor, begin: int = 0, nbytes: int | None = None
    ) -> npt.NDArray[np.uint8]:
        """Return ``nbytes`` of ``tensor`` from ``begin`` on, by default all: uint8 [nbytes]."""
        octets = np.empty(tensor.nbytes - begin if nbytes is None else nbytes, np.uint8)
        tensor.file.fill(octets, tensor.begin + begin)
        return octets


def part_files(path: Path) -> list[Path]:
    """Return ``path`` and the files beside it that are parts of the same model by their names."""
    name = PART.fullmatch(path.name)
    if name is None:
        return [path]
    mates = {other: PART.fullmatch(other.name) for other in path.parent.iterdir()}
    return sorted(o for o, mate in mates.items() if mate and mate.group(1, 3) == name.group(1, 3))


def open_gguf(path: Path) -> GGUF:
    """Return the model in the file at ``path`` and its other parts, without reading tensors."""
    first = _open(path)
    fields = first.fields
    count = fields.whole(COUNT, high=MOST_PARTS, default=1)
    if count < 2:
        return first
    name, number = PART.fullmatch(path.name), fields.whole(NUMBER, high=count - 1)
    if name is None or int(name[3]) != count or int(name[2]) != number + 1:
        ending = f"-{number + 1:05}-of-{count:05}{SUFFIX}"
        raise ModelError(
            f"{path} is part {number + 1} of {count}, but its name does not end in {ending}; "
            "rename all parts so."
        )
    if number:
        start = path.with_name(f"{name[1]}-{1:05}-of-{count:05}{SUFFIX}")
        raise ModelError(f"{path} is part {number + 1} of {count}; give the first, {start}.")
    files, tensors = [path], dict(first.tensors)
    for number in range(1, count):
        file = path.with_name(f"{name[1]}-{number + 1:05}-of-{count:05}{SUFFIX}")
        if not file.exists():
            raise ModelError(f"{file} is missing, part {number + 1} of {count}; fetch it, too.")
        part = _open(file)
        for key, needed in ((COUNT, count), (NUMBER, number)):
            said = part.fields.whole(key)
            if said != needed:
                raise ModelError(
                    f"{file}: {key} is {said}, not {needed} as its name says; {AGAIN}."
                )
        twice = tensors.keys() & part.tensors.keys()
        if twice:
            raise ModelError(f"{file}: tensor {min(twice)!r} is in another part, too; {AGAIN}.")
        files.append(file)
        tensors |= part.tensors
    if fields.whole(TENSORS, default=len(tensors)) != len(tensors):
        promised = f"{TENSORS} is {fields.whole(TENSORS)}"
        raise ModelError(
            f"{path}: {promised}, but its parts have {len(tensors)}; fetch them again."
        )
    return replace(first, tensors=tensors, files=tuple(files))


def _open(path: Path) -> GGUF:
    """Return the content of one file."""
    try:
        stored = StoredFile.at(path)
    except OSError:
        raise ModelError(f"{path} is no file; give a .gguf file that exists.") from None
    if stored.size < 24:
        raise ModelError(f"{path} is too short for a GGUF file; fetch it again.")
    with stored.opened() as file:
        header = Header(file, stored.size)
        if header.octets(4) != b"GGUF":
            raise ModelError(f"{path} is no GGUF file; fetch it again.")
        return _parsed(stored, header)


def _parsed(stored: StoredFile, header: Header) -> GGUF:
    path = stored.path
    version, num_tensors, num_entries = header.take("IQQ")
    if version not in VERSIONS:
        raise ModelError(f"{path} is GGUF of version {version}; versions 2 and 3 are read.")
    try:
        values = {header.text(): header.value() for _ in range(num_entries)}
        entries = [header.tensor() for _ in range(num_tensors)]
    except (struct.error, UnicodeDecodeError, KeyError, MemoryError, OverflowError):
        raise ModelError(f"{path}: the header is damaged; {AGAIN}.") from None
    if len(values) < num_entries:
        raise ModelError(f"{path}: its metadata hold a key twice; {AGAIN}.")
    metadata = Metadata(path, {key: value for key, (value, _) in values.items()})
    kinds = {key: kind for key, (_, kind) in values.items()}
    unit = Fields(metadata, str(path)).whole("general.alignment", high=LARGEST_UNIT, default=32)
    unit = unit or 32
    start = -(-header.at // unit) * unit
    tensors = {
        name: _placed(stored, name, shape, kind, start + offset)
        for name, shape, kind, offset in entries
    }
    if len(tensors) < len(entries):
        ((name, _),) = Counter(name for name, *_ in entries).most_common(1)
        raise ModelError(f"{path}: tensor {name!r} is there twice; {AGAIN}.")
    if sum(t.nbytes for t in tensors.values()) > stored.size:
        raise ModelError(f"{path}: tensors overlap in the file; fetch it again.")
    return GGUF(path, metadata, kinds, tensors, (path,))


def _placed(
    file: StoredFile, name: str, shape: tuple[int, ...], kind: int, begin: int
) -> StoredTensor:
    """Return the tensor ``name`` at the byte ``begin`` of a file."""
    path = file.path
    try:
        type = Kind(kind)
    except ValueError:
        raise ModelError(f"{path}: tensor {name!r} is of unknown type {kind}.") from None
    block, octets = SIZES[type]
    length = prod(shape) // block * octets
    if not shape or 0 in shape or shape[-1] % block or begin + length > file.size:
        raise ModelError(f"{path}: tensor {name!r} is damaged or cut off; {AGAIN}.")
    return StoredTensor(file, shape, type, begin, length)
