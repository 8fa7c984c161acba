"""The policy of a guard: a TOML file, checked whole before anything is watched."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...base.outside.documents import read_toml
from ...errors import ConfigError, no_option, shown

WITH_SWITCH = ("outrider",)
"""Engines whose drafting can be changed while they run."""
FIGURES = (
    "up", "done", "failed", "running", "tokens", "p99", "memory", "drafted", "accepted", "speedup",
    "draft_length",
)  # fmt: skip
"""What a source is asked for, by the names of ``[source.queries]``."""
LONGEST = 7 * 86400.0

ENGINES = ("outrider", "vllm", "sglang", "trtllm", "llamacpp")
SOURCES = ("prometheus", "scrape")
TRAFFIC = ("none", "haproxy", "httproute", "webhook")
LEASES = ("file", "kubernetes")
SHORTEST = 0.1
KUBERNETES_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


@dataclass(frozen=True)
class Signal:
    """The limits of a figure: bad, good again, and for how long it must be bad.

    Of a figure that must not fall, ``bad`` lies below ``clear``; of one that must not rise, above.
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
"""The lowest threshold that an advice sets; for lookups any acceptance breaks even."""
SHARES = ("acceptance", "errors", "memory", "memory_critical")


@dataclass(frozen=True)
class Server:
    """The engine, or its standby. ``key_env`` names a variable that holds its API key."""

    url: str
    kind: str = "outrider"
    key_env: str | None = None

    @property
    def key(self) -> str | None:
        """The API key; None for none."""
        return os.environ.get(self.key_env) if self.key_env else None

    @property
    def has_switch(self) -> bool:
        """Return whether its drafting can be changed while it runs."""
        return self.kind in WITH_SWITCH


@dataclass(frozen=True)
class Source:
    """The source of figures.

    ``engine`` and ``standby`` are label matchers of their series, as ``instance="host:8000"``;
    ``queries`` are expressions in place of the usual ones, where $MATCHER and $WINDOW are filled
    in.
    """

    kind: str = "scrape"
    url: str | None = None
    engine: str | None = None
    standby: str | None = None
    key_env: str | None = None
    queries: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Traffic:
    """The switch that divides traffic between the two, and their names there."""

    kind: str = "none"
    address: str | None = None
    backend: str | None = None
    engine: str | None = None
    standby: str | None = None
    url: str | None = None
    namespace: str | None = None
    route: str | None = None
    key_env: str | None = None


@dataclass(frozen=True)
class Minimum:
    """Below this much in a window a figure says nothing: requests, and drafted tokens."""

    requests: float = 20.0
    drafted: float = 500.0


@dataclass(frozen=True)
class Recovery:
    """The way back.

    Args:
        cooldown: least seconds between two changes that are not urgent.
        wait: seconds until the first try; it doubles up to ``longest_wait`` where tries fail.
        stages: the engine's shares of traffic in a probation; those above its own are left out.
        hold: seconds of a stage.
        requests: that a stage must have seen.
        relief: what the engine keeps of its share of traffic while memory is short.
    """

    cooldown: float = 60.0
    wait: float = 120.0
    longest_wait: float = 3600.0
    stages: tuple[float, ...] = (0.05, 0.25, 0.5)
    hold: float = 60.0
    requests: float = 5.0
    relief: float = 0.5


@dataclass(frozen=True)
class Lease:
    """The lease by which one guard alone acts: a lock in the folder, or a Kubernetes Lease."""

    kind: str = "file"
    url: str | None = None
    namespace: str | None = None
    name: str = "outrider-guard"
    key_env: str | None = None
    seconds: float = 30.0


@dataclass(frozen=True)
class Policy:
    """A whole policy.

    Args:
        folder: of state, audit and lease.
        interval: seconds between evaluations.
        window: seconds that figures cover.
        probe_timeout: seconds in which a model must answer one token.
        listen: host:port of the guard's own metrics; None for none.
        webhook: an address that gets each event; None for none.
        advice: a file of ``outrider ops advise --out``, relative to the policy; its break-even is
            the threshold of acceptance unless ``signals`` has one.
    """

    engine: Server
    standby: Server | None = None
    source: Source = Source()
    traffic: Traffic = Traffic()
    signals: Mapping[str, Signal] = field(default_factory=lambda: dict(SIGNALS))
    minimum: Minimum = Minimum()
    recovery: Recovery = Recovery()
    lease: Lease = Lease()
    folder: str = "guard"
    interval: float = 10.0
    window: float = 60.0
    probe_timeout: float = 5.0
    listen: str | None = None
    webhook: str | None = None
    advice: str | None = None
    dry_run: bool = False

    @property
    def can_shift(self) -> bool:
        """Return whether traffic can be moved at all."""
        return self.traffic.kind != "none" and self.standby is not None


