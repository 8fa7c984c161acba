"""AsyncLLM over a worker in its own process: the outputs of LLM, and what happens when it dies."""

import asyncio
import errno
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider import LLM, SamplingParams, async_llm
from outrider.async_llm import AsyncLLM
from outrider.engine.deaths import Deaths
from outrider.engine.process import WorkerProcess
from outrider.engine.worker import SpeculationState, Stepped
from outrider.errors import ConfigError, ModelError, RequestError, WorkerError
from outrider.outputs import RequestOutput
from outrider.types import Event, Origin, Speculation

PROMPTS = ["def greet(name):", "for word in", "the lazy dog", "print(greet("]
PARAMS = [
    SamplingParams(max_tokens=24, temperature=0, seed=2),
    SamplingParams(max_tokens=24, temperature=0.8, seed=3, n=2, logprobs=2),
    SamplingParams(max_tokens=40, temperature=0.8, seed=4, stop=["a", "e"], min_tokens=2),
    SamplingParams(max_tokens=24, seed=5, frequency_penalty=0.5, ignore_eos=True),
]
SOON = 30.0


@asynccontextmanager
async def opened(model: Path, drafter: Any = "auto", **options: Any) -> AsyncIterator[AsyncLLM]:
    llm = AsyncLLM(model, drafter, **options)
    try:
        await llm.start()
        yield llm
    finally:
        llm.shutdown()


async def last(llm: AsyncLLM, prompt: Any, params: SamplingParams, **more: Any) -> RequestOutput:
    return [output async for output in llm.generate(prompt, params, **more)][-1]


async def until(condition: Any) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 4 * SOON))


def test_outputs_are_those_of_llm(tiny_llama: Path, tiny_drafter: Path) -> None:
    """Alone or together, whoever drafts, with text, log probabilities, stop strings and samples."""
    expected = LLM(tiny_llama, drafter=None, max_num_seqs=1).generate(PROMPTS, PARAMS)

    async def work() -> None:
        async with opened(tiny_llama, tiny_drafter) as llm:
            drafters = (None, "ngram", "none", "prediction")
            for drafter in drafters:
                how = Speculation(drafter=drafter, prediction=(5, 9))
                found = await asyncio.gather(
                    *(
                        last(llm, p, q, speculation=how)
                        for p, q in zip(PROMPTS, PARAMS, strict=True)
                    )
                )
                for one, other in zip(found, expected, strict=True):
                    assert [replace(o, origins=[]) for o in one.outputs] == [
                        replace(o, origins=[]) for o in other.outputs
                    ]
                    assert one.prompt_token_ids == other.prompt_token_ids
            assert (
                llm.gauges.pages_used == llm.gauges.running == llm.gauges.waiting == llm.live == 0
            )

    run(work())


def test_a_request_chooses_its_drafter_and_its_length(tiny_llama: Path) -> None:
    async def drafted(llm: AsyncLLM, how: Speculation) -> list[Event]:
        request, _ = llm.request("ab ab ab ab", SamplingParams(max_tokens=30, temperature=0))
        found = []
        async for events in llm.stream(replace(request, speculation=how)):
            found += events
        return found

    async def work() -> None:
        async with opened(tiny_llama, tiny_llama, drafter_quantization="none") as llm:
            assert llm.ready is not None
            assert set(llm.ready.drafters) == {"model", "ngram", "prediction", "none"}
            events = await drafted(llm, Speculation())
            assert {e.drafted.drafter for e in events if e.drafted} == {"model"}
            assert {e.origin for e in events} == {Origin.ACCEPTED, Origin.BONUS, Origin.PLAIN}
            events = await drafted(llm, Speculation(num_speculative_tokens=2))
            assert {e.drafted.depth for e in events if e.drafted} <= {1, 2}
            assert not any(e.drafted for e in await drafted(llm, Speculation(enabled=False)))
            said = tuple(e.token_id for e in events if e.token_id is not None)
            events = await drafted(llm, Speculation(prediction=said))
            assert {e.drafted.drafter for e in events if e.drafted} == {"prediction"}
            (counts,) = (e.counts for e in events if e.counts)
            assert counts.accepted == counts.drafted > 0
            with pytest.raises(ConfigError, match="no drafter 'eagle' here; give one of model, ng"):
                await drafted(llm, Speculation(drafter="eagle"))
            with pytest.raises(ConfigError, match="drafts 4 tokens at most"):
                await drafted(llm, Speculation(num_speculative_tokens=5))

    run(work())


