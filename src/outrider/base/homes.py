"""Where files lie that Outrider makes for itself, and how small ones are kept."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LARGEST_FILE = 1 << 20  # characters of a small one


def cache_home() -> Path:
    """Return the folder of what can be made again: ``outrider`` in the user's cache folder.

    A user without a home gets a path where no file can be.
    """
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(home) if home else Path.home() / ".cache") / "outrider"
    except RuntimeError:  # as of an id that a container has no name for
        return Path(os.devnull)


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
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(kept), encoding="utf-8")
    part.replace(file)
