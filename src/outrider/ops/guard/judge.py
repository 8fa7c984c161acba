"""Judges the figures: which signals are bad, and for how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .policy import Policy
from .states import GuardView, Place, Side, State

DOWN = "down"
"""The signal of an engine of which neither metrics nor model answer."""
STANDBY_DOWN = "standby_down"
"""The same signal of the standby."""


@dataclass(frozen=True)
class Judgement:
    """The signals ``bad`` for long enough; ``pending`` has since when each is beyond its limit.

    ``reasons`` has a text for each signal, ``values`` the figures that were judged.
    """

    bad: frozenset[str]
    pending: Mapping[str, float]
    reasons: Mapping[str, str]
    values: Mapping[str, float]


def judge(state: State, seen: GuardView, policy: Policy, now: float) -> Judgement:
    """Return the verdict on the engine; figures from too little traffic are ignored."""
    # A probation sees few requests, and must be judged by them.
    least = policy.recovery if state.traffic.level == Place.PROBING else policy.minimum
    values = figures(seen.engine, policy, least.requests)
    pending: dict[str, float] = {}
    bad: set[str] = set()
    reasons: dict[str, str] = {}
    # A signal that was bad before a long gap may have been good in between.
    before = {} if now - state.seen > max(3 * policy.interval, policy.window) else state.pending
    for name, server, answers in (
        (DOWN, seen.engine, seen.answers), (STANDBY_DOWN, seen.standby, seen.warm),
    ):  # fmt: skip
        if server.up is True or answers is not False:
            continue
        pending[name] = min(before.get(name, now), now)
        # A server that the source no longer lists counts as gone only after a window.
        if server.up is False or now - pending[name] >= policy.window:
            bad.add(name)
    if DOWN in bad:
        values = {DOWN: 1.0}
        reasons[DOWN] = "neither the engine's metrics nor its model answer"
    for name, signal in policy.signals.items():
        if name not in values:
            reasons[name] = "no figure, or too little traffic for one"
            continue
        way = "below" if signal.falls else "above"
        text = f"{name} is {values[name]:.3g}"
        if not signal.is_bad(values[name], name in before):
            reasons[name] = f"{text}; bad {way} {signal.bad:g}"
            continue
        since = min(before.get(name, now), now)
        pending[name] = since
        if now - since >= signal.seconds:
            bad.add(name)
        of = f" of {signal.seconds:.0f}" if name not in bad else ""
        limit = signal.clear if name in before else signal.bad
        reasons[name] = f"{text}, {way} {limit:g} for {now - since:.0f}{of} s"
    return Judgement(frozenset(bad), pending, reasons, values)


def figures(side: Side, policy: Policy, requests: float) -> dict[str, float]:
    """Return the figures of a server that come from enough traffic."""
    values: dict[str, float | None] = {"memory": side.memory, "memory_critical": side.memory}
    if side.requests is not None and side.requests >= requests:
        values |= {"errors": side.errors, "p99": side.p99}
    elif side.p99 == float("inf"):  # requests run, and nothing ends
        values["p99"] = side.p99
    if (side.drafted or 0.0) >= policy.minimum.drafted and side.draft_length != 0:
        values |= {"acceptance": side.acceptance, "speedup": side.speedup}
    return {name: value for name, value in values.items() if value is not None}
