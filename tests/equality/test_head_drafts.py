"""Heads on the target's hidden states change nothing, and keep what they say they have kept."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outrider.audit.wrapped import WrappedPipeline
from outrider.base.types import Draft, Request, SamplingParams, SequenceState
from outrider.checkpoints.heads import DFLASH, DFLASH2, DSPARK
from outrider.drafters import eagle
from outrider.drafters.base import Drafter
from outrider.drafters.eagle import EagleDrafter
from outrider.drafters.medusa import MedusaDrafter
from outrider.engine.control.costs import Costs, Curve, DraftCosts
from outrider.engine.engine import Engine
from outrider.engine.worker.worker import Worker
from outrider.models.base import Model, Store
from outrider.models.native_block import NativeBlock
from outrider.models.rows import Segment
from outrider.native import choice as native
from outrider.sampling.pipeline import Logits
from tests.support import exactness
from tests.support.blocks import BlockReference, agreeing_block
from tests.support.exactness import VOCABULARY, make_engine, make_fickle, requests
from tests.support.heads import (
    Eagle,
    agreeing_head,
    agreeing_medusa,
    save_head,
    taciturn_target,
)
from tests.support.pages import check_engine
from tests.support.products import OPTIONS, Product, dealt, prompts, rest, some_for_engines

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native step is off")
DRAFTERS = (
    "eagle3", "eagle3 tree", "peagle", "peagle tree", "medusa", "medusa tree", "choices",
    "eagle3+ngram", "peagle+ngram", "medusa+ngram", "medusa+suffix", "auto+eagle3", "auto+peagle",
    "auto+medusa", "dflash", "dspark", "dspark tree", "dflash2", "dflash2+ngram", "auto+dspark",
)  # fmt: skip
CHOICES = {"medusa_choices": [[0], [2], [1], [0, 0], [0, 1], [2, 0], [0, 1, 0], [0, 1, 1]]}
KINDS = {
    "eagle3": Eagle(layers=(1, 0, 1), drafted=180, kv_heads=4, state_normed=True),
    "peagle": Eagle(
        layers=(-1, 0, 1), drafted=VOCABULARY, kv_heads=4, state_normed=True, parallel=True
    ),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose layers say little, so that heads without training can agree with it."""
    folder = taciturn_target(tmp_path_factory.mktemp("heads") / "target", head_dim=16)
    for kind, about in KINDS.items():
        save_head(agreeing_head(about, folder), folder / kind)
    agreeing_medusa(folder / "medusa", folder)
    BlockReference(folder, DFLASH).save(folder / DFLASH)
    for kind in (DSPARK, DFLASH2):
        agreeing_block(folder / kind, folder, kind)
    config = json.loads((folder / "medusa" / "config.json").read_text())
    shutil.copytree(folder / "medusa", folder / "choices")
    (folder / "choices" / "config.json").write_text(json.dumps({**config, **CHOICES}))
    return folder


def engine_of(target: Path, drafter: str, length: int = 4, **options: Any) -> Engine:
    name, _, tree = drafter.partition(" ")
    parts = [str(target / p) if (target / p).is_dir() else p for p in name.split("+")]
    nodes = 3 * length if tree else None
    engine = make_engine(
        target, "+".join(parts), num_speculative_tokens=length, max_draft_nodes=nodes, **options
    )
    if name.startswith("auto"):
        make_fickle(engine, random.Random(length))
    return engine


def method_of(drafter: str) -> str:
    """The name of the drafter that runs a kind of head."""
    names = {"peagle": "eagle3", **dict.fromkeys((DFLASH, DFLASH2, DSPARK), "dflash")}
    return names.get(drafter, drafter)


PRODUCT = Product(engine_of, prompts(), tokens=24, pages=26)


@pytest.mark.equality
@pytest.mark.parametrize(
    "case", some_for_engines(dealt(DRAFTERS)), ids=lambda case: "-".join(map(str, case))
)
def test_heads_change_nothing(target: Path, case: Any) -> None:
    PRODUCT.holds(target, *case)


@pytest.mark.slow
@pytest.mark.equality
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("option", OPTIONS)
def test_heads_change_nothing_in_the_full_product(target: Path, drafter: str, option: str) -> None:
    for each in rest():
        PRODUCT.holds(target, drafter, option, *each)


def test_medusas_choices_are_drafted_whole(target: Path) -> None:
    engine = engine_of(target, "choices")
    engine.add(Request("a", tuple(prompts()[0]), SamplingParams(max_tokens=16, temperature=0), 1))
    sizes: set[int] = set()
    drafter = engine.drafting.drafters["medusa"]
    assert (drafter.max_length, drafter.max_nodes) == (3, 8)
    propose = drafter.propose

    def watched(*args: Any) -> Any:
        draft = propose(*args)
        sizes.update(len(nodes.tokens) for nodes in draft)
        return draft

    drafter.propose = watched  # type: ignore[method-assign]
    while engine.has_work:
        engine.step()
    assert max(sizes) == len(CHOICES["medusa_choices"])


