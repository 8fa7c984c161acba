"""Figures of the server, from what the engine's controller believes (``control/summary.py``)."""

from collections.abc import Mapping
from typing import Any

Beliefs = Mapping[str, Any]


def in_use(beliefs: Beliefs) -> list[Mapping[str, Any]]:
    """Return the choices that draft now, most sequences first; in a pause, only requests' own."""
    paused = beliefs["paused"]
    drafting = [c for c in beliefs["choices"] if c["depth"] and (c["fixed"] or not paused)]
    return sorted(drafting, key=lambda choice: -choice["sequences"])


def longest(beliefs: Beliefs, drafter: str | None = None) -> int:
    """Return the longest draft in use, of one drafter or of any; 0 for none."""
    depths = (c["depth"] for c in in_use(beliefs) if drafter in (None, *c["drafters"]))
    return max(depths, default=0)


def depths(beliefs: Beliefs) -> dict[str, float]:
    """Return the mean depth of each method over the sequences that use it; 0 if none does."""
    means = dict.fromkeys(beliefs["draft_ms"], 0.0)
    for name in {choice["method"] for choice in in_use(beliefs)}:
        mine = [c for c in in_use(beliefs) if c["method"] == name]
        total = sum(c["sequences"] for c in mine)
        means[name] = sum(c["depth"] * c["sequences"] for c in mine) / max(1, total)
    return means


def survival(beliefs: Beliefs) -> dict[tuple[str, ...], float]:
    """Return the expected share of drafts accepted up to each position, by method and position."""
    return {
        (name, str(position)): share
        for name, method in beliefs["survival"].items()
        for position, share in enumerate(method["survival"])
    }


def why_not(beliefs: Beliefs) -> str:
    """Return why the engine chooses to draft nothing."""
    return "paused" if beliefs["paused"] else "plain_is_faster"
