"""What the controller expects of a sequence that decodes alone."""

from outrider.base.types import NO_DRAFT
from outrider.engine.control.choices import Choice, Method, Stream
from outrider.engine.control.controller import Controller
from outrider.engine.control.costs import CostModel, Costs, Curve, DraftCosts
from outrider.engine.control.learner import ChosenDraft, Learner
from outrider.engine.control.survival import Survival
from tests.support.priors import PRIORS
from tests.support.scheduling import record_of

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


class Reader:
    """Stands for a drafter that may have a prompt to read."""

    name, max_length, max_nodes, catching_up, ahead_share = "ngram", 8, 8, False, 0.0

    def ready(self, workload: str) -> bool:
        return True


def test_no_single_step_pays_for_what_a_drafter_reads_of_a_prompt() -> None:
    counted = []
    for reads in (False, True):
        drafter, (stream,) = Reader(), streams(1)
        known = controller(1e-3).known
        learner = Learner(known, frozenset(), {"ngram": drafter}, [], lambda *_: None)
        chosen = {stream.id: ChosenDraft(stream, Choice("ngram", 4), "ngram", NO_DRAFT)}
        for seconds in (*[0.05] * 20, 0.2):
            drafter.catching_up = reads and seconds > 0.05
            learner.looking = True
            record = record_of([], 1, 1, seconds, 2, "ngram")
            record.seconds.drafters["ngram"] = seconds / 4
            window = learner.learn(record, [], chosen, False, False)
        assert window is not None
        counted.append(window.took)
    assert counted[1] < 1.4 * 0.05 < counted[0]