def read(file: Path) -> Policy:
    """Return the policy in a file.

    Raises:
        ConfigError: it cannot be read, or is no policy.
    """
    where = f"The policy {file}"
    return parse(read_toml(file, where), where, file.parent)


def parse(document: Mapping[str, Any], where: str = "The policy", beside: Path = Path()) -> Policy:
    """Return the policy in a document; the path of its advice is relative to ``beside``.

    Raises:
        ConfigError: something in it is wrong; the message says what and where.
    """
    _known(Policy, document, where)
    parts: dict[str, Any] = {}
    for name, value in document.items():
        kind = PARTS.get(name)
        if name == "signals":
            parts[name] = _signals(value, where)
        elif kind is not None:
            parts[name] = _part(kind, value, f"{where}, [{name}]")
        else:
            parts[name] = _value(_field(Policy, name), value, where)
    if "engine" not in parts:
        raise ConfigError(f"{where} names no engine; add [engine] with its url.")
    if "advice" in parts and "acceptance" not in document.get("signals", {}):
        signals = parts.get("signals", SIGNALS)
        parts["signals"] = {**signals, "acceptance": _advised(beside / parts["advice"], where)}
    policy = Policy(**parts)
    check(policy, where)
    return policy


def _advised(file: Path, where: str) -> Signal:
    """Return the limits of acceptance from an advice: below break-even, drafting loses time."""
    from ..planning.saved import load_advice  # a slow import, and few policies name an advice

    even = load_advice(file, f"{where}: the advice").break_even
    if even is None:
        raise ConfigError(
            f"{where}: the advice {file} has no break-even acceptance: drafting never wins, or it "
            "was made without --hardware; give signals.acceptance, or drop the advice."
        )
    below = max(even.value, LEAST_ACCEPTANCE)
    return _signal("acceptance", {"below": below}, f"{where}: the break-even of {file}")


PARTS: dict[str, type[Any]] = {
    "engine": Server, "standby": Server, "source": Source, "traffic": Traffic, "minimum": Minimum,
    "recovery": Recovery, "lease": Lease,
}  # fmt: skip


def _field(kind: type[Any], name: str) -> Field[Any]:
    return next(f for f in fields(kind) if f.name == name)


def _known(kind: type[Any], document: Any, where: str) -> None:
    if not isinstance(document, Mapping):
        raise ConfigError(f"{where} is {shown(document)}; give a table of options.")
    names = [f.name for f in fields(kind)]
    for name in document:
        if name not in names:
            raise no_option(where, name, names)


def _part(kind: type[Any], document: Any, where: str) -> Any:
    _known(kind, document, where)
    for one in fields(kind):
        required = one.default is MISSING and one.default_factory is MISSING
        if required and one.name not in document:
            raise ConfigError(f"{where} has no {one.name}; add it.")
    return kind(**{name: _value(_field(kind, name), v, where) for name, v in document.items()})


def _value(one: Field[Any], value: Any, where: str) -> Any:
    """Return a value of an option, checked for its type."""
    wanted = str(one.type)
    if wanted == "float":
        return _number(value, f"{where}: {one.name}")
    if wanted == "bool" and isinstance(value, bool):
        return value
    if wanted.startswith("str") and isinstance(value, str) and value and value.isprintable():
        return value
    if wanted.startswith("tuple") and isinstance(value, list) and value:
        return tuple(_number(each, f"{where}: {one.name}") for each in value)
    if wanted.startswith("Mapping") and isinstance(value, dict):
        return _queries(value, where)
    kinds = {"bool": "true or false", "str": "a text", "tuple": "numbers", "Mapping": "a table"}
    kind = next(text for start, text in kinds.items() if wanted.startswith(start))
    raise ConfigError(f"{where}: {one.name} is {shown(value)}; give {kind}.")


