"""A checkpoint's safetensors files: which tensor lies where, and its bytes.

The layout is safetensors' own: the length of a header, the header as JSON, the tensors' bytes. The
safetensors library checks a file; bytes are read, not mapped, since a mapped file that shrinks ends
the process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..errors import ModelError, shown
from ..fields import read_object
from ..gguf import read_into
from ..text.guard import readable

INDEX = "model.safetensors.index.json"
TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Entry:
    """One tensor: its type as the file names it, its shape, and its bytes in the file."""

    file: Path
    type: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int

    def read(self) -> torch.Tensor:
        """The tensor, in memory of its own.

        Raises:
            ModelError: the file has become shorter, or the type is not read.
        """
        dtype = TYPES.get(self.type)
        if dtype is None:
            raise ModelError(f"{self.file} holds tensors of type {self.type}, which are not read.")
        room = torch.empty(self.nbytes, dtype=torch.uint8)
        try:
            with self.file.open("rb", buffering=0) as file:
                file.seek(self.begin)
                complete = read_into(file, room.numpy())
        except OSError as error:
            raise ModelError(f"{self.file} cannot be read ({error.strerror}).") from None
        if not complete:
            raise ModelError(f"{self.file} became shorter while it was read; fetch it again.")
        return room.view(dtype).view(self.shape)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the checkpoint in ``folder``, in order.

    Raises:
        ModelError: the index is damaged, names files elsewhere, or a file is missing.
    """
    index = folder / INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    named = read_object(index).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise ModelError(f"{index} is damaged; fetch the checkpoint again.")
    for name in named.values():
        plain = isinstance(name, str) and Path(name).name == name
        if not plain or not name.endswith(".safetensors"):
            raise ModelError(
                f"{index}: weight_map names {shown(name)}; the name of a .safetensors file in the "
                "same folder is needed."
            )
    return sorted({folder / name for name in named.values()})


def find_tensors(folder: Path) -> dict[str, Entry]:
    """The tensors of the checkpoint in ``folder``, by name; empty where there are no files.

    Raises:
        ModelError: see ``weight_files``; or a file is damaged.
    """
    found: dict[str, Entry] = {}
    for file in weight_files(folder):
        try:
            state = file.stat()
        except (OSError, ValueError):
            raise ModelError(f"{file} is missing; fetch the checkpoint again.") from None
        found |= _entries(file, state.st_mtime_ns, state.st_size)
    return found


@lru_cache(maxsize=512)
def _entries(file: Path, changed: int, size: int) -> Mapping[str, Entry]:
    with readable(f"{file} is damaged", "fetch it again."):
        with safe_open(file, framework="pt"):
            pass  # checks types, shapes and offsets
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header: dict[str, Any] = json.loads(opened.read(min(length, size)))
        header.pop("__metadata__", None)
        return {name: _entry(file, 8 + length, about) for name, about in header.items()}


def _entry(file: Path, start: int, about: Mapping[str, Any]) -> Entry:
    begin, end = about["data_offsets"]
    return Entry(file, about["dtype"], tuple(about["shape"]), start + begin, end - begin)
