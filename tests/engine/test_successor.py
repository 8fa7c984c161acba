"""An engine that goes on in the place of another, with another drafter: no request notices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from outrider.base.types import Request, SamplingParams, Speculation
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.drafters.layerskip import save_skips
from outrider.drafters.model import ModelDrafter
from outrider.drafters.registry import find_drafter, with_loaded
from outrider.engine import memory, successor
from outrider.engine.engine import Engine
from outrider.engine.setup import EngineSetup
from outrider.engine.successor import check_room
from outrider.errors import ConfigError, MemoryBudgetError, ModelError, OutriderError
from outrider.native import choice as native
from outrider.text.codec import TextCodec
from tests.support.exactness import (
    alone,
    collect,
    known_costs,
    make_engine,
    requests,
    tiny_tokenizer,
)
from tests.support.heads import Eagle, agreeing_head, agreeing_medusa, save_head, taciturn_target
from tests.support.pages import check_engine
from tests.support.products import OPTIONS, prompts
from tests.support.skipping import LAYERS, planted_target, useless

HEADS = pytest.mark.skipif(native.library() is None, reason="the native step is off")
LOADED = ["drafter", *(pytest.param(name, marks=HEADS) for name in ("eagle3", "medusa"))]
LENGTH = 24


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a small model and heads that may be loaded."""
    folder = taciturn_target(tmp_path_factory.mktemp("successor") / "target", head_dim=16)
    about = Eagle(layers=(1, 0, 1), drafted=180, kv_heads=4, state_normed=True)
    save_head(agreeing_head(about, folder), folder / "eagle3")
    agreeing_medusa(folder / "medusa", folder)
    return folder


def followed(engine: Engine, target: Path, first: str, file: Path) -> Engine:
    """The engine that goes on with the drafter in a file, where ``first`` was the option."""
    spec = with_loaded(find_drafter(first, target), file)
    codec = TextCodec(tiny_tokenizer(), None, {}, None, target)
    setup = EngineSetup(open_checkpoint(target), spec, engine.config, codec)
    with patch("outrider.engine.build.find_costs", known_costs):
        return successor.successor(engine, successor.opened(setup, engine))


def drive(engine: Engine, ids: dict[str, list[Any]], steps: int = 1000) -> None:
    """Step an engine, and collect what it says."""
    while engine.has_work and steps:
        steps -= 1
        for event in engine.step():
            collect(ids, event)
    assert steps or engine.has_work


def begun(engine: Engine, queued: Sequence[Request], steps: int) -> dict[str, list[Any]]:
    """Queue requests, and return what some steps say."""
    ids: dict[str, list[Any]] = {f"{r.id}/{i}": [] for r in queued for i in range(r.params.n)}
    for request in queued:
        engine.add(request)
    drive(engine, ids, steps)
    assert engine.has_work
    return ids


@pytest.mark.parametrize("name", LOADED)
@pytest.mark.parametrize("first", ["none", "auto", "drafter+suffix"])
def test_text_does_not_notice(target: Path, first: str, name: str) -> None:
    """Every option, requests that run and that wait, in a cache that is short of pages."""
    first = first.replace("drafter", str(target / "drafter"))
    for each in OPTIONS.values():
        params = SamplingParams(**{"max_tokens": LENGTH, **each})
        queued = requests(prompts(), params)
        engine = make_engine(target, first, 40, max_num_seqs=3, max_num_batched_tokens=16)
        ids = begun(engine, queued, 3)
        assert engine.scheduler.running
        assert engine.scheduler.waiting
        waiting = [*engine.scheduler.running, *engine.scheduler.waiting]
        made = followed(engine, target, first, target / name)
        assert not engine.has_work
        check_engine(engine)
        assert [*made.scheduler.waiting] == waiting
        drive(made, ids, 5)
        again = followed(made, target, first, target / name)  # and once more
        drive(again, ids)
        assert ids == alone(target, queued)
        check_engine(again)
        assert again.scheduler.pool.num_free == again.scheduler.pool.num_usable


@HEADS
def test_sublayers_that_were_searched_offline(tmp_path: Path) -> None:
    target, file = planted_target(tmp_path / "target", 0), tmp_path / "skips.json"
    kept = {*range(2 * LAYERS)} - useless(0)
    save_skips(file, LAYERS, sorted(kept), {})
    queued = requests(prompts()[:4], SamplingParams(max_tokens=LENGTH, ignore_eos=True))
    engine = make_engine(target, "auto")
    ids = begun(engine, queued, 3)
    made = followed(engine, target, "auto", file)
    assert {"layerskip", "suffix"} <= {*made.menu.portfolio}
    drive(made, ids)
    assert ids == alone(target, queued)


@HEADS
def test_it_drafts_and_the_switch_stays(target: Path) -> None:
    queued = requests(prompts(), SamplingParams(max_tokens=LENGTH, ignore_eos=True))
    engine = make_engine(target, "suffix", num_speculative_tokens=4)
    engine.menu.set(replace(engine.menu.state, num_speculative_tokens=3))
    ids = begun(engine, queued, 2)
    made = followed(engine, target, "suffix", target / "eagle3")
    assert made.menu.state == replace(engine.menu.state, drafter="eagle3")
    assert made.menu.enabled
    accepted = 0
    while made.has_work:
        for event in made.step():
            collect(ids, event)
            accepted += event.drafted.accepted if event.drafted else 0
    assert ids == alone(target, queued)
    assert accepted > 0
    made.menu.set(replace(made.menu.state, enabled=False))
    off = followed(made, target, "suffix", target / "medusa")
    assert off.menu.state == replace(made.menu.state, drafter="medusa")
    assert not off.menu.enabled
    plain = followed(make_engine(target, "none"), target, "none", target / "drafter")
    assert plain.menu.state.enabled  # nothing was off: there was nothing to draft with


