"""The sources of figures: Prometheus, or the servers' own ``/metrics``."""

from __future__ import annotations

import re
import tomllib
from collections import deque
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from math import inf, isfinite
from typing import Any, Protocol
from urllib.parse import urlencode

from ...base.outside.documents import MIB
from ...base.outside.http import call
from ...base.outside.sockets import Deadline
from ...base.outside.text import printable
from ...errors import EndpointError
from .. import metrics as scraping
from ..metrics import Page, Reader
from .policy import Policy, Server
from .states import Side

QUANTILE = 0.99
SECONDS = 5.0
"""Time in which a source must answer all queries."""
MOST_PAGES = 64
"""Most pages of a server that are kept over a window."""
LARGEST_PAGE = 16 * MIB


class Source(Protocol):
    """Gives the figures of engine and standby over the policy's window."""

    def read(self, now: float) -> tuple[Side, Side]:
        """Return the sides.

        Raises:
            EndpointError: the source itself does not answer.
        """
        ...


def source(policy: Policy) -> Source:
    """Return the source that a policy names."""
    return Prometheus(policy) if policy.source.kind == "prometheus" else Scrapes(policy)


KINDS = {"trtllm": "tensorrt-llm", "llamacpp": "llama.cpp"}
"""Engines whose names have other ones in the table of scraping."""
COUNTERS = {
    "done": "requests", "tokens": "generated", "drafted": "drafted", "accepted": "accepted"
}  # fmt: skip
GAUGES = {
    "running": ("running", "sum"), "memory": ("kv_usage", "max"), "speedup": ("speedup", "avg"),
    "draft_length": ("draft_length", "max"),
}  # fmt: skip
"""By figure: what the table of scraping calls it, and how several servers' are one."""


@cache
def names_of(kind: str) -> dict[str, str]:
    """Return what an engine calls its metrics; counters stand without their suffix _total."""
    text = (files(__package__) / "data" / "names.toml").read_text(encoding="utf-8")
    return {**scraping.names_of(KINDS.get(kind, kind)), **tomllib.loads(text).get(kind, {})}


def side(up: bool | None, found: Mapping[str, float | None]) -> Side:
    """Return a side from its figures: counts over the window, and present gauges.

    Negative counts and sums that are not finite are left out.
    """
    found = {
        name: value for name, value in found.items()
        if value is not None and isfinite(value) and value >= 0
    }  # fmt: skip
    done, failed = found.get("done"), found.get("failed") or 0.0
    requests = None if done is None and not failed else (done or 0.0) + failed
    drafted, accepted = found.get("drafted"), found.get("accepted")
    stalled = (found.get("running") or 0.0) >= 1 and found.get("tokens") == 0 and not requests
    return Side(
        up=up,
        requests=requests,
        errors=failed / requests if requests else None,
        p99=inf if stalled else found.get("p99"),
        memory=found.get("memory"),
        acceptance=min(1.0, accepted / drafted) if drafted and accepted is not None else None,
        drafted=drafted,
        speedup=found.get("speedup"),
        draft_length=found.get("draft_length"),
    )


def queries(kind: str, matcher: str, window: float) -> dict[str, str]:
    """Return PromQL for each figure that an engine has."""
    names, span = names_of(kind), f"{max(1, round(window * 1000))}ms"
    found = {"up": f"max(up{{{matcher}}})"}
    for figure, name in COUNTERS.items():
        if name in names:
            found[figure] = f"sum(increase({names[name]}_total{{{matcher}}}[{span}]))"
    if "failed" in names:
        labels = f'{matcher},{names["failed_label"]}=~"{names["failed_values"]}"'
        found["failed"] = f"sum(increase({names['failed']}_total{{{labels}}}[{span}]))"
    for figure, (name, how) in GAUGES.items():
        if name in names:
            found[figure] = f"{how}({names[name]}{{{matcher}}})"
    if "e2e" in names:
        buckets = f"{names['e2e']}_bucket{{{matcher}}}[{span}]"
        found["p99"] = f"histogram_quantile({QUANTILE}, sum by (le) (increase({buckets})))"
    return found


