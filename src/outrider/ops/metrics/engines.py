"""The names of each engine's figures, from ``data/engines.toml``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from ...base.tables import table
from .page import Page

OURS = "outrider_draft_length"
"""A metric that only Outrider has; its other names are vLLM's."""


@cache
def tables() -> dict[str, dict[str, str]]:
    """Return the names of metrics by engine; do not change what it holds."""
    loaded = table("outrider.ops.metrics", "engines")
    return {name: each for name, each in loaded.items() if isinstance(each, dict)}


def names_of(engine: str) -> Mapping[str, str]:
    """Return an engine's names by figure. Outrider has vLLM's, and some of its own."""
    return tables()["vllm"] | tables()["outrider"] if engine == "outrider" else tables()[engine]


def engine_of(page: Page) -> str | None:
    """Return whose names a page has; None where it is nobody's."""
    if OURS in page.samples:
        return "outrider"
    for engine, names in tables().items():
        if "at" in names and any(each.startswith(names["at"]) for each in page.samples):
            return engine
    return None
