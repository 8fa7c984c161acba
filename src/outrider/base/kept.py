"""Reads and writes small JSON files that other starts find again."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LARGEST_FILE = 1 << 20  # characters


def read_kept(file: Path) -> Any:
    """Return the JSON object in a file; OSError or ValueError where there is none that is small."""
    with file.open(encoding="utf-8") as opened:
        text = opened.read(LARGEST_FILE + 1)
    try:
        return json.loads(text) if len(text) <= LARGEST_FILE else {}
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_kept(file: Path, kept: Mapping[str, Any]) -> None:
    """Write a JSON object; who reads meanwhile finds the old one or the new one. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with part_of(file) as part:
        part.write_text(json.dumps(kept), encoding="utf-8")


@contextmanager
def part_of(file: Path) -> Iterator[Path]:
    """Yield a file to write, which then replaces ``file``; it is removed where that fails."""
    part = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with naming(file):
            yield part
            part.replace(file)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Have an OSError name a file that is written: what a full disk raises names none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from None
