"""What drafted rows of a mixture of experts cost: as much as they are strangers to each other."""

from __future__ import annotations

import pytest

from outrider.engine.control.costs import CostModel, Costs, Curve, ExpertCosts

MIXTURE = ExpertCosts(experts=128, top=8, share=0.1)
ROWS = (1, 2, 3, 5, 9)


def model_of() -> tuple[CostModel, Curve]:
    """A forward whose rows are strangers takes a tenth of a row's more for each expert."""
    seconds = tuple(1 + MIXTURE.share * (MIXTURE.strangers(n) - MIXTURE.top) for n in ROWS)
    curve = Curve(ROWS, seconds)
    return CostModel(Costs(curve, {}), mixture=MIXTURE), curve


def feed(costs: CostModel, share: float, rows: int = 3, steps: int = 60) -> None:
    """Steps whose rows are so strange to each other, and that take as long as what they read."""
    more = (MIXTURE.strangers(rows) - MIXTURE.top) * share
    for _ in range(steps):
        costs.observe_verify(rows, 0, 1 + MIXTURE.share * more, MIXTURE.top + more)
        costs.observe_verify(1, 0, 1.0, MIXTURE.top)
    costs.count()


def test_strangers_wake_experts_of_their_own() -> None:
    assert MIXTURE.strangers(1) == pytest.approx(8)
    assert MIXTURE.strangers(2) == pytest.approx(15.5)
    assert MIXTURE.strangers(1000) == pytest.approx(128, abs=1e-6)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_rows_cost_what_they_do_not_share(share: float) -> None:
    """Of lengths, too, that were not tried since: what rows have in common is known by then."""
    costs, curve = model_of()
    assert costs.verify(9, 0) == pytest.approx(curve.at(9))
    feed(costs, share)
    assert costs.strange == pytest.approx(share, abs=0.02)
    for rows in ROWS:
        expected = 1 + (curve.at(rows) - 1) * share
        assert costs.verify(rows, 0) == pytest.approx(expected, rel=0.03)


def test_a_slow_machine_does_not_make_rows_strange() -> None:
    costs, curve = model_of()
    for _ in range(60):
        for rows in (1, 3):
            costs.observe_verify(rows, 0, 2 * curve.at(rows), MIXTURE.strangers(rows))
    costs.count()
    assert costs.strange == pytest.approx(1.0)
    assert costs.verify(9, 0) == pytest.approx(2 * curve.at(9), rel=0.05)


def test_a_model_without_experts_has_no_strangers() -> None:
    costs = CostModel(Costs(Curve((1, 8), (1.0, 1.5)), {}))
    costs.observe_verify(4, 0, 1.2)
    assert costs.strange is None
