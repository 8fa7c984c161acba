"""Problems for people: Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .diagnose import Cause, Problem
from .facts import figure
from .observation import Observation

MOST_RUNS = 5
"""Runs of a report that a symptom names."""


def markdown(seen: Sequence[Observation], problems: Sequence[Problem]) -> str:
    """Return what was seen and what is wrong, as Markdown."""
    lines = list(_seen(seen))
    if not problems:
        known = len({name for each in seen for name in each.facts})
        lines += ["", f"Nothing is wrong, as far as {known} facts tell."]
    groups: dict[tuple[str, tuple[str, ...]], list[Problem]] = {}
    for problem in problems:
        likely = tuple(cause.title for cause in problem.causes if cause.likely)
        groups.setdefault((problem.symptom, likely), []).append(problem)
    for group in groups.values():
        lines += _group(group, len(seen) > 1)
    return "\n".join(lines) + "\n"


def _seen(seen: Sequence[Observation]) -> Iterator[str]:
    yield (
        f"# Diagnosis of {seen[0].where}" if len(seen) == 1 else f"# Diagnosis of {len(seen)} runs"
    )
    if len(seen) == 1:
        facts = seen[0].facts
        yield ""
        yield "Known: " + "; ".join(str(figure(name, facts)) for name in facts) + "."
    for note in dict.fromkeys(note for each in seen for note in each.notes):
        yield ""
        yield f"Note: {note}"


def _group(group: Sequence[Problem], several: bool) -> Iterator[str]:
    """Yield one symptom with its remedies; of several runs the first few are named."""
    first = group[0]
    yield ""
    yield f"## {first.title}"
    yield ""
    for problem in group[:MOST_RUNS]:
        where = f"{problem.where}: " if several else ""
        yield f"- {where}{_figures(problem.evidence)}"
    if len(group) > MOST_RUNS:
        yield f"- and {len(group) - MOST_RUNS} more runs"
    said: set[str] = set()
    for cause in first.causes:
        yield ""
        yield from _cause(cause, said)


def _cause(cause: Cause, said: set[str]) -> Iterator[str]:
    """Yield a cause and those of its remedies that were not said before."""
    shown = f" ({_figures(cause.because)})" if cause.because and cause.likely else ""
    yield f"{'Likely' if cause.likely else 'Possible'}: {cause.title}{shown}."
    fresh = [remedy for remedy in cause.remedies if remedy not in said]
    said.update(fresh)
    for number, remedy in enumerate(fresh, 1):
        yield f"{number}. {remedy}"


def _figures(figures: Iterable[object]) -> str:
    return "; ".join(map(str, figures))
