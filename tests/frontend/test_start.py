"""The start of an engine: who reads the tokenizer and how often, errors, and spare time."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
from gguf import GGMLQuantizationType as Kind

from outrider import LLM, SamplingParams
from outrider.async_llm import AsyncLLM
from outrider.checkpoints import unread
from outrider.checkpoints.formats.gguf_tokenizer import gguf_tokenizer
from outrider.engine.setup import set_up
from outrider.engine.worker import process, spare_time
from outrider.errors import ModelError
from outrider.frontend.inputs import InputProcessor
from outrider.params import StructuredOutputsParams
from tests.support.ggufs import SIZES, byte_level, convert

Make = Callable[..., Path]


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose tokenizers were built."""
    built: list[str] = []
    build = gguf_tokenizer

    def counted(file: Any) -> Any:
        built.append(str(file.path))
        return build(file)

    monkeypatch.setattr(unread, "gguf_tokenizer", counted)
    return built


def made(make_checkpoint: Make, folder: Path, damage: str | None = None) -> Path:
    """A GGUF file with a tokenizer, whose merges may be damaged."""
    source = make_checkpoint(folder / "source", "llama", tokenizer=True, **SIZES)

    def override(writer: gguf.GGUFWriter) -> None:
        byte_level()(writer)
        if damage:
            writer.kv_data[0]["tokenizer.ggml.merges"].value[0] = damage

    return convert(source, folder / "a.gguf", Kind.F32, override)[0]


def test_the_worker_builds_no_tokenizer_and_the_frontend_one(
    make_checkpoint: Make, tmp_path: Path, builds: list[str]
) -> None:
    path = made(make_checkpoint, tmp_path)
    setup = set_up(path, str(path), {})
    sent = pickle.dumps(setup.facts)
    assert not builds
    assert len(sent) < 10_000
    inputs = InputProcessor(pickle.loads(sent))
    assert len(builds) == 1
    assert inputs.codec is not None
    assert inputs.encode("hi")


def test_one_process_builds_one_tokenizer(
    make_checkpoint: Make, tmp_path: Path, builds: list[str]
) -> None:
    llm = LLM(made(make_checkpoint, tmp_path), drafter=None, memory="16MiB")
    form = StructuredOutputsParams(regex="a+")
    params = SamplingParams(max_tokens=3, structured_outputs=form, stop=["zzz"])
    (output,) = llm.generate("hi", params)
    assert set(output.outputs[0].text) == {"a"}
    assert len(builds) == 1


def test_a_damaged_tokenizer_is_one_sentence_and_no_process(
    make_checkpoint: Make, tmp_path: Path
) -> None:
    path = made(make_checkpoint, tmp_path, damage="nosuchtoken alike")
    workers: list[process.WorkerProcess] = []
    with pytest.raises(ModelError, match="tokenizer") as error:
        _Watched(workers, path)
    assert "\n" not in str(error.value)
    (worker,) = workers
    worker._process.join(20)
    assert worker._process.exitcode is not None


class _Watched(AsyncLLM):
    def __init__(self, workers: list[process.WorkerProcess], path: Path) -> None:
        self._workers = workers
        super().__init__(path, None)

    def _new_worker(self) -> process.WorkerProcess:
        self._workers.append(super()._new_worker())
        return self._workers[-1]


def test_an_early_worker_is_the_first_one() -> None:
    with process.early_worker():
        (early,) = process._early
        llm = AsyncLLM(drafter=None, memory="16MiB")
        assert llm._worker is not None
        assert llm._worker._process is early[0]
        try:
            asyncio.run(_first_token(llm))
        finally:
            llm.shutdown()


async def _first_token(llm: AsyncLLM) -> None:
    async for output in llm.generate("a", SamplingParams(max_tokens=1)):
        assert output.outputs[0].token_ids


def test_an_early_worker_that_nobody_wants_is_killed() -> None:
    with process.early_worker():
        ((child, _),) = process._early
    child.join(20)
    assert child.exitcode is not None
    assert not process._early


def spare(monkeypatch: pytest.MonkeyPatch, later: Iterator[None]) -> spare_time.SpareTime:
    monkeypatch.setattr(spare_time, "IDLE_SECONDS", 0.01)
    drafting = SimpleNamespace(drafters={})
    engine: Any = SimpleNamespace(model=None, drafting=drafting, later=later)
    return spare_time.SpareTime(engine)


def test_calls_come_before_spare_work(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def work() -> Iterator[None]:
        for number in range(3):
            done.append(number)
            if number == 1:
                inbox.put(os.getpid)  # a request comes in the middle
            yield
        inbox.put(os.getcwd)

    waits = spare(monkeypatch, work())
    inbox.put(os.getpid)
    assert waits.wait(inbox) is os.getpid
    assert not done
    assert waits.wait(inbox) is os.getpid
    assert done == [0, 1]
    assert waits.wait(inbox) is os.getcwd
    assert done == [0, 1, 2]


def test_spare_work_that_fails_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def work() -> Iterator[None]:
        inbox.put(os.getpid)
        raise ValueError("no")
        yield

    assert spare(monkeypatch, work()).wait(inbox) is os.getpid
    waits = spare(monkeypatch, work())
    waits._step()
    waits._step()
    assert waits._done
    assert "could not use its spare time" in caplog.text
