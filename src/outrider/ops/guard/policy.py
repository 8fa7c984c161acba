"""The policy of a guard: a TOML file, fully checked before anything is watched."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ...base.engines import named_engine
from ...base.outside.documents import read_toml
from ...base.outside.http import address
from ...base.outside.models import DataPart, checked
from ...errors import ConfigError, no_option, shown

ENGINES = ("outrider", "vllm", "sglang", "trtllm", "llamacpp")
FIGURES = (
    "up", "done", "failed", "running", "tokens", "p99", "memory", "drafted", "accepted", "speedup",
    "draft_length",
)  # fmt: skip
"""The figures that a source gives, by their names in ``[source.queries]``."""
MOST_SECONDS = 7 * 86400.0
LEAST_SECONDS = 0.1
HAPROXY_NAME = re.compile(r"[\w.:-]+")
KUBERNETES_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
PORT = re.compile(r".+:(\d{1,5})")


def _told(good: Callable[[Any], object], remedy: str) -> AfterValidator:
    """Return a validator of a value, whose error says what to give."""

    def check(value: Any) -> Any:
        try:
            refused = not good(value)
        except ValueError:
            refused = True
        if refused:
            raise ValueError(f"is {shown(value)}; {remedy}.")
        return value

    return AfterValidator(check)


def _is_url(url: str) -> bool:
    return url.startswith(("http://", "https://")) and " " not in url and bool(address(url).port)


def _is_port(listens: str) -> bool:
    match = PORT.fullmatch(listens)
    return match is not None and int(match[1]) <= 65535


def _rise(stages: tuple[float, ...]) -> bool:
    return bool(stages) and sorted(set(stages)) == list(stages) and 0 < stages[0] <= stages[-1] < 1


def _queries(queries: Mapping[str, str]) -> Mapping[str, str]:
    for name, text in queries.items():
        if name not in FIGURES:
            raise ValueError(str(no_option("", name, FIGURES)).strip())
        if not text.strip():
            raise ValueError(f"has an empty {name}; give an expression.")
    return queries


Amount = Annotated[float, Field(ge=0, le=MOST_SECONDS)]
Text = Annotated[str, _told(lambda text: text and text.isprintable(), "give a text on one line")]
Url = Annotated[str, _told(_is_url, "give an address like http://host:8000")]
Listen = Annotated[str, _told(_is_port, "give HOST:PORT")]
Object = Annotated[
    str, _told(KUBERNETES_NAME.fullmatch, "that is no name of an object in Kubernetes")
]
Matcher = Annotated[
    str, _told(lambda text: "=" in text and "{" not in text,
               "give label matchers, as 'instance=\"host:8000\"'"),
]  # fmt: skip


def key_in(variable: str | None) -> str | None:
    """Return the API key that a variable holds; None for none."""
    return os.environ.get(variable) if variable else None


@dataclass(frozen=True)
class Signal:
    """The limits of a figure: bad, good again, and the seconds for which it must be bad to count.

    ``bad`` is below ``clear`` for a figure that must not fall, above it for one that must not rise.
    """

    bad: float
    clear: float
    seconds: float = 0.0

    @property
    def falls(self) -> bool:
        """Return whether low values are the bad ones."""
        return self.bad < self.clear

    def is_bad(self, value: float, before: bool) -> bool:
        """Return whether a value is bad, given whether the last one was."""
        limit = self.clear if before else self.bad
        return value < limit if self.falls else value > limit

    def is_clear(self, value: float) -> bool:
        """Return whether a value is good enough to go back."""
        return value >= self.clear if self.falls else value <= self.clear


SIGNALS = {
    "acceptance": Signal(0.55, 0.60, 20.0),
    "speedup": Signal(1.0, 1.05),
    "p99": Signal(5.0, 3.0, 20.0),
    "errors": Signal(0.05, 0.02),
    "memory": Signal(0.92, 0.85, 20.0),
    "memory_critical": Signal(0.97, 0.92),
}
"""Defaults; acceptance and speedup are bad when low, the others when high."""
LEAST_ACCEPTANCE = 0.01
"""The lowest threshold that an advice can set; for lookups any acceptance breaks even."""
SHARES = ("acceptance", "errors", "memory", "memory_critical")


@dataclass(frozen=True)
class GuardedServer(DataPart):
    """The engine, or its standby. ``key_env`` names a variable that holds its API key."""

    url: Url
    kind: Annotated[str, AfterValidator(lambda name: named_engine(name, "", ENGINES))] = "outrider"
    key_env: Text | None = None

    @property
    def key(self) -> str | None:
        """The API key; None for none."""
        return key_in(self.key_env)

    @property
    def root(self) -> str:
        """Its address without ``/v1``."""
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def has_switch(self) -> bool:
        """Return whether its drafting can be changed while it runs: Outrider's alone can."""
        return self.kind == "outrider"


