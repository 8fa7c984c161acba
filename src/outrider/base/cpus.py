"""The CPUs that a drafter gets for itself, and those that are left to the target."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import NamedTuple

from ..errors import ConfigError, shown

LARGEST_CPU = 2**16 - 1


class Placement(NamedTuple):
    """The CPUs that the target's passes run on, and those of a drafter's."""

    target: frozenset[int]
    drafter: frozenset[int]


def parse_cpus(text: object) -> frozenset[int]:
    """Return the CPUs in a list such as 8-15 or 4,6-7. Raises ConfigError: it is malformed."""
    parts = text.replace(" ", "").split(",") if isinstance(text, str) else [""]
    cpus: set[int] = set()
    for part in parts:
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not first <= last <= LARGEST_CPU:
            raise ConfigError(
                f"drafter_cpus is {shown(text)}; give numbers and ranges of CPUs, as in 8-15 or "
                "4,6-7."
            )
        cpus.update(range(first, last + 1))
    return frozenset(cpus)


def placement(text: str) -> Placement:
    """Return the placement in which a drafter has the CPUs that ``text`` names.

    Raises ConfigError: this process may not use one of them, or none would be left.
    """
    drafter = parse_cpus(text)
    if not hasattr(os, "sched_getaffinity"):
        raise ConfigError(
            "drafter_cpus places threads on CPUs, which this system has no call for; leave it out."
        )
    usable = frozenset(os.sched_getaffinity(0))
    if absent := drafter - usable:
        raise ConfigError(
            f"drafter_cpus names CPU {min(absent)}, but this process may use {listed(usable)}; "
            "give some of these."
        )
    if drafter == usable:
        raise ConfigError(
            f"drafter_cpus names every CPU that this process may use ({listed(usable)}); "
            "leave at least one to the target."
        )
    return Placement(usable - drafter, drafter)


def listed(cpus: Iterable[int]) -> str:
    """Return CPUs in the form that ``parse_cpus`` reads."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][-1] == cpu - 1:
            runs[-1][1:] = [cpu]
        else:
            runs.append([cpu])
    return ",".join("-".join(map(str, run)) for run in runs)
