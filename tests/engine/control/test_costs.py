"""What is measured while steps run."""

import pytest

from outrider.engine.control.costs import (
    FEWEST_ROWS,
    FIRST_PROBE,
    PROBE_STEPS,
    STALL_SECONDS,
    CostModel,
    Costs,
    Curve,
    StepCosts,
)

Step = tuple[int, int, int, frozenset[str], float, float, float]


def step(
    rows: int, decoding: int, seconds: float, emitted: int = 0, drafter: str | None = None
) -> Step:
    drafters = frozenset() if drafter is None else frozenset([drafter])
    return rows, decoding, emitted, drafters, seconds, 0.25 * seconds, 0.75 * seconds


def test_a_chunk_is_as_long_as_streams_may_wait() -> None:
    costs = StepCosts()
    assert costs.max_chunk(512) == 512
    costs.observe(*step(4, 4, 0.005))
    costs.observe(*step(20, 4, 9.0))  # too few to tell
    assert costs.max_chunk(512) == 512
    costs.observe(*step(100, 0, 0.02))
    assert costs.max_chunk(512) == int(STALL_SECONDS / 0.0002)
    costs.observe(*step(4, 4, 1.0))
    assert costs.max_chunk(512) == 512  # where a step takes long, a chunk may too
    slow = StepCosts(seconds_per_row=1.0)
    assert slow.max_chunk(512) == FEWEST_ROWS


def test_speedups_are_against_plain_steps_of_as_many() -> None:
    costs = StepCosts()
    for _ in range(FIRST_PROBE):
        assert not costs.probe_due(2)
        costs.observe(*step(2, 2, 0.02, 6, "a"))
    assert costs.probe_due(2)
    assert not costs.probe_due(3)
    assert not costs.speedups
    costs.observe(*step(2, 2, 0.01, 2))
    assert not costs.probe_due(2)
    costs.observe(*step(2, 2, 0.02, 8, "a"))  # 4 tokens each in the time of 2 plain steps
    assert costs.speedups == {"a": pytest.approx(2.0)}
    for _ in range(PROBE_STEPS - 1):
        costs.observe(*step(2, 2, 0.02, 8, "a"))
    assert costs.probe_due(2)
    assert costs.draft_seconds / costs.verify_seconds == pytest.approx(1 / 3)


def test_a_step_that_others_slowed_does_not_count() -> None:
    model = CostModel(Costs(Curve((1, 16), (1e-3, 2e-3)), {}))
    for number in range(200):
        slowed = 1 if number % 10 else 3
        model.observe_verify(8, 0, slowed * model.prior.target.at(8))
    model.count()
    assert model.verify(8, 0) == pytest.approx(model.prior.target.at(8), rel=0.01)
    for _ in range(60):  # a machine that is slow from now on
        model.observe_verify(8, 0, 2 * model.prior.target.at(8))
    model.count()
    assert model.verify(8, 0) > 1.8 * model.prior.target.at(8)
