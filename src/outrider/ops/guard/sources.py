"""The sources of figures: Prometheus, or the servers' own ``/metrics``."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite
from typing import Any
from urllib.parse import urlencode

from ...base.outside.http import call
from ...base.outside.sockets import Deadline
from ...base.outside.text import printable
from ...errors import EndpointError
from ..metrics import Figures, PageWindow, ask_page, names_of
from .policy import GuardedServer, Policy, key_in
from .states import Side

QUANTILE = 0.99
SOURCE_SECONDS = 5.0


COUNTERS = {
    "done": "requests", "tokens": "generated", "drafted": "drafted", "accepted": "accepted"
}  # fmt: skip
GAUGES = {
    "running": ("running", "sum"), "memory": ("kv_usage", "max"), "speedup": ("speedup", "avg"),
    "draft_length": ("draft_length", "max"),
}  # fmt: skip
"""By figure: its name in the table of metrics, and how PromQL aggregates its series."""


def side(up: bool | None, figures: Mapping[str, float | None]) -> Side:
    """Return a side computed from counts and gauges; negative and infinite ones are left out."""
    seen = {name: x for name, x in figures.items() if x is not None and isfinite(x) and x >= 0}
    done, failed = seen.get("done"), seen.get("failed", 0.0)
    requests = None if done is None and not failed else (done or 0.0) + failed
    drafted, accepted = seen.get("drafted"), seen.get("accepted")
    stalled = seen.get("running", 0.0) >= 1 and seen.get("tokens") == 0 and not requests
    return Side(
        up=up,
        requests=requests,
        errors=failed / requests if requests else None,
        p99=inf if stalled else seen.get("p99"),
        acceptance=min(1.0, accepted / drafted) if drafted and accepted is not None else None,
        drafted=drafted,
        **{name: seen.get(name) for name in ("memory", "speedup", "draft_length")},
    )


def queries(kind: str, matcher: str, window: float) -> dict[str, str]:
    """Return PromQL for each figure that an engine has."""
    names, span = names_of(kind), _span(window)
    texts = {"up": f"max(up{{{matcher}}})"}
    for figure, name in COUNTERS.items():
        if name in names:
            texts[figure] = f"sum(increase({names[name]}_total{{{matcher}}}[{span}]))"
    if "failed" in names:
        labels = f'{matcher},{names["failed_label"]}=~"{names["failed_values"]}"'
        texts["failed"] = f"sum(increase({names['failed']}_total{{{labels}}}[{span}]))"
    for figure, (name, how) in GAUGES.items():
        if name in names:
            texts[figure] = f"{how}({names[name]}{{{matcher}}})"
    if "e2e" in names:
        buckets = f"{names['e2e']}_bucket{{{matcher}}}[{span}]"
        texts["p99"] = f"histogram_quantile({QUANTILE}, sum by (le) (increase({buckets})))"
    return texts


def _span(window: float) -> str:
    return f"{max(1, round(window * 1000))}ms"


class Prometheus:
    """Asks Prometheus' HTTP API; a figure without a series is None."""

    def __init__(self, policy: Policy) -> None:
        self._source, self._window = policy.source, policy.window
        self._url = (self._source.url or "").rstrip("/")
        self._engine = self._texts(policy.engine, self._source.engine)
        self._standby = self._texts(policy.standby, self._source.standby)

    def _texts(self, server: GuardedServer | None, matcher: str | None) -> dict[str, str]:
        if server is None or matcher is None:
            return {}
        own = {
            name: text.replace("$MATCHER", matcher).replace("$WINDOW", _span(self._window))
            for name, text in self._source.queries.items()
        }
        return queries(server.kind, matcher, self._window) | own

    def read(self, now: float) -> tuple[Side, Side]:
        """Return both sides; ``now`` is not used. Raises EndpointError: there is no answer."""
        deadline = Deadline(SOURCE_SECONDS)
        return self._side(self._engine, deadline), self._side(self._standby, deadline)

    def _side(self, texts: Mapping[str, str], deadline: Deadline) -> Side:
        values = {name: self._ask(text, deadline) for name, text in texts.items()}
        up = values.get("up")
        return side(None if up is None else up > 0, values)

    def _ask(self, text: str, deadline: Deadline) -> float | None:
        try:
            left = deadline.left()
        except TimeoutError:
            raise EndpointError(
                f"Prometheus at {self._url} does not answer all queries within "
                f"{SOURCE_SECONDS:g} s."
            ) from None
        url = f"{self._url}/api/v1/query?{urlencode({'query': text})}"
        answer = call(url, key=key_in(self._source.key_env), seconds=left)
        document = answer.json()
        if not answer.ok or not isinstance(document, dict) or document.get("status") != "success":
            told = printable(document.get("error") or "") if isinstance(document, dict) else ""
            raise EndpointError(
                f"Prometheus at {self._url} refuses {text!r} (HTTP {answer.status}"
                f"{f', {told}' if told else ''})."
            )
        return _value(document.get("data"))


def _value(data: Any) -> float | None:
    """Return the one value of an instant vector or scalar; None for none, NaN or several."""
    try:
        result = data["result"]
        if data["resultType"] == "scalar":
            value = float(result[1])
        elif len(result) == 1:
            value = float(result[0]["value"][1])
        else:
            return None
    except (TypeError, LookupError, ValueError, OverflowError):
        return None
    return value if isfinite(value) else None


class Scrapes:
    """Reads the servers' pages directly, and keeps those of the window."""

    def __init__(self, policy: Policy) -> None:
        self._engine = _ServerPages(policy.engine, policy.window)
        self._standby = _ServerPages(policy.standby, policy.window) if policy.standby else None

    def read(self, now: float) -> tuple[Side, Side]:
        """Return both sides; a server that does not answer is down, and is no error."""
        engine = self._engine.read(now)
        return engine, self._standby.read(now) if self._standby else Side()


FigureSource = Prometheus | Scrapes
"""Gives the figures of engine and standby over the policy's window."""


def source(policy: Policy) -> FigureSource:
    """Return the source that a policy names."""
    return Prometheus(policy) if policy.source.kind == "prometheus" else Scrapes(policy)


class _ServerPages:
    """The pages of one server over a window."""

    def __init__(self, server: GuardedServer, window: float) -> None:
        self._server = server
        self._names = frozenset(names_of(server.kind).values())
        self._window = PageWindow(window)

    def read(self, now: float) -> Side:
        try:
            page = ask_page(self._server.root, self._server.key, SOURCE_SECONDS, self._names)
        except EndpointError:
            page = None
        if page is None:
            return Side(up=False)
        before, span = self._window.take(page, now)
        seen = Figures.of(page, before, span, self._server.kind)
        assert seen is not None
        counted = figures_of(seen)
        if span < 0.9 * self._window.seconds:
            counted["tokens"] = None  # a short gap does not mean that nothing comes out
        return side(True, counted)


def figures_of(seen: Figures) -> dict[str, float | None]:
    """Return the figures of a server in a window, by the names of ``[source.queries]``."""
    return {
        **{figure: seen.total(name) for figure, name in COUNTERS.items()},
        **{figure: seen.total(name) if how == "sum" else seen.mean(name)
           for figure, (name, how) in GAUGES.items()},
        "failed": seen.failed, "p99": seen.quantile("e2e", QUANTILE),
    }  # fmt: skip
