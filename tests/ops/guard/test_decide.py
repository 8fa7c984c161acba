"""The guard's rules under a clock of their own: tables, and properties over a simulated fleet."""

import json
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.ops.guard.decide import URGENT, decide, wanted
from outrider.ops.guard.policy import Policy, parse
from outrider.ops.guard.states import (
    Decision,
    DraftingState,
    GuardView,
    Side,
    State,
    of_json,
)

POLICY = parse(
    {
        "engine": {"url": "http://e:1"},
        "standby": {"url": "http://s:1"},
        "traffic": {
            "kind": "haproxy", "address": "unix:/x", "backend": "b", "engine": "e", "standby": "s",
        },
    }
)  # fmt: skip
VLLM = replace(POLICY, engine=replace(POLICY.engine, kind="vllm"))
ALONE = replace(POLICY, standby=None, traffic=replace(POLICY.traffic, kind="none"))
HEALTHY = Side(
    up=True, requests=100, errors=0.0, p99=1.0, memory=0.3, acceptance=0.8, drafted=5000,
    speedup=1.6, draft_length=4,
)  # fmt: skip
PINNED = DraftingState(True, 4, 4)
NOW = 1000.0


def sight(drafting: DraftingState | None = PINNED, **engine: Any) -> GuardView:
    return GuardView(
        engine=replace(HEALTHY, **engine), standby=replace(HEALTHY, drafted=None, acceptance=None),
        drafting=drafting, weights=(100, 1), warm=True,
    )  # fmt: skip


def hold(
    seen: GuardView, policy: Policy = POLICY, state: State | None = None,
    seconds: float = 60, now: float = NOW,
) -> tuple[State, list[Decision]]:  # fmt: skip
    """Show one thing for so long; the state, and the decisions that did something."""
    state = state or State()
    end, done = now + seconds, []
    while now <= end:
        decision = decide(state, seen, policy, now)
        state = decision.state
        if decision.events:
            done.append(decision)
        now += policy.interval
    return state, done


def actions(decisions: list[Decision]) -> list[tuple[str, str]]:
    return [(e.action, e.signal) for decision in decisions for e in decision.events]


