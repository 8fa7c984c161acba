"""``diagnose``: what is wrong with a server's speculation, why, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import ConfigError
from .endpoint import differing
from .facts import (
    Facts,
    KnownFact,
    Value,
    check_facts,
    check_thresholds,
    data,
    figure,
    holds,
    number,
)
from .observation import Observation, Source, observe


@dataclass(frozen=True)
class Cause:
    """A cause of a symptom; ``likely`` if figures point to it, else it is merely possible."""

    title: str
    likely: bool
    because: tuple[KnownFact, ...]
    remedies: tuple[str, ...]


@dataclass(frozen=True)
class Problem:
    """A symptom of ``data/symptoms.toml`` in a server or a run; its likely causes come first."""

    symptom: str
    title: str
    where: str
    evidence: tuple[KnownFact, ...]
    causes: tuple[Cause, ...]

    @property
    def remedies(self) -> list[str]:
        """Return what to do, in order, each once."""
        return list(dict.fromkeys(text for cause in self.causes for text in cause.remedies))

    def to_json(self) -> dict[str, Any]:
        """Return it as plain objects."""
        return {**asdict(self), "evidence": [each._asdict() for each in self.evidence],
                "causes": [{**asdict(cause), "because": [b._asdict() for b in cause.because]}
                           for cause in self.causes],
                "remedies": self.remedies}  # fmt: skip


def symptoms() -> list[dict[str, Any]]:
    """Return every symptom of the catalogue with its causes."""
    shared = data("symptoms")["causes"]
    return [
        {**each, "cause": each.get("cause") or shared[each["causes_of"]]}
        for each in data("symptoms")["symptom"]
    ]


def judge(facts: Facts, thresholds: Mapping[str, float], where: str = "") -> list[Problem]:
    """Return the symptoms that facts show at these thresholds, in the catalogue's order."""

    def held(conditions: Sequence[str]) -> list[bool | None]:
        return [holds(each, facts, thresholds) for each in conditions]

    problems = []
    for each in symptoms():
        if all(held(each["when"])) and True not in held(each.get("unless", ())):
            evidence = tuple(figure(name, facts) for name in each["evidence"] if name in facts)
            causes = _causes(each["cause"], facts, held)
            problems.append(Problem(each["id"], each["title"], where, evidence, causes))
    return problems


def _causes(
    entries: list[dict[str, Any]], facts: Facts, held: Callable[[Sequence[str]], list[bool | None]]
) -> tuple[Cause, ...]:
    """Return the causes that no fact contradicts, likely ones first."""
    causes = []
    for each in entries:
        conditions = each.get("when", [])
        shown = held(conditions)
        if False in shown or True in held(each.get("unless", ())):
            continue
        names = dict.fromkeys(condition.split(" ", 1)[0] for condition in conditions)
        because = tuple(figure(name, facts) for name in names if name in facts)
        likely = bool(shown) and all(shown)
        causes.append(Cause(each["title"], likely, because, tuple(each["remedies"])))
    return tuple(sorted(causes, key=lambda cause: not cause.likely))


def compare(seen: Observation, plain: Observation | None, before: Observation | None) -> None:
    """Add the facts that follow from a plain run (no speculation) and from an earlier report."""
    facts = seen.facts
    if plain is not None:
        _ratio(facts, "ttft_ratio", facts.get("ttft"), plain.facts.get("ttft"))
        _ratio(facts, "speedup", plain.facts.get("tpot"), facts.get("tpot"))
        if seen.endpoint is not None and plain.endpoint is not None:
            facts["output_differs"] = differing(seen.endpoint, plain.endpoint)
    if before is not None:
        for name in ("acceptance", "speedup"):
            if name in before.facts:
                facts[f"{name}_before"] = before.facts[name]
        if seen.hardware and before.hardware:
            facts["hardware_changed"] = "yes" if seen.hardware != before.hardware else "no"


