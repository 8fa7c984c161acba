"""Tiny checkpoints kept on disk by content, for all workers and runs."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.metadata
import inspect
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

Options = ParamSpec("Options")
Maker = Callable[Concatenate[Path, Options], Path]

LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors")
UNUSED_SECONDS = 7 * 24 * 3600
"""Entries that nobody has used for so long are removed when another one is made."""
CONTENTS = "contents.json"


def kept_on_disk(make: Maker[Options]) -> Maker[Options]:
    """Return ``make(folder, ...)`` as a copy of what it once made of the same arguments.

    It must put the same files into an empty folder each time. An entry goes by the arguments, the
    source of the module that makes it, and the libraries' versions.
    """
    versions = [importlib.metadata.version(name) for name in LIBRARIES]
    source = Path(inspect.getfile(make)).read_text(encoding="utf-8")

    @functools.wraps(make)
    def copied(folder: Path, *args: Options.args, **options: Options.kwargs) -> Path:
        recipe = repr((make.__name__, args, sorted(options.items()), versions, source))
        entry = home() / hashlib.sha256(recipe.encode()).hexdigest()
        with locked(entry.with_suffix(".lock")):
            if not is_whole(entry):
                shutil.rmtree(entry, ignore_errors=True)
                remove_unused(entry.parent)
                half = Path(tempfile.mkdtemp(prefix="half-", dir=entry.parent))
                make(half / "files", *args, **options)
                (half / CONTENTS).write_text(json.dumps(contents(half / "files")))
                half.rename(entry)
            os.utime(entry)
            shutil.copytree(entry / "files", folder, dirs_exist_ok=True)
        return folder

    return copied


def home() -> Path:
    """Return this user's folder of entries."""
    folder = Path(tempfile.gettempdir()) / f"outrider-tests-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else: set TMPDIR to another folder")
    return folder


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold ``file`` against other processes; the lock goes with the process that holds it."""
    with file.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def contents(folder: Path) -> dict[str, str]:
    """Return the digest of each file in a folder by its path."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def is_whole(entry: Path) -> bool:
    """Whether an entry's files are those that were written."""
    try:
        written: Any = json.loads((entry / CONTENTS).read_text())
    except (OSError, ValueError):
        return False
    return bool(written) and written == contents(entry / "files")


def remove_unused(folder: Path) -> None:
    """Remove entries, and halves of entries, that nobody has used of late."""
    for entry in folder.iterdir():
        try:
            if time.time() - entry.stat().st_mtime > UNUSED_SECONDS:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        except OSError:
            continue  # another worker was faster
