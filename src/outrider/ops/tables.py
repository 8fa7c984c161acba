"""The data files of the packages beside this module."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any


@cache
def table(package: str, name: str) -> dict[str, Any]:
    """Return ``PACKAGE/data/NAME.toml``; do not change what it holds."""
    file = Path(__file__).with_name(package) / "data" / f"{name}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))
