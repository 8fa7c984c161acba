"""A bad request does not end drafting for good: the controller looks again at those that follow."""

from __future__ import annotations

import pytest

from outrider.engine.control.choices import Method
from outrider.engine.control.controller import Controller
from outrider.engine.control.costs import CostModel, Costs, Curve, DraftCosts
from outrider.engine.control.survival import Survival
from outrider.engine.control.tuning import USUAL
from tests.support.priors import PRIORS
from tests.support.simulate import simulate, simulate_requests

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


@pytest.mark.parametrize(
    ("unread", "rate", "drafts"), [(256, 0.9, True), (256, 0.1, False), (10**5, 0.9, False)]
)
def test_a_drafter_with_a_prompt_to_read_soon_shows_what_it_brings(
    unread: int, rate: float, drafts: bool
) -> None:
    """Reading takes 20 plain steps, which no share of the time would allow within a request."""
    passes = Curve((1, 256), (12e-3, 0.8))
    truth = Costs(Curve((1, 4, 256), (37e-3, 46e-3, 1.6)), {"model": DraftCosts(passes, 1e-4)}, 0.0)
    survival = Survival(PRIORS)
    controller = Controller(
        CostModel(truth), survival, {"model": Method(("model",), 8)},
        unread=lambda sequence, name: 0 if survival.judged(name, "") else unread,
    )  # fmt: skip
    found = simulate(controller, truth, lambda step, name, depth: rate, 1, 60)
    assert (sum(step.tokens for step in found[12:]) > 2 * len(found[12:])) == drafts
    tried = sum(step.tokens > 1 for step in found)
    assert tried >= 40 if drafts else tried <= USUAL.first_trials + 2
