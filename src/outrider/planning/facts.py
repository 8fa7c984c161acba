"""Facts of a diagnosis: figures and words by name, and conditions on them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from math import isfinite
from operator import ge, gt, le, lt
from typing import NamedTuple

from ..errors import ConfigError, shown
from .tables import table

Value = float | str
Facts = Mapping[str, Value]
ORDER: dict[str, Callable[[float, float], bool]] = {"<": lt, "<=": le, ">": gt, ">=": ge}
LARGEST = 1e15


class Figure(NamedTuple):
    """A fact with its unit; ``unit`` is empty where it is a word."""

    name: str
    value: Value
    unit: str

    def __str__(self) -> str:
        """Return the figure for people."""
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


def figure(name: str, facts: Facts) -> Figure:
    """Return a fact that is known, with its unit."""
    return Figure(name, facts[name], table("symptoms")["fact"][name]["unit"])


def holds(condition: str, facts: Facts, thresholds: Mapping[str, float]) -> bool | None:
    """Return whether a condition such as ``acceptance < low_acceptance`` holds; None if unknown.

    Behind ``is`` stands a word, behind ``<``, ``<=``, ``>`` and ``>=`` a number or a threshold.
    """
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


def check_facts(facts: Mapping[str, object]) -> dict[str, Value]:
    """Return facts that somebody stated; numbers may be texts.

    Raises:
        ConfigError: there is no such fact, or its value is none.
    """
    known = table("symptoms")["fact"]
    found: dict[str, Value] = {}
    for name, value in facts.items():
        if name not in known:
            raise ConfigError(f"there is no fact {shown(name)}; {_hint(name, known)}")
        if _is_word(name):
            if not isinstance(value, str) or not value.strip():
                raise ConfigError(f"fact {name} is {shown(value)}; give {known[name]['help']}.")
            found[name] = value.strip()
        else:
            amount = number(f"fact {name}", value)
            if known[name]["unit"] == "share" and amount > 1:
                raise ConfigError(f"fact {name} is {shown(value)}; give a share from 0 to 1.")
            found[name] = amount
    return found


def check_thresholds(thresholds: Mapping[str, object]) -> dict[str, float]:
    """Return all thresholds: the defaults, and those given instead.

    Raises:
        ConfigError: there is no such threshold, or its value is no number from 0 on.
    """
    known = table("symptoms")["threshold"]
    found: dict[str, float] = {name: float(each["value"]) for name, each in known.items()}
    for name, value in thresholds.items():
        if name not in known:
            raise ConfigError(f"there is no threshold {shown(name)}; {_hint(name, known)}")
        found[name] = number(f"threshold {name}", value)
    return found


def _is_word(name: str) -> bool:
    known = table("symptoms")["fact"][name]
    return not known["unit"] and name != "temperature"


def number(what: str, value: object) -> float:
    """Return a value as a number; it may be a text.

    Raises:
        ConfigError: it is none, or below 0.
    """
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        found = float(value)
    except (ValueError, OverflowError):
        found = -1.0
    if not isfinite(found) or not 0 <= found <= LARGEST:
        raise ConfigError(f"{what} is {shown(value)}; give a number from 0 on.")
    return found


def _hint(name: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(str(name), known, 1)
    if near:
        return f"did you mean {near[0]!r}?"
    return "docs/diagnose.md lists those that there are."