def noted(drafter: Drafter, order: list[str]) -> None:
    """Note the calls of a drafter in ``order``."""

    def told(name: str, call: Any) -> Any:
        return lambda *args: order.append(name) or call(*args)

    for name in ("propose", "observe", "release"):
        setattr(drafter, name, told(name, getattr(drafter, name)))


@pytest.mark.parametrize("name", ["eagle3", "peagle", "medusa", "dspark"])
def test_events_do_not_wait_for_a_heads_states(target: Path, name: str) -> None:
    engine, order = engine_of(target, name), list[str]()
    drafter = engine.drafting.drafters[method_of(name)]
    noted(drafter, order)
    params = SamplingParams(max_tokens=9, temperature=0.8, ignore_eos=True)
    outputs: list[list[int | None]] = []
    for _ in range(2):  # the second by the id of one that ended, which is not forgotten yet
        engine.add(Request("a", tuple(prompts()[2]), params, 1))
        outputs.append([])
        while engine.has_work:
            outputs[-1] += [event.token_id for event in engine.step()]
            order.append("events")
    assert outputs[0] == outputs[1]
    first, *steps = " ".join(order).split("events")
    assert first == "propose "
    assert {*steps[:-1]} == {" observe propose ", " observe release propose "}
    assert order.count("release") == 1
    del order[:]
    engine.settle()
    engine.settle()
    assert order == ["observe", "release"]


