"""What the options of a policy must be together, and the sentence where they are not."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..errors import ConfigError, shown

if TYPE_CHECKING:
    from .policy import Policy

ENGINES = ("outrider", "vllm", "sglang", "trtllm", "llamacpp")
SOURCES = ("prometheus", "scrape")
TRAFFIC = ("none", "haproxy", "httproute", "webhook")
LEASES = ("file", "kubernetes")
SHORTEST = 0.1
KUBERNETES_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


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
