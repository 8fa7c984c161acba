"""What AsyncLLM does while a drafter is loaded, and when the engine dies of it."""

from __future__ import annotations

import asyncio
import weakref
from pathlib import Path
from typing import Any

import pytest

from outrider.async_llm import AsyncLLM
from outrider.base.types import Request, SamplingParams
from outrider.engine.build import build_engine
from outrider.engine.control.switch import SpeculationState
from outrider.engine.setup import set_up
from outrider.engine.worker import loads
from outrider.engine.worker.messages import Load, Loaded, Message, Ready, WorkerSpec
from outrider.engine.worker.opener import Opener
from outrider.engine.worker.worker import Worker
from outrider.errors import ConfigError, ModelError, OutriderError, WorkerError
from tests.support.playing import STATE, Player, in_a_loop, opened, played, settle, start_again

NEW = SpeculationState(True, "eagle3", 4)
READY = Ready(("none", "eagle3"), ("none", "eagle3"), NEW, "budget", 9, 256, 4, {"eagle3": "/a"})
FILE = Path("/drafters/a")


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> list[Player]:
    return played(monkeypatch)


async def begun(llm: AsyncLLM) -> asyncio.Task[None]:
    """A load that the worker has been told of."""
    task = asyncio.create_task(llm.load_drafter(FILE))
    await settle()
    return task


def answer(player: Player, result: Ready | OutriderError = READY) -> None:
    player.take(player, Loaded(FILE, result))


async def loaded(folder: Path, lives: list[Player]) -> AsyncLLM:
    llm = await opened(folder, lives)
    task = await begun(llm)
    answer(lives[-1])
    await task
    return llm