WEAK = {"acceptance": 0.2, "speedup": 0.8}
CASES = {
    "healthy": (sight(), POLICY, []),
    "weak": (sight(**WEAK), POLICY, [("reduce", "acceptance")]),
    "weak with K of 1": (
        sight(DraftingState(True, 1, 1), **WEAK), POLICY, [("plain", "acceptance")],
    ),
    "low acceptance that still pays": (sight(acceptance=0.2, speedup=1.3), POLICY, []),
    "unknown speedup of a pinned K": (
        sight(acceptance=0.2, speedup=None), POLICY, [("reduce", "acceptance")],
    ),
    "weak where the engine chooses K": (
        sight(DraftingState(True, None, 4), **WEAK), POLICY, [("record", "acceptance")],
    ),
    "the engine's controller stopped drafting": (
        sight(DraftingState(True, None, 0), draft_length=0, **WEAK), POLICY,
        [("record", "acceptance")],
    ),
    "switched off by its operator": (sight(DraftingState(False, 4, 0), draft_length=0), POLICY, []),
    "weak without a switch": (sight(None, **WEAK), VLLM, [("shift", "acceptance")]),
    "weak with too few drafts": (sight(drafted=100, **WEAK), POLICY, []),
    "slow": (sight(p99=6.0), POLICY, [("shift", "p99")]),
    "slow, but few requests": (sight(p99=6.0, requests=3), POLICY, []),
    "stalled": (sight(p99=inf, requests=0), POLICY, [("shift", "p99")]),
    "errors": (sight(errors=0.06), POLICY, [("shift", "errors")]),
    "a few errors": (sight(errors=0.04), POLICY, []),
    "errors of an idle engine": (sight(errors=1.0, requests=2), POLICY, []),
    "memory": (sight(memory=0.94), POLICY, [("reduce", "memory"), ("relieve", "memory")]),
    "memory without a standby": (sight(memory=0.94), ALONE, [("reduce", "memory")]),
    "memory critical": (sight(memory=0.98), POLICY, [("shift", "memory_critical")]),
    "no figures": (replace(sight(), engine=Side()), POLICY, []),
    "down": (replace(sight(up=False), answers=False), POLICY, [("shift", "down")]),
    "gone from the source": (
        replace(sight(), engine=Side(), answers=False), replace(POLICY, window=30.0),
        [("shift", "down")],
    ),
    "gone for a moment": (replace(sight(), engine=Side(), answers=False), POLICY, []),
    "gone from the source, model answers": (
        replace(sight(), engine=Side(), answers=True), replace(POLICY, window=30.0), [],
    ),
    "metrics down, model answers": (replace(sight(up=False), answers=True), POLICY, []),
    "no source": (replace(sight(errors=0.5), trouble="Prometheus is gone."), POLICY, []),
    "dead switch": (
        replace(sight(errors=0.5), weights=None, traffic_trouble="gone"), POLICY, [],
    ),
    "dead switch of drafting": (
        replace(sight(None, **WEAK), drafting_trouble="gone"), POLICY, [],
    ),
    "cold standby": (replace(sight(errors=0.5), warm=False), POLICY, []),
    "standby fails more": (
        replace(sight(errors=0.1), standby=replace(HEALTHY, errors=0.2)), POLICY, [],
    ),
    "standby fails less": (
        replace(sight(errors=0.3), standby=replace(HEALTHY, errors=0.2)), POLICY,
        [("shift", "errors")],
    ),
    "standby is slower": (replace(sight(p99=6.0), standby=replace(HEALTHY, p99=9.0)), POLICY, []),
    "traffic is away already": (replace(sight(errors=0.5), weights=(0, 100)), POLICY, []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_case_has_its_action(name: str) -> None:
    seen, policy, expected = CASES[name]
    _, done = hold(seen, policy, seconds=50)
    assert actions(done) == expected


ALERTS = {
    "no source": "source", "dead switch": "traffic_switch", "cold standby": "standby_cold",
    "dead switch of drafting": "drafting_switch", "standby fails more": "both_bad",
    "traffic is away already": "no_traffic", "metrics down, model answers": "no_data",
    "no figures": "no_data",
}  # fmt: skip


@pytest.mark.parametrize("name", ALERTS)
def test_what_cannot_be_done_is_an_alert(name: str) -> None:
    seen, policy, _ = CASES[name]
    decision = decide(State(), seen, policy, NOW)
    assert ALERTS[name] in decision.alerts
    assert all(text.endswith((".", "gone")) for text in decision.alerts.values())


def test_urgent_signals_act_at_the_first_sight_and_others_after_their_time() -> None:
    for signal in ({"errors": 0.5}, {"memory": 0.99}):
        assert decide(State(), sight(**signal), POLICY, NOW).events
    for signal in ({"p99": 9.0}, {"memory": 0.93}, WEAK):
        state = State()
        for second in (0.0, 10.0):
            decision = decide(state, sight(**signal), POLICY, NOW + second)
            assert not decision.events
            state = decision.state
        assert decide(state, sight(**signal), POLICY, NOW + 20).events


def test_a_good_moment_or_a_long_silence_begins_the_time_anew() -> None:
    slow, state = sight(p99=6.0), State()
    for second, seen in ((0, slow), (10, sight()), (20, slow), (30, slow)):
        decision = decide(state, seen, POLICY, NOW + second)
        assert not decision.events
        state = decision.state
    assert not decide(state, slow, POLICY, NOW + 5000).events
    assert decide(state, slow, POLICY, NOW + 40).events


def test_between_threshold_and_clear_a_bad_signal_stays_bad_and_a_good_one_good() -> None:
    between = sight(p99=4.0)
    assert not actions(hold(between)[1])
    state = decide(State(), sight(p99=6.0), POLICY, NOW).state
    state, done = hold(between, state=state, now=NOW + 10)
    assert actions(done) == [("shift", "p99")]


def test_weak_drafting_goes_down_step_by_step_and_comes_back_by_a_trial() -> None:
    state, done = hold(sight(**WEAK), seconds=100)
    assert actions(done) == [("reduce", "acceptance"), ("plain", "acceptance")]
    assert state.mode == "plain"
    assert wanted(state, POLICY)[0] == {"enabled": False}
    plain = sight(DraftingState(False, 2, 0), draft_length=0, drafted=0)
    now = NOW + 110
    state, done = hold(plain, state=state, now=now, seconds=90)
    assert actions(done) == [("probe", "acceptance")]
    assert wanted(state, POLICY)[0] == {"enabled": True, "num_speculative_tokens": 2}
    state, done = hold(sight(DraftingState(True, 2, 2)), state=state, now=now + 100, seconds=300)
    assert actions(done) == [("restore", "acceptance")]
    assert state.mode == "normal"
    assert wanted(state, POLICY)[0] == {"enabled": True, "num_speculative_tokens": 4}


def test_a_trial_that_fails_doubles_the_wait() -> None:
    state, _ = hold(sight(**WEAK), seconds=100)
    waits, now = [state.drafting.wait], NOW + 110
    for _ in range(6):
        now = max(now, state.drafting.retry_at)
        state, done = hold(
            sight(DraftingState(False, 2, 0), drafted=0), state=state, now=now, seconds=0
        )
        assert actions(done) == [("probe", "acceptance")]
        state, done = hold(
            sight(DraftingState(True, 2, 2), **WEAK), state=state, now=now + 10, seconds=80
        )
        assert actions(done) == [("plain", "acceptance")]
        waits.append(state.drafting.wait)
        now += 100
    assert waits == [120, 240, 480, 960, 1920, 3600, 3600]


def away(cause: dict[str, Any] | None = None) -> State:
    state, _ = hold(sight(**(cause or {"errors": 0.5})), seconds=0)
    assert state.mode == "standby"
    return state


def test_traffic_returns_by_stages_to_the_weights_it_had() -> None:
    state = away()
    assert wanted(state, POLICY)[1] == (0, 100)
    seen = replace(sight(), answers=True, weights=(0, 100))
    shares, now = [], NOW
    while state.mode != "normal":
        now += 10
        decision = decide(state, seen, POLICY, now)
        state = decision.state
        if decision.events:
            shares.append((now - NOW, wanted(state, POLICY)[1]))
    assert shares == [(120, (5, 95)), (180, (25, 75)), (240, (50, 50)), (300, (100, 1))]


@pytest.mark.parametrize("weights", [(5, 95), (30, 70), (100, 1), (1, 99), (3, 1)])
def test_a_canary_never_gets_more_than_its_operator_gave_it(weights: tuple[int, int]) -> None:
    """Neither in a probation nor while memory is short."""
    own = weights[0] / sum(weights)
    sick = replace(sight(errors=0.5), weights=weights)
    state, _ = hold(sick, seconds=0)
    well = replace(sight(), answers=True, weights=(0, 100))
    shares, now = [], NOW + 130
    while state.mode != "normal":
        state = decide(state, well, POLICY, now).state
        engine, standby = wanted(state, POLICY)[1] or weights
        shares.append(engine / (engine + standby))
        now += POLICY.interval
    assert all(share <= max(own, 0.01) + 1e-9 for share in shares)
    assert shares == sorted(shares)
    assert wanted(state, POLICY)[1] == weights
    full, _ = hold(replace(sight(memory=0.94), weights=weights), seconds=30)
    assert full.mode == "relieved"
    engine, standby = wanted(full, POLICY)[1] or (1, 0)
    assert engine / (engine + standby) <= max(0.01, own / 2 + 0.005)


def test_an_engine_that_had_no_traffic_gets_none_back() -> None:
    state = State(forced="standby")
    state, _ = hold(replace(sight(), weights=(0, 100)), state=state, seconds=0)
    assert state.mode == "standby"
    released = replace(state, forced=None)
    seen = replace(sight(), answers=True, weights=(0, 100))
    state, done = hold(seen, state=released, now=NOW + 130, seconds=0)
    assert actions(done) == [("return", "forced")]
    assert wanted(state, POLICY)[1] == (0, 100)


def test_a_probation_without_requests_waits_and_a_bad_one_ends_with_a_longer_wait() -> None:
    probing = decide(away(), replace(sight(), answers=True), POLICY, NOW + 120).state
    assert probing.mode == "probing"
    _, done = hold(sight(requests=1), state=probing, now=NOW + 130, seconds=600)
    assert not done
    for bad in ({"errors": 0.2, "requests": 5}, {"p99": 6.0}, {"memory": 0.98}):
        failed = decide(probing, sight(**bad), POLICY, NOW + 130)
        assert [e.action for e in failed.events] == ["abort"]
        assert failed.state.traffic.wait == 240
    assert decide(probing, sight(p99=4.0), POLICY, NOW + 190).state.traffic.stage == 0


def test_an_engine_that_does_not_answer_is_not_tried() -> None:
    for answers in (None, False):
        state, done = hold(
            replace(sight(), answers=answers), state=away(), now=NOW + 10, seconds=900
        )
        assert not done
        assert state.mode == "standby"


@pytest.mark.parametrize("left", [{"p99": 9.0}, {"errors": 0.5}, {"memory": 0.9}])
def test_an_engine_is_tried_only_once_its_old_troubles_left_the_window(
    left: dict[str, Any],
) -> None:
    late = replace(sight(requests=1, **left), answers=True, weights=(0, 100))
    state, done = hold(late, state=away(), now=NOW + 120, seconds=300)
    assert not done
    clear = replace(sight(requests=1), answers=True, weights=(0, 100))
    assert actions(hold(clear, state=state, now=NOW + 430, seconds=0)[1]) == [("probe", "errors")]


@pytest.mark.parametrize(
    ("engine_errors", "standby", "warm", "answers", "returns"),
    [
        (0.1, {"errors": 0.5}, True, True, True),
        (0.9, {"errors": 0.5}, True, True, False),
        (0.1, {"errors": 0.5}, True, False, False),
        (0.9, {"up": False, "requests": None}, False, True, True),
        (0.9, {"up": False, "requests": None}, False, False, False),
        (0.1, {"errors": 0.01}, True, True, False),
    ],
)
def test_a_failing_standby_is_left_only_for_something_better(
    engine_errors: float, standby: dict[str, Any], warm: bool, answers: bool, returns: bool
) -> None:
    state = away({"errors": engine_errors})
    seen = replace(
        sight(), standby=replace(HEALTHY, **standby), warm=warm, answers=answers, weights=(0, 100)
    )
    decision = decide(state, seen, POLICY, NOW + 70)
    assert bool(decision.events) is returns
    assert (decision.state.mode == "normal") is returns
    if not returns and standby.get("errors") != 0.01:
        assert "both_bad" in decision.alerts


def test_a_standby_that_is_gone_from_the_source_is_left_after_a_window() -> None:
    gone = replace(sight(), standby=Side(), warm=False, answers=True, weights=(0, 100))
    state, done = hold(gone, state=away(), now=NOW + 10, seconds=50)
    assert not done
    state, done = hold(gone, state=state, now=NOW + 70, seconds=10)
    assert actions(done) == [("return", "standby")]
    assert state.mode == "normal"


def test_a_persons_word_holds_until_released() -> None:
    forced, done = hold(sight(), state=State(forced="standby"), seconds=600)
    assert actions(done) == [("shift", "forced")]
    assert forced.mode == "standby"
    assert not decide(forced, replace(sight(), trouble="gone"), POLICY, NOW + 700).events
    _, done = hold(
        replace(sight(), answers=True), state=replace(forced, forced=None), now=NOW + 700
    )
    assert actions(done)[0] == ("probe", "forced")
    plain, done = hold(sight(errors=0.5), state=State(forced="plain"))
    assert actions(done) == [("plain", "forced")]
    normal, _ = hold(sight(), state=replace(plain, forced="normal"), now=NOW + 100)
    assert wanted(normal, POLICY)[0] == {"enabled": True, "num_speculative_tokens": 4}
    cold = decide(State(forced="standby"), replace(sight(), warm=False), POLICY, NOW)
    assert not cold.events
    assert "forced" in cold.alerts
    none = decide(State(forced="plain"), sight(None), VLLM, NOW)
    assert not none.events
    assert "forced" in none.alerts


@dataclass
class World:
    """A fleet whose engine and standby are sick by a schedule; it obeys what the guard wants."""

    sick: list[str]
    state: State = field(default_factory=State)
    now: float = NOW
    log: list[tuple[float, Decision]] = field(default_factory=list)

    def tick(self, ill: str) -> None:
        drafting, weights = wanted(self.state, POLICY)
        length = (drafting or {}).get("num_speculative_tokens", 4)
        enabled = (drafting or {"enabled": True})["enabled"]
        share = weights[0] / sum(weights) if weights else 0.99
        figures: dict[str, Any] = {
            "errors": {"errors": 0.5},
            "slow": {"p99": 9.0},
            "weak": WEAK if enabled else {},
            "memory": {"memory": 0.94},
            "full": {"memory": 0.99},
        }.get(ill, {})
        if not enabled:
            figures |= {"drafted": 0, "draft_length": 0}
        engine = replace(HEALTHY, requests=200 * share, **figures)
        if ill == "down":
            engine = Side(up=False)
        standby = replace(HEALTHY, requests=200 * (1 - share), drafted=None)
        seen = GuardView(
            engine, standby, "gone" if ill == "blind" else None,
            DraftingState(enabled, length, length if enabled else 0), None, weights or (100, 1),
            None, ill != "cold", ill != "down",
        )  # fmt: skip
        decision = decide(self.state, seen, POLICY, self.now)
        again = decide(of_json(json.loads(json.dumps(self.state.to_json())), "x"), seen, POLICY,
                       self.now)  # fmt: skip
        assert again == decision, "a restart in between changes nothing"
        if decision.events:
            assert ill != "blind"
            assert not (ill == "cold" and decision.state.mode == "standby" != self.state.mode)
            self.log.append((self.now, decision))
        self.state = decision.state
        self.now += POLICY.interval

    def run(self) -> None:
        for ill in self.sick:
            self.tick(ill)


ILLS = ("", "", "errors", "slow", "weak", "memory", "full", "down", "blind", "cold")
SCHEDULES = st.lists(
    st.tuples(st.sampled_from(ILLS), st.integers(1, 40)).map(lambda pair: [pair[0]] * pair[1]),
    min_size=1, max_size=12,
).map(lambda parts: [ill for part in parts for ill in part])  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(SCHEDULES)
def test_changes_keep_their_distance_and_health_brings_all_back(sick: list[str]) -> None:
    world = World(sick)
    world.run()
    for (before, _), (after, decision) in zip(world.log, world.log[1:], strict=False):
        urgent = all(e.signal in URGENT or e.action == "abort" for e in decision.events)
        noted = all(e.action == "record" for e in decision.events)
        assert urgent or noted or after - before >= POLICY.recovery.cooldown
    last = 0.0
    for now, decision in world.log:
        for event in decision.events:
            if event.action in ("shift", "abort"):
                last = now
            elif event.action == "probe" and decision.state.mode == "probing":
                assert now - last >= POLICY.recovery.wait
    for _ in range(2000):
        if world.state.mode == "normal":
            break
        world.tick("")
    assert world.state.mode == "normal"
    assert wanted(world.state, POLICY)[0] in (None, {"enabled": True, "num_speculative_tokens": 4})
    assert wanted(world.state, POLICY)[1] in (None, (100, 1))


@pytest.mark.parametrize("ill", ["errors", "slow", "weak", "full", "down"])
def test_an_illness_that_stays_is_tried_ever_less_often(ill: str) -> None:
    world = World([ill] * 2160)  # six hours
    world.run()
    assert "normal" not in [decision.state.mode for _, decision in world.log]
    tries = [t for t, d in world.log if any(e.action == "probe" for e in d.events)]
    hours = [sum(h <= (t - NOW) / 3600 < h + 1 for t in tries) for h in range(6)]
    assert max(hours[2:]) <= 1
    assert hours[0] >= hours[-1]
    assert bool(tries) is (ill not in ("full", "down")), "what shows its trouble is not tried"
