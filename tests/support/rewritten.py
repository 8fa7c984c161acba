"""GGUF files with other metadata, whatever it is, and the tensors that they have."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf

BOOL, FLOAT32, TEXT, LIST, UINT64, INT64, FLOAT64 = 7, 6, 8, 9, 10, 11, 12
LARGEST = 3.4e38
ALIGNMENT = 32


def _kind(value: Any) -> int:
    match value:
        case bool():
            return BOOL
        case int():
            return UINT64 if 0 <= value < 1 << 64 else INT64 if abs(value) < 1 << 63 else FLOAT64
        case float():
            return FLOAT64 if LARGEST < abs(value) < float("inf") else FLOAT32
        case list():
            return LIST
    return TEXT


def _packed(value: Any, kind: int) -> bytes:
    if kind == LIST:
        kinds = {_kind(item) for item in value}
        inner = kinds.pop() if len(kinds) == 1 else TEXT if kinds else UINT64
        items = b"".join(_packed(item, inner) for item in value)
        return struct.pack("<IQ", inner, len(value)) + items
    if kind == TEXT:
        text = (value if isinstance(value, str) else repr(value)).encode("utf-8", "surrogatepass")
        return struct.pack("<Q", len(text)) + text
    if kind == FLOAT64:
        return struct.pack("<d", max(-(10**308), min(value, 10**308)))
    return struct.pack({BOOL: "<?", FLOAT32: "<f", UINT64: "<Q", INT64: "<q"}[kind], value)


class Rewritten:
    """The tensors of a file, to be written behind other metadata."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        whole = path.read_bytes()
        entries = [tensor.field for tensor in reader.tensors]
        first = min(entry.offset for entry in entries)
        end = max(entry.offset + sum(part.nbytes for part in entry.parts) for entry in entries)
        self._count, self._entries = len(entries), whole[first:end]
        self._data = whole[reader.data_offset :]
        self.metadata: dict[str, Any] = {
            name: field.contents()
            for name, field in reader.fields.items()
            if not name.startswith("GGUF.")
        }

    def with_metadata(self, metadata: Mapping[str, Any]) -> bytes:
        """The whole file; null is a value that is missing, and objects are texts."""
        there = {name: value for name, value in metadata.items() if value is not None}
        head = struct.pack("<4sIQQ", b"GGUF", 3, self._count, len(there))
        for name, value in there.items():
            kind = _kind(value)
            head += _packed(name, TEXT) + struct.pack("<I", kind) + _packed(value, kind)
        head += self._entries
        return head + bytes(-len(head) % ALIGNMENT) + self._data
