"""The controller on the costs and acceptance that it met in the cells of the portfolio.

``python -m benchmarks recording --rounds 2 --out benchmarks/results/recording.json`` wrote them.
"""

from __future__ import annotations

import pytest

from benchmarks.portfolio.cells import CELLS
from benchmarks.portfolio.recording import read
from outrider.engine.control.controller import Controller
from outrider.engine.control.costs import CostModel
from outrider.engine.control.survival import Survival
from tests.support import REPOSITORY
from tests.support.priors import PRIORS
from tests.support.simulate import simulate

FILE = REPOSITORY / "benchmarks" / "results" / "recording.json"
CELLS_OF_FILE = read(FILE)


def test_every_cell_of_the_portfolio_was_recorded() -> None:
    assert set(CELLS_OF_FILE) == {cell.name for cell in CELLS}


@pytest.mark.parametrize("cell", sorted(CELLS_OF_FILE))
def test_no_cell_is_slower_than_plain(cell: str) -> None:
    concurrency, costs, methods, rates = CELLS_OF_FILE[cell]
    controller = Controller(CostModel(costs), Survival(PRIORS), methods)
    found = simulate(
        controller, costs, lambda step, name, depth: rates[name][depth - 1], concurrency, 400, 1
    )
    tokens = sum(step.tokens for step in found)
    assert tokens >= 0.98 * sum(step.plain * step.seconds for step in found)