def _number(value: Any, where: str) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= LONGEST:  # NaN neither
        raise ConfigError(f"{where} is {shown(value)}; give a number from 0 to {LONGEST:.0f}.")
    return float(value)


def _queries(document: dict[str, Any], where: str) -> dict[str, str]:
    for name, text in document.items():
        if name not in FIGURES:
            raise no_option(f"{where}, queries", name, FIGURES)
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f"{where}: the query {name} is {shown(text)}; give an expression.")
    return document


def _signals(document: Any, where: str) -> dict[str, Signal]:
    where = f"{where}, [signals]"
    if not isinstance(document, Mapping):
        raise ConfigError(f"{where} is {shown(document)}; give a table of signals.")
    found = dict(SIGNALS)
    for name, values in document.items():
        if name not in SIGNALS:
            raise no_option(where, name, list(SIGNALS))
        found[name] = _signal(name, values, f"{where}: {name}")
    if found["memory"].bad >= found["memory_critical"].bad:
        raise ConfigError(f"{where}: memory must act below memory_critical; correct one.")
    return found


def _signal(name: str, values: Any, where: str) -> Signal:
    usual = SIGNALS[name]
    side = "below" if usual.falls else "above"
    names = (side, "clear", "for")
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} is {shown(values)}; give {{{side} = ..., clear = ...}}.")
    for each in values:
        if each not in names:
            raise no_option(where, each, names)
    bad = _number(values.get(side, usual.bad), f"{where}.{side}")
    # Where only the threshold is given, the way back keeps its usual distance to it.
    scaled = min(bad * usual.clear / usual.bad, 1.0 if name in SHARES else LONGEST)
    clear = _number(values.get("clear", scaled), f"{where}.clear")
    seconds = _number(values.get("for", usual.seconds), f"{where}.for")
    if bad == clear or (bad < clear) is not usual.falls:
        order = "above" if usual.falls else "below"
        raise ConfigError(
            f"{where}: clear is {clear:g} and {side} {bad:g}; clear must lie {order} it, "
            "or the guard flaps."
        )
    if name in SHARES and max(bad, clear) > 1:
        raise ConfigError(f"{where} is a share from 0 to 1, not {max(bad, clear):g}.")
    return Signal(bad, clear, seconds)


def check(policy: Policy, where: str) -> None:
    """Refuse options that contradict each other."""
    for name, value in (("interval", policy.interval), ("window", policy.window),
                        ("probe_timeout", policy.probe_timeout)):  # fmt: skip
        if value < SHORTEST:
            raise ConfigError(f"{where}: {name} is {value:g} s; give {SHORTEST:g} or more.")
    if policy.window < policy.interval:
        raise ConfigError(
            f"{where}: the window of {policy.window:g} s is shorter than the interval of "
            f"{policy.interval:g} s; what lies between is never seen."
        )
    _recovery(policy, where)
    _address(policy.engine.url, f"{where}, [engine]: url")
    _one_of(policy.engine.kind, ENGINES, f"{where}, [engine]: kind")
    if policy.standby is not None:
        _address(policy.standby.url, f"{where}, [standby]: url")
        _one_of(policy.standby.kind, ENGINES, f"{where}, [standby]: kind")
        if policy.standby.url.rstrip("/") == policy.engine.url.rstrip("/"):
            raise ConfigError(f"{where}: engine and standby are the same server; name two.")
    if policy.webhook is not None:
        _address(policy.webhook, f"{where}: webhook")
    if policy.listen is not None:
        _listens(policy.listen, f"{where}: listen")
    _source(policy, where)
    _traffic(policy, where)
    _one_of(policy.lease.kind, LEASES, f"{where}, [lease]: kind")
    if policy.lease.kind == "kubernetes":
        _needs(policy.lease, ("namespace",), f"{where}, [lease]")
        for name in ("namespace", "name"):
            _named(getattr(policy.lease, name), f"{where}, [lease]: {name}")
        if policy.lease.seconds < 2 * policy.interval:
            raise ConfigError(
                f"{where}, [lease]: {policy.lease.seconds:g} s would run out between two "
                f"evaluations; give {2 * policy.interval:g} or more."
            )


