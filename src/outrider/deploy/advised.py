"""A spec from the advice of ``outrider advise --json``: whether to draft, how far, at which batch.

Advice names models as its catalogue does. Checkpoints come from the command.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError, shown
from .capabilities import find

LEAVE = "do not"
"""The verdict against speculation, of ``planning.rules``, which would load much more."""
LOOKUPS = ("suffix", "ngram")
HEAD = "EAGLE-3 head of "
UNKNOWN = ("medusa", "layerskip")
"""Drafters of an advice that no spec can name."""


def is_advice(text: str) -> bool:
    """Return whether a text is a JSON object, which a spec never is."""
    return text.lstrip().startswith("{")


def document_of(text: str, source: str, engine: str | None, version: str | None) -> dict[str, Any]:
    """Return the document of a spec that follows an advice.

    Where the engine knows draft lengths by batch size they are the advice's; where it chooses them
    itself, it may, up to the longest of these; else the length is that of the traffic's median.

    Raises:
        ConfigError: it is no advice, or its drafter is none that engines have.
    """
    advice = _advice(text, source)
    document: dict[str, Any] = {"target": {"model": advice["target"]}}
    name, schedule = advice["drafter"], advice["schedule"]
    if advice["verdict"] == LEAVE:
        return {**document, "drafter": {"method": "none"}}
    if name in UNKNOWN:
        raise ConfigError(f"{source} is about {shown(name)}, which no engine here drafts with.")
    drafter: dict[str, Any] = {"method": "eagle3" if name.startswith(HEAD) else "draft_model"}
    if name in LOOKUPS:
        drafter = {"method": name}
    else:
        drafter["model"] = name
    known = find(engine, version)
    if known.schedule and schedule:
        drafter["schedule"] = schedule
    elif drafter["method"] in known.adaptive:
        longest = max((k for _, _, k in schedule), default=advice["k"])
        drafter |= {"adaptive": True, "num_speculative_tokens": longest}
    else:
        drafter["num_speculative_tokens"] = advice["k"]
    return {**document, "drafter": drafter}


def check_names(document: Mapping[str, Any]) -> None:
    """Refuse names of the catalogue that no flag has replaced by checkpoints.

    Raises:
        ConfigError: which flag is missing.
    """
    for part in ("target", "drafter"):
        name = document.get(part, {}).get("model")
        if name is not None and "/" not in name and not Path(name).exists():
            raise ConfigError(
                f"The advice is about {shown(name)}, which names no checkpoint; give a folder or a "
                f"hub name with --{part}."
            )


def _advice(text: str, source: str) -> Mapping[str, Any]:
    try:
        advice = json.loads(text)
        texts = all(isinstance(advice[key], str) for key in ("verdict", "target", "drafter"))
        whole = [advice["k"], *(number for row in advice["schedule"] for number in row)]
        rows = all(len(row) == 3 for row in advice["schedule"])
    except (KeyError, TypeError, ValueError, RecursionError):
        texts = rows = False
        whole = []
    if not texts or not rows or any(type(each) is not int for each in whole):
        raise ConfigError(
            f"{source} is JSON, but no advice; give the output of outrider advise --json, or TOML."
        )
    return dict(advice)
