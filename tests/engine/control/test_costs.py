"""What is measured while steps run."""

import pytest

from outrider.base.types import StepRecord
from outrider.engine.control.costs import CostModel, Costs, Curve, DraftCosts
from outrider.engine.control.tuning import USUAL
from tests.support.scheduling import record_of


def step(
    rows: int, decoding: int, seconds: float, emitted: int = 0, drafter: str | None = None
) -> StepRecord:
    return record_of([], rows, decoding, seconds, emitted, drafter)


def test_a_chunk_is_as_long_as_streams_may_wait() -> None:
    costs = CostModel()
    assert costs.chunk() is None
    costs.observe(step(4, 4, 0.005))
    costs.observe(step(20, 4, 9.0))  # too few to tell
    assert costs.chunk() is None
    costs.observe(step(100, 0, 0.02))
    assert costs.chunk() == int(USUAL.stall_seconds / 0.0002)
    costs.observe(step(4, 4, 1.0))
    assert (costs.chunk() or 0) > 512  # where a step takes long, a chunk may too
    slow = CostModel()
    slow.seconds_per_row = 1.0
    assert slow.chunk() == USUAL.fewest_chunk_rows


def test_speedups_are_against_plain_steps_of_as_many() -> None:
    costs = CostModel()
    costs.observe(step(2, 2, 0.02, 6, "a"))
    assert not costs.speedups
    assert not costs.knows_plain(2)
    costs.observe(step(2, 2, 0.01, 2))
    assert costs.knows_plain(2)
    assert not costs.knows_plain(3)
    costs.observe(step(2, 2, 0.02, 8, "a"))  # 4 tokens each in the time of 2 plain steps
    assert costs.speedups == {"a": pytest.approx(2.0)}
    costs.observe(step(3, 3, 0.02, 8, "a"))
    assert costs.speedups == {"a": pytest.approx(2.0)}
    assert costs.draft_seconds / costs.verify_seconds == pytest.approx(1 / 3)


def test_passes_that_repeat_rows_cost_them() -> None:
    passes = Curve((1, 8), (1.0, 8.0))
    once, again = DraftCosts(passes, 0.5), DraftCosts(passes, 0.5, repeats=True)
    assert once.at([2, 2, 1]) == 0.5 + 2 + 2 + 1
    assert again.at([2, 2, 1]) == 0.5 + 2 + 4 + 3
    assert again.at([1, 1]) == 0.5 + 1 + 2
    assert again.up_to([2, 2, 1]) == [0.0, 2.5, 6.5, 9.5]


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


def test_a_plain_step_that_met_other_work_promises_no_more_than_its_tokens() -> None:
    costs = CostModel()
    costs.observe(step(1, 1, 9.0))
    costs.observe(step(1, 1, 0.02, 3, "a"))
    assert costs.speedups == {"a": pytest.approx(3.0)}
