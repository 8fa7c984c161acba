"""Packed weights on disk: a later start maps them instead of packing or quantising again.

One file holds the weights of one checkpoint by one recipe, dtype and library, under a key of all
that. The least recently used files are removed first. A damaged file is removed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.config import Recipe
from ..base.homes import cache_home
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.files import weight_files
from ..checkpoints.formats.gguf_weights import GGUFTensors
from ..errors import ModelError
from ..native.library import Library

logger = logging.getLogger("outrider")

BOUND = 20 << 30
"""Most bytes of all kept files; one file takes at most half of them."""
LEAST = 32 << 20
"""Least bytes of a checkpoint whose weights are kept; smaller ones are packed in no time."""
LEFT_FREE = 4 << 30
"""Bytes of the disk that stay free."""
SAMPLE, STRIDE = 4096, 16 << 20
"""Bytes of a sample that tells files of one size and time apart, and the distance of samples."""
STALE_SECONDS = 3600.0
"""Age of an unfinished file that nobody writes any more."""
SUFFIX, UNFINISHED = ".packed", ".part"
VERSION = 2
"""Raise it when a recipe makes other weights from the same files."""


@dataclass(frozen=True)
class Kept:
    """The place where the packed weights of a model are kept, or would be.

    ``copies`` is True if reading them is worth it even if they cannot be mapped in large pages:
    that is quicker than quantising, but not than packing.
    """

    path: Path
    key: bytes
    nbytes: int
    copies: bool

    @property
    def there(self) -> bool:
        """True if the file exists and this process may see it."""
        return os.path.isfile(self.path)

    def take(self, library: Library, handle: int, beside: int | None) -> bool:
        """Give a new model its weights; False where they are not kept."""
        try:
            taken = self.there and library.take_kept(
                handle, self.path, self.key, self.copies, beside
            )
        except ModelError as error:
            logger.info("%s is removed (%s); weights are packed anew.", self.path, error)
            with suppress(OSError):
                self.path.unlink()
            return False
        if taken:
            with suppress(OSError):  # it may be another user's, or gone by now
                os.utime(self.path)
        return taken

    def keep(self, library: Library, handle: int) -> None:
        """Write a model's weights, unless they are there or there is no room for them."""
        # Processes of two containers may have the same number.
        part = self.path.with_suffix(f".{secrets.token_hex(8)}{UNFINISHED}")
        try:
            if self.path.exists() or not _has_room(self.path.parent, self.nbytes):
                return
            library.keep(handle, part, self.key)
            part.replace(self.path)
        except (OSError, ModelError) as error:
            logger.info("packed weights are not kept (%s)", error)
        finally:
            with suppress(OSError):
                part.unlink()


def place_of(
    checkpoint: Checkpoint, dtype: str, recipe: Recipe | None, library: Library
) -> Kept | None:
    """Return where the packed weights of a checkpoint are kept; None where they are not."""
    tensors = checkpoint.tensors
    of_gguf = isinstance(tensors, GGUFTensors)
    if (recipe is None and not of_gguf) or tensors.file_bytes < LEAST:
        return None
    about = written([*files_of(checkpoint), library.file])
    key = _digest([VERSION, dtype, str(recipe), about])
    path = cache_home() / "weights" / f"{key.hex()[:32]}{SUFFIX}"
    return Kept(path, key, tensors.file_bytes, recipe is not None)


def files_of(checkpoint: Checkpoint) -> list[Path]:
    """Return the files that a checkpoint's weights come from."""
    tensors, folder = checkpoint.tensors, checkpoint.folder
    if isinstance(tensors, GGUFTensors):
        return [*tensors.files]
    return [folder / "config.json", *weight_files(folder)]


def written(files: Iterable[Path]) -> list[tuple[str, int, int, str]]:
    """Return what identifies files: path, size, time, and a digest of samples of each."""
    states = [(str(file.resolve()), file.stat()) for file in files]
    return [(name, s.st_size, s.st_mtime_ns, _sample(Path(name), s.st_size)) for name, s in states]


def _sample(file: Path, size: int) -> str:
    """Return a digest of parts of a file: images and archives give many files the same time."""
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as opened:
        for place in range(0, size, STRIDE):
            opened.seek(place)
            digest.update(opened.read(SAMPLE))
    return digest.hexdigest()


def _digest(about: list[Any]) -> bytes:
    return hashlib.sha256(json.dumps(about).encode()).digest()


def _has_room(folder: Path, nbytes: int) -> bool:
    """Return whether ``nbytes`` more may be kept in ``folder``; removes what has to go for them."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.glob(f"*{UNFINISHED}"):
        if time.time() - file.stat().st_mtime > STALE_SECONDS:
            file.unlink(missing_ok=True)
    if nbytes > BOUND // 2:
        return False
    files = sorted(folder.glob(f"*{SUFFIX}"), key=lambda file: file.stat().st_mtime)
    total = nbytes + sum(file.stat().st_size for file in files)
    for file in files:
        if total <= BOUND:
            break
        total -= file.stat().st_size
        file.unlink(missing_ok=True)
    return shutil.disk_usage(folder).free >= nbytes + LEFT_FREE
