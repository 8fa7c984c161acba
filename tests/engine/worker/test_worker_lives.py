"""What AsyncLLM does when its worker dies, hangs or cannot start, with a worker that only plays."""

import asyncio
import errno
import gc
import logging
import weakref
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import httpx
import pytest
from httpx import ASGITransport

from outrider import SamplingParams, async_llm
from outrider.async_llm import AsyncLLM
from outrider.base.types import Request, Speculation
from outrider.engine.control.switch import SpeculationState
from outrider.engine.worker import heartbeat, suspects
from outrider.engine.worker.heartbeat import Watch
from outrider.engine.worker.messages import Abort, Beat, Beliefs, Gauges, Left, Stepped
from outrider.engine.worker.process import Outbox
from outrider.engine.worker.restarts import LONGEST_PAUSE, Deaths
from outrider.engine.worker.suspects import Suspects, fingerprint
from outrider.engine.worker.worker import Worker, _Adding
from outrider.errors import RequestError, WorkerError
from outrider.frontend.outputs import RequestState
from outrider.server.app import create_app
from outrider.server.build import build
from outrider.server.options import resolve
from tests.support.playing import Player, in_a_loop, opened, played, settle, start_again


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> list[Player]:
    """Every worker so far; starts follow each other without a pause."""
    return played(monkeypatch)


class Caller:
    """A client of a stream."""

    def __init__(
        self, llm: AsyncLLM, tokens: int, prompt: str = "ab", body: str = "", id: str | None = None
    ) -> None:
        state = llm.inputs.request(prompt, SamplingParams(max_tokens=tokens), id)
        self.id = state.request.id
        self.task = asyncio.create_task(self._collect(llm, state, body))

    async def _collect(self, llm: AsyncLLM, state: RequestState, body: str) -> int:
        return len([e async for events in llm.run(state, body) for e in events])


async def death(llm: AsyncLLM, lives: list[Player], *tokens: int, body: str = "") -> None:
    """Have the worker die under such requests, and another be ready."""
    callers = [Caller(llm, n, body=body) for n in tokens]
    await settle()
    lives[-1].step(*(c.id for c in callers))
    await settle()
    lives[-1].die()
    for caller in callers:
        with pytest.raises(WorkerError, match="killed by signal 9 while the request ran"):
            await caller.task
    await start_again(llm, lives)


@in_a_loop
async def test_deaths_under_requests_do_not_end_it(tiny_llama: Path, lives: list[Player]) -> None:
    llm = await opened(tiny_llama, lives)
    for number in range(6):
        await death(llm, lives, 10 + number)
    assert llm.restarts == 6
    assert [life.generation for life in lives] == list(range(7))
    for _ in range(3):
        lives[-1].die()
        await settle()
        assert llm.ready is None
        lives[-1].ready()
    with pytest.raises(WorkerError, match="3 times within 60 s, the last time it was killed"):
        await llm.start()
    assert llm.trouble is llm.failure is not None
    assert len(lives) == 9


@in_a_loop
async def test_beliefs_are_those_of_the_worker_that_lives(
    tiny_llama: Path, lives: list[Player]
) -> None:
    llm = await opened(tiny_llama, lives)
    assert llm.beliefs is None
    dead = lives[-1]
    dead.take(dead, Beliefs({"paused": False}))
    await settle()
    assert llm.beliefs == {"paused": False}
    dead.die()
    await settle()
    dead.take(dead, Beliefs({"paused": True}))
    await settle()
    assert llm.beliefs is None


@in_a_loop
async def test_a_body_that_kills_alone_is_refused(tiny_llama: Path, lives: list[Player]) -> None:
    llm = await opened(tiny_llama, lives)
    await death(llm, lives, 10)
    done = Caller(llm, 10)
    await settle()
    lives[-1].step(done.id, end=True)
    assert await done.task == 1
    await death(llm, lives, 10)  # the first since it completed
    await death(llm, lives, 10, 11)  # not alone
    await death(llm, lives, 10)
    with pytest.raises(RequestError, match="ran alone, so the request is refused until the"):
        await Caller(llm, 10).task
    await death(llm, lives, 11)
    await death(llm, lives, 30, 31, body="two prompts of one call")
    await death(llm, lives, 30, body="two prompts of one call")
    for tokens in (30, 31):
        with pytest.raises(RequestError, match="ran alone"):
            await Caller(llm, tokens, body="two prompts of one call").task


