"""The figures of any engine, from one or two pages of its ``/metrics``."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from ...base.tables import table
from .page import Page

POSITION_LABELS = ("position", "token_position")
MOST_PAGES_KEPT = 64


@dataclass(frozen=True)
class Figures:
    """The figures of an engine over a span of time. What it does not report is None, not guessed.

    ``page`` has the counts within the span (of ``seconds``, 0: since the engine's start), and
    gauges at its end. ``names`` are its metrics by figure, as in ``data/engines.toml``.
    """

    engine: str
    page: Page
    names: Mapping[str, str]
    seconds: float = 0.0

    @classmethod
    def of(
        cls, page: Page, before: Page | None = None, seconds: float = 0.0,
        engine: str | None = None,
    ) -> Figures | None:  # fmt: skip
        """Return the figures since a page ``seconds`` before or the start; None for no engine.

        ``engine`` says whose names are read; by default it is recognised by the page.
        """
        engine = engine or engine_of(page)
        if engine is None:
            return None
        grown = page if before is None else page.since(before)
        return cls(engine, grown, names_of(engine), seconds)

    @property
    def model(self) -> str:
        """The model that the page names; "" if it names none."""
        named = (s.labels["model_name"] for s in self.page.all() if "model_name" in s.labels)
        return next(named, "")

    def total(self, figure: str) -> float | None:
        """Return a figure's sum over its labels."""
        return self.page.total(self.names.get(figure, ""))

    def mean(self, figure: str) -> float | None:
        """Return a gauge's mean over its labels, or a histogram's mean."""
        return self.page.mean(self.names.get(figure, ""))

    def rate(self, figure: str) -> float | None:
        """Return a counter's rate per second."""
        total = self.total(figure)
        return total / self.seconds if total is not None and self.seconds > 0 else None

    def quantile(self, figure: str, share: float) -> float | None:
        """Return a histogram's quantile."""
        return self.page.quantile(self.names.get(figure, ""), share)

    def positions(self) -> dict[int, float]:
        """Return accepted tokens by position of the draft, in order, from 0."""
        sums = self.page.by_label(self.names.get("by_position", ""), *POSITION_LABELS)
        return {int(i): sums[i] for i in sorted(sums, key=_order) if re.fullmatch(r"[0-9]{1,3}", i)}

    def survival(self) -> list[float]:
        """Return the share of drafts accepted up to each position."""
        drafts = self.total("drafts")
        return [count / drafts for count in self.positions().values()] if drafts else []

    @property
    def acceptance(self) -> float | None:
        """Accepted / drafted; the engine's own gauge if it counts nothing."""
        drafted, accepted = self.total("drafted"), self.total("accepted")
        if drafted and accepted is not None:
            return min(1.0, accepted / drafted)
        return self._gauge("acceptance")

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / drafts; the engine's own gauge if it counts no drafts."""
        drafts, accepted = self.total("drafts"), self.total("accepted")
        if drafts and accepted is not None:
            return 1 + accepted / drafts
        return self._gauge("acceptance_length")

    def _gauge(self, figure: str) -> float | None:
        """Return a gauge; None if the engine did not work in this span."""
        drafted = self.total("drafted")
        value = self.mean(figure)
        worked = self.total("generated") if drafted is None else drafted
        return value if worked and value is not None and value > 0 else None

    @property
    def failed(self) -> float | None:
        """Requests that failed at the server."""
        if "failed" not in self.names:
            return None
        counts = self.page.by_label(self.names["failed"], self.names["failed_label"])
        pattern = re.compile(self.names["failed_values"])
        return sum(count for value, count in counts.items() if pattern.fullmatch(value))

    @property
    def token_seconds(self) -> float | None:
        """Mean seconds per output token: averaged over requests, else over all tokens."""
        mean = self.mean("tpot")
        over, under = self.total("decode_seconds"), self.total("generated")
        return mean or (over / under if over and under else None)


def _order(label: str) -> tuple[int, str]:
    return len(label), label


class PageWindow:
    """The pages of an engine over some seconds, from which rates and quantiles are taken."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.pages: deque[tuple[float, Page]] = deque()

    def take(self, page: Page, now: float) -> tuple[Page, float]:
        """Keep a page; return the page at the window's start, and the seconds since then."""
        pages, seconds = self.pages, self.seconds
        while pages and (pages[0][0] < now - 1.5 * seconds or pages[0][0] > now):
            pages.popleft()
        # First comes the newest page from before the window, else the oldest one within it.
        while len(pages) > 1 and pages[1][0] <= now - seconds:
            pages.popleft()
        start, before = pages[0] if pages else (now, page)
        if len(pages) < 2 or now - pages[-1][0] >= seconds / MOST_PAGES_KEPT:
            pages.append((now, page))
        return before, now - start

    def clear(self) -> None:
        """Forget all pages."""
        self.pages.clear()


OURS = "outrider_draft_length"
"""A metric that only Outrider has; it shares other names with vLLM."""


@cache
def tables() -> dict[str, dict[str, str]]:
    """Return the names of metrics by engine; do not change the tables, which are shared."""
    loaded = table("outrider.ops.metrics", "engines")
    return {name: each for name, each in loaded.items() if isinstance(each, dict)}


def names_of(engine: str) -> Mapping[str, str]:
    """Return an engine's metric names by figure. Outrider has vLLM's, and some of its own."""
    return tables()["vllm"] | tables()["outrider"] if engine == "outrider" else tables()[engine]


def engine_of(page: Page) -> str | None:
    """Return the engine whose names a page has; None if they are of no known engine."""
    if OURS in page.samples:
        return "outrider"
    for engine, names in tables().items():
        if "at" in names and any(each.startswith(names["at"]) for each in page.samples):
            return engine
    return None
