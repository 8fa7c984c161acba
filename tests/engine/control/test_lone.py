"""What the controller expects of a sequence that decodes alone."""

from outrider.engine.control.choices import Method, Stream
from outrider.engine.control.controller import Controller
from outrider.engine.control.costs import CostModel, Costs, Curve, DraftCosts
from outrider.engine.control.survival import Survival
from tests.support.priors import PRIORS

METHODS = {"ngram": Method(("ngram",), 8)}


def controller(seconds_of_nine_rows: float) -> Controller:
    """Of which six rows cost as much as one, and more are dear."""
    rows = Curve((1, 6, 9), (1e-3, 1e-3, seconds_of_nine_rows))
    free = DraftCosts(None, 1e-6)
    return Controller(CostModel(Costs(rows, {"ngram": free})), Survival(PRIORS), METHODS)


def streams(count: int) -> list[Stream]:
    return [Stream(str(i), "", 0, ("ngram",), 8) for i in range(count)]


def test_drafts_end_before_rows_grow_dear_though_the_mean_draft_is_short() -> None:
    depths = []
    for seconds in (1e-3, 3e-3):
        found = controller(seconds)
        for number in range(400):  # half of the drafts are whole, and the others end at once
            whole = number % 2
            found.survival.observe("ngram", "", "another", 8, 8 * whole)
            found.survival.observe_size("ngram", "", [1] * (8 if whole else 1), 8, 1)
        (choice,) = found.decide(streams(1))
        depths.append(choice.depth)
    assert depths == [8, 5]


def test_the_luck_of_a_sequence_alone_counts_once_as_its_workloads() -> None:
    for count, apart in ((1, False), (2, True)):
        found = controller(1e-3)
        for _ in range(40):
            found.survival.observe("ngram", "", "0", 4, 4)
            found.survival.observe("ngram", "", "1", 4, 0)
        found.decide(streams(count))
        assert any(group.levels for group in found.choices) == apart


def test_choices_are_compared_sooner_where_no_draft_is_accepted() -> None:
    reviewed = []
    for accepted in (True, False):
        found = controller(1e-3)
        found.step = found.reviewed = 100  # it is not new any more
        found.affords(2)
        found.decide(streams(1))
        begin = found.reviewed
        while found.reviewed == begin:
            found.accepted(accepted)
            found.decide(streams(1))
        reviewed.append(found.reviewed - begin)
    assert reviewed == [found.tuning.review_steps, found.tuning.vain_steps]
