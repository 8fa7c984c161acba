"""A checkpoint's files: each is opened once, and its header says where each tensor is.

The layout of safetensors is the length of a header, the header as JSON, and the tensors' bytes. The
safetensors library checks a file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file as save

from ..base.fields import one_line, read_object, readable
from ..base.stored import StoredFile
from ..errors import ConfigError, ModelError, shown
from .dtypes import Array
from .formats.gguf import GGUF, is_gguf, open_gguf

INDEX = "model.safetensors.index.json"
MOST_DIMENSIONS = 32
"""Most dimensions of a tensor; some versions of NumPy support no more."""
TYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True)
class Entry:
    """One tensor: its type as the file names it, its shape, and its bytes in the file."""

    file: StoredFile
    type: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int

    def read(self) -> Array:
        """Return the tensor, in its own memory."""
        dtype = TYPES.get(self.type)
        if dtype is None:
            file = self.file.path
            raise ModelError(f"{file} holds tensors of type {self.type}, which are not read.")
        octets = np.empty(self.nbytes, np.uint8)
        self.file.fill(octets, self.begin)
        return octets.view(dtype).reshape(self.shape)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of the checkpoint in ``folder``, in order."""
    index = folder / INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} is damaged; fetch the checkpoint again.")
    for name in weight_map.values():
        plain = isinstance(name, str) and Path(name).name == name
        if not plain or not name.endswith(".safetensors"):
            needed = "the name of a .safetensors file in the same folder is needed"
            raise ModelError(f"{index}: weight_map names {shown(name)}; {needed}.")
    return sorted({folder / name for name in weight_map.values()})


class Files:
    """The files of a checkpoint's ``folder``, or a GGUF file: each is read when asked for, once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __str__(self) -> str:
        return str(self.folder)

    @cached_property
    def gguf(self) -> GGUF | None:
        """The GGUF file; None for a folder."""
        return open_gguf(self.folder) if is_gguf(self.folder) else None

    @cached_property
    def config(self) -> dict[str, Any] | None:
        """The object in config.json; None if there is no such file."""
        file = self.folder / "config.json"
        return read_object(file) if file.is_file() else None

    @cached_property
    def tensors(self) -> Mapping[str, Entry]:
        """The tensors of the safetensors files by name; none without files."""
        entries: dict[str, Entry] = {}
        for file in weight_files(self.folder):
            entries |= read_header(file)
        return entries


def files_of(folder: Path | Files) -> Files:
    """Return the files of ``folder``, which may be opened already."""
    return folder if isinstance(folder, Files) else Files(folder)


def read_header(file: Path) -> dict[str, Entry]:
    """Return the tensors in a safetensors file by name."""
    try:
        stored = StoredFile.at(file)
    except (OSError, ValueError):
        raise ModelError(f"{file} is missing; fetch the checkpoint again.") from None
    with readable(f"{file} is damaged", "fetch it again."):
        with safe_open(file, framework="np"):
            pass  # checks types, shapes and offsets
        with stored.opened() as opened:
            length = int.from_bytes(opened.read(8), "little")
            header: dict[str, Any] = json.loads(opened.read(min(length, stored.size)))
        header.pop("__metadata__", None)
        return {name: _entry(stored, 8 + length, about) for name, about in header.items()}


def _entry(file: StoredFile, start: int, about: Mapping[str, Any]) -> Entry:
    (begin, end), shape = about["data_offsets"], tuple(about["shape"])
    if len(shape) > MOST_DIMENSIONS:
        raise ValueError(f"a tensor has {len(shape)} dimensions")
    return Entry(file, about["dtype"], shape, start + begin, end - begin)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to fill, which is renamed to ``out``, or removed after an error."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} already exists and is not empty; give a new folder.")
    with _renamed(out) as filling:
        filling.mkdir()
        yield filling


@contextmanager
def new_file(out: Path) -> Iterator[Path]:
    """Yield the path of a file to write, which is renamed to ``out``, or removed after an error."""
    if out.exists():
        raise ConfigError(f"{out} already exists; give a new file.")
    with _renamed(out) as filling:
        yield filling


@contextmanager
def _renamed(out: Path) -> Iterator[Path]:
    """Yield a path near ``out``; what is made there is renamed to ``out``, or removed."""
    place = out.resolve()
    near = next(folder for folder in place.parents if folder.is_dir())
    filling = near / f".{place.name}-{uuid4().hex}"
    try:
        yield filling
        place.parent.mkdir(parents=True, exist_ok=True)
        filling.rename(place)
    finally:
        if filling.is_file():
            filling.unlink()
        shutil.rmtree(filling, ignore_errors=True)


@contextmanager
def usual_mode(file: Path) -> Iterator[None]:
    """Give a file that is written meanwhile the usual permissions of a new file.

    The safetensors library makes it readable by its owner only.
    """
    file.touch()
    mode = file.stat().st_mode
    yield
    file.chmod(mode)


def save_file(tensors: dict[str, Array], file: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file."""
    try:
        whole = {name: np.asarray(each, order="C") for name, each in tensors.items()}
        with usual_mode(file):
            save(whole, file, metadata)
    except Exception as error:
        raise ModelError(f"{file} cannot be written ({one_line(error)}).") from None
