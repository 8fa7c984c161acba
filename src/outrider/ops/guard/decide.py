"""The rules of the guard: what to do about what it observes. No I/O, no clock of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .judge import DOWN, STANDBY_DOWN, Judgement, figures, judge
from .policy import Policy
from .states import Decision, DraftingState, GuardEvent, GuardTrack, GuardView, Level, Place, State

URGENT = (DOWN, "errors", "memory_critical")
"""Signals that move traffic at once, even right after another change."""
FORCIBLE = ("normal", "reduced", "plain", "standby")
NO_TRAFFIC = (0, 100)


def decide(state: State, seen: GuardView, policy: Policy, now: float) -> Decision:
    """Return what to do, and why; ``now`` is in seconds since the epoch, as in the state."""
    turn = _Turn(state, seen, policy, now)
    if state.forced is not None:
        if seen.trouble is None:
            turn.reasons.update(judge(state, seen, policy, now).reasons)
        turn.obey(state.forced)
        return turn.decision({})
    if seen.trouble is not None:
        turn.alerts["source"] = f"{seen.trouble} Nothing is changed until it answers."
        return turn.decision({})
    verdict = judge(state, seen, policy, now)
    turn.reasons.update(verdict.reasons)
    turn.run(verdict)
    return turn.decision(dict(verdict.pending))


def wanted(state: State, policy: Policy) -> tuple[dict[str, Any] | None, tuple[int, int] | None]:
    """Return a body for ``/v1/speculation``, and weights; None for what the guard leaves alone."""
    drafting: dict[str, Any] | None = None
    if state.drafting.level == Level.REDUCED:
        drafting = {"enabled": True, "num_speculative_tokens": state.reduced_to}
    elif state.drafting.level == Level.PLAIN:
        drafting = {"enabled": False}
    elif state.own_drafting is not None:
        own = state.own_drafting
        drafting = {"enabled": own.enabled, "num_speculative_tokens": own.length}
    recovery, place = policy.recovery, state.traffic.level
    if place == Place.OWN:
        return drafting, state.own_weights
    if place == Place.STANDBY:
        return drafting, NO_TRAFFIC
    if place == Place.RELIEVED:
        share = recovery.relief * own_share(state)
    else:
        steps = stages(state, policy)
        share = steps[min(state.traffic.stage, len(steps) - 1)]
    engine = min(99, max(1, round(100 * share)))
    return drafting, (engine, 100 - engine)


def own_share(state: State) -> float:
    """Return the engine's share of traffic under the operator's weights."""
    engine, standby = state.own_weights or (1, 0)
    return engine / max(1, engine + standby)


def stages(state: State, policy: Policy) -> tuple[float, ...]:
    """Return the engine's shares in a probation: the stages below its own share, else its own."""
    own = own_share(state)
    return tuple(share for share in policy.recovery.stages if share < own) or (own,)


