"""Reads and writes small JSON files that later runs use again."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LARGEST_FILE = 1 << 20  # characters


def read_kept(file: Path) -> Any:
    """Return the JSON in a file, {} if it is too large. Raises OSError, ValueError: it has none."""
    with file.open(encoding="utf-8") as opened:
        text = opened.read(LARGEST_FILE + 1)
    try:
        return json.loads(text) if len(text) <= LARGEST_FILE else {}
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_kept(file: Path, kept: Mapping[str, Any]) -> None:
    """Write a JSON object; concurrent readers find the old one or the new one. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with part_of(file) as part:
        part.write_text(json.dumps(kept), encoding="utf-8")


@contextmanager
def part_of(file: Path) -> Iterator[Path]:
    """Yield a file to write, which then replaces ``file``; it is removed if that fails."""
    part = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with naming(file):
            yield part
            part.replace(file)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Make an OSError name the file that is written: the error of a full disk names none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from None
