"""A checkpoint's safetensors files: where each tensor lies, and its bytes.

The layout is safetensors' own: the length of a header, the header as JSON, the tensors' bytes. The
safetensors library checks a file.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..base.fields import check_plain, fill, read_object, readable
from ..errors import ModelError, shown

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
        """Return the tensor, in memory of its own.

        Raises:
            ModelError: the file has become shorter, or the type is not read.
        """
        dtype = TYPES.get(self.type)
        if dtype is None:
            raise ModelError(f"{self.file} holds tensors of type {self.type}, which are not read.")
        octets = torch.empty(self.nbytes, dtype=torch.uint8)
        fill(octets.numpy(), self.file, self.begin)
        return octets.view(dtype).view(self.shape)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of the checkpoint in ``folder``, in order.

    Raises:
        ModelError: the index is damaged, names files elsewhere, or a file is missing.
    """
    index = folder / INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} is damaged; fetch the checkpoint again.")
    for name in weight_map.values():
        plain = isinstance(name, str) and Path(name).name == name
        if not plain or not name.endswith(".safetensors"):
            raise ModelError(
                f"{index}: weight_map names {shown(name)}; the name of a .safetensors file in the "
                "same folder is needed."
            )
    return sorted({folder / name for name in weight_map.values()})


def find_tensors(folder: Path) -> dict[str, Entry]:
    """Return the tensors of the checkpoint in ``folder`` by name; none without files.

    Raises:
        ModelError: see ``weight_files``; or a file is damaged.
    """
    entries: dict[str, Entry] = {}
    for file in weight_files(folder):
        try:
            state = file.stat()
        except (OSError, ValueError):
            raise ModelError(f"{file} is missing; fetch the checkpoint again.") from None
        check_plain(file, state)
        entries |= _entries(file, state.st_mtime_ns, state.st_size)
    return entries


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
