"""The data files of diagnosis: symptoms, engines' metrics, and points to check."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def table(name: str) -> dict[str, Any]:
    """Return a data file of this package; do not change what it holds."""
    text = (files(__package__) / "data" / f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
