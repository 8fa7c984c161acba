"""The figures of one engine, of any that is supported, from two pages of its ``/metrics``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..metrics import Page, engine_of, names_of, positions_of

SUPPORTED = ("outrider", "vllm", "sglang", "tensorrt-llm", "llama.cpp")
COUNTED = ("drafts", "drafted", "accepted", "generated", "requests", "good_requests")
NOW = ("running", "waiting", "kv_usage")
LATENCIES = ("ttft", "itl", "e2e")
SHARES = (0.5, 0.9, 0.95, 0.99)


@dataclass(frozen=True)
class Figures:
    """The figures of an engine. One that it does not tell is missing, never guessed.

    Attributes:
        counted: counts since the engine's start, by name.
        positions: accepted tokens by position of the draft, from 0.
        now: gauges of this moment.
        lately: figures of the window between the two pages.
        quantiles: of each latency, in seconds, by share; of the same window.
        token_seconds: mean time of an output token after the first, in the window.
    """

    engine: str
    model: str
    counted: dict[str, float] = field(default_factory=dict)
    positions: dict[int, float] = field(default_factory=dict)
    now: dict[str, float] = field(default_factory=dict)
    lately: dict[str, float] = field(default_factory=dict)
    quantiles: dict[str, dict[float, float]] = field(default_factory=dict)
    token_seconds: float | None = None


def figures_of(page: Page, before: Page | None = None, seconds: float = 0.0) -> Figures | None:
    """Return the figures of an engine; None where the page is of none that is supported.

    Args:
        page: what it says now.
        before: what it said at the window's start; None leaves out what needs a window.
        seconds: the window's length.
    """
    engine = engine_of(page)
    if engine not in SUPPORTED:
        return None
    names = names_of(engine)
    found = Figures(
        engine, model_of(page), _sums(page, names, COUNTED),
        positions_of(page, names), _sums(page, names, NOW),
    )  # fmt: skip
    if before is None or seconds <= 0:
        return found
    grown = page.since(before)
    return Figures(
        engine, found.model, found.counted, found.positions, found.now,
        _lately(page, grown, names, seconds), _quantiles(grown, names),
        _token_seconds(grown, names),
    )  # fmt: skip


def model_of(page: Page) -> str:
    """Return the model that a page names, "" if it names none."""
    return next((s.labels["model_name"] for s in page.all() if "model_name" in s.labels), "")


def _sums(page: Page, names: Mapping[str, str], figures: tuple[str, ...]) -> dict[str, float]:
    sums = {figure: page.total(names.get(figure, "")) for figure in figures}
    return {figure: value for figure, value in sums.items() if value is not None}


def _lately(page: Page, grown: Page, names: Mapping[str, str], seconds: float) -> dict[str, float]:
    """Return what happened in the window; ratios only where there was something to divide."""
    counts = _sums(grown, names, (*COUNTED, "good_tokens"))
    drafts, drafted, accepted = (counts.get(name) for name in ("drafts", "drafted", "accepted"))
    found: dict[str, float] = {}
    if drafted and accepted is not None:
        found["acceptance"] = min(1.0, accepted / drafted)
    if drafts and accepted is not None:
        found["acceptance_length"] = 1 + accepted / drafts
    # Engines with gauges alone: their last value, which is of this window only if they worked.
    if drafted or ("drafted" not in counts and counts.get("generated")):
        for name in ("acceptance", "acceptance_length"):
            value = page.mean(names.get(name, ""))
            if value is not None and value > 0:
                found.setdefault(name, value)
    for name in ("drafted", "accepted", "generated", "good_requests", "good_tokens"):
        if name in counts:
            found[f"{name}_per_second"] = counts[name] / seconds
    return found


def _quantiles(grown: Page, names: Mapping[str, str]) -> dict[str, dict[float, float]]:
    found: dict[str, dict[float, float]] = {}
    for latency in LATENCIES:
        values = {share: grown.quantile(names.get(latency, ""), share) for share in SHARES}
        known = {share: value for share, value in values.items() if value is not None}
        if known:
            found[latency] = known
    return found


def _token_seconds(grown: Page, names: Mapping[str, str]) -> float | None:
    """Return the mean time of an output token: of requests, else of all tokens together."""
    tpot = names.get("tpot", "")
    over, under = grown.total(f"{tpot}_sum"), grown.total(f"{tpot}_count")
    if not under:
        over, under = (grown.total(names.get(each, "")) for each in ("decode_seconds", "generated"))
    return over / under if over and under else None