@in_a_loop
async def test_a_part_of_a_body_does_not_clear_it(tiny_llama: Path, lives: list[Player]) -> None:
    llm = await opened(tiny_llama, lives)
    for _ in range(2):
        good, bad = (Caller(llm, n, body="both") for n in (5, 6))
        await settle()
        lives[-1].step(good.id, end=True)
        assert await good.task == 1
        lives[-1].die()
        with pytest.raises(WorkerError):
            await bad.task
        await settle()
        lives[-1].ready()
    with pytest.raises(RequestError, match="ran alone"):
        await Caller(llm, 5, body="both").task


@pytest.mark.parametrize(
    ("path", "asks"),
    [
        ("completions", {"prompt": ["ab", "cd"]}),
        ("chat/completions", {"messages": [{"role": "user", "content": "ab"}]}),
    ],
)
@in_a_loop
async def test_a_call_that_kills_gets_400(
    tiny_llama: Path, lives: list[Player], path: str, asks: dict[str, Any]
) -> None:
    llm, settings = build(tiny_llama, "tiny", resolve({}, {}, None))
    transport = ASGITransport(create_app(llm, settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

        async def call(**more: Any) -> httpx.Response:
            return await client.post(f"/v1/{path}", json={"max_tokens": 9, **asks, **more})

        llm.launch()
        for number in range(2):
            lives[-1].ready()
            calling = asyncio.create_task(call(request_id=f"id-{number}"))
            while not lives[-1].sent:
                await asyncio.sleep(0.01)
            lives[-1].die()
            assert (await calling).status_code == 503
        lives[-1].ready()
        refused = await call()
        assert refused.status_code == 400
        assert "ran alone" in refused.json()["error"]["message"]
        other = asyncio.create_task(call(temperature=0.5))
        while not lives[-1].sent:
            await asyncio.sleep(0.01)
        other.cancel()


@in_a_loop
async def test_whoever_leaves_before_the_death_is_known(
    tiny_llama: Path, lives: list[Player]
) -> None:
    """A request counts until the worker says that it is gone."""
    llm = await opened(tiny_llama, lives)
    for number in range(4):
        caller = Caller(llm, 10 + number)
        await settle()
        caller.task.cancel()
        await settle()
        assert lives[-1].sent[-1] == Abort(caller.id)
        lives[-1].die()
        await start_again(llm, lives)
    caller = Caller(llm, 20)
    await settle()
    caller.task.cancel()
    await settle()
    lives[-1].take(lives[-1], Left(caller.id, Gauges()))
    for _ in range(3):
        await settle()
        lives[-1].die()
    await settle()
    assert llm.failure is not None


@in_a_loop
async def test_what_the_worker_never_got_is_not_blamed(
    tiny_llama: Path, lives: list[Player]
) -> None:
    """A body that still lies in the outbox neither shares the blame nor has it."""
    llm = await opened(tiny_llama, lives)
    for _ in range(2):
        guilty, innocent = (Caller(llm, 10, body=name) for name in ("guilty", "innocent"))
        await settle()
        lives[-1].unsent = {("add", innocent.id)}
        lives[-1].die()
        for caller in (guilty, innocent):
            with pytest.raises(WorkerError, match="send it again"):
                await caller.task
        await start_again(llm, lives)
    with pytest.raises(RequestError, match="ran alone"):
        llm.suspects.check("guilty")
    llm.suspects.check("innocent")
    llm.shutdown()


@in_a_loop
async def test_an_id_is_free_when_its_request_was_refused(
    tiny_llama: Path, lives: list[Player]
) -> None:
    """Whoever waits for an id that was left goes on with either answer of the worker."""
    llm = await opened(tiny_llama, lives)
    worker = lives[-1]
    for answer in (Left("same", Gauges(), RequestError("no")), Left("same", Gauges())):
        left = Caller(llm, 10, id="same")
        await settle()
        left.task.cancel()
        await settle()
        again = Caller(llm, 10, id="same")
        await settle()
        assert [type(sent) for sent in worker.sent] == [Request, Abort]
        worker.take(worker, answer)
        await settle()
        assert isinstance(worker.sent[-1], Request)
        worker.step("same", end=True)
        assert await again.task == 1
        worker.sent.clear()
    llm.shutdown()


@in_a_loop
async def test_a_reader_that_is_slow_keeps_its_output(
    tiny_llama: Path, lives: list[Player]
) -> None:
    """What was computed before the death is handed out, and a finished request does not fail."""
    llm = await opened(tiny_llama, lives)
    caller = Caller(llm, 10)
    await settle()
    for end in (False, True):
        lives[-1].step(caller.id, end=end)
    lives[-1].die()
    assert await caller.task == 2


@in_a_loop
async def test_messages_of_a_worker_that_is_gone(tiny_llama: Path, lives: list[Player]) -> None:
    llm = await opened(tiny_llama, lives)
    old = lives[-1]
    old.die()
    await settle()
    old.ready()
    old.die()
    await settle()
    assert llm.ready is None
    assert len(lives) == 2


@in_a_loop
async def test_clients_that_come_while_it_starts(tiny_llama: Path, lives: list[Player]) -> None:
    llm = AsyncLLM(tiny_llama)
    early, gone = Caller(llm, 10), Caller(llm, 11)
    await settle()
    gone.task.cancel()
    await settle()
    assert llm.live == 0
    assert not lives[-1].sent
    lives[-1].ready()
    await settle()
    assert [type(command) for command in lives[-1].sent] == [Request]
    changing = asyncio.create_task(llm.set_speculation(SpeculationState(False, "none", 2)))
    await changing
    lives[-1].die()
    with pytest.raises(WorkerError):
        await early.task
    changing = asyncio.create_task(llm.set_speculation(SpeculationState(True, "none", 1)))
    await settle()
    lives[-1].ready()
    await changing
    assert lives[-1].sent[-1] == llm.speculation == SpeculationState(True, "none", 1)


@in_a_loop
async def test_death_and_shutdown_meet(tiny_llama: Path, lives: list[Player]) -> None:
    llm = await opened(tiny_llama, lives)
    caller = Caller(llm, 10)
    await settle()
    lives[-1].die()
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(WorkerError, match="shut down"):
        await caller.task
    await settle()
    assert len(lives) == 1
    assert lives[-1].killed
    with pytest.raises(WorkerError, match="the engine was shut down"):
        await Caller(llm, 10).task
    loading = AsyncLLM(tiny_llama)
    waiting = asyncio.create_task(loading.start())
    await settle()
    loading.shutdown()
    with pytest.raises(WorkerError, match="shut down"):
        await waiting


@in_a_loop
async def test_a_system_without_files_is_asked_again(
    tiny_llama: Path, lives: list[Player], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Deaths, "pause", property(lambda deaths: 0.05 * deaths.failed_starts))
    llm = await opened(tiny_llama, lives)
    Player.failures += [OSError(errno.EMFILE, "Too many open files")] * 2
    lives[-1].die()
    await settle()
    assert "cannot be started ([Errno 24] Too many open files)" in str(llm.trouble)
    while llm.trouble is not None:
        await asyncio.sleep(0.01)
    lives[-1].ready()
    await llm.start()
    assert llm.failure is None


@in_a_loop
async def test_an_engine_that_never_gets_ready_is_given_up(
    tiny_llama: Path, lives: list[Player]
) -> None:
    llm = await opened(tiny_llama, lives)
    for _ in range(4):
        llm._deaths._idle.clear()  # loading takes longer than a minute
        lives[-1].die(1)
        await settle()
    with pytest.raises(WorkerError, match=r"3 times before it was ready, .* with code 1"):
        await llm.start()


def test_an_observer_that_fails_is_logged_once(
    tiny_llama: Path, lives: list[Player], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no")

    async def work() -> None:
        llm = await opened(tiny_llama, lives)
        seen: list[Stepped] = []
        llm.observers += [fail, lambda step, _: seen.append(step)]
        caller = Caller(llm, 10)
        await settle()
        lives[-1].step(caller.id)
        lives[-1].step(caller.id, end=True)
        assert await caller.task == 2
        assert len(seen) == 2

    with caplog.at_level(logging.ERROR, "outrider"):
        in_a_loop(work)()
    assert sum("observer" in r.message for r in caplog.records) == 1


@in_a_loop
async def test_a_hung_worker_is_told_and_killed(
    tiny_llama: Path, lives: list[Player], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_llm, "TICK_SECONDS", 0.001)
    llm = await opened(tiny_llama, lives)
    assert llm.trouble is None
    while not lives[-1].killed:
        lives[-1].take(lives[-1], Beat(step=7, longest=1))
        await asyncio.sleep(0.001)
    assert "has been in one step for" in str(llm.trouble)
    lives[-1].die()
    await settle()
    assert llm.trouble is None
    lives[-1].take(lives[-1], Beat())
    while not lives[-1].killed:
        await asyncio.sleep(0.001)
    assert "has not answered for" in str(llm.trouble)


def ticks(watch: Watch, *beats: Beat) -> None:
    """A second for each beat; none is silence."""
    for beat in beats:
        watch.hear(beat)
        watch.tick()


def test_silence_is_judged_by_the_fronts_own_seconds() -> None:
    watch = Watch()
    for _ in range(heartbeat.START_SECONDS // 2 - 1):
        watch.tick()
    assert watch.complaint is None
    watch.hear(Beat())
    for second in range(1, heartbeat.SILENT_SECONDS + 1):
        assert not watch.hung
        watch.tick()
        assert (watch.complaint is not None) == (second >= heartbeat.SILENT_SECONDS / 2)
    assert watch.hung
    assert watch.complaint == "the engine has not answered for 30 s"
    watch.begin()
    assert not watch.hung


def test_a_step_may_be_as_long_as_others_and_more() -> None:
    watch = Watch()
    ticks(watch, *[Beat()] * 900, *(Beat(step=i) for i in range(900)))
    assert watch.complaint is None
    ticks(watch, *[Beat(step=900)] * 599)
    assert not watch.hung
    assert watch.complaint == "the engine has been in one step for 599 s"
    ticks(watch, Beat(step=901, longest=100))
    ticks(watch, *[Beat(step=902, longest=100)] * 1900)
    assert not watch.hung
    ticks(watch, *[Beat(step=902, longest=100)] * 100)
    assert watch.hung
    watch.begin()
    ticks(watch, *[Beat(command=3)] * 599)
    assert watch.complaint == "the engine has been reading one request for 599 s"
    ticks(watch, Beat(command=3))
    assert watch.hung


def test_pauses_grow_and_end() -> None:
    deaths = Deaths()
    found = []
    for _ in range(9):
        deaths.died(running=True, ready=True)
        found.append(deaths.pause)
    assert found == [0, 1, 2, 4, 8, 16, LONGEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]
    assert deaths.hopeless is None
    deaths = Deaths()
    for number in range(1, 2000):
        deaths.failed_starts += 1
        assert deaths.pause == min(LONGEST_PAUSE, 2.0 ** min(9, number - 1))
    deaths.failed_starts = 0
    assert deaths.pause == 0


def asked(**more: Any) -> Request:
    params = SamplingParams(max_tokens=3, seed=more.pop("chosen", None))
    given: dict[str, Any] = {"id": "a", "prompt_token_ids": (1, 2), "params": params, "seed": 4}
    return Request(**given | more)


def test_a_fingerprint_is_of_what_is_asked() -> None:
    same = fingerprint([asked()])
    assert same == fingerprint([asked(id="b", seed=5, priority=3)])
    for other in (
        asked(chosen=5), asked(prompt_token_ids=(1, 3)), asked(cache_salt="x"),
        asked(speculation=Speculation(prediction=(7,))), asked(cache_salt="\ud800"),
    ):  # fmt: skip
        assert fingerprint([other]) != same
    assert fingerprint([asked(), asked()]) != same


def test_the_table_of_suspects_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects, "REMEMBERED", 3)
    found = Suspects()
    for body in "abcabc":
        found.died({body})
    found.died({"d"})
    found.check("a")
    for body in "bc":
        with pytest.raises(RequestError):
            found.check(body)


def test_a_box_never_blocks_and_holds_one_command_a_request() -> None:
    box = Outbox()
    for number in range(10_000):
        box.put(b"add", ("add", number))
        assert box.withdraw(("add", number))
        box.put(b"%d" % number, "speculation")
    assert box.get() == b"9999"
    box.close()
    assert box.get() is None


def playing(engine: Any) -> tuple[Worker, list[Any]]:
    """Return a worker that an engine only plays for, and what it sends."""
    worker, sent = Worker.__new__(Worker), []
    worker.engine, worker.inbox = engine, SimpleQueue()
    worker.outlet = type("Outlet", (), {"send": staticmethod(sent.append)})()
    worker._gauges = Gauges  # type: ignore[method-assign]
    return worker, sent


def test_a_panic_over_one_request_refuses_it() -> None:
    """Rust's panics are no ``Exception``."""

    class Panic(BaseException):
        pass

    class Engine:
        def prepare(self, request: Request) -> None:
            raise Panic("index out of bounds" * 1000)

    worker, sent = playing(Engine())
    worker._prepare(_Adding(asked()))
    worker.inbox.get()()
    (refused,) = sent
    assert isinstance(refused, Left)
    assert str(refused.error).startswith("the request cannot be prepared: index out")
    assert len(str(refused.error)) <= 300


@pytest.mark.parametrize("method", ["prepare", "enqueue"])
def test_a_refused_request_is_let_go_without_the_collector(method: str) -> None:
    class Engine:
        def prepare(self, request: Request) -> list[Any]:
            self.refuse("prepare")
            return []

        def enqueue(self, sequences: list[Any]) -> None:
            self.refuse("enqueue")

        def refuse(self, where: str) -> None:
            if where == method:
                raise RequestError("no")

    worker, sent = playing(Engine())
    gc.disable()
    try:
        adding = _Adding(asked())
        alive = weakref.ref(adding)
        worker._prepare(adding)
        worker.inbox.get()()
        del adding
        assert alive() is None
    finally:
        gc.enable()
    assert str(sent[0].error) == "no"