def _recovery(policy: Policy, where: str) -> None:
    recovery, where = policy.recovery, f"{where}, [recovery]"
    for name in ("cooldown", "wait", "hold"):
        if getattr(recovery, name) < policy.window:
            raise ConfigError(
                f"{where}: {name} is {getattr(recovery, name):g} s, less than the window of "
                f"{policy.window:g} s; the guard would judge by figures from before its change."
            )
    if recovery.longest_wait < recovery.wait:
        raise ConfigError(f"{where}: longest_wait is shorter than wait; correct one.")
    stages = recovery.stages
    if sorted(set(stages)) != list(stages) or not 0 < stages[0] <= stages[-1] < 1:
        raise ConfigError(f"{where}: stages are shares that rise between 0 and 1; correct them.")
    if round(100 * stages[0]) == 0:
        raise ConfigError(f"{where}: the first stage is below 1 %, which weights cannot express.")
    if not 0 < recovery.relief < 1:
        raise ConfigError(f"{where}: relief is a share between 0 and 1.")


def _source(policy: Policy, where: str) -> None:
    source, where = policy.source, f"{where}, [source]"
    _one_of(source.kind, SOURCES, f"{where}: kind")
    if source.kind == "scrape":
        if source.queries:
            raise ConfigError(f'{where}: queries need kind = "prometheus".')
        return
    _needs(source, ("url", "engine", *(("standby",) if policy.standby else ())), where)
    _address(source.url or "", f"{where}: url")
    for name in ("engine", "standby"):
        matcher = getattr(source, name)
        if matcher is not None and ("=" not in matcher or "{" in matcher):
            raise ConfigError(
                f"{where}: {name} is {shown(matcher)}; give label matchers, as "
                "'instance=\"host:8000\"'."
            )


def _traffic(policy: Policy, where: str) -> None:
    traffic, where = policy.traffic, f"{where}, [traffic]"
    _one_of(traffic.kind, TRAFFIC, f"{where}: kind")
    if traffic.kind == "none":
        return
    if policy.standby is None:
        raise ConfigError(f"{where} moves traffic, but there is no [standby]; add one.")
    needs = {
        "haproxy": ("address", "backend", "engine", "standby"),
        "httproute": ("namespace", "route", "engine", "standby"),
        "webhook": ("url",),
    }[traffic.kind]
    _needs(traffic, needs, where)
    if traffic.engine is not None and traffic.engine == traffic.standby:
        raise ConfigError(f"{where}: engine and standby have the same name; name two.")
    if traffic.kind == "haproxy":
        for name in ("backend", "engine", "standby"):
            if not all(c.isalnum() or c in "_-.:" for c in getattr(traffic, name)):
                raise ConfigError(f"{where}: {name} is no name of HAProxy's; correct it.")
        kind, _, rest = (traffic.address or "").partition(":")
        if kind not in ("unix", "tcp") or not rest:
            raise ConfigError(
                f"{where}: address is {shown(traffic.address)}; give unix:PATH or tcp:HOST:PORT."
            )
        if kind == "tcp":
            _listens(rest, f"{where}: address")
    if traffic.kind == "httproute":
        for name in ("namespace", "route"):
            _named(getattr(traffic, name), f"{where}: {name}")
    if traffic.url is not None:
        _address(traffic.url, f"{where}: url")


def _needs(part: Any, names: tuple[str, ...], where: str) -> None:
    for name in names:
        if getattr(part, name) is None:
            raise ConfigError(f"{where} of kind {part.kind!r} needs {name}; add it.")


def _named(value: str, where: str) -> None:
    if not KUBERNETES_NAME.fullmatch(value):
        raise ConfigError(f"{where} is {shown(value)}, no name of an object in Kubernetes.")


def _one_of(value: str, known: tuple[str, ...], where: str) -> None:
    if value not in known:
        raise ConfigError(f"{where} is {shown(value)}; known are {', '.join(known)}.")


def _address(url: str, where: str) -> None:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        good = False
    if not good or " " in url:
        raise ConfigError(f"{where} is {shown(url)}; give an address like http://host:8000.")


def _listens(address: str, where: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise ConfigError(f"{where} is {shown(address)}; give HOST:PORT.")
