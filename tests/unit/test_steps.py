"""Profiles of steps: what is fitted to times, and which steps are timed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.bench.steps import Recorder, Timed, fitted, line, quick
from outrider.engine.costs import Costs, Curve, DraftCosts

CONTEXT = 100.0
ROWS = (1, 2, 4, 8, 9, 16, 32, 36, 64, 144)
CURVE = Curve(ROWS, tuple(1e-3 * (1 + 0.02 * rows) for rows in ROWS))
CELLS = [(size, k) for size in (1, 4, 16) for k in (0, 1, 3, 8)]


def steps_of(costs: Costs, name: str) -> dict[tuple[int, int], list[Timed]]:
    """Return the steps that an engine with such costs would take."""
    found = {}
    for size, k in CELLS:
        draft = costs.drafters[name].at([size] * k)
        verify = costs.target.at(size * (1 + k)) + costs.per_context * CONTEXT * size
        step = Timed(size, draft + verify + costs.host_at(size), draft, verify)
        slow = Timed(size, 9.0, 4.0, 4.0)  # while somebody else used the machine
        found[size, k] = [step, step, step, slow, slow]
    return found


@pytest.mark.parametrize(
    ("name", "drafting", "model"),
    [
        ("model", DraftCosts(Curve((1, 4, 16), (1e-4, 1.5e-4, 3e-4)), 4e-5), True),
        ("suffix", DraftCosts(None, 3e-5, 6e-6), None),
    ],
)
def test_costs_are_found_again_in_their_steps(name: str, drafting: DraftCosts, model: Any) -> None:
    costs = Costs(CURVE, {name: drafting}, 2e-8, 1.2e-4, 1.5e-5)
    drafter: Any = SimpleNamespace(model=model, name=name)
    found = fitted(drafter, steps_of(costs, name), CONTEXT)
    assert found.per_context == pytest.approx(costs.per_context)
    assert found.host == pytest.approx(costs.host)
    assert found.host_per_sequence == pytest.approx(costs.host_per_sequence)
    for rows in (1, 3, 16, 50, 288):
        assert found.target.at(rows) == pytest.approx(costs.target.at(rows), rel=0.01)
    for counts in ([1], [4] * 3, [10] * 8, [16] * 2):
        assert found.drafters[name].at(counts) == pytest.approx(drafting.at(counts), rel=0.01)


def test_only_steps_of_the_whole_batch_count() -> None:
    recorder = Recorder(size=4)
    for rows, decoding in ((4, 4), (20, 4), (3, 3), (12, 0), (4, 4)):
        recorder.observe(rows, decoding, 6, {"model"}, 0.01, 0.002, 0.007)
    assert recorder.steps == [Timed(6, 0.01, 0.002, 0.007)] * 2
    assert recorder.steps[0].host == pytest.approx(0.001)


def test_the_quicker_steps_count_and_lines_do_not_fall() -> None:
    assert quick([9.0] * 9 + [1.0] * 2) == 1.0
    assert line((1, 4, 16), (3.0, 6.0, 18.0)) == (pytest.approx(2.0), pytest.approx(1.0))
    assert line((1, 2), (5.0, 3.0)) == (pytest.approx(4.0), 0.0)
