"""The controller on known costs and survival, with a virtual clock."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from outrider.base.types import Request, SamplingParams, SequenceState
from outrider.engine.control.choices import PLAIN, Choice, Method, Stream
from outrider.engine.control.chooser import Chooser
from outrider.engine.control.controller import Controller
from outrider.engine.control.costs import CostModel, Costs, Curve, DraftCosts
from outrider.engine.control.prices import Prices, least_chance
from outrider.engine.control.survival import Survival
from outrider.engine.control.switch import Menu, SpeculationState
from outrider.engine.control.tuning import USUAL
from tests.support.priors import PRIORS
from tests.support.scheduling import record_of
from tests.support.simulate import Step, simulate

ROWS = tuple(2**i for i in range(14))
METHODS = {name: Method((name,), 8) for name in ("model", "ngram")}


def curve(base: float, slope: float, scale: float = 1.0) -> Curve:
    """Rows are nearly free up to six, then cost ``slope`` each."""
    seconds = (base * (1 + 0.02 * (r - 1) ** 0.5) + slope * max(0, r - 6) for r in ROWS)
    return Curve(ROWS, tuple(scale * each for each in seconds))


def costs(slope: float, target: float = 1.0, drafter: float = 1.0) -> Costs:
    model = DraftCosts(curve(0.15e-3, 0.01e-3, drafter), 2e-5)
    return Costs(
        curve(1e-3, slope, target), {"model": model, "ngram": DraftCosts(None, 1e-5, 3e-6)}, 1e-8
    )


def geometric(rates: dict[str, float]) -> Survival:
    """Return a table that has seen thousands of drafts with these shares of accepted tokens."""
    survival, rng = Survival(PRIORS), random.Random(0)
    for number in range(2000):
        for name, rate in rates.items():
            accepted = next((i for i in range(8) if rng.random() >= rate), 8)
            survival.observe(name, "", "another", 8, accepted)
        if number % 50 == 0:
            survival.count()
    survival.count()
    return survival


def run(
    batch: int, rates: dict[str, float], slope: float, steps: int, **options: float
) -> list[Step]:
    prior = costs(slope, options.pop("target", 1.0), options.pop("drafter", 1.0))
    controller = Controller(CostModel(prior), Survival(PRIORS), METHODS)
    return simulate(
        controller, costs(slope), lambda step, name, depth: rates[name], batch, steps, 1, **options
    )


def share_of_best(steps: list[Step]) -> float:
    return sum(s.tokens for s in steps) / sum(s.best * s.seconds for s in steps)


def worst_window(steps: list[Step], length: int = 200) -> float:
    """The least of expected tokens over those of plain decoding in the same time."""
    windows = [steps[i : i + length] for i in range(0, len(steps) - length + 1, 10)]
    return min(sum(s.tokens for s in w) / sum(s.plain * s.seconds for s in w) for w in windows)


RATES = [(0.8, 0.5), (0.5, 0.1), (0.2, 0.05), (0.6, 0.9)]


@pytest.mark.parametrize(
    ("batch", "rates", "slope"),
    [
        *product([1, 4, 32], RATES, [2e-5, 2e-4]),
        *product([128], RATES, [2e-4]),
        (512, RATES[1], 2e-4),
    ],
)
def test_with_known_costs_and_survival_it_makes_the_best_choice(
    batch: int, rates: tuple[float, float], slope: float
) -> None:
    known = dict(zip(("model", "ngram"), rates, strict=True))
    controller = Controller(CostModel(costs(slope)), geometric(known), METHODS)
    found = simulate(controller, costs(slope), lambda step, name, i: known[name], batch, 220, 1)
    assert share_of_best(found) >= 0.95
    assert worst_window(found) >= 0.98


@pytest.mark.parametrize("batch", [1, 8, 128])
@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("slope", [2e-5, 2e-4])
def test_with_known_costs_it_comes_near_the_best_fixed_choice(
    batch: int, rates: tuple[float, float], slope: float
) -> None:
    found = run(batch, {"model": rates[0], "ngram": rates[1]}, slope, 900 if batch <= 32 else 300)
    assert share_of_best(found[len(found) // 3 :]) >= 0.95
    assert worst_window(found) >= 0.98


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(("target", "drafter"), [(0.7, 1.3), (1.3, 0.7)])
def test_wrong_costs_and_spikes_do_not_make_it_slower_than_plain(
    batch: int, target: float, drafter: float
) -> None:
    rates = {"model": 0.5, "ngram": 0.1}
    found = run(batch, rates, 2e-4, 800, target=target, drafter=drafter, spikes=0.05)
    assert worst_window(found) >= 0.98


APART, SETTLING = 2000, 100
"""Steps between drifts, and steps after one that do not count."""
DRIFTS = [
    [(0.8, 0.5), (0.05, 0.02), (0.5, 0.1)],
    [(0.6, 0.9), (0.05, 0.02), (0.8, 0.5)],
    [(0.5, 0.1), (0.2, 0.05), (0.6, 0.9)],
    [(0.2, 0.05), (0.8, 0.5), (0.05, 0.02)],
]
"""P(accept) of model and ngram before the first drift, after it, and after the second."""
SLOPES = [2e-5, 2e-4]
BIASES = [(0.7, 1.3), (1.3, 0.7)]
"""Costs of target and drafter that are believed, over the true ones."""


def check_drifts(
    batch: int, rates: list[tuple[float, float]], slope: float, bias: tuple[float, float]
) -> None:
    """Fail if 200 steps emit less than 0.98 of plain, unless acceptance changed just before."""
    phases = [dict(zip(("model", "ngram"), each, strict=True)) for each in rates]
    controller = Controller(CostModel(costs(slope, *bias)), Survival(PRIORS), METHODS)
    found = simulate(
        controller, costs(slope), lambda step, name, depth: phases[step // APART][name], batch,
        APART * len(phases), 0, spikes=0.05,
    )  # fmt: skip
    for begin in range(0, len(found), APART):
        settled = begin + SETTLING if begin else 0
        assert worst_window(found[settled : begin + APART]) >= 0.98


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(("rates", "bias"), [*zip(DRIFTS, 2 * BIASES, strict=True)])
def test_drifts_wrong_costs_and_spikes_do_not_make_it_slower_than_plain(
    batch: int, rates: list[tuple[float, float]], bias: tuple[float, float]
) -> None:
    check_drifts(batch, rates, 2e-5, bias)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [2**i for i in range(10)])
@pytest.mark.parametrize("rates", DRIFTS)
@pytest.mark.parametrize("slope", SLOPES)
@pytest.mark.parametrize("bias", BIASES)
def test_all_drifts_wrong_costs_and_spikes_do_not_make_it_slower_than_plain(
    batch: int, rates: list[tuple[float, float]], slope: float, bias: tuple[float, float]
) -> None:
    check_drifts(batch, rates, slope, bias)


def test_what_one_size_takes_is_told_apart_from_the_machine() -> None:
    """However many spikes it saw: other sizes and drafters stay what they are beside it."""
    model, rng = CostModel(costs(2e-4)), random.Random(0)
    usual, other = model.verify(8, 100), model.verify(2, 100)
    for _ in range(4000):
        model.observe_verify(8, 100, 1.4 * usual * (2 if rng.random() < 0.05 else 1))
        model.count()
    assert model.verify(8, 100) == pytest.approx(1.4 * usual, rel=0.1)
    assert model.verify(2, 100) == pytest.approx(1.4 * other, rel=0.1)


def test_survival_follows_what_happens_and_knows_workloads_and_sequences_apart() -> None:
    survival = Survival(PRIORS)
    assert survival.curve("eagle3", "code", 1) == [PRIORS["eagle3"]]
    for _ in range(400):
        survival.observe("model", "code", "a", 1, 1)
        survival.observe("model", "prose", "b", 1, 0)
        survival.count()
    assert survival.curve("model", "code", 1)[0] > 0.9
    assert survival.curve("model", "prose", 1)[0] < 0.1
    assert 0.3 < survival.curve("model", "unknown", 1)[0] < 0.7
    assert survival.curve("model", "code", 12) == sorted(
        survival.curve("model", "code", 12), reverse=True
    )
    for _ in range(600):
        survival.observe("model", "code", "a", 1, 0)
    survival.count()
    assert survival.curve("model", "code", 1)[0] < 0.2
    for _ in range(30):
        survival.observe("model", "prose", "lucky", 1, 1)
    assert survival.odds("model", "prose", "lucky") > 2 > 1.5 > survival.odds("model", "prose", "b")
    survival.release("lucky", METHODS)
    assert survival.odds("model", "prose", "lucky") == 1


def test_survival_by_depth_counts_what_was_not_drafted_as_refused() -> None:
    survival = Survival(PRIORS)
    for _ in range(500):  # four might have been drafted, three were and stood
        survival.observe("model", "", "a", 4, 3)
        survival.observe_size("model", "", [1, 1, 1], 4, 1)
    survival.count()
    curve = survival.curve("model", "", 4)
    assert curve[2] > 0.8
    assert curve[3] < 0.2
    assert survival.fill("model", "", 5) == pytest.approx([1, 1, 1, 0, 0], abs=0.1)


def test_rates_of_nodes_are_told_apart_by_depth_rank_and_margin() -> None:
    survival = Survival(PRIORS)
    prior = survival.rates("model", "").table
    for _ in range(300):
        survival.observe_node("model", "", 1, 0, 3, True)
        survival.observe_node("model", "", 1, 0, 0, False)
    survival.count()
    table = survival.rates("model", "").table
    assert table[0, 0, 3] > 0.94 > 0.1 > table[0, 0, 0]
    assert table[5, 0, 0] < 0.2  # of all depths together
    assert (table[:, 1] == prior[:, 1]).all()


def test_a_tree_starts_from_what_its_chains_do() -> None:
    survival = Survival(PRIORS, wider={"model tree": ("model", 0.4)})
    assert survival.curve("model tree", "", 1) > survival.curve("model", "", 1)
    for _ in range(300):
        survival.observe("model", "", "a", 1, 0)
    survival.count()
    assert survival.curve("model tree", "", 1)[0] < 0.5


def prices(controller: Controller) -> Prices:
    """Return the prices by what a controller knows."""
    made = Prices(controller.known)
    made.renew(controller.review)
    return made


def test_a_row_must_bring_what_it_costs() -> None:
    streams = [Stream(str(i), "", 100, tuple(METHODS)) for i in range(8)]
    chances = [0.9, 0.8, 0.7, 0.5, 0.2, 0.05]
    kept = []
    for slope in (0.0, 1e-4, 1.0):
        controller = Controller(CostModel(costs(slope)), Survival(PRIORS), METHODS)
        controller.decide(streams)
        worth = prices(controller).worth(chances, 8, 8, 0.0)
        kept.append(sum(chance >= worth for chance in chances))
        assert prices(controller).least(Choice("model", 4), "", 8) > 0  # a pass is never free
    assert kept[0] == 6
    assert 6 > kept[1] > kept[2] == 0


def test_a_pass_pays_from_the_chance_at_which_its_child_brings_its_price() -> None:
    """The child is verified only behind margins at which that is worth a row."""
    children = [(0.2, 0.4), (0.3, 0.6), (0.5, 0.9)]
    for passed, row in ((0.05, 0.0), (0.1, 0.2), (0.02, 0.5)):
        least = least_chance(children, passed, row)
        gains = [
            sum(share * max(0.0, chance * rate - row) for share, rate in children)
            for chance in (least, least * 0.99)
        ]
        assert gains[0] == pytest.approx(passed)
        assert gains[1] < passed


def test_drafts_end_sooner_where_rows_are_dear() -> None:
    streams = [Stream("a", "", 100, tuple(METHODS))]
    least = []
    for slope in (0.0, 1e-4):
        controller = Controller(CostModel(costs(slope)), Survival(PRIORS), METHODS)
        controller.decide(streams)
        least.append(prices(controller).least(Choice("model", 8), "", 1))
    assert least[1] > 1.1 * least[0]


def test_long_drafts_are_chosen_where_they_seldom_grow_long() -> None:
    """A draft that ends early where it would not pay has few of the rows and passes it may have."""
    streams = [Stream("a", "", 100, ("model",))]
    depths = []
    for drafted in (8, 3):
        controller = Controller(CostModel(costs(2e-4)), Survival(PRIORS), METHODS)
        for number in range(400):  # one of four goes far
            accepted = 8 if number % 4 == 0 else 2
            nodes = max(drafted, accepted)
            controller.survival.observe("model", "", "another", 8, accepted)
            controller.survival.observe_size("model", "", [1] * nodes, 8, 1)
        (choice,) = controller.decide(streams)
        depths.append(choice.depth)
    assert depths[0] < depths[1] == 8


def test_children_are_told_by_how_often_they_have_a_margin() -> None:
    survival = Survival(PRIORS)
    for _ in range(200):
        survival.observe_node("model", "", 1, 0, 3, True)
        survival.observe_node("model", "", 1, 1, 0, False)  # no first child
    survival.count()
    (*_, (share, rate)) = survival.children("model", "")
    assert share > 0.8
    assert rate > 0.9
    assert sum(share for share, _ in survival.children("model", "")) == pytest.approx(1)


def test_a_row_has_the_price_of_the_tokens_that_its_time_would_bring() -> None:
    """Also behind a draft whose nodes are all worth far more: the next one may be less likely."""
    streams = [Stream(str(i), "", 100, tuple(METHODS)) for i in range(8)]
    slope = 1e-5
    controller = Controller(CostModel(costs(slope)), Survival(PRIORS), METHODS)
    controller.decide(streams)
    price = slope * 8 / costs(slope).target.at(8)
    for chances in ([], [0.99] * 2):
        assert prices(controller).worth(chances, 8, 8, 0.0) == pytest.approx(price, rel=0.5)


def test_a_fixed_choice_is_obeyed_and_a_request_bounds_the_others() -> None:
    controller = Controller(CostModel(costs(2e-5)), Survival(PRIORS), METHODS)
    fixed = Stream("a", "", 100, (), 8, Choice("ngram", 7))
    bound = Stream("b", "", 100, ("model",), 2)
    plain = Stream("c", "", 100, (), 0, PLAIN)
    free = Stream("d", "", 100, tuple(METHODS))
    for _ in range(200):
        first, second, third, _ = controller.decide([fixed, bound, plain, free])
        assert (first, third) == (Choice("ngram", 7), PLAIN)
        assert second.depth <= 2
        assert second.method in ("model", "none")


def sure(accepted: dict[str, float]) -> Survival:
    """Return a table that has seen these shares of accepted tokens a thousand times."""
    survival = Survival(PRIORS)
    for name, share in accepted.items():
        for i in range(1000):
            survival.observe(name, "", "another", 8, 8 if i % 100 < 100 * share else 0)
    survival.count()
    return survival


def test_what_a_drafter_has_missed_is_part_of_its_price() -> None:
    chosen = []
    for missed in (0, 2**20):
        controller = Controller(
            CostModel(costs(2e-5)),
            sure({"model": 0.8, "ngram": 0.1}),
            METHODS,
            unread=lambda id, name, missed=missed: missed if name == "model" else 0,
        )
        (choice,) = controller.decide([Stream("a", "", 100, tuple(METHODS))])
        chosen.append(choice.method)
    assert chosen[0] == "model"
    assert chosen[1] != "model"


def trials(controller: Controller, streams: list[Stream], steps: int) -> dict[str, int]:
    """Run steps of a millisecond; return how often each sequence tried the model, "" all plain."""
    found: dict[str, int] = {}
    for _ in range(steps):
        before = controller.reviewed
        choices = controller.decide(streams)
        if controller.tries:
            assert controller.reviewed == before  # a review's time is not the trial's
            triers = [s.id for s, c in zip(streams, choices, strict=True) if c.method == "model"]
            for id in triers or [""] * all(choice == PLAIN for choice in choices):
                found[id] = found.get(id, 0) + 1
            controller.trials.observe(1e-3, len(streams))
        controller.observe(len(streams), len(streams), 1e-3, 1e-3)
    return found


def test_what_is_tried_falls_to_the_sequence_that_has_the_least_to_read() -> None:
    controller = Controller(
        CostModel(costs(2e-4)),
        sure({"model": 0.05, "ngram": 0.02}),
        METHODS,
        unread=lambda id, name: 50 - int(id),
    )
    streams = [Stream(str(i), "", 100, tuple(METHODS)) for i in range(8)]
    assert set(trials(controller, streams, 3000)) == {"7"}
    assert controller.trials.explored < 0.01 * controller.trials.seconds


def test_no_request_tries_more_than_it_allows() -> None:
    controller = Controller(
        CostModel(costs(2e-4)),
        sure({"model": 0.05, "ngram": 0.02}),
        METHODS,
        unread=lambda id, name: int(id),
    )
    bounds = [1] + [8] * 7  # the first has least to read
    streams = [Stream(str(i), "", 100, tuple(METHODS), bound) for i, bound in enumerate(bounds)]
    tried: set[tuple[int, int]] = set()
    for _ in range(3000):
        choices = controller.decide(streams)
        if controller.tries:
            tried |= {(b, c.depth) for b, c in zip(bounds, choices, strict=True) if c.depth}
        controller.observe(8, 8, 1e-3, 1e-3)
    assert tried
    assert all(depth <= bound for bound, depth in tried)


def test_every_sequence_gets_its_turn_to_try() -> None:
    """Also where there are as many as steps between reviews."""
    controller = Controller(CostModel(costs(2e-4)), sure({"model": 0.05, "ngram": 0.02}), METHODS)
    streams = [
        Stream(str(i), "", 100, ("model", "ngram") if i == 5 else ("ngram",)) for i in range(8)
    ]
    assert "5" in trials(controller, streams, 3000)


def test_plain_steps_are_tried_more_often_where_drafts_win_little() -> None:
    tried = []
    for share in (0.04, 0.5):
        controller = Controller(
            CostModel(costs(2e-5)), sure({"ngram": share}), {"ngram": METHODS["ngram"]}
        )
        stream = Stream("a", "", 100, ("ngram",))
        assert controller.decide([stream])[0].method == "ngram"
        tried.append(trials(controller, [stream], 300).get("", 0))
    assert tried[0] >= 3
    assert tried[0] > 2 * tried[1] > 0  # what makes plain decoding look dear is found out


def test_a_size_that_was_not_seen_for_long_is_learnt_again_soon() -> None:
    model = CostModel(costs(2e-4))
    small, large = model.verify(8, 100), model.verify(64, 100)
    for _ in range(200):
        model.observe_verify(8, 100, small)
    for _ in range(200):
        model.observe_verify(64, 100, large)
    for _ in range(6):  # now and then, while the other size is usual
        model.observe_verify(8, 100, 0.8 * small)
        for _ in range(16):
            model.observe_verify(64, 100, large)
    model.count()
    assert model.verify(8, 100) == pytest.approx(0.8 * small, rel=0.06)
    assert model.verify(64, 100) == pytest.approx(large, rel=0.03)


def test_equal_streams_need_no_new_decision() -> None:
    controller = Controller(CostModel(costs(2e-5)), Survival(PRIORS), METHODS)
    streams = [Stream("a", "", 100, tuple(METHODS))]
    asked = sum(not controller.steady(1) and bool(controller.decide(streams)) for _ in range(320))
    assert controller.step == 320
    assert asked < 60


def test_costs_learn_and_spikes_count_little() -> None:
    model = CostModel(costs(2e-4))
    before = model.verify(8, 100)
    for _ in range(50):
        model.observe_verify(8, 100, 2 * before)
    model.count()
    assert model.verify(8, 100) == pytest.approx(2 * before, rel=0.05)
    assert model.verify(64, 100) > 1.5 * CostModel(costs(2e-4)).verify(64, 100)
    model.observe_verify(8, 100, 100 * before)
    model.count()
    assert model.verify(8, 100) < 2.2 * before
    assert model.draft("model", []) == model.draft("ngram", [0]) == 0
    assert model.draft("model", [2, 1]) > model.draft("model", [1, 1])


@pytest.mark.parametrize("rates", [(0.2, 0.05), (0.05, 0.02)])
@pytest.mark.parametrize("batch", [8, 32])
def test_an_engine_that_has_just_started_learns_at_a_small_share_of_its_time(
    batch: int, rates: tuple[float, float]
) -> None:
    """A review takes a fifth of a plain step; drafts bring nothing."""
    known = dict(zip(("model", "ngram"), rates, strict=True))
    for seed in range(3):
        prior = costs(2e-4)
        controller = Controller(CostModel(prior), Survival(PRIORS), METHODS)
        controller.review_steps = 96
        found = simulate(
            controller, prior, lambda step, name, depth: known[name], batch, 96, seed,
            reviewing=0.2 * prior.target.at(batch),
        )  # fmt: skip
        assert worst_window(found, 96) >= 0.975


def test_what_is_not_known_must_promise_more() -> None:
    """The same expectation is enough where it was seen, and a bad deal where it is a guess."""
    streams = [Stream(str(i), "", 100, ("model",)) for i in range(8)]
    guess = {"model": 0.55}
    chosen = []
    for survival in (Survival(guess), geometric(guess)):
        controller = Controller(CostModel(costs(2e-5)), survival, {"model": METHODS["model"]})
        chosen.append(controller.decide(streams)[0])
    assert chosen[0] == PLAIN
    assert chosen[1].method == "model"


def test_drafts_for_some_do_not_slow_down_many() -> None:
    """The sum of tokens a second is 1.3 times plain decoding's, and six of eight wait longer."""
    survival = Survival(PRIORS)
    for workload, accepted in (("repeats", 8), ("new", 0)):
        for _ in range(1000):
            survival.observe("ngram", workload, "another", 8, accepted)
    survival.count()
    chosen = []
    for repeating in (2, 8):
        controller = Controller(CostModel(costs(1e-4)), survival, {"ngram": METHODS["ngram"]})
        streams = [
            Stream(str(i), "repeats" if i < repeating else "new", 100, ("ngram",)) for i in range(8)
        ]
        chosen.append(controller.decide(streams))
    assert chosen[0] == [PLAIN] * 8
    assert all(choice.depth for choice in chosen[1])


