"""A bad request does not end drafting for good: the controller looks again at those that follow."""

from __future__ import annotations

import pytest

from outrider.engine.control.choices import Method
from outrider.engine.control.controller import Controller
from outrider.engine.control.costs import CostModel, Costs, Curve, DraftCosts
from outrider.engine.control.survival import Survival
from tests.support.priors import PRIORS
from tests.support.simulate import simulate_requests

ROWS = tuple(2**i for i in range(10))
TRUTH = Costs(
    Curve(ROWS, tuple(8e-3 + 4e-4 * (rows - 1) for rows in ROWS)),
    {"suffix": DraftCosts(None, 2e-5, 5e-6)},
    0.0,
)
"""Those of a lone model of 135M parameters, about: a row takes a twentieth of a step."""
PROSE, EDIT = 0.02, 0.9
"""Shares of drafts that are accepted where nothing repeats, and where the output is the prompt."""


def speeds(requests: list[float], batch: int, tokens: int, shadow_steps: int = 4) -> list[float]:
    methods = {"suffix": Method(("suffix",), 8)}
    found = Controller(CostModel(TRUTH), Survival(PRIORS), methods, frozenset(methods))
    return simulate_requests(found, TRUTH, requests, batch, tokens, shadow_steps)


@pytest.mark.parametrize(("batch", "least"), [(1, 2.5), (4, 1.8), (16, 1.1)])
def test_an_edit_behind_bad_requests_is_drafted_for(batch: int, least: float) -> None:
    *bad, edit = speeds([PROSE, PROSE, PROSE, EDIT], batch, 200)
    assert min(bad) > 0.98
    assert edit > least


@pytest.mark.parametrize(("batch", "least"), [(1, 2.0), (4, 1.5)])
def test_a_pause_ends_where_new_requests_fare_well(batch: int, least: float) -> None:
    """Drafting that has won goes on into prose, loses there, and pauses for longer than that."""
    *_, edit = speeds([EDIT, EDIT, PROSE, EDIT, PROSE, EDIT], batch, 80, shadow_steps=2)
    assert edit > least


def test_a_pause_goes_on_for_those_that_it_is_for() -> None:
    methods = {"suffix": Method(("suffix",), 8)}
    believed = Costs(Curve((1, 64), (1e-3, 1.1e-3)), TRUTH.drafters, 0.0)
    dear = Costs(Curve((1, 2, 64), (1e-3, 4e-3, 1e-1)), TRUTH.drafters, 0.0)
    found = Controller(CostModel(believed), Survival(PRIORS), methods, frozenset(methods))
    (one,) = simulate_requests(found, dear, [EDIT], 1, 400, shadow_steps=2)
    assert one > 0.95  # though all of its drafts are accepted
