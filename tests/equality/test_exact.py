"""The same seed gives the same tokens, whatever drafts, however the work is cut up (fp32)."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.base.types import Request, SamplingParams
from outrider.engine.engine import Engine
from tests.support.exactness import (
    SAMPLING,
    VOCABULARY,
    adversary,
    alone,
    in_batches,
    make_engine,
    make_fickle,
    planted_pair,
    requests,
    run,
)
from tests.support.pages import check_engine
from tests.support.products import some_for_engines

DRAFTERS = (
    "none", "ngram", "model", "tree", "wrong", "right", "ragged", "suffix", "suffix tree",
    "model+suffix", "auto",
)  # fmt: skip
BATCHES = (1, 5)
LENGTHS = (1, 4, 7)
CHUNKS = (3, 16, 512)
POOLS = ("ample", "tight")
FAMILIES = ("llama", "qwen3")


def _prompts() -> list[list[int]]:
    """Prompts of many lengths, some repetitive so that ngram has something to find."""
    rng = random.Random(0)
    prompts = [[rng.randrange(4, VOCABULARY) for _ in range(n)] for n in (1, 7, 19, 40)]
    return [*prompts, [11, 12, 13, 14, 15] * 6]


class Reference:
    """Plain decoding of a checkpoint, by option."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._outputs: dict[str, dict[str, list[Any]]] = {}

    def __call__(self, option: str) -> dict[str, list[Any]]:
        if option not in self._outputs:
            self._outputs[option] = alone(self.folder, _requests(option))
        return self._outputs[option]


def _requests(option: str) -> list[Request]:
    return requests(_prompts(), SamplingParams(max_tokens=24, **SAMPLING[option]))


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """The reference of a family."""

    @functools.cache
    def of(family: str) -> Reference:
        return Reference(planted_pair(tmp_path_factory.mktemp(family), family))

    return of


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request: pytest.FixtureRequest, references: Callable[[str], Reference]) -> Reference:
    return references(request.param)


@pytest.fixture(scope="module")
def pair(reference: Reference) -> Path:
    return reference.folder


def _engine(
    reference: Reference, drafter: str, option: str, length: int, chunk: int, pool: str
) -> Engine:
    branches = drafter.endswith("tree")
    kind = {"tree": "model", "suffix tree": "suffix"}.get(drafter, drafter)
    engine = make_engine(
        reference.folder,
        adversary(kind, _requests(option), reference(option), length),
        pages=26 if pool == "tight" else None,
        max_num_batched_tokens=chunk,
        num_speculative_tokens=length,
        max_draft_nodes=3 * length if branches else None,
        suffix_store=300 if drafter == "suffix tree" else 0,
    )
    if drafter == "auto":
        make_fickle(engine, random.Random(length))
    return engine


def _holds(
    reference: Reference, drafter: str, option: str, batch: int, length: int, chunk: int, pool: str
) -> None:
    engine = _engine(reference, drafter, option, length, chunk, pool)
    assert in_batches(engine, _requests(option), batch) == reference(option)
    counts = engine.counts
    assert counts.drafted == sum(counts.drafted_by_position)
    assert counts.accepted == sum(counts.accepted_by_position)
    # A grammar cuts wrong drafts and adds what it forces, so that neither end is certain.
    formed = "structured_outputs" in SAMPLING[option]
    if drafter == "wrong" and not formed:
        assert counts.accepted == 0
        assert counts.drafted > 0
    if drafter == "right":
        assert counts.accepted == counts.drafted > 0
    if drafter == "model":
        assert 0 < counts.accepted <= counts.drafted
        # In a tight pool, or under a grammar, drafts can be so few that all of them stand.
        assert counts.accepted < counts.drafted or pool == "tight" or formed
    if drafter in ("tree", "ragged"):
        # Depths may all be reached by the right branch; the wrong ones show in the nodes.
        assert 0 < counts.accepted <= counts.nodes
        assert counts.accepted < counts.nodes or formed


SLICE = [
    # Every drafter under every option, the other dimensions dealt out over them.
    [
        FAMILIES[(i // 5) % 2], drafter, option,
        BATCHES[i % 2], LENGTHS[i % 3], CHUNKS[(i // 2) % 3], POOLS[(i // 3) % 2],
    ]
    for i, (drafter, option) in enumerate(itertools.product(DRAFTERS, SAMPLING))
]  # fmt: skip


@pytest.mark.equality
@pytest.mark.parametrize(
    ("family", "drafter", "option", "batch", "length", "chunk", "pool"), some_for_engines(SLICE)
)
def test_drafts_change_nothing(
    references: Callable[[str], Reference],
    family: str,
    drafter: str,
    option: str,
    batch: int,
    length: int,
    chunk: int,
    pool: str,
) -> None:
    _holds(references(family), drafter, option, batch, length, chunk, pool)


@pytest.mark.slow
@pytest.mark.equality
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("option", SAMPLING)
def test_drafts_change_nothing_in_the_full_product(
    reference: Reference, drafter: str, option: str
) -> None:
    for rest in itertools.product(BATCHES, LENGTHS, CHUNKS, POOLS):
        _holds(reference, drafter, option, *rest)


def test_the_tight_pool_preempts(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine(reference, "model", "0.7", 4, 16, "tight")
    taken: list[str] = []
    release = engine.drafter.release
    monkeypatch.setattr(
        engine.drafter, "release", lambda id, ended: (taken.append(id), release(id, ended))[1]
    )
    queued = _requests("0.7")
    found = run(engine, queued)
    assert found == reference("0.7")
    assert len(taken) > len(queued), "every sequence is released once; preemption releases again"


def test_samples_of_one_request_differ_and_repeat(pair: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, n=3, ignore_eos=True)
    queued = requests(_prompts()[:2], params)
    plain = run(make_engine(pair, "none"), queued)
    drafted = run(make_engine(pair, "model"), queued)
    assert plain == drafted
    assert len({tuple(plain[f"r0/{i}"]) for i in range(3)}) == 3


def test_random_adds_and_aborts_leave_nothing_behind(reference: Reference) -> None:
    rng = random.Random(3)
    engine = _engine(reference, "model", "0.7", 4, 5, "tight")
    expected = reference("0.7")
    queued = _requests("0.7")
    ids: dict[str, list[int]] = {}
    live: dict[str, str] = {}
    for turn in range(250):
        if rng.random() < 0.3 and len(live) < 6:
            which = rng.randrange(len(queued))
            name = f"t{turn}"
            engine.add(replace(queued[which], id=name))
            live[name], ids[name] = f"r{which}/0", []
        if rng.random() < 0.05 and live:
            name = rng.choice(list(live))
            free = engine.scheduler.pool.num_free
            engine.abort(name)
            assert engine.scheduler.pool.num_free >= free
            del live[name]
        for event in engine.step():
            if event.token_id is not None:
                ids[event.request_id].append(event.token_id)
            if event.finish_reason is not None:
                assert ids[event.request_id] == expected[live.pop(event.request_id)]
        check_engine(engine)
    for name in live:
        engine.abort(name)
    check_engine(engine)
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_usable
    assert not engine.has_work
