"""Facts of a diagnosis from a server's ``/metrics``, by each engine's own names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...base.outside.text import printable
from ..metrics import Page, engine_of, names_of, positions_of
from .facts import Value

PLAIN = ("running", "waiting", "kv_usage", "requests", "prefix_hits", "acceptance_length")
"""Facts that are metrics as they are."""
SHARES = ("kv_usage", "prefix_hits", "acceptance")


def facts_of(page: Page) -> dict[str, Value]:
    """Return the facts that a page tells; none of an engine that is unknown."""
    engine = engine_of(page)
    if engine is None:
        return {}
    names = names_of(engine)
    facts: dict[str, Value] = {"engine": engine, "metrics": "yes"}
    for fact in PLAIN:
        value = page.total(names[fact]) if fact in names else None
        if value is not None and value >= 0:
            facts[fact] = min(value, 1.0) if fact in SHARES else value
    for fact in ("ttft", "tpot"):
        value = page.mean(names[fact]) if fact in names else None
        if value is not None and value > 0:
            facts[fact] = value
    _share(facts, "queue_share", page.mean(names.get("queue", "")), facts.get("ttft"))
    _share(facts, "prefix_hits", page.total(names.get("hits", "")),
           page.total(names.get("queries", "")))  # fmt: skip
    preempted = page.total(names.get("preemptions", ""))
    requests = facts.get("requests")
    if preempted is not None and isinstance(requests, float) and requests > 0:
        facts["preemptions_per_request"] = max(0.0, preempted) / requests
    ends = page.by_label(names.get("requests", ""), "finished_reason")
    _share(facts, "answers_cut", ends.get("length", 0.0), sum(ends.values()))
    _speculation(facts, page, names)
    if engine == "outrider":
        _ours(facts, page)
    return facts


def _share(facts: dict[str, Value], name: str, part: float | None, whole: Any) -> None:
    if part is not None and isinstance(whole, int | float) and whole > 0 and part >= 0:
        facts[name] = min(1.0, part / whole)


def _speculation(facts: dict[str, Value], page: Page, names: Mapping[str, str]) -> None:
    """Add acceptance, from counters where there are some, else from gauges."""
    drafted = page.total(names.get("drafted", ""))
    accepted = page.total(names.get("accepted", ""))
    length = facts.get("acceptance_length")
    if drafted is None or accepted is None:
        rate = page.mean(names.get("acceptance", ""))
        counted = rate is not None and isinstance(length, float) and length > 0
        facts["speculation_counters"] = "yes" if counted else "no"
        if counted and rate is not None:
            facts["acceptance"] = min(max(rate, 0.0), 1.0)
        return
    facts["speculation_counters"] = "yes"
    facts["drafted"] = drafted
    _share(facts, "acceptance", accepted, drafted)
    drafts = page.total(names.get("drafts", "")) or 0.0
    if drafts <= 0:
        return
    facts["acceptance_length"] = 1 + accepted / drafts
    add_survival(facts, [count / drafts for count in positions_of(page, names).values()])


def add_survival(facts: dict[str, Value], survival: list[float]) -> None:
    """Add what survival by position tells."""
    if survival:
        facts["draft_length"] = float(len(survival))
        facts["first_survival"] = min(1.0, survival[0])
        facts["last_survival"] = min(1.0, survival[-1])


def _ours(facts: dict[str, Value], page: Page) -> None:
    """Add what Outrider tells beside vLLM's names."""
    drafting, verifying = (page.total(f"outrider_{x}_seconds") for x in ("drafting", "verifying"))
    if drafting is not None and verifying is not None:
        _share(facts, "draft_share", drafting, drafting + verifying)
    length = page.total("outrider_draft_length")
    if length:
        facts["draft_length"] = length
    speedup = page.mean("outrider_speedup")
    if speedup is not None and speedup > 0:
        facts["speedup"] = speedup
    reasons = page.by_label("outrider_speculation_off", "reason")
    if reasons:
        facts["speculation_off"] = printable(next(iter(reasons)))
