"""Creates a new folder completely or not at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from safetensors.torch import save_file as save
from torch import Tensor

from ..base.fields import one_line
from ..errors import ConfigError, ModelError


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to fill, which is renamed to ``out``, or removed after an error."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} already exists and is not empty; give a new folder.")
    place = out.resolve()
    near = next(folder for folder in place.parents if folder.is_dir())
    filling = near / f".{place.name}-{uuid4().hex}"
    filling.mkdir()
    try:
        yield filling
        place.parent.mkdir(parents=True, exist_ok=True)
        filling.rename(place)
    finally:
        shutil.rmtree(filling, ignore_errors=True)


def save_file(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file."""
    try:
        save(tensors, file, metadata)
    except Exception as error:
        raise ModelError(f"{file.name} cannot be written ({one_line(error)}).") from None
