"""Facts of a diagnosis from a server's ``/metrics``, by each engine's own names."""

from __future__ import annotations

from typing import Any

from ...base.outside.text import printable
from ..metrics import Figures, Page
from .facts import Value

PLAIN = ("running", "waiting", "kv_usage", "requests", "prefix_hits", "acceptance_length")
"""Facts that are metrics as they are."""
SHARES = ("kv_usage", "prefix_hits", "acceptance")


def facts_of(page: Page) -> dict[str, Value]:
    """Return the facts that a page tells; none of an engine that is unknown."""
    seen = Figures.of(page)
    if seen is None:
        return {}
    facts: dict[str, Value] = {"engine": seen.engine, "metrics": "yes"}
    for fact in PLAIN:
        value = seen.total(fact)
        if value is not None and value >= 0:
            facts[fact] = min(value, 1.0) if fact in SHARES else value
    for fact in ("ttft", "tpot"):
        value = seen.mean(fact)
        if value is not None and value > 0:
            facts[fact] = value
    _share(facts, "queue_share", seen.mean("queue"), facts.get("ttft"))
    _share(facts, "prefix_hits", seen.total("hits"), seen.total("queries"))
    preempted = seen.total("preemptions")
    requests = facts.get("requests")
    if preempted is not None and isinstance(requests, float) and requests > 0:
        facts["preemptions_per_request"] = max(0.0, preempted) / requests
    ends = page.by_label(seen.names.get("requests", ""), "finished_reason")
    _share(facts, "answers_cut", ends.get("length", 0.0), sum(ends.values()))
    _speculation(facts, seen)
    if seen.engine == "outrider":
        _ours(facts, seen)
    return facts


def _share(facts: dict[str, Value], name: str, part: float | None, whole: Any) -> None:
    if part is not None and isinstance(whole, int | float) and whole > 0 and part >= 0:
        facts[name] = min(1.0, part / whole)


def _speculation(facts: dict[str, Value], seen: Figures) -> None:
    """Add acceptance, from counters where there are some, else from gauges."""
    drafted, accepted = seen.total("drafted"), seen.total("accepted")
    length = facts.get("acceptance_length")
    if drafted is None or accepted is None:
        rate = seen.mean("acceptance")
        counted = rate is not None and isinstance(length, float) and length > 0
        facts["speculation_counters"] = "yes" if counted else "no"
        if counted and rate is not None:
            facts["acceptance"] = min(max(rate, 0.0), 1.0)
        return
    facts["speculation_counters"] = "yes"
    facts["drafted"] = drafted
    _share(facts, "acceptance", accepted, drafted)
    drafts = seen.total("drafts") or 0.0
    if drafts > 0:
        facts["acceptance_length"] = 1 + accepted / drafts
        add_survival(facts, seen.survival())


def add_survival(facts: dict[str, Value], survival: list[float]) -> None:
    """Add what survival by position tells."""
    if survival:
        facts["draft_length"] = float(len(survival))
        facts["first_survival"] = min(1.0, survival[0])
        facts["last_survival"] = min(1.0, survival[-1])


def _ours(facts: dict[str, Value], seen: Figures) -> None:
    """Add what Outrider tells beside vLLM's names."""
    drafting, verifying = seen.total("drafting"), seen.total("verifying")
    if drafting is not None and verifying is not None:
        _share(facts, "draft_share", drafting, drafting + verifying)
    length = seen.total("draft_length")
    if length:
        facts["draft_length"] = length
    speedup = seen.mean("speedup")
    if speedup is not None and speedup > 0:
        facts["speedup"] = speedup
    reasons = seen.page.by_label("outrider_speculation_off", "reason")
    if reasons:
        facts["speculation_off"] = printable(next(iter(reasons)))
