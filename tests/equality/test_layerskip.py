"""A target that drafts for itself changes nothing, and finds the sublayers that it can miss."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outrider import LLM, pocket
from outrider.base.types import DEFAULT_SPECULATION, Request, SamplingParams, SequenceState
from outrider.drafters import layerskip, skips
from outrider.drafters.base import DrafterSpec
from outrider.drafters.layerskip import LayerskipDrafter, LayerskipSpec, sure_rates
from outrider.drafters.registry import find_drafter
from outrider.drafters.skips import ScoredWindow, Search, Skips, Space
from outrider.engine.control.chooser import AdaptiveChooser
from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.models.native import NativeTransformer
from outrider.models.native_store import NativeStore
from outrider.models.rows import Segment
from outrider.native import choice as native
from tests.support.exactness import (
    VOCABULARY,
    alone,
    in_batches,
    make_engine,
    make_fickle,
    planted_pair,
    requests,
    run,
)
from tests.support.products import NUMBERS, OPTIONS, UNBOUND, Product, dealt, prompts, rest
from tests.support.skipping import LAYERS, planted_target, useless

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native step is off")
SEED = 5
DRAFTERS: dict[str, str | DrafterSpec] = {
    "search": "layerskip",
    "exit": "layerskip:9",
    "spread": LayerskipSpec(adaptive=False, skip_threshold=0.0),
    "merged": "layerskip+ngram",
    "auto": "auto+layerskip",
}
CASES = [*DRAFTERS, "search tree", "exit tree"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted_target(tmp_path_factory.mktemp("layerskip") / "target", SEED)


@pytest.fixture
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every step be preceded by an evaluation."""
    monkeypatch.setattr(layerskip, "STEPS_BETWEEN", 1)
    monkeypatch.setattr(layerskip, "SEARCH_SHARE", 1e9)
    monkeypatch.setattr(layerskip, "UNPAID_SHARE", 1e9)


def engine_of(target: Path, case: str, length: int | None = 4, **options: Any) -> Engine:
    name, _, tree = case.partition(" ")
    nodes = 3 * length if tree and length else None
    engine = make_engine(
        target, DRAFTERS[name], num_speculative_tokens=length, max_draft_nodes=nodes, **options
    )
    if name == "auto":
        make_fickle(engine, random.Random(length))
    return engine


def drafter_of(engine: Engine) -> LayerskipDrafter:
    drafter = engine.drafting.drafters["layerskip"]
    assert isinstance(drafter, LayerskipDrafter)
    return drafter


TOKENS = 36
"""Of an output: enough that sets are scored meanwhile."""
PRODUCT = Product(engine_of, prompts(), TOKENS, pages=32)


def holds(
    target: Path, drafter: str, option: str, batch: int, length: int, chunk: int, pool: str,
    numbers: str,
) -> None:  # fmt: skip
    engine = PRODUCT.holds(target, drafter, option, batch, length, chunk, pool, numbers)
    if option in UNBOUND and pool == "ample" and drafter.startswith("search"):
        assert drafter_of(engine).evaluations > 10


@pytest.mark.equality
@pytest.mark.usefixtures("_eager")
@pytest.mark.parametrize("case", dealt(CASES), ids=lambda case: "-".join(map(str, case)))
def test_drafting_for_itself_changes_nothing(target: Path, case: Any) -> None:
    holds(target, *case)


@pytest.mark.parametrize("family", ["gemma3_text", "smollm3", "olmo2", "phi3", "qwen3_moe"])
def test_other_families_draft_for_themselves(family: str, tmp_path: Path) -> None:
    """Windows and full layers, layers without a rope, norms behind, ropes by length."""
    target = planted_target(tmp_path / "target", SEED, family)
    prompts = [[(7 * i) % 190 + 5 for i in range(27)], [40, 50]]
    queued = requests(prompts, SamplingParams(temperature=0.7, max_tokens=16, ignore_eos=True))
    engine = make_engine(target, "layerskip:9", num_speculative_tokens=4)
    assert in_batches(engine, queued, 2) == alone(target, queued)
    assert engine.counts.drafted > 0


@pytest.mark.equality
@pytest.mark.usefixtures("_eager")
@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("drafter", ["search", "exit", "search tree"])
def test_nothing_changes_in_any_numbers_with_pages_short(
    target: Path, drafter: str, numbers: str
) -> None:
    holds(target, drafter, "n", 4, 4, 16, "tight", numbers)


