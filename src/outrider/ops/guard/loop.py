"""The guard's loop: observe, decide, save the decision, change, confirm."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, TypeVar

from ...base.outside.http import call
from ...base.outside.sockets import Deadline
from ...errors import ConfigError, EndpointError
from .decide import FORCIBLE, decide, wanted
from .events import Events, logger
from .lease import GuardLease, lease
from .policy import GuardedServer, Policy
from .sources import FigureSource, source
from .states import Decision, GuardView, Level, Place, Side, State, carried_over
from .store import GuardStore, StoreError
from .switches import SpeculationSwitch, SwitchError, TrafficSwitch, traffic_switch

T = TypeVar("T")


class StoppedError(Exception):
    """A signal arrived while the guard was waiting."""


class GuardStop:
    """Stops a guard: between two evaluations, or at once while it waits."""

    def __init__(self) -> None:
        self.asked = False
        self._waits = False

    def ask(self, *_: Any) -> None:
        """Request the stop; this is a signal handler."""
        self.asked = True
        if self._waits:
            self._waits = False
            raise StoppedError

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let a signal end the code inside at once by StoppedError; it must change nothing."""
        self._waits = True
        try:
            if self.asked:
                raise StoppedError
            yield
        finally:
            self._waits = False


def steady(begin: float | None = None) -> Callable[[], float]:
    """Return a monotonic clock that starts at ``begin``, by default the wall clock's time."""
    ahead = (time.time() if begin is None else begin) - time.monotonic()
    return lambda: time.monotonic() + ahead


class Guard:
    """A guard of one engine; tests can pass in its parts.

    The state, which says what must be true, is on disk before anything is changed; each evaluation
    enforces it. So a guard that dies in between continues where it was.
    """

    def __init__(
        self, policy: Policy, *, right: GuardLease | None = None,
        clock: Callable[[], float] | None = None, stop: GuardStop | None = None,
    ) -> None:  # fmt: skip
        self.policy, self.clock, self.stop = policy, clock or steady(), stop or GuardStop()
        self.store = GuardStore(policy.folder)
        self.events = Events(self.store, policy.webhook, dry_run=policy.dry_run)
        self.source = source(policy)
        self.lease = right or lease(policy)
        self.traffic = traffic_switch(policy)
        self.drafting = SpeculationSwitch(policy.engine) if policy.engine.has_switch else None
        self.state = self._load()  # reports damage at the start
        self._leads = False
        self._told: tuple[str, ...] = ()
        self._failing: tuple[str, ...] = ()

    def run(self) -> None:
        """Evaluate every interval until asked to stop; an evaluation that fails is an alert.

        Raises ConfigError: the first evaluation cannot write the folder, or the policy is unusable.
        """
        if self.policy.listen is not None:
            self.events.listen(self.policy.listen)
        began = False
        try:
            while not self.stop.asked:
                begin = time.monotonic()
                try:
                    self.turn()
                except StoreError as error:
                    if not began:
                        raise
                    # The disk may be full for a while; nothing is changed until it has room.
                    self.events.also("folder", str(error))
                except (ConfigError, StoppedError):
                    raise
                except Exception as error:  # an unforeseen error must not end the guard
                    self.events.also("failed", f"An evaluation failed with {error!r}.")
                began = True
                with self.stop.at_once():
                    time.sleep(max(0.0, self.policy.interval - (time.monotonic() - begin)))
        except StoppedError:
            pass
        finally:
            self.lease.release()
            self.events.close()

    def turn(self) -> Decision | None:
        """Evaluate once and return the decision; None if another guard acts."""
        now = self.clock()
        if not self._may_act(now):
            return None
        if not self._leads:  # the state of the guard before this one counts
            self.state, self._leads = self._load(), True
            self.events.tell("note", f"this guard acts; the state is {self.state.mode}")
        alerts = self._commands()
        with self.stop.at_once():
            seen = look(self.state, self.policy, self.source, self.drafting, self.traffic, now)
        decision = decide(self.state, seen, self.policy, now)
        # The lease may have expired while slow servers answered.
        if not self._may_act(self.clock()):
            return None
        alerts |= decision.alerts
        if self.policy.dry_run:
            self._pretend(decision)
        else:
            alerts |= self._carry_out(decision, seen)
        try:
            self._show(seen, decision, alerts)
        except StoreError as error:
            alerts["folder"] = str(error)
        self.events.alert(alerts)
        self.events.gauges(self.state.mode, seen.warm if self.policy.standby else None, True)
        return decision

    def _load(self) -> State:
        """Return the state on disk, with its times shifted to this guard's clock."""
        state = self.store.load(self.policy.engine.url)
        return carried_over(state, self.clock(), self.policy.recovery.longest_wait)

    def _may_act(self, now: float) -> bool:
        """Take or renew the lease; without it this guard only watches."""
        with self.stop.at_once():
            other = self.lease.hold(now)
        if other is not None:
            self._leads = False
            logger.info("%s", other)
            self.events.gauges(self.state.mode, None, False)
            self.events.alert({})
        return other is None

    def _commands(self) -> dict[str, str]:
        """Apply a person's command to the state; return an alert if it cannot be read or saved."""
        try:
            said, mode = self.store.commanded()
            if not said:
                return {}
            if mode is None or mode in FORCIBLE:
                self._remember(forced=mode)
                told = "rules hold again" if mode is None else f"a person holds it in {mode}"
                self.events.tell("note", told)
            self.store.obeyed()
        except ConfigError as error:
            return {"folder": str(error)}
        return {}

    def _pretend(self, decision: Decision) -> None:
        """Report once what would be done; levels stay as they are."""
        told = tuple(event.action for event in decision.events)
        if told != self._told:
            for event in decision.events:
                self.events.tell("decided", event.text, action=event.action, signal=event.signal)
        self._told = told
        self.state = replace(self.state, pending=decision.state.pending, seen=decision.state.seen)

    def _carry_out(self, decision: Decision, seen: GuardView) -> dict[str, str]:
        """Save the decision, enforce it, and return alerts on what failed."""
        before = self.state
        self.store.save(decision.state)
        self.state = decision.state
        actions = tuple(event.action for event in decision.events)
        again = bool(actions) and actions == self._failing  # tried each time, reported once
        for event in () if again else decision.events:
            self.events.tell("decided", event.text, action=event.action, signal=event.signal)
        if seen.trouble is not None and self.state.forced is None:
            return {}
        drifted, failed = self._enforce(seen)
        if failed:  # their tracks stay as they were
            undone: dict[str, Any] = {track: getattr(before, track) for track in failed}
            if "drafting" in failed:
                undone["reduced_to"] = before.reduced_to
            self._remember(**undone)
        if drifted and not decision.events:
            self.events.tell("drift", f"{' and '.join(drifted)} put back to {self.state.mode}")
        for event in decision.events:
            if event.track not in failed:
                self.events.tell("done", event.text, action=event.action, signal=event.signal)
            elif not again:
                text = failed[event.track]
                self.events.tell("failed", text, action=event.action, signal=event.signal)
        self._failing = tuple(event.action for event in decision.events if event.track in failed)
        return {"failed": " ".join(failed.values())} if failed else {}

    def _enforce(self, seen: GuardView) -> tuple[list[str], dict[str, str]]:
        """Enforce the state; return the tracks that changed, and by track why enforcing failed."""
        changed: list[str] = []
        failed: dict[str, str] = {}
        for track, enforce in (("traffic", self._set_traffic), ("drafting", self._set_drafting)):
            try:
                if enforce(seen):
                    changed.append(track)
            except SwitchError as error:
                failed[track] = str(error)
        return changed, failed

    def _set_traffic(self, seen: GuardView) -> bool:
        """Set the weights that the state asks for; return whether they were different."""
        weights = wanted(self.state, self.policy)[1]
        if weights is None or self.traffic is None or seen.weights is None:
            return False
        if weights != seen.weights:
            self.traffic.set(weights)
            if self.traffic.read() != weights:
                raise SwitchError("The switch of traffic took new weights and has others.")
        if self.state.traffic.level == Place.OWN:
            self._remember(own_weights=None)
        return weights != seen.weights

    def _set_drafting(self, seen: GuardView) -> bool:
        """Set the drafting that the state asks for; return whether it was different."""
        drafting = wanted(self.state, self.policy)[0]
        if drafting is None or self.drafting is None or seen.drafting is None:
            return False
        has = {"enabled": seen.drafting.enabled, "num_speculative_tokens": seen.drafting.length}
        differs = any(has[name] != value for name, value in drafting.items())
        if differs:
            self.drafting.set(drafting)
        if self.state.drafting.level == Level.OWN:
            self._remember(own_drafting=None)
        return differs

    def _remember(self, **fields: Any) -> None:
        state = replace(self.state, **fields)
        self.store.save(state)
        self.state = state

    def _show(self, seen: GuardView, decision: Decision, alerts: Mapping[str, str]) -> None:
        state, engine = self.state, self.policy.engine
        self.store.show({
            "time": time.time(), "engine": engine.url, "mode": state.mode, "forced": state.forced,
            "dry_run": self.policy.dry_run, "runtime_switch": engine.has_switch,
            "alerts": dict(alerts), "reasons": dict(decision.reasons), "seen": asdict(seen),
            "drafting": asdict(state.drafting), "traffic": asdict(state.traffic),
        })  # fmt: skip


