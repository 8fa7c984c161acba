"""What the controller says of itself: as JSON, in use or paused, and without secrets."""

import json

from outrider.engine.control.choices import PLAIN, Choice, Method, Stream
from outrider.engine.control.controller import Controller
from outrider.engine.control.costs import CostModel, Costs, Curve, DraftCosts
from outrider.engine.control.summary import summary
from outrider.engine.control.survival import Survival
from tests.support.priors import PRIORS

SECRET = "salt-of-a-tenant"
METHODS = {
    "model": Method(("model",), 4),
    "suffix": Method(("suffix",), 4),
    "model+suffix": Method(("model", "suffix"), 3),
}


def controller() -> Controller:
    """With a drafter that costs next to nothing, and rows that are nearly free."""
    free = DraftCosts(None, 1e-6)
    drafters = dict.fromkeys(("model", "suffix", "model+suffix"), free)
    return Controller(
        CostModel(Costs(Curve((1, 64), (1e-3, 2e-3)), drafters)), Survival(PRIORS), METHODS
    )


def streams(count: int, fixed: Choice | None = None) -> list[Stream]:
    names = tuple(METHODS) if fixed is None else ()
    return [Stream(str(i), f"text cold {SECRET}", 9, names, 4, fixed) for i in range(count)]


def test_choices_are_counted_and_no_salt_is_told() -> None:
    found = controller()
    found.decide([*streams(3), Stream("x", SECRET, 9, (), 4, Choice("suffix", 2))])
    found.survival.observe("model+suffix", f"text cold {SECRET}", "0", 3, 2)
    told = summary(found)
    assert json.loads(json.dumps(told)) == told
    assert SECRET not in json.dumps(told)
    assert not told["paused"]
    chosen, fixed = told["choices"]
    assert (chosen["sequences"], chosen["fixed"]) == (3, False)
    assert chosen["depth"] > 0
    assert chosen["drafters"] == list(METHODS[chosen["method"]].drafters)
    assert (fixed["method"], fixed["depth"], fixed["sequences"]) == ("suffix", 2, 1)
    assert fixed["fixed"]
    assert told["tokens_per_second"] > told["plain_tokens_per_second"] > 0
    assert len(told["survival"]["model+suffix"]["survival"]) == 3  # its longest draft
    assert told["draft_ms"].keys() == METHODS.keys()


def test_a_pause_is_told_with_the_batch_that_it_is_for() -> None:
    found = controller()
    both = streams(2)
    assert found.decide(both)[0].depth
    for _ in range(20):
        found.observe(2, 18, 2, True, 0.1)
    assert set(found.decide(both)) == {PLAIN}
    assert found.barred(2) == {*METHODS}
    told = summary(found)
    assert told["paused"]
    assert [*told["pauses"]] == ["2"]
    assert found.decide(streams(1))[0].depth
    assert not summary(found)["paused"]
