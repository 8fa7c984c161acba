"""The guard at work: look, decide, write down, change, confirm."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from ..errors import ConfigError
from .decide import FORCIBLE, decide, wanted
from .events import Events, logger
from .lease import Lease, lease
from .policy import Policy
from .sources import Source, source
from .states import Decision, Level, Observation, Place, State
from .store import Store
from .switches import SwitchError, TrafficSwitch, traffic_switch
from .switches.speculation import Speculation
from .watch import look


class Guard:
    """A guard of one engine; its parts can be given, for tests.

    The state is on disk before anything is changed, and says what must be true afterwards; each
    evaluation puts into force what is not. So a guard that dies in between goes on where it was.
    """

    def __init__(
        self, policy: Policy, *, figures: Source | None = None, right: Lease | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self.policy, self.clock = policy, clock
        self.store = Store(policy.folder)
        self.events = Events(self.store, policy.webhook, dry_run=policy.dry_run)
        self.source = figures or source(policy)
        self.lease = right or lease(policy)
        self.traffic: TrafficSwitch | None = traffic_switch(policy)
        self.drafting = Speculation(policy.engine) if policy.engine.has_switch else None
        self.state = self.store.load(policy.engine.url)  # damage is told at the start
        self._leads = False
        self._told: tuple[str, ...] = ()
        self._failing: tuple[str, ...] = ()

    def run(self, stop: threading.Event) -> None:
        """Evaluate every interval until ``stop`` is set."""
        if self.policy.listen is not None:
            self.events.listen(self.policy.listen)
        try:
            while not stop.is_set():
                begin = time.monotonic()
                self.turn()
                stop.wait(max(0.0, self.policy.interval - (time.monotonic() - begin)))
        finally:
            self.lease.release()
            self.events.close()

    def turn(self) -> Decision | None:
        """Evaluate once; None where another guard acts."""
        now = self.clock()
        if not self._may_act(now):
            return None
        if not self._leads:  # what the one before has written counts
            self.state, self._leads = self.store.load(self.policy.engine.url), True
            self.events.tell("note", f"this guard acts; the state is {self.state.mode}")
        self._commands()
        seen = look(self.state, self.policy, self.source, self.drafting, self.traffic, now)
        decision = decide(self.state, seen, self.policy, now)
        # Servers that answer slowly may have outlasted a lease.
        if not self._may_act(self.clock()):
            return None
        alerts = dict(decision.alerts)
        if self.policy.dry_run:
            self._pretend(decision)
        else:
            alerts |= self._carry_out(decision, seen)
        self.events.alert(alerts)
        self.events.gauges(self.state.mode, seen.warm if self.policy.standby else None, True)
        self._show(now, seen, replace(decision, alerts=alerts))
        return decision

    def _may_act(self, now: float) -> bool:
        """Take or renew the lease; without it this guard only watches."""
        other = self.lease.hold(now)
        if other is not None:
            self._leads = False
            logger.info("%s", other)
            self.events.gauges(self.state.mode, None, False)
            self.events.alert({})
        return other is None

    def _commands(self) -> None:
        """Take a person's word into the state."""
        said, mode = self.store.commanded()
        if not said:
            return
        if mode is None or mode in FORCIBLE:
            self.state = replace(self.state, forced=mode)
            self.store.save(self.state)
            told = "rules hold again" if mode is None else f"a person holds it in {mode}"
            self.events.tell("note", told)
        self.store.obeyed()

    def _pretend(self, decision: Decision) -> None:
        """Tell what would be done, once; levels stay as they are."""
        told = tuple(event.action for event in decision.events)
        if told != self._told:
            for event in decision.events:
                self.events.tell("decided", event.text, action=event.action, signal=event.signal)
        self._told = told
        self.state = replace(self.state, pending=decision.state.pending, seen=decision.state.seen)

    def _carry_out(self, decision: Decision, seen: Observation) -> dict[str, str]:
        """Write the decision down, put it into force, and return what failed."""
        before, self.state = self.state, decision.state
        self.store.save(self.state)
        actions = tuple(event.action for event in decision.events)
        again = bool(actions) and actions == self._failing  # tried at each evaluation, told once
        for event in () if again else decision.events:
            self.events.tell("decided", event.text, action=event.action, signal=event.signal)
        if seen.trouble is not None and self.state.forced is None:
            return {}
        try:
            drifted = self._enforce(seen)
        except SwitchError as error:
            if decision.events:
                self._undo(before)
            for event in () if again else decision.events:
                self.events.tell("failed", str(error), action=event.action, signal=event.signal)
            self._failing = actions
            return {"failed": str(error)}
        self._failing = ()
        if drifted and not decision.events:
            self.events.tell("drift", f"{' and '.join(drifted)} put back to {self.state.mode}")
        for event in decision.events:
            self.events.tell("done", event.text, action=event.action, signal=event.signal)
        return {}

    def _undo(self, before: State) -> None:
        """Go back to the state before a change that failed; what it half did is put back later."""
        now = self.state
        self.state = replace(
            before, pending=now.pending, seen=now.seen, own_weights=now.own_weights,
            own_drafting=now.own_drafting,
        )  # fmt: skip
        self.store.save(self.state)

    def _enforce(self, seen: Observation) -> list[str]:
        """Put into force what the state wants and is not so; return what that was."""
        drafting, weights = wanted(self.state, self.policy)
        changed = []
        if weights is not None and self.traffic is not None and seen.weights is not None:
            if weights != seen.weights:
                self.traffic.set(weights)
                if self.traffic.read() != weights:
                    raise SwitchError("The switch of traffic took new weights and has others.")
                changed.append("traffic")
            if self.state.traffic.level == Place.OWN:
                self._forget(own_weights=None)
        if drafting is not None and self.drafting is not None and seen.drafting is not None:
            has = {"enabled": seen.drafting.enabled, "num_speculative_tokens": seen.drafting.length}
            if any(has[name] != value for name, value in drafting.items()):
                self.drafting.set(drafting)
                changed.append("drafting")
            if self.state.drafting.level == Level.OWN:
                self._forget(own_drafting=None)
        return changed

    def _forget(self, **fields: Any) -> None:
        self.state = replace(self.state, **fields)
        self.store.save(self.state)

    def _show(self, now: float, seen: Observation, decision: Decision) -> None:
        self.store.show(
            {
                "time": now,
                "engine": self.policy.engine.url,
                "mode": self.state.mode,
                "forced": self.state.forced,
                "dry_run": self.policy.dry_run,
                "runtime_switch": self.policy.engine.has_switch,
                "alerts": dict(decision.alerts),
                "reasons": dict(decision.reasons),
                "seen": asdict(seen),
                "drafting": asdict(self.state.drafting),
                "traffic": asdict(self.state.traffic),
            }
        )


def run(policy: Policy, stop: threading.Event) -> None:
    """Run a guard until ``stop`` is set.

    Raises:
        ConfigError: the policy's folder or port cannot be used.
    """
    try:
        Guard(policy).run(stop)
    except OSError as error:
        raise ConfigError(f"The guard's folder {policy.folder}: {error.strerror}.") from None