class _Turn:
    """One evaluation, which builds the new state."""

    def __init__(self, state: State, seen: GuardView, policy: Policy, now: float) -> None:
        self.state, self.seen, self.policy, self.now = state, seen, policy, now
        self.events: list[GuardEvent] = []
        self.alerts: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        if seen.traffic_trouble is not None:
            self.alerts["traffic_switch"] = seen.traffic_trouble
        if seen.drafting_trouble is not None and seen.engine.up is not False:
            self.alerts["drafting_switch"] = seen.drafting_trouble
        if seen.trouble is None and seen.engine.up is None:
            self.alerts["no_data"] = "The source has no figures of the engine."
        if seen.engine.up is False and seen.answers is True:
            self.alerts["no_data"] = "The engine's model answers, but its metrics do not."
        if policy.can_shift and not seen.warm:
            self.alerts["standby_cold"] = "The standby's model does not answer."

    def decision(self, pending: dict[str, float]) -> Decision:
        """Return the result of the evaluation."""
        state = replace(self.state, pending=pending, seen=self.now)
        return Decision(state, tuple(self.events), self.alerts, self.reasons)

    @property
    def settled(self) -> bool:
        """Return whether the last change is long enough ago to make another non-urgent one."""
        last = max(self.state.drafting.since, self.state.traffic.since)
        return not 0 <= self.now - last < self.policy.recovery.cooldown

    def run(self, verdict: Judgement) -> None:
        """Make at most one change, for the most urgent reason."""
        place = self.state.traffic.level
        if place == Place.STANDBY:
            self._at_standby(STANDBY_DOWN in verdict.bad)
            return
        cause = self._reason_to_leave(verdict, place)
        if cause is not None and self._leave(cause, verdict):
            return
        if not self.settled:
            self.reasons["cooldown"] = "a change was made a moment ago"
        elif self._relieve(verdict) or self._reduce(verdict):
            pass
        elif place == Place.PROBING:
            self._advance(verdict)
        else:
            self._go_back(verdict)

    # Traffic to the standby

    def _reason_to_leave(self, verdict: Judgement, place: str) -> str | None:
        """Return the signal for which traffic should go to the standby; None if there is none."""
        for name in URGENT:
            if name in verdict.bad:
                return name
        if place == Place.PROBING:  # on probation a single bad figure is enough
            watched = ("p99",) if self.policy.engine.has_switch else ("p99", "acceptance")
            for name in watched:
                signal, value = self.policy.signals[name], verdict.values.get(name)
                if value is not None and signal.is_bad(value, False):
                    return name
        if not self.settled:
            return None
        if "p99" in verdict.bad:
            return "p99"
        if not self.policy.engine.has_switch and self._weak(verdict):
            return "acceptance"
        return None

    def _leave(self, cause: str, verdict: Judgement) -> bool:
        """Move traffic to the standby, unless it cannot take it or is no better."""
        errors = 1.0 if cause == DOWN else verdict.values.get("errors", 0.0)
        if not self._standby_fits(cause, errors, verdict):
            return False
        wait = self._longer(self.state.traffic)
        action = "abort" if self.state.traffic.level == Place.PROBING else "shift"
        text = f"{verdict.reasons.get(cause, cause)}: traffic goes to the standby"
        text += f"; the engine is tried again in {wait:.0f} s"
        self._go(Place.STANDBY, cause, action, text, wait=wait, errors=errors)
        return True

    def _standby_fits(self, cause: str, errors: float, verdict: Judgement) -> bool:
        """Return whether traffic may move; if not, an alert says why."""
        seen, policy = self.seen, self.policy
        if not policy.can_shift:
            self.alerts["no_standby"] = f"{cause} is bad, and the policy has nowhere to shift to."
        elif seen.weights is None:
            pass  # a dead switch has its own alert
        elif seen.weights[0] == 0:
            self.alerts["no_traffic"] = f"{cause} is bad, but the engine has no traffic already."
        elif not seen.warm:
            self.alerts["standby_cold"] = (
                f"{cause} is bad, but the standby's model does not answer: traffic stays."
            )
        elif self._standby_worse(cause, errors, verdict):
            self.alerts["both_bad"] = (
                f"{cause} is bad, but the standby is no better: traffic stays."
            )
        else:
            return True
        return False

    def _standby_worse(self, cause: str, errors: float, verdict: Judgement) -> bool:
        other = figures(self.seen.standby, self.policy, self.policy.recovery.requests)
        theirs = other.get("errors", 0.0)
        if cause in (DOWN, "errors"):
            return theirs >= errors
        if theirs > max(self.policy.signals["errors"].bad, errors):
            return True
        if cause in ("p99", "memory_critical"):
            return cause in other and other[cause] >= verdict.values[cause]
        return False

    # Traffic at the standby, and back

    def _at_standby(self, dead: bool) -> None:
        """Leave the standby if it fails or is dead; try the engine again when it is time."""
        other = figures(self.seen.standby, self.policy, self.policy.minimum.requests)
        theirs, limit = other.get("errors", 0.0), self.policy.signals["errors"].bad
        if dead or theirs > limit:
            self._leave_standby(1.0 if dead else theirs, dead)
            return
        track = self.state.traffic
        if self.now < track.retry_at:
            self.reasons["return"] = (
                f"the engine is tried again in {track.retry_at - self.now:.0f} s"
            )
        elif self.seen.weights is None:
            self.reasons["return"] = "the engine waits for the switch of traffic"
        elif self.seen.answers is not True:
            self.reasons["return"] = "the engine's model does not answer yet"
        elif unclear := self._unclear(figures(self.seen.engine, self.policy, 1.0)):
            # Requests that were running when traffic left end later; a try that began while they
            # are in the window would be judged by them.
            self.reasons["return"] = f"{unclear} of the engine is not clear over a whole window yet"
        elif own_share(self.state) == 0:
            text = "the engine answers; it had no traffic before"
            self._go(Place.OWN, track.cause, "return", text)
        else:
            share = stages(self.state, self.policy)[0]
            text = f"the engine answers: it gets {share:.0%} of traffic"
            self._go(Place.PROBING, track.cause, "probe", text, errors=track.errors)

    def _unclear(self, values: Mapping[str, float]) -> str:
        """Return the first figure that is not clear; "" if all are."""
        names = (x for x in ("errors", "p99", "memory") if x in values)
        return next((x for x in names if not self.policy.signals[x].is_clear(values[x])), "")

    def _leave_standby(self, errors: float, dead: bool) -> None:
        """Go back to the engine if fewer requests fail there."""
        better = self.state.traffic.errors < errors or dead
        if self.seen.answers is not True or not better or self.seen.weights is None:
            self.alerts["both_bad"] = "The standby fails, and the engine is no better."
        elif not dead and not self.settled:
            self.alerts["both_bad"] = "The standby fails; the last change was a moment ago."
        else:
            text = "the standby fails and the engine answers: back to it"
            self._go(Place.OWN, "standby", "return", text)

    def _advance(self, verdict: Judgement) -> None:
        """Give the engine more traffic after a good stage."""
        track, recovery = self.state.traffic, self.policy.recovery
        steps = stages(self.state, self.policy)
        unclear = self._unclear(verdict.values)
        served = self.seen.engine.requests or 0.0
        if self.now - track.since < recovery.hold:
            self.reasons["return"] = f"stage {track.stage + 1} runs"
        elif served < recovery.requests:
            self.reasons["return"] = f"stage {track.stage + 1} waits for requests"
        elif unclear:
            self.reasons["return"] = f"stage {track.stage + 1} waits: {unclear} is not clear"
        elif track.stage + 1 < len(steps):
            share = steps[track.stage + 1]
            text = f"a good stage: the engine gets {share:.0%}"
            self._go(Place.PROBING, track.cause, "advance", text, stage=track.stage + 1,
                     errors=track.errors)  # fmt: skip
        else:
            text = "all stages were good: the engine has its traffic"
            self._go(Place.OWN, track.cause, "return", text)

    # Drafting

    def _weak(self, verdict: Judgement) -> bool:
        """Return whether speculation loses time: bad acceptance, and no good speedup known."""
        pays = "speedup" in verdict.values and "speedup" not in verdict.bad
        return "acceptance" in verdict.bad and not pays

    def _reduce(self, verdict: Judgement) -> bool:
        """Draft less if speculation loses time; only note it if the engine chooses K."""
        drafting, policy = self.seen.drafting, self.policy
        if not policy.engine.has_switch or drafting is None or not drafting.enabled:
            return False
        if drafting.length is None:
            self._note(drafting.in_use, verdict)
            return False
        if not self._weak(verdict):
            return False
        shorter = self.state.drafting.level == Level.OWN and drafting.in_use > 1
        self._draft_less(Level.REDUCED if shorter else Level.PLAIN, "acceptance", verdict)
        return True

    def _note(self, in_use: int, verdict: Judgement) -> None:
        """Record once what the engine's own controller should handle."""
        stopped = in_use == 0
        noted = stopped or self._weak(verdict)
        if noted and not self.state.noted:
            what = "it drafts nothing now" if stopped else verdict.reasons["acceptance"]
            text = f"the engine chooses K itself: {what}"
            self.events.append(GuardEvent("record", "acceptance", text, ""))
            self.state = replace(self.state, noted=True)
        elif not noted and self._drafts_well(verdict):
            self.state = replace(self.state, noted=False)

    def _draft_less(self, level: Level, cause: str, verdict: Judgement) -> None:
        assert self.seen.drafting is not None
        self._note_own(self.seen.drafting)
        action = "reduce" if level == Level.REDUCED else "plain"
        what = f"K goes to {self.state.reduced_to}" if action == "reduce" else "it decodes plainly"
        speedup = verdict.reasons.get("speedup", "") if "speedup" in verdict.values else ""
        why = f"{verdict.reasons[cause]}{'; ' if speedup else ''}{speedup}"
        self._go(level, cause, action, f"{why}: {what}", wait=self._longer(self.state.drafting))

    def _note_own(self, drafting: DraftingState) -> None:
        """Save the operator's setting of the switch before it is changed."""
        if self.state.drafting.level == Level.OWN:
            own, reduced = self.state.own_drafting or drafting, max(1, drafting.in_use // 2)
            self.state = replace(self.state, own_drafting=own, reduced_to=reduced)

    def _relieve(self, verdict: Judgement) -> bool:
        """Draft less and let fewer requests in while memory is short."""
        if "memory" not in verdict.bad:
            return False
        changed, drafting = False, self.seen.drafting
        if (
            self.state.drafting.level == Level.OWN and drafting is not None
            and drafting.enabled and drafting.in_use
        ):  # fmt: skip
            level = Level.REDUCED if drafting.in_use > 1 else Level.PLAIN
            self._draft_less(level, "memory", verdict)
            changed = True
        if self.state.traffic.level == Place.OWN and self._standby_fits("memory", 0.0, verdict):
            kept = f"the engine keeps {self.policy.recovery.relief:.0%} of its traffic"
            self._go(Place.RELIEVED, "memory", "relieve", f"{verdict.reasons['memory']}: {kept}",
                     wait=self._longer(self.state.traffic))  # fmt: skip
            changed = True
        return changed

    def _go_back(self, verdict: Judgement) -> None:
        """Undo what is no longer needed, once the wait is over."""
        traffic, drafting = self.state.traffic, self.state.drafting
        if traffic.level == Place.RELIEVED and self._due(traffic) and self._memory_clear(verdict):
            text = "memory is clear: the engine has its traffic"
            self._go(Place.OWN, "memory", "return", text)
        if drafting.level == Level.OWN or not self._due(drafting) or self.seen.drafting is None:
            return
        if drafting.level == Level.PLAIN:
            text = f"drafting is tried again with K of {self.state.reduced_to}"
            self._go(Level.REDUCED, drafting.cause, "probe", text, stage=1)
        elif self._drafts_well(verdict):
            text = "the engine drafts as its operator set it"
            self._go(Level.OWN, drafting.cause, "restore", text)

    def _drafts_well(self, verdict: Judgement) -> bool:
        if self.state.drafting.cause == "memory":
            return self._memory_clear(verdict)
        return any(
            name in verdict.values and self.policy.signals[name].is_clear(verdict.values[name])
            for name in ("acceptance", "speedup")
        )

    # Forced modes

    def obey(self, mode: str) -> None:
        """Go to the mode that a person forces, if that is possible."""
        state = self.state
        if mode == "standby":
            ready = self.policy.can_shift and self.seen.weights is not None and self.seen.warm
            if state.traffic.level != Place.STANDBY and ready:
                self._go(Place.STANDBY, "forced", "shift", "a person moved traffic to the standby")
            elif state.traffic.level != Place.STANDBY:
                self.alerts["forced"] = (
                    "The standby was forced, but it has no switch, or its model does not answer."
                )
            return
        if state.traffic.level != Place.OWN:
            self._go(Place.OWN, "forced", "return", "a person moved traffic to the engine")
        level = Level.OWN if mode == "normal" else Level(mode)
        if state.drafting.level == level:
            return
        if self.seen.drafting is None and state.drafting.level == Level.OWN:
            self.alerts["forced"] = f"{mode} was forced, but no switch of drafting answers."
            return
        if self.seen.drafting is not None:
            self._note_own(self.seen.drafting)
        actions = {Level.OWN: "restore", Level.REDUCED: "reduce", Level.PLAIN: "plain"}
        self._go(level, "forced", actions[level], f"a person set drafting to {level}")

    # Helpers

    def _due(self, track: GuardTrack) -> bool:
        return self.now >= track.retry_at

    def _memory_clear(self, verdict: Judgement) -> bool:
        value = verdict.values.get("memory")
        return value is None or self.policy.signals["memory"].is_clear(value)

    def _longer(self, track: GuardTrack) -> float:
        """Return the wait for the next try: the usual one, doubled if the last try failed soon."""
        recovery = self.policy.recovery
        soon = track.level == Level.OWN and self.now - track.since <= 2 * track.wait
        tried = track.level == Place.PROBING or track.stage
        if track.wait and (soon or tried):
            return min(2 * track.wait, recovery.longest_wait)
        return track.wait if track.level == Level.REDUCED else recovery.wait

    def _go(
        self, to: Level | Place, cause: str, action: str, text: str, *, wait: float | None = None,
        stage: int = 0, errors: float = 0.0,
    ) -> None:  # fmt: skip
        """Set drafting to a level, or traffic to a place, and record an event."""
        name, own = "drafting" if isinstance(to, Level) else "traffic", self.state.own_weights
        if isinstance(to, Place) and to != Place.OWN and own is None:
            own = self.seen.weights
        wait = getattr(self.state, name).wait if wait is None else wait
        track: Any = GuardTrack(to, self.now, cause, wait, self.now + wait, stage, errors)
        self.state = replace(self.state, own_weights=own, **{name: track})
        self.events.append(GuardEvent(action, cause, text, name))