@dataclass(frozen=True)
class PolicySource(DataPart):
    """The source of figures.

    ``engine`` and ``standby`` are label matchers of their series, as ``instance="host:8000"``.
    ``queries`` replace the usual expressions; $MATCHER and $WINDOW are filled in.
    """

    kind: Literal["prometheus", "scrape"] = "scrape"
    url: Url | None = None
    engine: Matcher | None = None
    standby: Matcher | None = None
    key_env: Text | None = None
    queries: Annotated[Mapping[str, str], AfterValidator(_queries)] = field(default_factory=dict)


@dataclass(frozen=True)
class PolicyTraffic(DataPart):
    """The switch that divides traffic between engine and standby, and their names in it."""

    kind: Literal["none", "haproxy", "httproute", "webhook"] = "none"
    address: Text | None = None
    backend: Text | None = None
    engine: Text | None = None
    standby: Text | None = None
    url: Url | None = None
    namespace: Object | None = None
    route: Object | None = None
    key_env: Text | None = None


@dataclass(frozen=True)
class Minimum(DataPart):
    """The least requests and drafted tokens in a window for which figures are judged."""

    requests: Amount = 20.0
    drafted: Amount = 500.0


@dataclass(frozen=True)
class Recovery(DataPart):
    """The pace at which the guard undoes its changes.

    Changes that are not urgent are ``cooldown`` seconds apart. The first try comes after ``wait``
    seconds; the wait doubles after failed tries, up to ``longest_wait``. ``stages`` are the
    engine's shares of traffic in a probation; each lasts ``hold`` seconds and sees ``requests``.
    While memory is short the engine keeps ``relief`` of its share.
    """

    cooldown: Amount = 60.0
    wait: Amount = 120.0
    longest_wait: Amount = 3600.0
    stages: Annotated[
        tuple[float, ...], _told(_rise, "give numbers: shares that rise between 0 and 1"),
        _told(lambda stages: round(100 * stages[0]), "weights cannot express less than 1 %"),
    ] = (0.05, 0.25, 0.5)  # fmt: skip
    hold: Amount = 60.0
    requests: Amount = 5.0
    relief: Annotated[float, _told(lambda share: 0 < share < 1, "give a share between 0 and 1")] = (
        0.5
    )


@dataclass(frozen=True)
class PolicyLease(DataPart):
    """The lease by which one guard alone acts: a lock in the folder, or a Kubernetes Lease."""

    kind: Literal["file", "kubernetes"] = "file"
    url: Url | None = None
    namespace: Object | None = None
    name: Object = "outrider-guard"
    key_env: Text | None = None
    seconds: Amount = 30.0


@dataclass(frozen=True)
class Policy(DataPart):
    """A whole policy.

    The ``folder`` holds state, audit and lease. Evaluations come every ``interval`` seconds, and
    figures cover ``window`` seconds; a model must answer one token within ``probe_timeout``. The
    guard's own metrics are at ``listen``, and ``webhook`` gets each event. The break-even of
    ``advice``, a file of ``outrider ops advise --out`` beside the policy, is the threshold of
    acceptance unless ``signals`` has one.
    """

    engine: GuardedServer
    standby: GuardedServer | None = None
    source: PolicySource = PolicySource()
    traffic: PolicyTraffic = PolicyTraffic()
    signals: Mapping[str, Signal] = field(default_factory=lambda: dict(SIGNALS))
    minimum: Minimum = Minimum()
    recovery: Recovery = Recovery()
    lease: PolicyLease = PolicyLease()
    folder: Text = "guard"
    interval: Amount = 10.0
    window: Amount = 60.0
    probe_timeout: Amount = 5.0
    listen: Listen | None = None
    webhook: Url | None = None
    advice: Text | None = None
    dry_run: bool = False

    @property
    def can_shift(self) -> bool:
        """Return whether traffic can be moved at all."""
        return self.traffic.kind != "none" and self.standby is not None


def read(file: Path) -> Policy:
    """Return the policy in a file. Raises ConfigError: it cannot be read, or is not valid."""
    where = f"The policy {file}"
    return parse(read_toml(file, where), where, file.parent)


def parse(document: Mapping[str, Any], where: str = "The policy", beside: Path = Path()) -> Policy:
    """Return the policy in a document; its advice is relative to ``beside``. Raises ConfigError."""
    if "engine" not in document:
        raise ConfigError(f"{where} names no engine; add [engine] with its url.")
    others = dict(document)
    given = others.pop("signals", {})
    policy = checked(Policy, others, where)
    signals = _signals(given, where)
    if policy.advice is not None and "acceptance" not in given:
        signals["acceptance"] = _advised(beside / policy.advice, where)
    for problem in _contradictions(policy):
        raise ConfigError(f"{where}{problem}")
    return replace(policy, signals=signals)


# Signals


def _signals(document: Any, where: str) -> dict[str, Signal]:
    where = f"{where}, [signals]"
    given = checked(dict[str, dict[str, Amount]], document, where)
    signals = dict(SIGNALS)
    for name, limits in given.items():
        if name not in SIGNALS:
            raise no_option(where, name, list(SIGNALS))
        signals[name] = _signal(name, limits, f"{where}: {name}")
    if signals["memory"].bad >= signals["memory_critical"].bad:
        raise ConfigError(f"{where}: memory must act below memory_critical; correct one.")
    return signals