def test_what_a_drafter_must_read_is_spread_over_the_tokens_that_are_left() -> None:
    chosen = []
    for left in (12, 4096):
        controller = Controller(
            CostModel(costs(2e-5)), geometric({"model": 0.6}), {"model": METHODS["model"]},
            unread=lambda id, name: 4000,
        )  # fmt: skip
        chosen.append(controller.decide([Stream("a", "", 4000, ("model",), left=left)])[0])
    assert chosen[0] == PLAIN
    assert chosen[1].method == "model"


def test_all_try_together_what_is_not_known_where_they_share_its_passes() -> None:
    """One sequence's draft takes nearly the time of all; only known methods are tried by few."""
    streams = [Stream(str(i), "", 100, ("model",)) for i in range(8)]
    sizes = []
    for survival in (Survival({"model": 0.4}), geometric({"model": 0.1})):
        controller = Controller(CostModel(costs(2e-5)), survival, {"model": METHODS["model"]})
        for _ in range(400):
            choices = controller.decide(streams)
            if controller.tries:
                sizes.append(sum(choice.depth > 0 for choice in choices))
                break
            controller.observe(8, 8, 0.0, 1.5e-3)
    assert sizes == [8, 1]


def test_of_several_streams_luck_is_shared() -> None:
    """A batch loses less than a single stream before drafting pauses."""
    lost = []
    for batch in (1, 64):
        controller = Controller(CostModel(costs(2e-5)), sure({"ngram": 0.9}), METHODS)
        streams = [Stream(str(i), "", 100, ("ngram",)) for i in range(batch)]
        assert controller.decide(streams)[0].depth
        plain = costs(2e-5).target.at(batch)
        for number in range(100):
            controller.observe(batch, batch, 3 * plain, 3 * plain)
            if controller.pauses:
                lost.append(number)
                break
    assert lost[0] > lost[1]


