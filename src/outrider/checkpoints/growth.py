"""Bounds how much a tokenizer.json can lengthen a text, before the tokenizer is built.

A file of a kilobyte with ten replacements of one character by ten turns one into ten billion.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Regex, Tokenizer, normalizers

from ..errors import ModelError

LARGEST_GROWTH = 256
"""Most characters that one may become; usual tokenizers stay below 110."""
LARGEST_ADDED = 4096
"""Most characters, or special tokens, that are put around any text."""
MOST_RULES = 1000
FORM = 18
"""Most characters that a Unicode normal form makes from one; a second form adds none."""
FORMS = ("NFC", "NFD", "NFKC", "NFKD", "BertNormalizer")
CASE = 3
BYTES = 4
"""Most characters that lower case and bytes make from one."""
USUAL_ENTRY = 32
"""Most characters of an entry in a table of forms."""
LOOKS_AROUND = re.compile(r"\(\?|\\[bBAzZGKXRNO1-9]|[\^$]")
"""Syntax with which an expression may match an empty text at some places only."""


class _Rule(NamedTuple):
    """A step that turns a character in ``seen`` into ``growth`` in ``made``; None is any."""

    growth: float
    seen: frozenset[str] | None
    made: frozenset[str] | None
    form: str = ""


def check_growth(file: Path) -> None:
    """Refuse a tokenizer.json whose normalizer or decoder could make a text much longer."""
    octets = file.read_bytes()
    # Parsing a large vocabulary takes a while, so names are searched first; escapes may hide them.
    if not any(word in octets for word in (b"Replace", b"Prepend", b"Precompiled", b"\\u")):
        return
    options = json.loads(octets)
    for part in ("normalizer", "decoder") if isinstance(options, dict) else ():
        rules, added = [], 0
        for step in _steps(options.get(part)):
            if step.get("type") == "Prepend":
                added += len(str(step.get("prepend", "")))
            elif (rule := _rule(step)) is not None:
                rules.append(rule)
            if len(rules) > MOST_RULES:
                raise ModelError(f"{file}: its {part} has more than {MOST_RULES} steps.")
        growth = _growth(rules)
        if growth > LARGEST_GROWTH or added * growth > LARGEST_ADDED * FORM:
            raise ModelError(
                f"{file}: its {part} could make {min(growth, 1e300):.3g} characters of one and put "
                f"{added} before a text; {LARGEST_GROWTH} and {LARGEST_ADDED} are the most."
            )


def check_specials(tokenizer: Tokenizer, file: Path) -> None:
    """Refuse a tokenizer that puts too many special tokens around a text."""
    added = tokenizer.num_special_tokens_to_add(False)
    if added > LARGEST_ADDED:
        what = f"its tokenizer puts {added} tokens around a text"
        raise ModelError(f"{file}: {what}; {LARGEST_ADDED} are the most.")


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer or decoder in order, including those of sequences."""
    if isinstance(part, dict):
        inner = part.get("normalizers", part.get("decoders"))
        if part.get("type") == "Sequence" and isinstance(inner, list):
            for each in inner:
                yield from _steps(each)
        else:
            yield part


def _rule(step: dict[str, Any]) -> _Rule | None:
    """Return the rule of a step; None if it does not lengthen a text."""
    match step:
        case {"type": "Replace", "pattern": {"String": str(text)}, "content": str(content)}:
            growth = len(content) / len(text) if text else 1.0 + len(content)
            return _Rule(max(1.0, growth), frozenset(text) or None, frozenset(content))
        case {"type": "Replace", "pattern": {"Regex": str(text)}, "content": str(content)}:
            growth = len(content) + (1.0 if _matches_nothing(text) else 0.0)
            return _Rule(max(1.0, growth), None, frozenset(content))
        case {"type": "Precompiled", "precompiled_charsmap": str(table)}:
            longest = _longest_entry(table)
            usual = longest <= USUAL_ENTRY
            return _Rule(FORM if usual else longest, None, None, "form" if usual else "")
        case {"type": "Lowercase"}:
            return _Rule(CASE, None, None, "case")
        case {"type": "ByteLevel"}:
            return _Rule(BYTES, None, None, "bytes")
        case {"type": kind} if kind in FORMS:
            return _Rule(FORM, None, None, "form")
    return None


def _growth(rules: list[_Rule]) -> float:
    """Return the most characters that a chain of rules makes from one.

    A rule applies to the output of an earlier one if it sees one of its characters.
    """
    reached: list[tuple[float, frozenset[str] | None]] = []
    forms: set[str] = set()
    for rule in rules:
        if rule.form in forms:
            continue
        forms |= {rule.form} - {""}
        before = [
            growth
            for growth, made in reached
            if made is None or rule.seen is None or not made.isdisjoint(rule.seen)
        ]
        reached.append((rule.growth * max(before, default=1.0), rule.made))
    return max((growth for growth, _ in reached), default=1.0)


def _matches_nothing(expression: str) -> bool:
    """Return whether an expression may match between two characters."""
    around = LOOKS_AROUND.search(expression)
    return bool(around or normalizers.Replace(Regex(expression), "x").normalize_str(""))


def _longest_entry(table: str) -> int:
    """Return the length of the longest entry of SentencePiece's table of forms."""
    octets = base64.b64decode(table)
    size = int.from_bytes(octets[:4], "little")
    entries = octets[4 + size :].split(b"\0")
    return max((len(each.decode("utf-8", "replace")) for each in entries), default=0)
