"""The data files of the packages beside this module."""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any


@cache
def table(package: str, name: str) -> dict[str, Any]:
    """Return ``PACKAGE/data/NAME.toml``; do not change what it holds."""
    file = Path(__file__).with_name(package) / "data" / f"{name}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def told(
    sentences: Mapping[str, str], holds: Mapping[str, object], values: Mapping[str, object] = {}
) -> list[str]:
    """Return the sentences that hold, in the order of ``holds``, with values in their braces."""
    return [sentences[name].format_map(values) for name, each in holds.items() if each]