def test_what_a_request_leaves_open_is_compared_at_its_first_step() -> None:
    """Also between two reviews, where what others leave open was compared without it."""
    controller = Controller(CostModel(costs(2e-5)), sure({"ngram": 0.9}), METHODS)
    usual = [Stream(str(i), "", 100, ("model",)) for i in range(4)]
    for _ in range(35):
        controller.decide(usual)
    before = controller.reviewed
    assert before < controller.step
    predicted = Stream("p", "", 100, ("model", "ngram"))
    assert controller.due([*usual, predicted])
    assert controller.decide([*usual, predicted])[-1].method == "ngram"
    assert controller.reviewed == controller.step
    another = Stream("q", "", 100, ("model", "ngram"))
    assert not controller.due([*usual, predicted, another])  # it joins those that are alike


def test_its_constants_can_be_varied() -> None:
    """An engine that asks for twice the speed of plain decoding does not draft for less."""
    streams = [Stream("a", "", 100, ("ngram",))]
    known = {"ngram": METHODS["ngram"]}
    depths = []
    for tuning in (USUAL, replace(USUAL, enter_speedup=2.0)):
        chooser = Controller(
            CostModel(costs(2e-5), tuning), sure({"ngram": 0.15}), known, tuning=tuning
        )
        depths.append(chooser.decide(streams)[0].depth)
    assert depths[0] > depths[1] == 0