@pytest.mark.slow
@pytest.mark.equality
@pytest.mark.usefixtures("_eager")
@pytest.mark.parametrize("drafter", CASES)
@pytest.mark.parametrize("option", OPTIONS)
def test_nothing_changes_in_the_full_product(target: Path, drafter: str, option: str) -> None:
    for each in rest():
        holds(target, drafter, option, *each)


def own_page(engine: Engine) -> int:
    """The page behind all that the engine and its drafters use: for a test alone."""
    size, model = engine.config.page_size, engine.model
    page = engine.budget.pages + engine.budget.scratch
    store = model.new_store(page + 1, size)
    engine.verifier.store = store
    drafter_of(engine).attach(store)
    return page


def whole_pages(engine: Engine) -> list[tuple[SequenceState, int]]:
    """The running sequences, and how many of their slots fill pages."""
    size = engine.config.page_size
    found = [(each, each.num_computed // size * size) for each in engine.scheduler.running]
    return [(sequence, count) for sequence, count in found if count]


def committed(engine: Engine, page: int) -> dict[str, list[int]]:
    """The bits of logits that depend on every committed slot of each running sequence.

    A row on a page that nobody else uses follows them; all entries before it are read, not written.
    """
    found = {}
    size = engine.config.page_size
    for sequence, count in whole_pages(engine):
        at = Segment([7], count, [*sequence.pages[: count // size], page], 1, 1)
        logits = engine.model.run([at], engine.verifier.store).logits
        found[f"{sequence.id} {count}"] = logits.view(np.int32).flatten().tolist()
    return found


def shadow(engine: Engine) -> dict[str, list[int]]:
    """What ``committed`` returns where the target alone has computed all in one forward."""
    found = {}
    size, model = engine.config.page_size, engine.model
    for sequence, count in whole_pages(engine):
        pages = range(1 + count // size)
        whole = Segment([*sequence.tokens[:count], 7], 0, pages, 1, 1)
        logits = model.run([whole], model.new_store(len(pages), size)).logits
        assert logits is not None
        found[f"{sequence.id} {count}"] = logits.view(np.int32).flatten().tolist()
    return found


@pytest.mark.engine
@pytest.mark.usefixtures("_eager")
@pytest.mark.parametrize("case", ["search", "exit", "search tree"])
@pytest.mark.parametrize("numbers", NUMBERS)
def test_drafts_and_searches_write_no_committed_slot(
    target: Path, case: str, numbers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(target, case, pages=60, **NUMBERS[numbers])
    drafter, propose = drafter_of(engine), engine.drafting.propose
    page, checked = own_page(engine), 0

    def watched(plan: Any) -> Any:
        nonlocal checked
        before = committed(engine, page)
        assert before == shadow(engine)
        draft = propose(plan)
        assert committed(engine, page) == before
        checked += len(before) * any(nodes.tokens for nodes in draft)
        return draft

    monkeypatch.setattr(engine.drafting, "propose", watched)
    params = SamplingParams(max_tokens=40, temperature=0.8, n=2)
    for request in requests(prompts()[2:4], params):
        engine.add(request)
    while engine.has_work:
        engine.step()
    assert checked > 20
    assert not case.startswith("search") or drafter.evaluations > 10
    assert not engine.menu.switched_off


def bad_slot(engine: Engine) -> int:
    """A slot of the test's own whose entries are NaN in every layer."""
    page, model = own_page(engine), engine.model
    assert isinstance(model, NativeTransformer)
    assert model.embedding is not None
    before = model.embedding[2].copy()
    model.embedding[2] = np.nan
    found = model.run([Segment([2], 0, [page], 1, 1)], engine.verifier.store).logits
    model.embedding[2] = before
    assert np.isnan(found).all()
    store = engine.verifier.store
    assert isinstance(store, NativeStore)
    assert store.any_harmed
    return page * engine.config.page_size


@pytest.mark.usefixtures("_eager")
@pytest.mark.parametrize("case", ["search", "spread", "search tree"])
@pytest.mark.parametrize("option", ["greedy", "0.8"])
def test_what_drafts_leave_is_never_read(
    target: Path, case: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All slots that drafts may have written are spoilt before the target verifies."""
    engine = engine_of(target, case)
    expected = PRODUCT.plain(target, option, "float32")
    propose, size, bad = engine.drafting.propose, engine.config.page_size, bad_slot(engine)
    spoilt = 0

    def spoiling(plan: Any) -> Any:
        nonlocal spoilt
        draft = propose(plan)
        for item in plan.batch:
            sequence = item.sequence
            slots = range(sequence.num_computed, len(sequence.pages) * size)
            if item.budget.depth:
                to = [sequence.pages[place // size] * size + place % size for place in slots]
                engine.verifier.store.move([bad] * len(to), to)
                spoilt += len(slots)
        return draft

    monkeypatch.setattr(engine.drafting, "propose", spoiling)
    queued = requests(prompts(), SamplingParams(max_tokens=TOKENS, **OPTIONS[option]))
    assert run(engine, queued) == expected
    assert spoilt > 500
    assert engine.counts.accepted
    assert not engine.menu.switched_off


def test_a_spoilt_committed_slot_is_seen(target: Path) -> None:
    """The test above would see a slot that was read before it is written anew."""
    engine = engine_of(target, "search")
    bad = bad_slot(engine)
    engine.add(requests(prompts()[3:4], SamplingParams(max_tokens=TOKENS))[0])
    engine.step()
    (sequence,) = engine.scheduler.running
    engine.verifier.store.move([bad], [sequence.pages[0] * engine.config.page_size])
    assert engine.step()[0].error


@pytest.mark.usefixtures("_eager")
@pytest.mark.parametrize(
    ("seed", "heat"),
    [
        (0, 0.0),
        (1, 0.8),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in ((1, 0.0), (2, 0.0), (3, 0.0))),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in ((0, 0.8), (2, 0.8), (3, 0.8))),
    ],
)
def test_the_search_finds_what_matters_little(tmp_path: Path, seed: int, heat: float) -> None:
    engine = make_engine(planted_target(tmp_path, seed), "layerskip")
    rng, drafter = random.Random(seed), drafter_of(engine)
    params = SamplingParams(max_tokens=200, temperature=heat, ignore_eos=True)

    def some(count: int) -> list[Request]:
        texts = [[rng.randrange(4, VOCABULARY) for _ in range(12)] for _ in range(count)]
        return requests(texts, params)

    run(engine, some(6))
    (search,) = drafter.searches.values()
    assert search.wants is None
    assert drafter._window is None  # since the pages that it read have been given back
    assert search.evaluations < 80
    found = agreement(engine, search.chosen, some(6))
    best = agreement(engine, useless(seed), some(6))
    every = agreement(engine, frozenset(range(2, 2 * LAYERS - 2)), some(6))
    spread = agreement(engine, drafter._space.spread(), some(6))
    assert found > best - 0.03
    assert max(every, spread) < best - 0.1
    assert search.chosen != drafter._space.spread()


def agreement(engine: Engine, skipped: Skips, queued: list[Request]) -> float:
    """The share of tokens that the target draws alike without some sublayers, of fresh texts."""
    drafter, shares = drafter_of(engine), []
    sublayers = drafter._space.kept(skipped)
    for request in queued:
        engine.add(request)
        while engine.has_work:
            engine.step()
            for sequence in engine.scheduler.running:
                if sequence.num_output in (32, 33, 34, 100, 101, 102, 160, 161, 162):
                    window = ScoredWindow(
                        drafter._target, drafter._store, drafter._scratch, sequence, engine.noise
                    )
                    drawn, _ = engine.noise.draw(window._logits(sublayers), window._rows)
                    pairs = zip(drawn, window._written, strict=True)
                    shares.append(sum(a == b for a, b in pairs) / len(drawn))
                    assert window._written == sequence.tokens[-len(drawn) :]
    assert len(shares) > 10
    return sum(shares) / len(shares)


SPACE = Space(12, tuple(range(2, 22)), 9, 0.025, 0.05, 4)


def searched(agree: Callable[[Skips], float], reused: int = 8) -> Search:
    """A search that has come to its end, with what it was told of each set."""
    search, asked = Search(SPACE), 0
    while search.wants is not None:
        search.scored(agree(search.wants), asked % reused == 0)
        asked += 1
    return search


def test_a_search_skips_little_where_every_sublayer_matters() -> None:
    harsh = searched(lambda skips: 0.7 ** len(skips))
    assert harsh.sublayers == ()
    assert harsh.evaluations < 30
    hopeless = searched(lambda skips: 0.0)
    assert hopeless.sublayers == ()
    assert hopeless.evaluations < 60


def test_a_search_asks_for_nothing_where_no_agreement_could_pay() -> None:
    dear = replace(SPACE, row=0.7)
    assert dear.needed(dear.cheapest(dear.most)) > 1
    search = Search(dear)
    assert search.wants is None
    assert search.sublayers == ()


def test_what_a_set_needs_is_where_its_drafts_break_even() -> None:
    for row in (0.0, 0.05, 0.3):
        space = replace(SPACE, row=row)
        for size in range(1, SPACE.most + 1):
            skips = space.cheapest(size)
            needed = space.needed(skips)
            assert needed == pytest.approx(1 - 0.05 * size + row)
            if needed < 0.99:
                assert space.speed(skips, needed + 0.01) > 1 > space.speed(skips, needed - 0.01)
    alone = dict.fromkeys(SPACE.candidates, 0.4)
    assert SPACE.hope({}) > 1 > SPACE.hope(alone)
    assert SPACE.hope({**alone, 3: 1.0}) > SPACE.hope(alone)
    assert "up to 9 of 24 sublayers" in SPACE.told(None)
    assert "more than 0.60 of them are accepted" in SPACE.told(None)


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_a_target_that_cannot_pay_is_soon_decoded_plainly(
    heat: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layerskip, "STEPS_BETWEEN", 1)
    monkeypatch.setattr(layerskip, "UNPAID_SHARE", 1e9)
    llm = LLM(pocket.PATH, drafter="layerskip", max_num_seqs=2, max_model_len=256, memory="64MiB")
    drafter = drafter_of(llm.engine)
    drafter.measured(0.15)  # of this target, on a machine that does nothing else
    params = SamplingParams(max_tokens=48, temperature=heat, ignore_eos=True, seed=3)
    llm.generate(pocket.prompts()[:4], params)
    (search,) = drafter.searches.values()
    assert search.wants is None
    assert search.evaluations < 30
    assert search.sublayers == ()
    assert llm.engine.counts.drafted == 0


@pytest.mark.usefixtures("_eager")
def test_the_engine_chooses_it_only_once_a_set_pays(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(target, "search", length=None)
    drafter, propose = drafter_of(engine), drafter_of(engine).propose
    drafter.measured(0.05)
    asked: list[bool | None] = []

    def watched(batch: Any, budgets: Any, noise: Any) -> Any:
        workloads = {item.sequence.workload for item in batch if item.budget.depth}
        asked.extend(drafter.searches[workload].pays for workload in workloads)
        return propose(batch, budgets, noise)

    monkeypatch.setattr(drafter, "propose", watched)
    chooser = engine.chooser
    assert isinstance(chooser, AdaptiveChooser)
    freedom = engine.menu.freedom(DEFAULT_SPECULATION)
    assert freedom.methods[0] == "layerskip"

    def methods(workload: str) -> tuple[str, ...]:
        speaks = SimpleNamespace(speculation=DEFAULT_SPECULATION)
        state: Any = SimpleNamespace(id="s", tokens=[1], workload=workload, limit=9, request=speaks)
        return chooser._stream(state).methods

    assert methods("") == ()
    run(engine, requests(prompts()[2:4], SamplingParams(max_tokens=150, ignore_eos=True)))
    (workload,) = (name for name, search in drafter.searches.items() if search.evaluations)
    assert drafter.searches[workload].pays
    assert methods(workload) == freedom.methods
    assert set(asked) <= {True}


def test_a_search_weighs_what_is_skipped_against_what_agrees() -> None:
    # Attention is cheap here, and as harmful as an MLP: MLPs go first.
    found = searched(lambda skips: 0.99 ** len(skips))
    assert sum(sublayer % 2 for sublayer in found.chosen) >= len(found.chosen) - 1
    # Pairs that stand for each other must not go together.
    twins = searched(lambda skips: 0.5 if {7, 9} <= skips else 0.995 ** len(skips))
    assert not {7, 9} <= twins.chosen
    assert len(twins.chosen) >= 7


def test_a_search_bears_noise() -> None:
    rng, little = random.Random(1), frozenset(random.Random(2).sample(range(2, 22), 9))

    def agree(skips: Skips) -> float:
        return 0.98 * 0.85 ** len(skips - little) + rng.gauss(0, 0.02)

    assert len(searched(agree).chosen & little) >= 8


def test_a_search_goes_on_from_another_workload() -> None:
    first = searched(lambda skips: 0.97 ** len(skips))
    second = Search(SPACE, first)
    assert second.chosen == first.chosen
    count = 0
    while second.wants is not None and count < 100:
        second.scored(0.97 ** len(second.wants), count % 8 == 0)
        count += 1
    assert second.evaluations < first.evaluations - 15  # it ranks nothing again


def test_searches_belong_to_workloads_and_take_their_share(target: Path) -> None:
    engine = engine_of(target, "search")
    drafter = drafter_of(engine)
    for heat in (0.0, 0.8):
        params = SamplingParams(max_tokens=150, temperature=heat, ignore_eos=True)
        run(engine, requests(prompts()[2:4], params))
    assert len(drafter.searches) == 2
    assert (
        drafter.evaluations * layerskip.STEPS_BETWEEN <= 2 * drafter._turn
    )  # a window's first counts twice
    pays = any(search.sublayers for search in drafter.searches.values())
    share = layerskip.SEARCH_SHARE if pays else layerskip.UNPAID_SHARE
    assert drafter.searched <= share * drafter._seconds + 0.1


def test_nothing_follows_a_token_of_low_confidence(target: Path) -> None:
    def deepest(threshold: float) -> list[int]:
        spec = LayerskipSpec(adaptive=False, skip_threshold=threshold)
        engine = make_engine(target, spec)
        lengths: list[int] = []
        propose = engine.drafting.propose

        def watched(plan: Any) -> Any:
            draft = propose(plan)
            lengths.extend(len(nodes.tokens) for nodes in draft)
            return draft

        engine.drafting.propose = watched
        run(engine, requests(prompts()[2:4], SamplingParams(max_tokens=24, temperature=0.0)))
        return lengths

    never, usual, always = deepest(0.0), deepest(0.8), deepest(1.0)
    assert max(always) == 1
    assert sum(never) / len(never) > sum(usual) / len(usual) > 1
    assert sure_rates(0.8).table[0, 0].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (LayerskipSpec(exit_layer=12), "give 1 to 11"),
        (LayerskipSpec(exit_layer=0), "give 1 to 11"),
        (LayerskipSpec(min_layers=13), "give 1 to 12"),
        (LayerskipSpec(min_layers=12), "can leave out none of 12"),
        (LayerskipSpec(skip_threshold=1.5), "give 0 to 1"),
    ],
)
def test_what_cannot_be_skipped_is_refused(target: Path, spec: LayerskipSpec, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make_engine(target, spec)


def test_targets_and_rules_that_it_cannot_draft_for(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none of 2 layers"):
        make_engine(planted_pair(tmp_path / "two"), "layerskip")
    with pytest.raises(ConfigError, match="coupled"):
        make_engine(target, "layerskip", acceptance_rule="rejection")
    with pytest.raises(ConfigError, match="native step"):
        make_engine(planted_pair(tmp_path / "moe", "qwen2_moe"), "layerskip")


def test_names(tmp_path: Path) -> None:
    assert find_drafter("layerskip", tmp_path) == LayerskipSpec()
    assert find_drafter("layerskip:3", tmp_path) == LayerskipSpec(exit_layer=3)
    assert find_drafter("auto+layerskip", tmp_path).members[-1] == LayerskipSpec()
    text = "layerskip:skip_threshold=.65,min_layers=9,adaptive=false"
    spec = LayerskipSpec(skip_threshold=0.65, min_layers=9, adaptive=False)
    assert find_drafter(text, tmp_path) == spec
    assert find_drafter(f"{text}+ngram", tmp_path).members[0] == spec
    assert find_drafter("layerskip:exit_layer=3,skip_threshold=1", tmp_path) == LayerskipSpec(
        skip_threshold=1.0, exit_layer=3
    )
    assert find_drafter("layerskip:adaptive=true", tmp_path) == LayerskipSpec()


@pytest.mark.parametrize(
    "option",
    [
        "", "x", "-1", "3,4", "1234567", "\u0663", "skip_threshold", "skip_threshold=", "depth=3",
        "skip_threshold=x", "skip_threshold=nan", "skip_threshold=-1", "skip_threshold=1e5",
        "min_layers=2.5", "min_layers=-3", "min_layers=9,", ",", "adaptive=1", "adaptive=True",
        "min_layers=9,min_layers=8", "min_layers=9;adaptive=true", " min_layers=9",
    ],
)  # fmt: skip
def test_options_that_are_none_are_refused(option: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give layerskip:N") as caught:
        find_drafter(f"layerskip:{option}", tmp_path)
    assert "\n" not in str(caught.value)


def test_scratch_pages_are_no_part_of_the_pool(target: Path) -> None:
    plain_budget, budget = make_engine(target, "none").budget, engine_of(target, "search").budget
    assert budget.scratch == skips.scratch_pages(4) == 9
    assert budget.pages == plain_budget.pages
    assert engine_of(target, "search").scheduler.pool.num_pages == budget.pages
    assert engine_of(target, "exit").budget.scratch == 0