def look(
    state: State, policy: Policy, source: FigureSource, drafting: SpeculationSwitch | None,
    traffic: TrafficSwitch | None, now: float,
) -> GuardView:  # fmt: skip
    """Return the present state of everything; what does not answer leaves the reason."""
    answers = None
    sides, trouble = _asked(lambda: source.read(now))
    drafts, drafting_trouble = _asked(drafting.read) if drafting else (None, None)
    weights, traffic_trouble = _asked(traffic.read) if traffic else (None, None)
    engine, standby = sides or (Side(), Side())
    warm = policy.standby is not None and is_warm(policy.standby, policy.probe_timeout)
    due = state.traffic.level == Place.STANDBY and (
        now >= state.traffic.retry_at or not warm or (standby.errors or 0) > 0
    )
    if due or (trouble is None and engine.up is not True):
        answers = is_warm(policy.engine, policy.probe_timeout)
    return GuardView(
        engine, standby, trouble, drafts, drafting_trouble, weights, traffic_trouble, warm, answers
    )


def _asked(ask: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return an answer, or the reason why there is none."""
    try:
        return ask(), None
    except (EndpointError, SwitchError) as error:
        return None, str(error)


def is_warm(server: GuardedServer, seconds: float) -> bool:
    """Return whether a server answers with its model's name and one token within ``seconds``."""
    deadline = Deadline(seconds)
    try:
        models = call(f"{server.root}/v1/models", key=server.key, seconds=seconds).json()
        name = models["data"][0]["id"]
        body = {"model": name, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
        left = deadline.left()
        answer = call(f"{server.root}/v1/completions", body, key=server.key, seconds=left)
        return answer.ok and bool(answer.json()["choices"])
    except (EndpointError, LookupError, TypeError, TimeoutError):
        return False