class Fixed:
    """Stands for a drafter of chains."""

    name, max_length, max_nodes, catching_up, ahead_share = "ngram", 8, 8, False, 0.0

    def ready(self, workload: str) -> bool:
        return True


def test_a_fixed_drafter_has_plain_steps_too() -> None:
    """At each number of sequences: 48 drafted steps before the first, 192 before the next."""
    menu = Menu({"ngram": Fixed()}, SpeculationState(True, "ngram", 4), 8)
    chooser = Chooser(menu, CostModel())
    request = Request("a", (1, 2), SamplingParams(), 0, offline=True)
    sequence = SequenceState("a/0", request, 0, None, None, [1, 2, 3])  # type: ignore[arg-type]
    plain = []
    for step in range(400):
        chooser.choose([sequence, sequence])
        name, budget = chooser.budget(sequence)
        assert name == "ngram"
        plain += [step] * (not budget.depth)
        chooser.learn(record_of([], 2, 2, 0.01, 2, "ngram" if budget.depth else None))
    assert plain == [USUAL.plain_steps, USUAL.plain_steps + USUAL.sure_steps + 1]
    chooser.tries_plain = False
    for _ in range(2 * USUAL.sure_steps):
        chooser.choose([sequence, sequence])
        assert chooser.budget(sequence)[1].depth == 4
        chooser.learn(record_of([], 2, 2, 0.01, 2, "ngram"))
