"""A real worker that is stopped, hangs or fails: the front goes on, and starts another."""

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx import ASGITransport

from outrider import SamplingParams
from outrider.async_llm import AsyncLLM
from outrider.engine.worker import heartbeat
from outrider.engine.worker.restarts import Deaths
from outrider.errors import WorkerError
from outrider.server.app import create_app
from outrider.server.build import build
from outrider.server.options import resolve

SILENT, WORK = 6, 4
SOON = 120.0


HOSTILE = """
import time

def hang(ids, logits):
    time.sleep(9999)

def leave(ids, logits):
    raise SystemExit("no more steps")
"""
"""Logits processors: one never returns, one fails as no request may."""


def worker_of(llm: AsyncLLM) -> int:
    assert llm._worker is not None
    return llm._worker._process.pid or 0


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def whole(llm: AsyncLLM, prompt: Any, **params: Any) -> int:
    asked = SamplingParams(max_tokens=4, ignore_eos=True, **params)
    found = [output async for output in llm.generate(prompt, asked)]
    return len(found[-1].outputs[0].token_ids)


async def stopped(llm: AsyncLLM, client: httpx.AsyncClient) -> None:
    """Stop the worker and call it: the front goes on, ``/health`` tells, another comes."""
    os.kill(worker_of(llm), signal.SIGSTOP)
    calls = [asyncio.create_task(whole(llm, [5] * 240, seed=n)) for n in range(1000)]
    worst, codes, texts = 0.0, set(), set()
    while llm.ready is not None:
        begin = time.monotonic()
        found = await client.get("/health")
        worst = max(worst, time.monotonic() - begin)
        codes.add(found.status_code)
        texts.add(found.text)
        await asyncio.sleep(0.05)
    assert worst < SILENT  # whoever waits for the worker waits so long
    assert codes == {200, 503}
    assert any("the engine has not answered for" in text for text in texts)
    for found in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(found, WorkerError)
        assert "the engine hung while the request ran" in str(found)
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/ready")).status_code == 503
    assert await whole(llm, "ab") == 4
    assert (await client.get("/ready")).status_code == 200


async def broken(llm: AsyncLLM) -> None:
    """Break the step, then the reading thread: each ends the process in order."""
    hostile = importlib.import_module("hostile")
    with pytest.raises(WorkerError, match="ended with code 1 while the request ran"):
        await whole(llm, "ab", logits_processors=[hostile.leave])
    with pytest.raises(WorkerError, match="the engine hung while the request ran"):
        await whole(llm, "ab", logits_processors=[hostile.hang])
    assert await whole(llm, "ab") == 4
    assert llm._worker is not None
    llm._worker._outbox.put(b"no pickle", "garbage")
    await until(lambda: llm.ready is None)
    await until(lambda: llm._worker is not None)


def test_a_worker_that_is_stopped_fails_or_hangs(
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "hostile.py").write_text(HOSTILE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(heartbeat, "SILENT_SECONDS", SILENT)
    monkeypatch.setattr(heartbeat, "WORK_SECONDS", WORK)

    async def work() -> None:
        llm, settings = build(tiny_llama, "tiny", resolve({}, {}, None))
        client = httpx.AsyncClient(
            transport=ASGITransport(create_app(llm, settings)), base_url="http://localhost"
        )
        await llm.start()
        await stopped(llm, client)
        llm._deaths = Deaths()
        await broken(llm)
        pid = worker_of(llm)
        os.kill(pid, signal.SIGSTOP)
        llm.shutdown()
        await until(lambda: gone(pid))

    with caplog.at_level(logging.ERROR, "outrider"):
        asyncio.run(asyncio.wait_for(work(), 4 * SOON))
    text = caplog.text
    assert "the engine failed: SystemExit: no more steps\nTraceback" in text
    assert "the engine failed: UnpicklingError" in text
    assert "the engine has been in one step for" in text
    assert "the engine has not answered for" in text


def gone(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return False
    return True