class Prometheus:
    """Asks Prometheus' HTTP API; a figure without a series is None."""

    def __init__(self, policy: Policy) -> None:
        own = policy.source
        self._url = (own.url or "").rstrip("/")
        self._policy = policy
        self._queries = {
            "engine": self._texts(policy.engine, own.engine),
            "standby": self._texts(policy.standby, own.standby),
        }

    def _texts(self, server: Server | None, matcher: str | None) -> dict[str, str]:
        if server is None or matcher is None:
            return {}
        window = self._policy.window
        span = f"{max(1, round(window * 1000))}ms"
        own = {
            name: text.replace("$MATCHER", matcher).replace("$WINDOW", span)
            for name, text in self._policy.source.queries.items()
        }
        return queries(server.kind, matcher, window) | own

    def read(self, now: float) -> tuple[Side, Side]:
        """Return the sides; ``now`` is Prometheus' own."""
        deadline = Deadline(SECONDS)
        engine, standby = (
            {name: self._ask(text, deadline) for name, text in self._queries[each].items()}
            for each in ("engine", "standby")
        )
        return _queried(engine), _queried(standby)

    def _ask(self, text: str, deadline: Deadline) -> float | None:
        key = None
        if self._policy.source.key_env:
            key = Server("", key_env=self._policy.source.key_env).key
        url = f"{self._url}/api/v1/query?{urlencode({'query': text})}"
        try:
            left = deadline.left()
        except TimeoutError:
            raise EndpointError(
                f"Prometheus at {self._url} does not answer all queries within {SECONDS:g} s."
            ) from None
        answer = call(url, key=key, seconds=left)
        document = answer.json()
        if not answer.ok or not isinstance(document, dict) or document.get("status") != "success":
            told = printable(document.get("error") or "") if isinstance(document, dict) else ""
            raise EndpointError(
                f"Prometheus at {self._url} refuses {text!r} (HTTP {answer.status}"
                f"{f', {told}' if told else ''})."
            )
        return _value(document.get("data"))


def _queried(found: Mapping[str, float | None]) -> Side:
    up = found.get("up")
    return side(None if up is None else up > 0, found)


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
    """Reads the servers' pages itself, and keeps those of the window."""

    def __init__(self, policy: Policy) -> None:
        self._window = policy.window
        self._engine = _Pages(policy.engine)
        self._standby = _Pages(policy.standby) if policy.standby else None

    def read(self, now: float) -> tuple[Side, Side]:
        """Return the sides; a server that does not answer is down, and the source never is."""
        engine = self._engine.read(now, self._window)
        return engine, self._standby.read(now, self._window) if self._standby else Side()


class _Pages:
    """The pages of one server over a window."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._names = frozenset(names_of(server.kind).values())
        self._kept: deque[tuple[float, Page]] = deque()

    def read(self, now: float, window: float) -> Side:
        reader = Reader(self._names)
        try:
            url = self._server.url.rstrip("/").removesuffix("/v1")
            answer = call(f"{url}/metrics", key=self._server.key, seconds=SECONDS,
                          limit=LARGEST_PAGE, take=reader.feed)  # fmt: skip
        except EndpointError:
            return Side(up=False)
        if not answer.ok:
            return Side(up=False)
        page = reader.page()
        while self._kept and (self._kept[0][0] < now - 1.5 * window or self._kept[0][0] > now):
            self._kept.popleft()
        # The oldest page within the window, else the youngest before it.
        while len(self._kept) > 1 and self._kept[1][0] <= now - window:
            self._kept.popleft()
        begin, before = self._kept[0] if self._kept else (now, page)
        if len(self._kept) < 2 or now - self._kept[-1][0] >= window / MOST_PAGES:
            self._kept.append((now, page))
        found = figures_of(page.since(before), names_of(self._server.kind))
        if now - begin < 0.9 * window:
            found["tokens"] = None  # a short silence is no standstill
        return side(True, found)


def figures_of(page: Page, names: Mapping[str, str]) -> dict[str, float | None]:
    """Return the figures on a page that holds what was counted in a window."""
    counted = {figure: names[name] for figure, name in COUNTERS.items() if name in names}
    found = {figure: page.total(name) for figure, name in counted.items()}
    if "failed" in names:
        by_code = page.by_label(names["failed"], names["failed_label"])
        wanted = re.compile(names["failed_values"])
        found["failed"] = sum(n for code, n in by_code.items() if wanted.fullmatch(code))
    for figure, (name, how) in GAUGES.items():
        if name in names:
            found[figure] = page.total(names[name]) if how == "sum" else page.mean(names[name])
    if "e2e" in names:
        found["p99"] = page.quantile(names["e2e"], QUANTILE)
    return found
