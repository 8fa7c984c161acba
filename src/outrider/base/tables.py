"""The data files of packages, and the sentences in them."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def table(package: str, name: str) -> dict[str, Any]:
    """Return ``data/NAME.toml`` of a package, which callers must not modify."""
    text = (files(package) / "data" / f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def told(
    sentences: Mapping[str, str], holds: Mapping[str, object], values: Mapping[str, object] = {}
) -> list[str]:
    """Return the sentences that hold, in the order of ``holds``, with ``values`` filled in."""
    return [sentences[name].format_map(values) for name, each in holds.items() if each]
