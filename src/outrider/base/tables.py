"""The data files of packages, and sentences that stand in them."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def table(package: str, name: str) -> dict[str, Any]:
    """Return ``data/NAME.toml`` of a package; do not change what it holds."""
    text = (files(package) / "data" / f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def told(
    sentences: Mapping[str, str], holds: Mapping[str, object], values: Mapping[str, object] = {}
) -> list[str]:
    """Return the sentences that hold, in the order of ``holds``, with values in their braces."""
    return [sentences[name].format_map(values) for name, each in holds.items() if each]
