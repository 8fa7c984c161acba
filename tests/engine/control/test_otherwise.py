"""A lookup drafts where it promises enough, and another drafter elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.base.types import Draft, DraftBudget, DraftNodes, Scheduled, Speculation
from outrider.drafters.base import Drafter, NoDrafter
from outrider.engine.control.choices import Choice, Knowledge, Method, methods_of
from outrider.engine.control.costs import CostModel, Costs, Curve, DraftCosts
from outrider.engine.control.prices import Prices
from outrider.engine.control.survival import Survival
from outrider.engine.control.switch import Menu, SpeculationState
from outrider.engine.control.tuning import USUAL
from outrider.engine.drafting import Drafting

BOTH = Method(("suffix", "model"), 6, otherwise=True)


class Says(Drafter):
    """Drafts the same everywhere, as deep as it may; ``asked`` are the sequences of each call."""

    def __init__(self, name: str, token: int, most: int, blank: tuple[int, ...] = ()) -> None:
        self.name, self.max_length, self.max_nodes = name, most, most
        self._token, self._blank = token, blank
        self.asked: list[list[int]] = []

    def propose(self, batch: Any, budgets: Any, noise: Any) -> Draft:
        self.asked.append([item.sequence for item in batch])
        return Draft.chains(
            [] if item.sequence in self._blank else [self._token] * budget.depth
            for item, budget in zip(batch, budgets, strict=True)
        )


def items(count: int, depth: int = 5) -> list[Any]:
    budget = DraftBudget(depth, depth)
    return [Scheduled(i, 0, 1, True, BOTH.drafter, budget) for i in range(count)]  # type: ignore[arg-type]


def drafting(*drafters: Drafter) -> Drafting:
    known = {each.name: each for each in (NoDrafter(0), *drafters)}
    menu = Menu(known, SpeculationState(True, "none", None), 8)
    return Drafting(known, menu, None, 9)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences are numbers here, which cannot be copied as drafters of others get them."""
    monkeypatch.setattr("outrider.engine.drafting.is_foreign", lambda drafter: False)


def test_each_sequence_has_one_of_both() -> None:
    """The other drafter is asked for those alone whose lookup is empty or promises less."""
    lookup, model = Says("suffix", 7, 8, blank=(0,)), Says("model", 3, 4, blank=(3,))
    found = drafting(lookup, model)
    found.promises = lambda item, nodes: item.sequence == 2
    batch, seconds = items(4), dict[str, float]()
    made = found._made(BOTH.drafter, batch, seconds)
    assert [nodes.tokens for nodes in made] == [[3] * 4, [3] * 4, [7] * 5, [7] * 5]
    assert [item.drafter for item in batch] == ["model", "model", "suffix", "suffix"]
    assert lookup.asked == [[0, 1, 2, 3]]
    assert model.asked == [[0, 1, 3]]
    assert seconds.keys() == {"suffix", "model"}


def test_nobody_else_is_asked_where_all_lookups_promise_enough() -> None:
    lookup, model = Says("suffix", 7, 8), Says("model", 3, 4)
    seconds: dict[str, float] = {}
    drafting(lookup, model)._made(BOTH.drafter, items(3), seconds)
    assert not model.asked
    assert seconds.keys() == {"suffix"}


def test_one_that_fails_leaves_the_other(caplog: pytest.LogCaptureFixture) -> None:
    class Fails(Says):
        def propose(self, batch: Any, budgets: Any, noise: Any) -> Draft:
            raise ValueError("broken")

    model = Says("model", 3, 4)
    for lookup, other, said in (
        (Fails("suffix", 7, 8), model, [[3] * 4] * 2),
        (Says("suffix", 7, 8), Fails("model", 3, 4), [[7] * 5] * 2),
    ):
        found = drafting(lookup, other)
        found.promises = lambda item, nodes: False
        made = found._made(BOTH.drafter, items(2), {})
        assert [nodes.tokens for nodes in made] == said
        assert len(found.menu.switched_off) == 1
    caplog.clear()  # that they failed is meant


def test_what_a_method_of_both_takes() -> None:
    assert BOTH.drafter == "suffix or model"
    assert BOTH.nodes(4) == 4
    assert BOTH.parts == BOTH.parts_of("model") == ("suffix", "model")
    assert BOTH.parts_of("suffix") == ("suffix",)
    merged = Method(("model", "suffix"), 4)
    assert merged.nodes(4) == 8
    assert merged.parts_of("model+suffix") == ("model", "suffix", "model+suffix")


def test_auto_has_both_and_merges_nothing() -> None:
    views: Any = {
        name: SimpleNamespace(name=name, max_length=most, max_nodes=most)
        for name, most in (("suffix", 8), ("model", 4))
    }
    methods = methods_of(views, 8, [("model", "suffix")], True, [("suffix", "model")])
    assert methods["suffix or model"].max_depth == 8
    state = SpeculationState(True, "auto", None)
    menu = Menu(views, state, 8, [("model", "suffix")], ["suffix", "model"], methods)
    assert menu.freedom(Speculation()).methods == ("suffix", "model", "suffix or model")
    named = menu.freedom(Speculation(drafter="model+suffix"))
    assert named.methods == ("model+suffix",)
    menu.switched_off["model"] = "broken"
    menu.refresh()
    assert menu.freedom(Speculation()).methods == ("suffix",)


@pytest.mark.parametrize("passed", [0.0, 0.5, 2.0])
def test_a_lookup_must_promise_what_the_other_brings_for_its_time(passed: float) -> None:
    """In the same time, so less than the other where a pass takes long."""
    costs = CostModel(
        Costs(Curve((1, 64), (1.0, 1.0)), {"model": DraftCosts(Curve((1, 64), (passed,) * 2), 0)})
    )
    survival = Survival({"model": 0.5})
    methods = {"model": Method(("model",), 3)}
    prices = Prices(Knowledge(costs, survival, methods, USUAL))
    enough = prices.enough(Choice("model", 3), "text")
    expected = sum(survival.curve("model", "text", 3))
    host = costs.host(1)
    drafting_takes = methods["model"].seconds(costs, [1.0] * 3)
    assert enough == pytest.approx(
        (1 + expected) * (1 + host) / (1 + host + drafting_takes) - 1, rel=1e-6
    )
    assert enough <= expected + 1e-9


def test_rates_by_margin_are_those_of_who_drafted() -> None:
    assert BOTH.scored("suffix") == "suffix"
    assert BOTH.scored("model") == "model"
    assert Method(("model", "suffix"), 3).scored("model+suffix") is None
    nodes = DraftNodes.chain([1, 2])._replace(margins=(3.5, 0.1))
    survival = Survival({"model": 0.5, "suffix": 0.5})
    for _ in range(50):
        survival.observe_node("suffix", "text", 1, 0, 3, False)
        survival.observe_node("model", "text", 1, 0, 3, True)
    survival.count()
    costs = CostModel(Costs(Curve((1, 64), (1.0, 1.0)), {}))
    prices = Prices(Knowledge(costs, survival, {}, USUAL))
    assert (
        prices.survivals(nodes, "suffix", "text")[0] + 0.3
        < prices.survivals(nodes, "model", "text")[0]
    )
