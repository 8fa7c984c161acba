"""Problems for people: Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .diagnose import Problem
from .facts import figure
from .observation import Observation

MOST_RUNS = 5
"""Runs of a report that a symptom names."""


def markdown(seen: Sequence[Observation], problems: Sequence[Problem]) -> str:
    """Return what was seen and what is wrong, as Markdown."""
    lines = [f"# Diagnosis of {seen[0].where if len(seen) == 1 else f'{len(seen)} runs'}"]
    if len(seen) == 1:
        facts = seen[0].facts
        lines += ["", "Known: " + "; ".join(str(figure(name, facts)) for name in facts) + "."]
    for note in dict.fromkeys(note for each in seen for note in each.notes):
        lines += ["", f"Note: {note}"]
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


def _group(group: Sequence[Problem], several: bool) -> Iterator[str]:
    """Yield one symptom and the remedies of its causes, each once; a few of several runs."""
    yield from ("", f"## {group[0].title}", "")
    for problem in group[:MOST_RUNS]:
        where = f"{problem.where}: " if several else ""
        yield f"- {where}{_figures(problem.evidence)}"
    if len(group) > MOST_RUNS:
        yield f"- and {len(group) - MOST_RUNS} more runs"
    said: set[str] = set()
    for cause in group[0].causes:
        shown = f" ({_figures(cause.because)})" if cause.because and cause.likely else ""
        yield from ("", f"{'Likely' if cause.likely else 'Possible'}: {cause.title}{shown}.")
        fresh = [remedy for remedy in cause.remedies if remedy not in said]
        said.update(fresh)
        yield from (f"{number}. {remedy}" for number, remedy in enumerate(fresh, 1))


def _figures(figures: Iterable[object]) -> str:
    return "; ".join(map(str, figures))