def derive(facts: dict[str, Value]) -> None:
    """Add acceptance and speedup relative to before, and the cost of verification."""
    for name in ("acceptance", "speedup"):
        _ratio(facts, f"{name}_kept", facts.get(name), facts.get(f"{name}_before"))
    share = facts.get("draft_share")
    if isinstance(share, float):
        # A step emits `length` tokens `speedup` times as fast as plain steps would.
        length, speedup = facts.get("acceptance_length"), facts.get("speedup")
        _ratio(facts, "verify_ratio", length, speedup, 1 - share)


def _ratio(
    facts: dict[str, Value], name: str, over: object, under: object, times: float = 1
) -> None:
    if isinstance(over, float) and isinstance(under, float) and under > 0:
        facts.setdefault(name, over / under * times)


def _match(one: Observation, others: list[Observation], option: str) -> Observation | None:
    """Return the observation of the same run, or the only one; None if there are none."""
    if len(others) == 1:
        return others[0]
    same = [other for other in others if other.where == one.where]
    if others and not same:
        raise ConfigError(f"{option} has several runs, and none is {one.where!r}; give one run.")
    return same[0] if same else None


def look(
    source: Source,
    plain: Source | None = None,
    before: Source | None = None,
    facts: Mapping[str, object] | None = None,
    key: str | None = None,
    seconds: float = 0.0,
) -> list[Observation]:
    """Return a source's observations, compared, with stated and derived facts; see ``diagnose``."""
    stated = check_facts(facts or {})
    number("seconds", seconds)
    without = [] if plain is None else observe(plain, key, seconds)
    earlier = [] if before is None else observe(before, key)
    seen = observe(source, key, seconds)
    for each in seen:
        each.facts |= stated
        compare(each, _match(each, without, "--plain"), _match(each, earlier, "--before"))
        each.facts |= stated
        derive(each.facts)
    return seen


def diagnose(
    source: Source,
    *,
    plain: Source | None = None,
    before: Source | None = None,
    facts: Mapping[str, object] | None = None,
    thresholds: Mapping[str, object] | None = None,
    key: str | None = None,
    seconds: float = 0.0,
) -> list[Problem]:
    """Return the problems of a server or a report, each with evidence, causes and remedies.

    A source is a server's address, a file with metrics, facts or a report, or facts by name.
    ``plain`` is the same without speculation, ``before`` an earlier one. ``facts`` override those
    of the source and ``thresholds`` the defaults; ``data/symptoms.toml`` names both. A server,
    asked with ``key``, is watched for ``seconds``; with 0 its counts since its start are used.

    Raises ConfigError: an argument is wrong; EndpointError: a server is down or not OpenAI's.
    """
    limits = check_thresholds(thresholds or {})
    seen = look(source, plain, before, facts, key, seconds)
    return [problem for each in seen for problem in judge(each.facts, limits, each.where)]


MOST_RUNS_SHOWN = 5


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
    """Yield one symptom and the remedies of its causes, each once; of several runs, a few."""
    yield from ("", f"## {group[0].title}", "")
    for problem in group[:MOST_RUNS_SHOWN]:
        where = f"{problem.where}: " if several else ""
        yield f"- {where}{_figures(problem.evidence)}"
    if len(group) > MOST_RUNS_SHOWN:
        yield f"- and {len(group) - MOST_RUNS_SHOWN} more runs"
    said: set[str] = set()
    for cause in group[0].causes:
        shown = f" ({_figures(cause.because)})" if cause.because and cause.likely else ""
        yield from ("", f"{'Likely' if cause.likely else 'Possible'}: {cause.title}{shown}.")
        fresh = [remedy for remedy in cause.remedies if remedy not in said]
        said.update(fresh)
        yield from (f"{number}. {remedy}" for number, remedy in enumerate(fresh, 1))


def _figures(figures: Iterable[object]) -> str:
    return "; ".join(map(str, figures))
