"""Facts of a diagnosis: figures and words by name, and conditions on them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from math import isfinite
from operator import ge, gt, le, lt
from typing import Any, NamedTuple

from ...base.outside.text import printable
from ...base.tables import table
from ...errors import ConfigError, shown

data = partial(table, "outrider.ops.diagnose")
Value = float | str
Facts = Mapping[str, Value]
ORDER: dict[str, Callable[[float, float], bool]] = {"<": lt, "<=": le, ">": gt, ">=": ge}
LARGEST_NUMBER = 1e15
LISTED = "docs/diagnose.md lists the known ones."
LONGEST_COMPARED = 60


class KnownFact(NamedTuple):
    """A fact with its unit; ``unit`` is empty if the value is a word."""

    name: str
    value: Value
    unit: str

    def __str__(self) -> str:
        """Return the figure in readable form."""
        name = self.name.replace("_", " ")
        if isinstance(self.value, str):
            return f"{name}: {self.value}"
        if self.unit == "share":
            return f"{name}: {100 * self.value:.1f} %"
        if self.unit == "s":
            return f"{name}: {1000 * self.value:.1f} ms"
        if self.unit == "times":
            return f"{name}: {self.value:.2f}"
        return f"{name}: {self.value:,.6g} {self.unit}".rstrip()


def figure(name: str, facts: Facts) -> KnownFact:
    """Return a known fact with its unit."""
    return KnownFact(name, facts[name], data("symptoms")["fact"][name]["unit"])


def holds(condition: str, facts: Facts, thresholds: Mapping[str, float]) -> bool | None:
    """Return whether a condition such as ``acceptance < low_acceptance`` holds; None if unknown."""
    name, operator, right = condition.split(" ", 2)
    value = facts.get(name)
    if value is None:
        return None
    if operator == "is":
        return value == right
    if isinstance(value, str):
        return None
    limit = thresholds[right] if right in thresholds else float(right)
    return ORDER[operator](value, limit)


class Named(NamedTuple):
    """The fact that a name refers to, and how many units of the name make one unit of the fact."""

    fact: str
    scale: float


@cache
def names() -> dict[str, Named]:
    """Return the meaning of each known name: the facts' own names, and others in use."""
    meanings = {}
    for fact, each in data("symptoms")["fact"].items():
        for name in (fact, *each.get("also", ())):
            meanings[name] = Named(fact, 1.0)
        for name, scale in each.get("scaled", {}).items():
            meanings[name] = Named(fact, float(scale))
    return meanings


def plain_name(name: str) -> str:
    """Return a name in lower case, with underscores between words."""
    return re.sub(r"[\s-]+", "_", name.strip()).lower()


def named(name: object) -> Named | None:
    """Return the meaning of a name; None if it is unknown."""
    return names().get(plain_name(name)) if isinstance(name, str) else None


def near(name: object, likeness: float = 0.6) -> str | None:
    """Return the known name closest to an unknown one; None if they are not similar enough."""
    return _close(name, names(), likeness)


def check_facts(facts: Mapping[str, object]) -> dict[str, Value]:
    """Return given facts under our names; a number may be given as text, and None is unknown."""
    checked: dict[str, Value] = {}
    said: dict[str, str] = {}
    for name, value in facts.items():
        known = named(name)
        if known is None:
            raise ConfigError(f"there is no fact {shown(name)}; {_hint(near(name))}")
        if value is None:
            continue
        own = check_fact(name, known, value)
        if checked.setdefault(known.fact, own) != own:
            raise ConfigError(
                f"{said[known.fact]} and {name} mean the same fact and differ; give one."
            )
        said[known.fact] = name
    return checked


def check_fact(name: str, known: Named, value: object) -> Value:
    """Return the value of a fact that was given as ``name``, in the fact's own unit."""
    entry, what, scale = data("symptoms")["fact"][known.fact], f"fact {name}", known.scale
    if not entry["unit"] and known.fact != "temperature":
        return _word(what, value, entry)
    if entry["unit"] != "share":
        return number(what, value) / scale
    part = value
    if isinstance(value, str) and value.strip().endswith("%"):
        part, scale = value.strip()[:-1], 100.0
    share = number(what, part) / scale
    if share > 1:
        most = "a share from 0 to 1, such as 0.9 or 90%" if scale == 1 else f"0 to {scale:g}"
        raise ConfigError(f"{what} is {shown(value)}; give {most}.")
    return share


def _word(what: str, value: object, entry: Mapping[str, Any]) -> str:
    word = printable(value) if isinstance(value, str | bool) else ""
    for each, others in entry.get("values", {word: ()}).items():
        if word and word.lower() in (each.lower(), *others):
            return str(each)
    raise ConfigError(f"{what} is {shown(value)}; give {entry['help']}.")


def check_thresholds(
    given: Mapping[str, object], known: Mapping[str, Any] | None = None, listed: str = LISTED
) -> dict[str, float]:
    """Return all thresholds of a table: its defaults, replaced by those given."""
    known = data("symptoms")["threshold"] if known is None else known
    limits = {name: float(each["value"]) for name, each in known.items()}
    for name, value in given.items():
        if name not in known:
            hint = _hint(_close(name, known), listed)
            raise ConfigError(f"there is no threshold {shown(name)}; {hint}")
        limits[name] = number(f"threshold {name}", value)
        if "share" in known[name] and limits[name] > 1:
            raise ConfigError(f"threshold {name} is {shown(value)}; give a share from 0 to 1.")
    return limits


def number(what: str, value: object) -> float:
    """Return a value as a number; it may be given as text."""
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        amount = float(value)
    except (ValueError, OverflowError):
        amount = -1.0
    if not isfinite(amount) or not 0 <= amount <= LARGEST_NUMBER:
        raise ConfigError(f"{what} is {shown(value)}; give a number from 0 on.")
    return amount


def _close(name: object, known: Iterable[str], likeness: float = 0.6) -> str | None:
    text = name.lower()[:LONGEST_COMPARED] if isinstance(name, str) else ""
    close = difflib.get_close_matches(text, known, 1, likeness)
    return close[0] if close else None


def _hint(near: str | None, listed: str = LISTED) -> str:
    return f"did you mean {near!r}?" if near else listed
