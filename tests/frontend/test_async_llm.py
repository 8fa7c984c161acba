"""AsyncLLM over a worker in its own process: the outputs of LLM, and what happens when it dies."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import generate_latest

from outrider import LLM, SamplingParams
from outrider.async_llm import AsyncLLM
from outrider.base.types import Event, Origin, Speculation
from outrider.engine.control.switch import SpeculationState
from outrider.engine.worker.process import refuse_unguarded
from outrider.errors import ConfigError, ModelError, RequestError, WorkerError
from outrider.frontend.outputs import RequestOutput
from outrider.server.metrics import Metrics

PROMPTS = ["def greet(name):", "for word in", "the lazy dog", "print(greet("]
PARAMS = [
    SamplingParams(max_tokens=24, temperature=0, seed=2),
    SamplingParams(max_tokens=24, temperature=0.8, seed=3, n=2, logprobs=2),
    SamplingParams(max_tokens=40, temperature=0.8, seed=4, stop=["a", "e"], min_tokens=2),
    SamplingParams(max_tokens=24, seed=5, frequency_penalty=0.5, ignore_eos=True),
]
SOON = 120.0


FOUR: Any = {"num_speculative_tokens": 4}


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
    asyncio.run(asyncio.wait_for(work, 2 * SOON))


Work = Callable[[AsyncLLM], Coroutine[Any, Any, None]]


@contextmanager
def runner(model: Path, drafter: Any = "auto", **options: Any) -> Iterator[Callable[[Work], None]]:
    """Run work with an engine that several tests share; each leaves it as it was."""
    llm = AsyncLLM(model, drafter, **options)
    with asyncio.Runner() as loop:
        try:
            loop.run(asyncio.wait_for(llm.start(), 2 * SOON))
            yield lambda work: loop.run(asyncio.wait_for(work(llm), 2 * SOON))
        finally:
            llm.shutdown()


@pytest.fixture(scope="module")
def shared(tiny_llama: Path) -> Iterator[Callable[[Work], None]]:
    with runner(tiny_llama) as run:
        yield run


@pytest.fixture(scope="module")
def drafting(tiny_llama: Path) -> Iterator[Callable[[Work], None]]:
    """The same with the target as its own drafter, up to four tokens."""
    with runner(tiny_llama, tiny_llama, drafter_quantization="none", **FOUR) as run:
        yield run


def test_outputs_are_those_of_llm(tiny_llama: Path, tiny_drafter: Path) -> None:
    """Alone or together, whoever drafts, with text, log probabilities, stop strings and samples."""
    expected = LLM(tiny_llama, drafter=None, max_num_seqs=1).generate(PROMPTS, PARAMS)

    async def work() -> None:
        async with opened(tiny_llama, tiny_drafter) as llm:
            drafters = (None, "ngram", "suffix", "none", "prediction")
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


def test_a_request_chooses_its_drafter_and_its_length(drafting: Callable[[Work], None]) -> None:
    async def drafted(llm: AsyncLLM, how: Speculation) -> list[Event]:
        params = SamplingParams(max_tokens=30, temperature=0)
        return [event async for event in llm.stream("ab ab ab ab", params, speculation=how)]

    async def work(llm: AsyncLLM) -> None:
        assert llm.ready is not None
        assert set(llm.ready.drafters) == {"model", "ngram", "suffix", "prediction", "none"}
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

    drafting(work)


def test_outputs_tell_what_runs_and_what_was_cached(shared: Callable[[Work], None]) -> None:
    async def work(llm: AsyncLLM) -> None:
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        outputs = [output async for output in llm.generate([5] * 40, params, "mine")]
        assert {output.request_id for output in outputs} == {"mine"}
        assert not outputs[0].finished
        assert outputs[0].outputs[0].finish_reason is None
        assert not outputs[0].outputs[0].finished()
        assert outputs[-1].finished
        assert outputs[-1].num_cached_tokens == 0
        again = await last(llm, [5] * 40, params)
        assert again.num_cached_tokens == 32  # two full pages
        events = [event async for event in llm.stream([5] * 40, params)]
        assert [e.token_id for e in events] == again.outputs[0].token_ids
        assert "".join(e.text for e in events) == again.outputs[0].text

    shared(work)


def test_the_switch(drafting: Callable[[Work], None]) -> None:
    async def work(llm: AsyncLLM) -> None:
        params = SamplingParams(max_tokens=12, temperature=0)
        assert (await last(llm, "ab", params)).metrics.drafted > 0
        await llm.set_speculation(SpeculationState(False, "model", 4))
        assert (await last(llm, "ab", params)).metrics.drafted == 0
        await llm.set_speculation(SpeculationState(True, "model", 1))
        assert (await last(llm, "ab", params)).metrics.steps == 6
        await llm.set_speculation(SpeculationState(True, "model", None))  # up to its four
        assert (await last(llm, "ab", params)).metrics.steps < 6
        for wrong in (SpeculationState(True, "eagle", 4), SpeculationState(True, "model", 9)):
            with pytest.raises(ConfigError):
                await llm.set_speculation(wrong)
        await llm.set_speculation(SpeculationState(True, "model", 4))

    drafting(work)


def test_whoever_leaves_frees_the_pages(shared: Callable[[Work], None]) -> None:
    async def work(llm: AsyncLLM) -> None:
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        async with aclosing(llm.stream("ab", params)) as stream:
            await anext(stream)
        assert llm.live == 0
        other = await last(llm, "ab", SamplingParams(max_tokens=4))
        assert other.outputs[0].finish_reason
        assert llm.gauges.pages_used == 0

    shared(work)


def test_a_wrong_request_harms_nobody(shared: Callable[[Work], None]) -> None:
    async def work(llm: AsyncLLM) -> None:
        form = {"regex": "(unclosed"}
        for prompt, params, text in (
            ([5, 999], SamplingParams(), "vocabulary ends"),
            ("x" * 999, SamplingParams(), "longer than the model's context length"),
            ("ab", SamplingParams(structured_outputs=form), "structured_outputs.regex"),
        ):
            with pytest.raises(RequestError, match=text):
                await last(llm, prompt, params)
        form = {"choice": ["word", "fox"]}
        found = await last(llm, "ab", SamplingParams(structured_outputs=form, max_tokens=9))
        assert found.outputs[0].text in form["choice"]

    shared(work)


def counted(metrics: Metrics) -> dict[str, float]:
    """Every counter by its name and labels."""
    lines = [
        line for line in generate_latest(metrics.registry).decode().splitlines() if "_total" in line
    ]
    return {k: float(v) for k, v in (x.rsplit(" ", 1) for x in lines if not x.startswith("#"))}


def test_a_dead_worker_is_started_again(tiny_llama: Path) -> None:
    """The switch and the metrics go on, and the outputs are the same."""

    async def work() -> None:
        async with opened(tiny_llama) as llm:
            metrics = Metrics(llm, "tiny", {})
            await llm.set_speculation(SpeculationState(True, "ngram", 2))
            params = SamplingParams(max_tokens=9, seed=1, ignore_eos=True)
            expected = [await last(llm, [5] * 40, params) for _ in range(3)][-1]
            before = counted(metrics)
            assert before['vllm:prefix_cache_hits_total{engine="0",model_name="tiny"}'] > 0
            stream = llm.stream("ab", SamplingParams(max_tokens=200, ignore_eos=True, n=64))
            await anext(stream)
            assert llm._worker is not None
            os.kill(llm._worker._process.pid or 0, signal.SIGKILL)
            with pytest.raises(WorkerError, match="killed by signal 9"):
                async for _ in stream:
                    pass
            assert llm.ready is None
            await llm.set_speculation(SpeculationState(True, "ngram", 3))
            await last(llm, [6] * 200, params)  # more rows than all before, and no hit
            middle = counted(metrics)
            assert (await last(llm, [5] * 40, params)).outputs == expected.outputs
            after = counted(metrics)
            assert all(before[k] <= middle[k] <= after[k] for k in before)
            queried = 'vllm:prefix_cache_queries_total{engine="0",model_name="tiny"}'
            assert before[queried] + 200 <= middle[queried] < after[queried]
            assert llm.speculation == SpeculationState(True, "ngram", 3)
            assert llm.restarts == 1

    run(work())


def test_an_id_may_be_used_again_at_once(shared: Callable[[Work], None]) -> None:
    async def work(llm: AsyncLLM) -> None:
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        for _ in range(20):
            async with aclosing(llm.stream("ab", params, "same")) as stream:
                await anext(stream)
        found = await last(llm, "ab", params, request_id="same")
        assert len(found.outputs[0].token_ids) == 100
        await until(lambda: not llm._engaged)
        assert llm.gauges.pages_used == 0

    shared(work)


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
    found = subprocess.run(words, capture_output=True, text=True, timeout=2 * SOON, check=True)
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
    llm.shutdown()
    assert (llm.inputs.drafter, llm.config.max_num_seqs) == ("ngram", 3)


SCRIPT = """
import asyncio
from outrider import AsyncLLM

async def main():
    await AsyncLLM({model!r}).start()

asyncio.run(main())
"""


def test_a_script_without_a_guard_is_told_so_once(tiny_llama: Path, tmp_path: Path) -> None:
    """The worker imports the script, which would start an engine again."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(model=str(tiny_llama)))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=2 * SOON
    )
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1  # of the error itself, in the script
    last = done.stderr.splitlines()[-1]
    assert f"imports {script}, which starts an engine again" in last
    assert 'if __name__ == "__main__":' in last
    assert "bootstrapping" not in done.stderr


def test_another_spawned_process_is_told_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(WorkerError, match="if __name__"):
        refuse_unguarded()