def _signal(name: str, given: Mapping[str, float], where: str) -> Signal:
    usual = SIGNALS[name]
    side = "below" if usual.falls else "above"
    for each in given:
        if each not in (side, "clear", "for"):
            raise no_option(where, each, (side, "clear", "for"))
    bad = given.get(side, usual.bad)
    # If only ``bad`` is given, ``clear`` keeps its usual ratio to it.
    scaled = min(bad * usual.clear / usual.bad, 1.0 if name in SHARES else MOST_SECONDS)
    clear = given.get("clear", scaled)
    if bad == clear or (bad < clear) is not usual.falls:
        order = "above" if usual.falls else "below"
        raise ConfigError(
            f"{where}: clear is {clear:g} and {side} {bad:g}; clear must lie {order} it, "
            "or the guard flaps."
        )
    if name in SHARES and max(bad, clear) > 1:
        raise ConfigError(f"{where} is a share from 0 to 1, not {max(bad, clear):g}.")
    return Signal(bad, clear, given.get("for", usual.seconds))


def _advised(file: Path, where: str) -> Signal:
    """Return the limits of acceptance from an advice: below break-even, drafting loses time."""
    from ..planning.advice import load_advice  # a slow import, and few policies name an advice

    even = load_advice(file, f"{where}: the advice").break_even
    if even is None:
        raise ConfigError(
            f"{where}: the advice {file} has no break-even acceptance: drafting never wins, or it "
            "was made without --hardware; give signals.acceptance, or drop the advice."
        )
    below = max(even.value, LEAST_ACCEPTANCE)
    return _signal("acceptance", {"below": below}, f"{where}: the break-even of {file}")


# Options that contradict each other

TRAFFIC_NEEDS = {
    "haproxy": ("address", "backend", "engine", "standby"),
    "httproute": ("namespace", "route", "engine", "standby"),
    "webhook": ("url",),
}


def _contradictions(policy: Policy) -> Iterator[str]:
    """Yield contradictions, as the ends of sentences that begin with the policy's name."""
    for name in ("interval", "window", "probe_timeout"):
        if (seconds := getattr(policy, name)) < LEAST_SECONDS:
            yield f": {name} is {seconds:g} s; give {LEAST_SECONDS:g} or more."
    window, interval, recovery = policy.window, policy.interval, policy.recovery
    if window < interval:
        yield (f": the window of {window:g} s is shorter than the interval of {interval:g} s; "
               "what lies between is never seen.")  # fmt: skip
    for name in ("cooldown", "wait", "hold"):
        if (seconds := getattr(recovery, name)) < window:
            yield (f", [recovery]: {name} is {seconds:g} s, less than the window of {window:g} s; "
                   "the guard would judge by figures from before its change.")  # fmt: skip
    if recovery.longest_wait < recovery.wait:
        yield ", [recovery]: longest_wait is shorter than wait; correct one."
    standby, source, lease = policy.standby, policy.source, policy.lease
    if standby is not None and standby.url.rstrip("/") == policy.engine.url.rstrip("/"):
        yield ": engine and standby are the same server; name two."
    if source.kind == "prometheus":
        names = ("url", "engine", "standby") if standby else ("url", "engine")
        yield from _lacking("source", source, names)
    elif source.queries:
        yield ', [source]: queries need kind = "prometheus".'
    if policy.traffic.kind != "none":
        if standby is None:
            yield ", [traffic] moves traffic, but there is no [standby]; add one."
        yield from _of_traffic(policy.traffic)
    if lease.kind == "kubernetes":
        yield from _lacking("lease", lease, ("namespace",))
        if lease.seconds < 2 * interval:
            yield (f", [lease]: {lease.seconds:g} s would run out between two evaluations; give "
                   f"{2 * interval:g} or more.")  # fmt: skip


def _of_traffic(traffic: PolicyTraffic) -> Iterator[str]:
    yield from _lacking("traffic", traffic, TRAFFIC_NEEDS[traffic.kind])
    if traffic.engine is not None and traffic.engine == traffic.standby:
        yield ", [traffic]: engine and standby have the same name; name two."
    if traffic.kind == "haproxy":
        for name in ("backend", "engine", "standby"):
            if not HAPROXY_NAME.fullmatch(getattr(traffic, name)):
                yield f", [traffic]: {name} is no name of HAProxy's; correct it."
        kind, _, rest = (traffic.address or "").partition(":")
        if not rest or not (kind == "unix" or (kind == "tcp" and _is_port(rest))):
            said = shown(traffic.address)
            yield f", [traffic]: address is {said}; give unix:PATH or tcp:HOST:PORT."


def _lacking(name: str, part: Any, needs: Iterable[str]) -> Iterator[str]:
    for each in needs:
        if getattr(part, each) is None:
            yield f", [{name}] of kind {part.kind!r} needs {each}; add it."
