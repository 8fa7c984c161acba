"""Prompts of a load: from files, from bundled workloads, or made up."""

import json
import random
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ..workload import BUNDLED, Item, Workload, load_workload

SYNTHETIC = "synthetic"
SYNTHETIC_PROMPTS = 1000
WARNING = (
    "SYNTHETIC PROMPTS: random words measure load only. Acceptance and speedup on them mean "
    "NOTHING; use prompts like your users' for those."
)
SYLLABLES = ("ba", "ke", "ti", "lo", "mu", "ra", "se", "no")
WORDS = tuple(map("".join, product(SYLLABLES, repeat=3)))


def load_prompts(which: str, seed: int = 0) -> Workload:
    """Return the data set of a name or a file. Raises ConfigError: it is neither.

    ``synthetic`` or ``synthetic:WORDS`` makes up prompts of that many random words (128). A .json
    file in ShareGPT's layout gives the first turn of each conversation; the rest is read as
    ``outrider bench --prompts`` reads it.
    """
    kind, _, length = which.partition(":")
    if kind == SYNTHETIC:
        return synthetic(length or "128", seed)
    turns = _sharegpt(which) if which not in BUNDLED and which.endswith(".json") else None
    return load_workload(which) if turns is None else turns


def synthetic(words: str, seed: int) -> Workload:
    """Return prompts of random words. Raises ConfigError: it is no number from 1 to 1,000,000."""
    if not words.isascii() or not words.isdigit() or not 1 <= int(words[:8]) <= 1_000_000:
        raise ConfigError(f"synthetic:{words}: give 1 to 1,000,000 words, as in synthetic:256.")
    draw = random.Random(seed)
    # A thousand long prompts would fill the memory.
    number = min(SYNTHETIC_PROMPTS, max(1, 4_000_000 // int(words)))
    made = (" ".join(draw.choices(WORDS, k=int(words))) for _ in range(number))
    return Workload.of_prompts(SYNTHETIC, list(made))


def _sharegpt(file: str) -> Workload | None:
    """Return the first human turn of each conversation; None if the file has another layout."""
    try:
        entries: Any = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None  # load_workload says what is wrong
    whole = isinstance(entries, list) and bool(entries)
    if not whole or not all(isinstance(e, dict) and "conversations" in e for e in entries):
        return None
    prompts = [_first_turn(entry["conversations"]) for entry in entries]
    kept = [prompt for prompt in prompts if prompt]
    if not kept:
        raise ConfigError(f"{file}: no conversation begins with a turn from human or user.")
    return Workload.of_prompts(Path(file).stem, kept)


def _first_turn(turns: Any) -> str:
    """Return the user's first text, "" if the conversation does not begin with the user."""
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], dict):
        return ""
    speaker = turns[0].get("from", turns[0].get("role"))
    text = turns[0].get("value", turns[0].get("content"))
    return text if speaker in ("human", "user") and isinstance(text, str) else ""


def body_of(item: Item, chat: bool, base: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a request for one item."""
    asked: dict[str, Any] = {"prompt": item.prompt}
    if chat:
        asked = {"messages": item.opening or [{"role": "user", "content": item.prompt}]}
    if item.schema is not None:
        form = {"name": "output", "schema": item.schema}
        asked["response_format"] = {"type": "json_schema", "json_schema": form}
    return base | asked


def shuffled(workload: Workload, seed: int) -> Workload:
    """Return the items in an order that the seed decides."""
    items = list(workload.items)
    random.Random(seed).shuffle(items)
    return replace(workload, items=tuple(items))