def test_counts_go_on(target: Path) -> None:
    queued = requests(prompts(), SamplingParams(max_tokens=LENGTH, ignore_eos=True))
    engine = make_engine(target, "none")
    begun(engine, queued, 4)
    engine.settle()
    scheduler, costs = engine.scheduler, engine.chooser.costs
    scheduler.hit = 7  # as if something had been found
    figures = scheduler.rows, scheduler.queried, 7
    seconds, preempted = costs.verify_seconds, scheduler.preemptions
    running = len(scheduler.running)
    assert running
    assert seconds
    made = followed(engine, target, "none", target / "drafter")
    now = made.scheduler
    assert (now.rows, now.queried, now.hit) == figures
    assert now.preemptions == preempted + running
    assert made.chooser.costs.verify_seconds == seconds
    made.abort("r0")  # requests are known by their ids
    assert all(s.request.id != "r0" for s in now.waiting)


@HEADS
def test_a_request_for_a_drafter_that_is_gone(target: Path) -> None:
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    wishes = Speculation(drafter="model", num_speculative_tokens=2)
    queued = [replace(each, speculation=wishes) for each in requests(prompts(), params)]
    engine = make_engine(target, str(target / "drafter"))
    ids = begun(engine, queued[1:], 2)
    late = engine.prepare(queued[0])  # in another thread, for the engine that was there
    made = followed(engine, target, str(target / "drafter"), target / "eagle3")
    made.enqueue(late)
    ids["r0/0"] = []
    drive(made, ids)
    assert ids == alone(target, requests(prompts(), params))
    with pytest.raises(ConfigError, match="there is no drafter 'model'"):
        made.prepare(queued[0])


def test_what_it_stands_for(target: Path) -> None:
    new, auto = target / "drafter", find_drafter("auto", target)
    assert [m.name for m in auto.members] == ["model", "suffix"]
    loaded = with_loaded(auto, target / "eagle3")
    assert [m.name for m in loaded.members] == ["eagle3", "suffix"]
    assert loaded.auto
    merged = with_loaded(find_drafter("model+suffix", target), target / "medusa")
    assert merged.name == "medusa+suffix"
    for option in ("none", "suffix", "ngram+suffix", str(new)):
        assert with_loaded(find_drafter(option, target), target / "eagle3").name == "eagle3"


def test_a_kind_stands_for_its_folder(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("eagle3", "medusa"):
        assert find_drafter(kind, target).folder == target / kind
        assert [m.folder for m in find_drafter(f"auto+{kind}", target).members] == [
            target / "drafter", None, target / kind,
        ]  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="neither a drafter"):
        find_drafter("eagle3", target / "drafter")
    (target / "eagle3").rename(tmp_path / "eagle3")
    try:
        assert find_drafter("eagle3", target).folder == Path("eagle3")  # what lies here comes first
    finally:
        (tmp_path / "eagle3").rename(target / "eagle3")


def harmless(engine: Engine, target: Path, file: Path, why: type[OutriderError], text: str) -> None:
    """Assert that a drafter is refused, and that the engine's requests do not notice."""
    queued = requests(prompts(), SamplingParams(max_tokens=LENGTH))
    ids = begun(engine, queued, 3)
    tables = [list(each.pages) for each in engine.scheduler.running]
    with pytest.raises(why, match=text):
        followed(engine, target, "none", file)
    assert [list(each.pages) for each in engine.scheduler.running] == tables
    drive(engine, ids)
    assert ids == alone(target, queued)


def test_a_drafter_that_fails_is_refused(target: Path, caplog: pytest.LogCaptureFixture) -> None:
    def propose(*_: Any) -> None:
        raise ValueError("no")

    with patch.object(ModelDrafter, "propose", propose):
        harmless(
            make_engine(target, "none"), target, target / "drafter",
            ModelError, "drafter model fails when it drafts: 'ValueError: no'",
        )  # fmt: skip
    caplog.clear()  # it was said


def test_no_request_is_lost_to_a_smaller_cache(target: Path) -> None:
    """With a drafter's cache beside the target's the same bytes hold fewer pages."""
    engine = make_engine(target, "none", 18, max_model_len=80)
    harmless(engine, target, target / "drafter", MemoryBudgetError, "pages, but the cache has 1")


def test_memory(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(target, "none")
    budget = engine.budget
    with monkeypatch.context() as patched:
        patched.setattr(memory, "free_memory", lambda: 2**20)
        with pytest.raises(MemoryBudgetError, match="are missing"):
            followed(engine, target, "none", target / "drafter")
    pool = engine.scheduler.pool
    each = (budget.target_bytes + budget.drafter_bytes) // budget.pages
    begun(engine, requests(prompts()[3:4], SamplingParams(max_tokens=64, ignore_eos=True)), 30)
    used = each * (pool.num_usable - pool.num_blank)
    seen: list[int] = []
    with (
        patch.object(successor, "build_engine", lambda *_, freed, **__: seen.append(freed)),
        pytest.raises(AttributeError),
    ):
        followed(engine, target, "none", target / "drafter")
    assert seen == [used]
    assert used > 0


def test_weights_that_do_not_fit_are_not_read(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_room(target / "drafter")
    monkeypatch.setattr(successor, "free_memory", lambda: 10)
    with pytest.raises(MemoryBudgetError, match="bytes of weights, but only 10 are free"):
        check_room(target / "drafter")
