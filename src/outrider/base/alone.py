"""Keeps two processes from writing one folder at once."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

from ..errors import ConfigError

LOCK = ".lock"
"""The file in a folder that is locked; the kernel releases the lock when the process ends."""


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock a folder, creating it if it is missing; new folders that stay empty are removed.

    Raises ConfigError: another process has locked it, or it is a file.
    """
    new = [*takewhile(lambda each: not each.exists(), (folder, *folder.parents))]
    found = new[-1].parent if new else folder
    if not found.is_dir():
        raise ConfigError(f"{found} is no folder; give a new one.")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another process writes to {folder}; wait for its end, or give another folder."
            ) from None
        except OSError:
            pass  # a file system without locks
        try:
            yield
        finally:
            if new and [*folder.iterdir()] == [folder / LOCK]:
                (folder / LOCK).unlink()
            for each in new:
                if any(each.iterdir()):
                    break
                each.rmdir()
