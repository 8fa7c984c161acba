"""What each engine calls its figures, from ``data/engines.toml``."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from .page import Page

OURS = "outrider_draft_length"
SHOWN = {
    "outrider": "vLLM's names", "vllm": "vLLM's names", "llama.cpp": "llama.cpp's names",
    "tensorrt-llm": "TensorRT-LLM's names", "sglang": "SGLang's names", "tgi": "TGI's names",
}  # fmt: skip
POSITION = ("position", "token_position")
"""Labels for the position of a drafted token."""


@cache
def tables() -> dict[str, dict[str, str]]:
    """Return the names of metrics by engine; do not change what it holds."""
    text = (files(__package__) / "data" / "engines.toml").read_text(encoding="utf-8")
    return {name: each for name, each in tomllib.loads(text).items() if isinstance(each, dict)}


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


def source_of(engine: str) -> str:
    """Return whose names an engine's page has, for people."""
    return SHOWN[engine]


def positions_of(page: Page, names: Mapping[str, str]) -> dict[int, float]:
    """Return accepted tokens by position of the draft, in order; labels that are none left out."""
    sums = page.by_label(names.get("by_position", ""), *POSITION)
    return {int(i): sums[i] for i in sorted(sums, key=_order) if re.fullmatch(r"[0-9]{1,3}", i)}


def _order(label: str) -> tuple[int, str]:
    return len(label), label


def counts_drafts(page: Page, names: Mapping[str, str]) -> bool:
    """Return whether a page counts drafted tokens."""
    return names.get("drafted") in page.samples
