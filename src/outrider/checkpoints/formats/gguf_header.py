"""Reads the header of a GGUF file from one buffer; lists are read on demand.

A vocabulary of 152,000 tokens, read string by string from the file, took most of a second.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ...errors import ModelError

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
AGAIN = "fetch the file again"
PIECE = 1 << 20
"""Bytes of a file that are read first; later reads double what was read."""
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class UnreadList:
    """A list in a header: the kind of its items, how many, and their bytes."""

    kind: int
    count: int
    octets: bytes

    def read(self) -> list[Any]:
        """Return the items."""
        octets, length_at, at = self.octets, _LENGTH.unpack_from, 0
        if self.kind != STRING:
            return list(struct.unpack(f"<{self.count}{NUMBERS[self.kind]}", octets))
        texts = []
        for _ in range(self.count):
            start = at + 8
            at = start + length_at(octets, at)[0]
            texts.append(octets[start:at].decode())
        return texts

    def find(self, texts: Collection[str]) -> dict[str, int]:
        """Return the last place of each of ``texts`` that is an item, without reading others."""
        octets, length_at, at = self.octets, _LENGTH.unpack_from, 0
        encoded = {text.encode(): text for text in texts}
        ends = {each: octets.rfind(_LENGTH.pack(len(each)) + each) for each in encoded}
        wanted = {each: encoded[each] for each, end in ends.items() if end >= 0}
        lengths, last = {len(each) for each in wanted}, max(ends.values(), default=-1)
        places: dict[str, int] = {}
        for number in range(self.count if self.kind == STRING else 0):
            if at > last:
                break
            start = at + 8
            at = start + length_at(octets, at)[0]
            if at - start in lengths and octets[start:at] in wanted:
                places[wanted[octets[start:at]]] = number
        return places


class Metadata(Mapping[str, Any]):
    """The values of the file at ``path`` by key; a damaged list is a ModelError when it is read.

    Args:
        path: the file.
        values: numbers, strings and lists.
    """

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self._path, self._values = path, values
        self._lists: dict[str, list[Any]] = {}

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if not isinstance(value, UnreadList):
            return value
        if key not in self._lists:
            try:
                self._lists[key] = value.read()
            except (UnicodeDecodeError, MemoryError):
                raise ModelError(f"{self._path}: the header is damaged; {AGAIN}.") from None
        return self._lists[key]

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def count(self, key: str) -> int:
        """Return how many items the list ``key`` has, 0 if there is none, without reading it."""
        value = self._values.get(key)
        if isinstance(value, UnreadList):
            return value.count
        return len(value) if isinstance(value, list) else 0

    def find(self, key: str, texts: Collection[str]) -> dict[str, int]:
        """Return the last place of each of ``texts`` in the list ``key``, without reading it."""
        value = self._values.get(key)
        if isinstance(value, UnreadList):
            return value.find(texts)
        listed = value if isinstance(value, list) else []
        return {text: i for i, text in enumerate(listed) if text in texts}

    def same(self, other: Metadata, key: str) -> bool:
        """Return whether another file has the same value of ``key``, without reading lists."""
        return bool(self._values.get(key) == other._values.get(key))


class Header:
    """Reads the header of a ``file`` of ``size`` bytes from start to end; ``at`` is the next byte.

    If the file ends too early, or has impossible values, it raises struct.error, KeyError or
    UnicodeDecodeError.
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self._octets = b""
        self.at = 0

    def _have(self, end: int) -> bytes:
        """Return the file's bytes up to ``end`` or further."""
        held = len(self._octets)
        if end > held:
            if end <= self._size:
                self._octets += self._file.read(max(end, 2 * held, PIECE) - held)
            if end > len(self._octets):
                raise struct.error("the file ends inside its header")
        return self._octets

    def octets(self, count: int) -> bytes:
        """Return the next bytes."""
        start, self.at = self.at, self.at + count
        return self._have(self.at)[start : self.at]

    def take(self, form: str) -> tuple[Any, ...]:
        """Return the next numbers, by their ``struct`` codes."""
        return struct.unpack("<" + form, self.octets(struct.calcsize("<" + form)))

    def text(self) -> str:
        """Return the next string."""
        (length,) = self.take("Q")
        return self.octets(length).decode()

    def value(self) -> tuple[Any, tuple[int, int | None]]:
        """Return the next value of metadata and its kind: a number, a string, or a list of one."""
        (kind,) = self.take("I")
        if kind == STRING:
            return self.text(), (kind, None)
        if kind != ARRAY:
            return self.take(NUMBERS[kind])[0], (kind, None)
        items, count = self.take("IQ")
        octets = self._strings(count) if items == STRING else self._numbers(items, count)
        return UnreadList(items, count, octets), (kind, items)

    def _numbers(self, kind: int, count: int) -> bytes:
        return self.octets(count * struct.calcsize("<" + NUMBERS[kind]))

    def _strings(self, count: int) -> bytes:
        """Return the bytes of the next strings, each after its length."""
        start = at = self.at
        held, length_at = self._have(at), _LENGTH.unpack_from
        for _ in range(count):
            if at + 8 > len(held):
                held = self._have(at + 8)
            at += 8 + length_at(held, at)[0]
        return self.octets(at - start)

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return the next tensor's name, shape, type and offset."""
        name = self.text()
        (dims,) = self.take("I")
        if dims > DIMENSIONS:
            raise struct.error("a tensor of too many dimensions")
        shape = self.take(f"{dims}Q")
        kind, offset = self.take("IQ")
        return name, tuple(reversed(shape)), kind, offset