@pytest.mark.parametrize(("later", "early"), [(1024, False), (8, True)])
def test_a_prompts_states_wait_for_its_first_token(
    target: Path, later: int, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is read in chunks; a long prompt's are made as they come."""
    monkeypatch.setattr(eagle, "WAITING_PROMPT_ROWS", later)
    engine = engine_of(target, "eagle3", max_num_batched_tokens=16)
    drafter = engine.drafting.drafters["eagle3"]
    assert isinstance(drafter, EagleDrafter)
    made = states_made(drafter)
    prompt = prompts()[3]
    engine.add(Request("a", tuple(prompt), SamplingParams(max_tokens=9, ignore_eos=True), 1))
    while not engine.step():
        assert bool(made) <= early
    assert bool(made) == early
    engine.settle()
    assert sum(made) in {len(prompt), len(prompt) - len(prompt) % 16}  # few rows wait for more
    engine.step()
    assert sum(made) == len(prompt)
    while engine.has_work:
        engine.step()
    assert engine.counts.accepted


@pytest.mark.engine
@pytest.mark.parametrize(("size", "others"), [(1, ()), (3, (-1,))])
def test_states_that_nobody_reads_are_made_together(
    target: Path, size: int, others: tuple[int, ...]
) -> None:
    """While others draft, and in time: what is left when the head drafts is right.

    Also where another drafter reads a layer before those of the head.
    """
    engine = engine_of(target, "eagle3", max_num_seqs=size)
    drafter = engine.drafting.drafters["eagle3"]
    assert isinstance(drafter, EagleDrafter)
    assert -1 not in drafter.target_layers
    engine.drafting.drafters["none"].target_layers = others
    engine.drafting.refresh()
    made = states_made(drafter)
    state = engine.menu.state
    engine.menu.set(replace(state, enabled=False))
    assert engine.drafting.target_layers == (*others, *drafter.target_layers)
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    for i in range(size):
        engine.add(Request(f"r{i}", tuple(prompts()[1]), params, i))
    for _ in range(150):
        engine.step()
    engine.settle()
    assert len(made) <= 1 + size * 150 // eagle.WAITING_ROWS
    engine.menu.set(state)
    assert len(firsts_of_right_contexts(engine)) == size


def test_states_wait_no_longer_than_their_room_lasts(target: Path) -> None:
    """While another drafts so much that a few steps fill the room: what is left is right."""
    engine = engine_of(target, "eagle3", 40, max_num_seqs=1)
    drafter = engine.drafting.drafters["eagle3"]
    assert isinstance(drafter, EagleDrafter)
    made, propose = states_made(drafter), drafter.propose
    drafter.propose = lambda _, budgets, __: Draft.chains(  # type: ignore[method-assign]
        [[5] * budgets[0].depth]
    )
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    engine.add(Request("a", tuple(prompts()[1]), params, 1))
    for _ in range(60):
        engine.step()
    engine.settle()
    assert len(made) > 1
    assert max(made) < eagle.WAITING_ROWS
    drafter.propose = propose  # type: ignore[method-assign]
    assert firsts_of_right_contexts(engine) == {"a/0": 1}


def test_a_worker_sends_events_before_states_are_made(target: Path) -> None:
    engine, order = engine_of(target, "eagle3"), list[str]()
    noted(engine.drafting.drafters["eagle3"], order)
    sends: Any = SimpleNamespace(send=lambda message: order.append(type(message).__name__))
    worker = Worker(engine, sends, sends, SimpleNamespace(longest=0.0), 0)  # type: ignore[arg-type]
    engine.add(Request("a", tuple(prompts()[2]), SamplingParams(max_tokens=9), 1))
    worker._step()
    assert order == ["propose", "Stepped", "observe"]
    assert worker.pulse.longest


@pytest.mark.parametrize("drafter", ["eagle3", "peagle", "medusa", "dspark", "dflash2"])
def test_an_abort_finds_nothing_unsettled(target: Path, drafter: str) -> None:
    """A sequence that leaves between a step and what follows from it leaves nothing behind."""
    engine = engine_of(target, drafter)
    own = engine.drafting.drafters[method_of(drafter)]
    for request in requests(prompts()[2:4], SamplingParams(max_tokens=30, ignore_eos=True)):
        engine.add(request)
    for _ in range(3):
        engine.step()
    engine.abort("r0")
    engine.step()
    engine.abort("r1")
    engine.step()
    check_engine(engine)
    kept = [own._states] if isinstance(own, MedusaDrafter) else [own._states, own._ring._runs]  # type: ignore[attr-defined]
    assert not any(kept)


@pytest.mark.parametrize("option", ["greedy", "0.8", "penalties", "regex"])
@pytest.mark.parametrize("drafter", ["eagle3", "peagle", "medusa", "dspark", "dflash2"])
def test_heads_draft_alike_where_python_processes_logits(
    target: Path, drafter: str, option: str
) -> None:
    """Chains; where a processor has its say, and where a step is explained."""
    found = []
    for wrap in (False, True):
        engine = engine_of(target, drafter)
        events: list[tuple[Any, ...]] = []
        for request in requests(prompts()[2:], SamplingParams(max_tokens=16, **OPTIONS[option])):
            sequences = engine.prepare(request)
            for sequence in sequences if wrap else ():
                sequence.pipeline = WrappedPipeline(sequence.pipeline)
            engine.enqueue(sequences)
            while engine.has_work:
                events += [(e.request_id, e.token_id, e.drafted) for e in engine.step()]
        found.append(events)
        assert engine.counts.drafted
        assert not engine.menu.switched_off
    assert found[0] == found[1]


def test_a_sequence_goes_on_behind_pages_of_one_that_has_ended(target: Path) -> None:
    """The state of the last token of the last page went with it, where that was its last step."""
    engine = engine_of(target, "eagle3", page_size=4)
    drafter = engine.drafting.drafters["eagle3"]
    assert isinstance(drafter, EagleDrafter)
    begun: set[bool] = set()
    for more in range(1, 9):
        params = SamplingParams(max_tokens=4 + more, ignore_eos=True)
        prompt = [more, *prompts()[2]]
        engine.add(Request(f"a{more}", tuple(prompt), params, 1))
        emitted: list[int] = []
        while engine.has_work:
            emitted += [event.token_id for event in engine.step() if event.token_id is not None]
        going_on = tuple(prompt + emitted + [5])
        engine.add(Request(f"b{more}", going_on, SamplingParams(max_tokens=6, ignore_eos=True), 1))
        while engine.has_work:
            engine.step()
            engine.settle()
            for sequence in engine.scheduler.running:
                kept = drafter._states.get(sequence.id)
                if kept is not None and kept.num_computed == len(sequence.tokens) - 1:
                    recomputed(engine, sequence, kept.first)
                    begun.add(kept.first > 1)
    assert begun


def states_made(drafter: EagleDrafter) -> list[int]:
    """Return a list that is told how many states are made at once, each time."""
    made: list[int] = []
    fuse = drafter.model.fuse
    drafter.model.fuse = lambda *args: made.append(len(args[1])) or fuse(*args)  # type: ignore[method-assign]
    return made


def firsts_of_right_contexts(engine: Engine) -> dict[str, int]:
    """Run to the end; where a head's context begins, of sequences of which all was right."""
    drafter, found = engine.drafting.drafters["eagle3"], dict[str, int]()
    assert isinstance(drafter, EagleDrafter)
    while engine.has_work:
        engine.step()
        engine.settle()
        for sequence in engine.scheduler.running:
            kept = drafter._states[sequence.id]
            if kept.num_computed == len(sequence.tokens) - 1:  # all but the last entry are there
                recomputed(engine, sequence, kept.first)
                found[sequence.id] = kept.first
    return found


def recomputed(engine: Engine, sequence: SequenceState, first: int, name: str = "eagle3") -> None:
    """See that a sequence's head computes of what it has kept what it does of everything anew."""
    drafter, target = engine.drafting.drafters[name], engine.model
    assert isinstance(drafter, EagleDrafter)
    head, tokens = drafter.model, sequence.tokens
    room = min(3, 4 * len(sequence.pages) - len(tokens))  # of a block's masks
    if isinstance(head, NativeBlock) and not room:
        return
    pages = range(1 + (len(tokens) + 3) // 4)
    whole = Segment(tokens, 0, pages, 0, 1)
    hidden = target.run([whole], target.new_store(len(pages), 4), drafter.target_layers).hidden
    states = np.empty((len(tokens), head.hidden_size), np.float32)
    rows = array("i", range(len(tokens)))
    head.fuse([hidden[layer] for layer in head.target_layers], rows, states, rows)

    def run(begin: int, where: Sequence[int], store: Store) -> Logits:
        """The logits behind the last token, where entries from ``begin`` on are computed."""
        own, seen = states[begin - 1 : -1], first - drafter._ahead
        start = begin - drafter._ahead
        row = Segment(tokens[start:], start, where, 1, 1, first=seen, states=own)
        if isinstance(head, NativeBlock):
            row = head.behind(row._replace(tokens=row.tokens[:-1]), room, tokens[-1])
        found = head.run([row], store).logits
        assert found is not None
        return found

    anew = run(first, pages, head.new_store(len(pages), 4))
    kept = run(len(tokens) - 1, sequence.pages, drafter._store)
    assert np.array_equal(anew, kept)


def made_up_costs(
    _: Model, drafters: Mapping[str, Drafter], merging: Sequence[str], *__: Any
) -> tuple[Costs, None]:
    passes = Curve((1, 64), (1e-4, 5e-4))
    found = {n: DraftCosts(passes if d.model else None, 2e-5, 5e-6) for n, d in drafters.items()}
    found |= {name: DraftCosts(None, 2e-5, 5e-6) for name in merging}
    return Costs(Curve((1, 64), (1e-3, 5e-3)), found), None


@pytest.mark.parametrize(
    ("name", "chunk"),
    [
        ("eagle3", 5), ("eagle3", 64), ("auto+eagle3", 5), ("auto+peagle", 64), ("dflash2", 5),
        ("auto+dspark", 64),
    ],
)  # fmt: skip
def test_what_a_head_keeps_is_what_it_would_compute(
    target: Path, name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After random adds, aborts, preemptions and shared beginnings, bit for bit.

    Where the engine chooses, states that a head has not read get lost, it sleeps, and contexts
    begin anew.
    """
    rng, fickle = random.Random(chunk + 4), name.startswith("auto")
    if fickle:
        monkeypatch.setattr(eagle, "UNREAD_STATES", 1)
        monkeypatch.setattr(eagle, "UNSEEN_ROWS", 8)
        monkeypatch.setattr(eagle, "AWAKE_STEPS", 1)
        monkeypatch.setattr(eagle, "MOST_AWAKE_STEPS", 1)
    # What is drafted and when depends on times, which are the same on every machine here.
    monkeypatch.setattr(time, "perf_counter", itertools.count(0.0, 1e-4).__next__)
    monkeypatch.setattr(exactness, "known_costs", made_up_costs)
    engine = engine_of(target, name, pages=30, max_num_batched_tokens=chunk, max_num_seqs=4)
    method = method_of(name.removeprefix("auto+"))
    drafter = engine.drafting.drafters[method]
    assert isinstance(drafter, EagleDrafter)
    base = prompts()[3]
    live: dict[str, int] = {}
    seen = shared = cut = slept = 0
    for turn in range(320):
        if rng.random() < 0.25 and len(live) < 5:
            prompt = [*base[: rng.choice((0, 8, 13, 24, 40))], rng.randrange(4, VOCABULARY)]
            id = f"t{turn}"
            engine.add(Request(id, tuple(prompt), SamplingParams(max_tokens=30), turn))
            live[id] = turn
        if live and rng.random() < 0.05:
            id = rng.choice([*live])
            engine.abort(id)
            del live[id]
        for event in engine.step():
            if event.finish_reason:
                live.pop(event.request_id, None)
        if not turn % 3:
            continue  # the next step, or an abort before it, finds this one unsettled
        engine.settle()
        slept += not drafter._awake
        for sequence in engine.scheduler.running:
            state = drafter._states.get(sequence.id)
            if (
                state is None
                or state.num_computed != len(sequence.tokens) - 1
                or rng.random() < 0.5
            ):
                continue
            # All but the last entry are there.
            recomputed(engine, sequence, state.first, method)
            seen += 1
            cut += state.first > 1
            shared += sequence.start is not None and sequence.start.cached_tokens > 0
    assert seen > 10
    assert shared > 5
    assert engine.scheduler.preemptions
    assert not fickle or (cut > 0 and slept > 0)
