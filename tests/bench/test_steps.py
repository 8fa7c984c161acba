"""Profiles of steps: what is fitted to times, and which steps are timed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.bench.steps import (
    PASSES,
    Timed,
    fitted,
    line,
    quick,
    timed,
    timed_steps,
    tokens_per_second,
)
from outrider.engine.control.costs import Costs, Curve, DraftCosts
from outrider.errors import ConfigError
from outrider.llm import LLM
from tests.support.scheduling import record_of

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
        drafted = size * k
        step = Timed(size, size, drafted, draft + verify + costs.host_at(size), draft, verify)
        slow = Timed(size, size, drafted, 9.0, 4.0, 4.0)  # while somebody else used the machine
        found[size, k] = [step] * 30 + [slow] * 20
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


def test_forwards_cost_by_the_rows_that_there_were() -> None:
    """A lookup that may draft eight tokens drafts none in half of its steps."""
    costs = Costs(CURVE, {"suffix": DraftCosts(None, 3e-5)})
    steps = steps_of(costs, "suffix")
    for size, k in CELLS:
        (one, *_) = steps[size, 0]
        steps[size, k] += [one] * 200
    drafter: Any = SimpleNamespace(model=None, name="suffix")
    found = fitted(drafter, steps, CONTEXT)
    for rows in (1, 3, 16, 50, 288):
        assert found.target.at(rows) == pytest.approx(costs.target.at(rows), rel=0.01)
    with pytest.raises(ConfigError, match="too short"):
        fitted(drafter, {cell: some[:5] for cell, some in steps.items()}, CONTEXT)


def test_only_steps_of_the_whole_batch_count() -> None:
    for rows, decoding, counts in ((4, 4, True), (20, 4, False), (3, 3, False), (12, 0, False)):
        record = record_of([], rows, decoding, 0.01, 6, "model")
        assert len(timed_steps(record, 4)) == counts
    assert timed_steps(None, 4) == []
    assert Timed(4, 6, 2, 0.01, 0.002, 0.007).host == pytest.approx(0.001)


def test_sequences_of_all_ages_decode_together(tiny_llama: Path) -> None:
    """With what the text repeats, drafts make some outputs end long before others."""
    llm = LLM(
        tiny_llama, drafter="suffix", num_speculative_tokens=4, max_num_seqs=3,
        enable_prefix_caching=False,
    )  # fmt: skip
    prompts = ["a b a b a b", "one two three", "the lazy dog"]
    steps, counts = timed(llm, prompts, 3, 4, 12)
    assert counts.emitted == 12 * PASSES * 3 - PASSES * 3  # the first token is no step's
    assert all(each.emitted >= 3 and each.seconds > each.verify > 0 for each in steps)
    assert sum(each.drafted for each in steps) <= counts.drafted
    plain, none = timed(llm, prompts, 3, 0, 12)
    assert none.steps == none.emitted == counts.emitted
    assert {(each.emitted, each.drafted) for each in plain} == {(3, 0)}
    assert not llm.engine.has_work


def test_a_stall_does_not_count() -> None:
    plain, drafted = Timed(2, 2, 0, 0.1, 0.0, 0.1), Timed(2, 4, 8, 0.2, 0.0, 0.2)
    stalled = plain._replace(seconds=9.0)
    steps = [plain, stalled, drafted, plain, drafted, drafted]
    assert tokens_per_second(steps) == pytest.approx((3 * 2 + 3 * 4) / (3 * 0.1 + 3 * 0.2))


def test_the_quicker_steps_count_and_lines_do_not_fall() -> None:
    assert quick([9.0] * 9 + [1.0] * 2) == 1.0
    assert line((1, 4, 16), (3.0, 6.0, 18.0)) == (pytest.approx(2.0), pytest.approx(1.0))
    assert line((1, 2), (5.0, 3.0)) == (pytest.approx(4.0), 0.0)