def test_the_switch(tiny_llama: Path) -> None:
    async def work() -> None:
        async with opened(tiny_llama, tiny_llama) as llm:
            params = SamplingParams(max_tokens=12, temperature=0)
            assert (await last(llm, "ab", params)).metrics.drafted > 0
            await llm.set_speculation(SpeculationState(False, "model", 4))
            assert (await last(llm, "ab", params)).metrics.drafted == 0
            await llm.set_speculation(SpeculationState(True, "model", 1))
            assert (await last(llm, "ab", params)).metrics.steps == 6
            for wrong in (SpeculationState(True, "eagle", 4), SpeculationState(True, "model", 9)):
                with pytest.raises(ConfigError):
                    await llm.set_speculation(wrong)

    run(work())


def test_whoever_leaves_frees_the_pages(tiny_llama: Path) -> None:
    async def work() -> None:
        async with opened(tiny_llama) as llm:
            params = SamplingParams(max_tokens=200, ignore_eos=True)
            request, _ = llm.request("ab", params)
            async with aclosing(llm.stream(request)) as stream:
                await anext(stream)
            assert llm.live == 0
            other = await last(llm, "ab", SamplingParams(max_tokens=4))
            assert other.outputs[0].finish_reason
            assert llm.gauges.pages_used == 0

    run(work())


def test_a_wrong_request_harms_nobody(tiny_llama: Path) -> None:
    async def work() -> None:
        async with opened(tiny_llama) as llm:
            form = {"regex": "(unclosed"}
            for prompt, params, text in (
                ([5, 999], SamplingParams(), "vocabulary ends"),
                ("x" * 999, SamplingParams(), "leaves no room"),
                ("ab", SamplingParams(structured_outputs=form), "structured_outputs.regex"),
            ):
                with pytest.raises(RequestError, match=text):
                    await last(llm, prompt, params)
            form = {"choice": ["word", "fox"]}
            found = await last(llm, "ab", SamplingParams(structured_outputs=form, max_tokens=9))
            assert found.outputs[0].text in form["choice"]

    run(work())


def kill_worker(llm: AsyncLLM, number: int = signal.SIGKILL) -> None:
    assert llm._worker is not None
    os.kill(llm._worker.pid, number)


async def death(llm: AsyncLLM, params: SamplingParams, text: str = "killed by signal 9") -> None:
    """Kill the worker while it runs a request."""
    request, _ = llm.request("ab", params)
    stream = llm.stream(request)
    await anext(stream)
    kill_worker(llm)
    with pytest.raises(WorkerError, match=text):
        async for _ in stream:
            pass


def test_a_dead_worker_is_started_again_and_given_up_after_three(tiny_llama: Path) -> None:
    """Deaths under requests are no reason to give up; deaths of an idle worker are."""

    async def work() -> None:
        async with opened(tiny_llama) as llm:
            await llm.set_speculation(SpeculationState(True, "ngram", 2))
            expected = await last(llm, "ab", SamplingParams(max_tokens=9, seed=1))
            for number in range(4):
                await death(llm, SamplingParams(max_tokens=200 + number, ignore_eos=True))
                assert llm.ready is None
                if number == 0:
                    await llm.set_speculation(SpeculationState(True, "ngram", 3))
                again = await last(llm, "ab", SamplingParams(max_tokens=9, seed=1))
                assert again.outputs == expected.outputs
                assert llm.speculation == SpeculationState(True, "ngram", 3)
            assert llm.restarts == 4
            llm._deaths = Deaths()
            for _ in range(3):
                await llm.start()
                kill_worker(llm)
                await until(lambda: llm.ready is None)
            with pytest.raises(WorkerError, match="3 times within 60 s"):
                await llm.start()

    run(work())


def test_a_request_that_kills_alone_is_refused(tiny_llama: Path) -> None:
    """Its id and its seed do not matter; company at its death and its completion clear it."""
    killer, other = (
        SamplingParams(max_tokens=n, ignore_eos=True, temperature=0) for n in (220, 221)
    )

    async def work() -> None:
        async with opened(tiny_llama) as llm:
            await death(llm, killer)
            await last(llm, "ab", killer)
            await death(llm, killer)
            request, _ = llm.request("cd", other)
            company = llm.stream(request)
            await anext(company)
            await death(llm, killer)
            with pytest.raises(WorkerError):
                await anext(company)
            await company.aclose()
            llm._deaths = Deaths()
            await death(llm, killer)
            with pytest.raises(RequestError, match="ran alone, so the request is refused"):
                await last(llm, "ab", killer)
            assert (await last(llm, "ab", other)).outputs[0].finish_reason == "length"

    run(work())


