"""Drafters on CPUs of their own change nothing, nor do drafts made while the target verifies."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.base.types import Draft, SamplingParams
from outrider.drafters.ahead import Ahead, Chain
from outrider.drafters.model import ModelDrafter
from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.models.native_model import NativeModel
from outrider.native.choice import library
from tests.support.exactness import (
    SAMPLING,
    alone,
    collect,
    make_engine,
    make_fickle,
    planted_pair,
    requests,
    run,
)
from tests.support.pages import check_engine
from tests.support.products import prompts, some_for_engines

CPUS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
OWN = str(CPUS[-1]) if CPUS else "0"

pytestmark = [
    pytest.mark.skipif(len(CPUS) < 2, reason="one CPU, or no affinity on this system"),
    pytest.mark.skipif(library() is None, reason="the native step is off"),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def plain(pair: Path) -> Callable[[str], dict[str, list[Any]]]:
    """What plain decoding says under an option."""
    known: dict[str, dict[str, list[Any]]] = {}

    def of(option: str) -> dict[str, list[Any]]:
        if option not in known:
            known[option] = alone(pair, _requests(option))
        return known[option]

    return of


def _requests(option: str) -> list[Any]:
    return requests(prompts(), SamplingParams(max_tokens=24, **SAMPLING[option]))


def placed(folder: Path, drafter: str = "model", ahead: int | None = 5, **options: Any) -> Engine:
    return make_engine(folder, drafter, drafter_cpus=OWN, draft_ahead=ahead, **options)


def to_the_end(ahead: Ahead, stop: Callable[[], Sequence[Chain]]) -> Sequence[Chain]:
    """Stop only where the queue is full."""
    if ahead._job is not None:
        ahead._job.result()
    return stop()


def at_once(ahead: Ahead, chains: Sequence[Chain], rng: random.Random) -> None:
    """Go on as far as chance says."""
    for chain in chains:
        chain.most = min(chain.most, len(chain.tokens) + rng.randrange(8))


def speeds(engine: Engine, speed: str, seed: int) -> None:
    """Let the target take as long as nothing, as long as the queue needs, or anything between."""
    drafter = engine.drafting.drafters["model"]
    assert isinstance(drafter, ModelDrafter)
    ahead, rng = drafter._ahead, random.Random(seed)
    assert ahead is not None
    start, stop = ahead.start, ahead.stop
    if speed == "full":
        ahead.stop = lambda: to_the_end(ahead, stop)  # type: ignore[method-assign]
    elif speed == "any":

        def begin(chains: Sequence[Chain], noise: Any) -> None:
            at_once(ahead, chains, rng)
            start(chains, noise)

        ahead.start = begin  # type: ignore[method-assign]
        ahead.stop = lambda: to_the_end(ahead, stop)  # type: ignore[method-assign]


CASES = [
    [option, ("full", "any", "as it is")[i % 3], (1, 4, 7)[(i // 2) % 3], (1, 4)[i % 2],
     ("ample", "tight")[(i // 3) % 2], (1, 3, 9)[(i // 4) % 3]]
    for i, option in enumerate(SAMPLING)
]  # fmt: skip


@pytest.mark.equality
@pytest.mark.parametrize(
    ("option", "speed", "length", "batch", "pool", "most"), some_for_engines(CASES)
)
def test_drafts_ahead_change_nothing(
    pair: Path,
    plain: Callable[[str], dict[str, list[Any]]],
    option: str,
    speed: str,
    length: int,
    batch: int,
    pool: str,
    most: int,
) -> None:
    pages = 26 if pool == "tight" else None
    engine = placed(pair, ahead=most, num_speculative_tokens=length, pages=pages)
    speeds(engine, speed, length)
    queued, found = _requests(option), {}
    for first in range(0, len(queued), batch):
        found |= run(engine, queued[first : first + batch])
    assert found == plain(option)
    assert not engine.menu.switched_off


def drafts_of(engine: Engine, option: str) -> list[list[tuple[str, list[int]]]]:
    """What was drafted in each step, for whom."""
    found = []
    for request in _requests(option):
        engine.add(replace(request, offline=True))  # how long steps take bounds no step
    while engine.has_work:
        engine.step()
        record = engine.record
        assert record is not None
        batch: Draft = record.draft
        found.append(
            [(item.sequence.id, n.tokens) for item, n in zip(record.plan.batch, batch, strict=True)]
        )
    engine.settle()
    return found


@pytest.mark.parametrize("option", ["greedy", "0.7", "all", "min_tokens", "bias", "n", "penalties"])
@pytest.mark.parametrize(("speed", "pages"), [("full", None), ("any", None), ("any", 26)])
def test_a_draft_made_ahead_is_the_one_that_would_be_made_later(
    pair: Path, option: str, speed: str, pages: int | None
) -> None:
    engine = placed(pair, pages=pages, num_speculative_tokens=2)
    speeds(engine, speed, 1)
    drafter = engine.drafter
    assert isinstance(drafter, ModelDrafter)
    taken: list[int] = []
    behind = drafter._behind_queue

    def counted(sequence: Any, state: Any, budget: Any) -> Any:
        taken.append(len(state.queue.tokens))
        return behind(sequence, state, budget)

    drafter._behind_queue = counted  # type: ignore[method-assign]
    waits = make_engine(pair, "model", pages=pages, num_speculative_tokens=2)
    assert drafts_of(engine, option) == drafts_of(waits, option)
    assert bool(taken) == (option not in ("penalties", "bias"))  # where Python has no say
    check_engine(engine)


@pytest.mark.parametrize("drafter", ["auto", "model+suffix", "model"])
def test_drafters_that_change_from_step_to_step(
    pair: Path, plain: Callable[[str], dict[str, list[Any]]], drafter: str
) -> None:
    trees = 12 if drafter == "model" else None
    engine = placed(pair, drafter, None, max_draft_nodes=trees)
    if drafter == "auto":
        make_fickle(engine, random.Random(2))
    speeds(engine, "any", 3)
    assert run(engine, _requests("0.7"), arrival=random.Random(1)) == plain("0.7")


def test_requests_come_and_go(pair: Path, plain: Callable[[str], dict[str, list[Any]]]) -> None:
    engine, rng, expected = placed(pair, pages=40), random.Random(5), plain("0.7")
    speeds(engine, "any", 7)
    queued, ids, live = _requests("0.7"), {}, {}
    for turn in range(150):
        if rng.random() < 0.3 and len(live) < 5:
            request = rng.choice(queued)
            name = f"{request.id}-{turn}"
            live[name] = request.id
            ids[f"{name}/0"] = []
            engine.add(request.__class__(name, *list(vars(request).values())[1:]))
        if live and rng.random() < 0.1:
            gone = rng.choice([*live])
            engine.abort(gone)
            del live[gone], ids[f"{gone}/0"]
        for event in engine.step():
            collect(ids, event)
            if event.finish_reason is not None:
                name = event.request_id
                assert ids.pop(f"{name}/0") == expected[f"{live.pop(name)}/0"]
        check_engine(engine)
    for name in [*live]:
        engine.abort(name)
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_usable


def test_a_fault_ahead_switches_the_drafter_off(
    pair: Path, plain: Callable[[str], dict[str, list[Any]]], caplog: pytest.LogCaptureFixture
) -> None:
    engine = placed(pair)
    speeds(engine, "full", 1)
    model = engine.drafting.drafters["model"].model
    assert model is not None
    draft, calls = model.draft, []

    def failing(segments: Any, store: Any, inputs: Any, noise: Any, *more: Any) -> Any:
        if any(asked is not None and asked.position is not None for asked in inputs):
            calls.append(1)
            if len(calls) == 9:
                raise ValueError("a pass failed")
        return draft(segments, store, inputs, noise, *more)

    model.draft = failing  # type: ignore[method-assign]
    assert run(engine, _requests("0.7")) == plain("0.7")
    assert "a pass failed" in engine.menu.switched_off["model"]
    caplog.clear()


def test_passes_run_where_they_should(pair: Path) -> None:
    engine = placed(pair)
    where = {}
    for name, model in (("target", engine.model), ("drafter", engine.drafter.model)):
        assert isinstance(model, NativeModel)
        cores = model.library.cores
        assert cores is not None
        where[name] = cores.call(os.sched_getaffinity, 0)
    assert where == {"target": set(CPUS[:-1]), "drafter": {CPUS[-1]}}
    assert os.sched_getaffinity(0) == set(CPUS)


@pytest.mark.parametrize(
    ("options", "drafter", "said"),
    [
        ({"drafter_cpus": "63000"}, "model", "names CPU 63000, but this process may use"),
        ({"drafter_cpus": f"{CPUS[0] if CPUS else 0}-{OWN}"}, "model", "names every CPU"),
        ({"drafter_cpus": OWN}, "ngram", "no passes of a checkpoint of its own"),
        ({"drafter_cpus": "3-1"}, "model", "give numbers and ranges"),
        ({"drafter_cpus": "1;2"}, "model", "give numbers and ranges"),
        ({"draft_ahead": 4}, "model", "give drafter_cpus too"),
    ],
)
def test_what_cannot_be_placed_is_refused(
    pair: Path, options: dict[str, Any], drafter: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        make_engine(pair, drafter, **options)
