"""Reads an advice that was saved as JSON, and checks every part of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...base.limits import LARGEST_DRAFT
from ...base.outside.documents import parse_json, read_json
from ...base.outside.models import checked
from ...base.outside.text import printable
from ...errors import ConfigError, shown
from .advice import VERSION, Advice
from .rules import LEAVE

LARGEST = 1 << 20
"""Most bytes of a document; an advice has about 20,000."""
WRITE = "write one with outrider ops advise --out FILE"


def load_advice(file: Path, option: str = "--advice") -> Advice:
    """Return the advice in a file; ``option`` names it in messages.

    Raises ConfigError: it cannot be read, or is not an advice.
    """
    name = f"{option} {printable(file)}"
    return _advice(read_json(file, name, limit=LARGEST), name)


def read_advice(text: str, source: str) -> Advice:
    """Return the advice in a text, the output of ``Advice.to_json`` as JSON.

    Raises ConfigError: it is not an advice, of another version, or damaged; the message says where.
    """
    return _advice(parse_json(text, source, limit=LARGEST, unique=True), source)


def _advice(document: Any, source: str) -> Advice:
    if not isinstance(document, dict) or not {"version", "verdict"} <= document.keys():
        raise ConfigError(f"{source} is JSON, but not an advice with a version; {WRITE}.")
    if document["version"] != VERSION or isinstance(document["version"], bool):
        raise ConfigError(
            f"{source} is an advice of version {shown(document['version'])}, but this Outrider "
            f"reads version {VERSION}; {WRITE} again."
        )
    advice = checked(Advice, document, source)
    if not 0 <= advice.k <= LARGEST_DRAFT or (advice.k == 0 and advice.verdict != LEAVE):
        raise ConfigError(
            f"{source}: k is {advice.k}; give a draft length from 1 to {LARGEST_DRAFT}."
        )
    if (even := advice.break_even) is not None and not 0 <= even.value <= 1:
        raise ConfigError(f"{source}: break_even is {even.value:g}; give a share from 0 to 1.")
    return advice