def test_a_client_that_leaves_does_not_hide_that_its_request_killed(tiny_llama: Path) -> None:
    async def work() -> None:
        async with opened(tiny_llama) as llm:
            for number in range(3):
                request, _ = llm.request("ab", SamplingParams(max_tokens=200 + number))
                await llm.start()
                kill_worker(llm, signal.SIGSTOP)
                task = asyncio.create_task(anext(llm.stream(request)))
                await asyncio.sleep(0.2)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                kill_worker(llm)
                await until(lambda: llm.ready is None)
                llm._deaths._recent.clear()
            await llm.start()
            assert llm.restarts == 3

    run(work())


def test_events_in_any_order(tiny_llama: Path) -> None:
    """A client that leaves before the engine is ready, an id used again, and the end of it all."""

    async def work() -> None:
        llm = AsyncLLM(tiny_llama)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(last(llm, "ab", SamplingParams(max_tokens=3)), 0.01)
        assert llm.live == 0
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        for _ in range(20):
            request, _ = llm.request("ab", params, "same")
            async with aclosing(llm.stream(request)) as stream:
                await anext(stream)
        assert len((await last(llm, "ab", params, request_id="same")).outputs[0].token_ids) == 100
        await until(lambda: not llm._engaged)
        assert llm.gauges.pages_used == 0
        pending = asyncio.create_task(last(llm, "ab", params))
        kill_worker(llm)
        llm.shutdown()
        llm.shutdown()
        with pytest.raises(WorkerError, match="shut down"):
            await pending
        with pytest.raises(WorkerError, match="shut down"):
            await last(llm, "ab", params)
        loading = AsyncLLM(tiny_llama)
        waiting = asyncio.create_task(loading.start())
        await asyncio.sleep(0.1)
        loading.shutdown()
        with pytest.raises(WorkerError, match="shut down"):
            await waiting

    run(work())


def test_a_system_without_files_is_asked_again(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [OSError(errno.EMFILE, "Too many open files")] * 2

    def start(*args: Any) -> WorkerProcess:
        if left:
            raise left.pop()
        return WorkerProcess(*args)

    async def work() -> None:
        monkeypatch.setattr(async_llm, "WorkerProcess", start)
        llm = AsyncLLM(tiny_llama)
        llm.launch()
        assert "cannot be started ([Errno 24] Too many open files)" in str(llm.trouble)
        await llm.start()
        assert llm.trouble is None
        llm.shutdown()

    run(work())


def test_an_observer_that_fails_is_logged_once(
    tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no")

    async def work() -> None:
        async with opened(tiny_llama) as llm:
            seen: list[Stepped] = []
            llm.observers += [fail, lambda step, _: seen.append(step)]
            found = await last(llm, "ab", SamplingParams(max_tokens=9, ignore_eos=True))
            assert len(found.outputs[0].token_ids) == 9
            assert len(seen) > 1

    with caplog.at_level(logging.ERROR, "outrider"):
        run(work())
    assert sum("observer" in r.message for r in caplog.records) == 1


FORGETS = """
import asyncio, sys
from outrider import AsyncLLM

if __name__ == "__main__":
    llm = AsyncLLM(sys.argv[1])
    asyncio.run(llm.start())
    print("done")
"""


def test_a_program_that_forgets_the_engine_ends(tiny_llama: Path, tmp_path: Path) -> None:
    script = tmp_path / "forgets.py"
    script.write_text(FORGETS)
    words = [sys.executable, str(script), str(tiny_llama)]
    found = subprocess.run(words, capture_output=True, text=True, timeout=4 * SOON, check=True)
    assert found.stdout == "done\n"


def test_what_cannot_be_loaded_says_so(tiny_llama: Path, tmp_path: Path) -> None:
    async def work() -> None:
        with pytest.raises(ModelError):
            AsyncLLM(tmp_path / "absent")
        llm = AsyncLLM(tiny_llama, memory=1)
        with pytest.raises(Exception, match="cache pages"):
            await llm.start()
        llm.shutdown()

    run(work())


def test_vllms_arguments(tiny_llama: Path) -> None:
    args = SimpleNamespace(model=str(tiny_llama), speculative_model="[ngram]", max_num_seqs=3)
    with pytest.warns(FutureWarning, match="is an old"):
        llm = AsyncLLM.from_engine_args(args)
    assert (llm.intake.spec.name, llm.config.max_num_seqs) == ("ngram", 3)