@in_a_loop
async def test_a_drafter_that_is_loaded_outlives_the_worker(
    tiny_llama: Path, lives: list[Player], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = await opened(tiny_llama, lives)
    first = llm.spec
    task = await begun(llm)
    assert lives[-1].sent == [Load(FILE)]
    assert llm.loads.under_way
    answer(lives[-1])
    await task
    assert not llm.loads.under_way
    assert llm.ready == READY
    assert llm.speculation == NEW
    monkeypatch.setattr(loads, "TRIAL_SECONDS", 0.0)
    lives[-1].die()
    await settle()
    assert lives[-1].spec.loaded == FILE
    assert lives[-1].spec.drafter == first.drafter
    task = asyncio.create_task(llm.set_speculation(STATE))
    await settle()
    lives[-1].take(lives[-1], READY)
    with pytest.raises(ConfigError, match="no drafter 'ngram'"):
        await task


@in_a_loop
async def test_one_that_cannot_be_used_changes_nothing(
    tiny_llama: Path, lives: list[Player]
) -> None:
    llm = await opened(tiny_llama, lives)
    spec, ready = llm.spec, llm.ready
    for why in (ModelError("damaged."), ConfigError("wrong.")):
        task = await begun(llm)
        answer(lives[-1], why)
        with pytest.raises(type(why), match=str(why)):
            await task
        assert (llm.spec, llm.ready, llm.speculation) == (spec, ready, STATE)
    lives[-1].die()
    await start_again(llm, lives)
    assert lives[-1].spec == spec


@in_a_loop
async def test_one_at_a_time(tiny_llama: Path, lives: list[Player]) -> None:
    llm = await opened(tiny_llama, lives)
    task = await begun(llm)
    with pytest.raises(ConfigError, match="a drafter is being loaded"):
        await llm.load_drafter(FILE)
    changing = asyncio.create_task(llm.set_speculation(SpeculationState(True, "eagle3", 2)))
    task.cancel()  # whoever asked goes away: it is loaded all the same
    await settle()
    assert llm.loads.under_way
    answer(lives[-1])
    await changing  # by the names that there are afterwards
    assert lives[-1].sent[1:] == [SpeculationState(True, "eagle3", 2)]
    task = await begun(llm)
    answer(lives[-1])
    await task


@in_a_loop
async def test_a_death_ends_the_load(tiny_llama: Path, lives: list[Player]) -> None:
    llm = await opened(tiny_llama, lives)
    spec = llm.spec
    task = await begun(llm)
    lives[-1].die()
    with pytest.raises(WorkerError, match="killed by signal 9 while the drafter was loaded"):
        await task
    await start_again(llm, lives)
    assert lives[-1].spec == spec
    assert llm.speculation == STATE
    task = await begun(llm)
    llm.shutdown()
    with pytest.raises(WorkerError, match="shut down"):
        await task


@in_a_loop
async def test_one_that_kills_the_engine_is_given_up(
    tiny_llama: Path, lives: list[Player], caplog: pytest.LogCaptureFixture
) -> None:
    llm = await loaded(tiny_llama, lives)
    lives[-1].die()
    await start_again(llm, lives)
    assert lives[-1].spec.loaded is None
    assert llm.speculation == STATE
    assert f"the drafter in {FILE} is given up: the engine was killed by signal 9" in caplog.text
    lives[-1].die()  # there is nothing else to give up
    await start_again(llm, lives)
    assert lives[-1].spec.loaded is None


@in_a_loop
async def test_the_trial_begins_again_with_each_start(
    tiny_llama: Path, lives: list[Player], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = await loaded(tiny_llama, lives)
    monkeypatch.setattr(loads, "TRIAL_SECONDS", 0.0)
    lives[-1].die()
    await settle()
    assert lives[-1].spec.loaded == FILE
    lives[-1].take(lives[-1], READY)
    await llm.start()
    monkeypatch.setattr(loads, "TRIAL_SECONDS", 60.0)
    lives[-1].die()
    await settle()
    assert lives[-1].spec.loaded is None


@pytest.mark.parametrize("said", [True, False])
@in_a_loop
async def test_one_that_is_gone_at_the_next_start_does_not_end_the_server(
    tiny_llama: Path, lives: list[Player], monkeypatch: pytest.MonkeyPatch, said: bool
) -> None:
    llm = await loaded(tiny_llama, lives)
    monkeypatch.setattr(loads, "TRIAL_SECONDS", 0.0)
    lives[-1].die()
    await settle()
    assert lives[-1].spec.loaded == FILE
    if said:
        lives[-1].take(lives[-1], ModelError("it is gone."))
    lives[-1].die(0)
    await start_again(llm, lives)
    assert lives[-1].spec.loaded is None
    assert llm.failure is None
    assert llm.speculation == STATE


class Sent:
    """Stands for the way to the frontend."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.longest = 0.0

    def send(self, message: Message) -> None:
        self.messages.append(message)


def test_the_worker_changes_its_engine_and_lets_the_old_one_go(
    tiny_llama: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    spec = WorkerSpec(tiny_llama, "suffix", {})
    setup, sent = set_up(spec.model, spec.drafter, spec.options), Sent()
    nothing: Any = sent
    worker = Worker(build_engine(setup), nothing, nothing, nothing, 0, Opener(spec, setup))
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    worker.engine.add(Request("a", (5, 6, 7), params, 1))
    worker._step()
    gone, store = weakref.ref(worker.engine), weakref.ref(worker.engine.verifier.store)

    def load(drafter: Path) -> Ready | Exception:
        worker._open(drafter)
        worker.inbox.get()()
        message = sent.messages[-1]
        assert isinstance(message, Loaded)
        assert message.drafter == drafter
        return message.result

    for wrong in (tmp_path, tmp_path / "none", tiny_drafter / "config.json"):
        assert isinstance(load(wrong), OutriderError)
        assert worker.engine is gone()
    ready = load(tiny_drafter)
    assert isinstance(ready, Ready)
    assert ready.folders == {"model": str(tiny_drafter)}
    assert ready.speculation.drafter == "model"
    assert gone() is None
    assert store() is None
    assert [each.request.id for each in worker.engine.scheduler.waiting] == ["a"]
    while worker.engine.has_work:
        worker._step()
