"""Workers that only play, for tests of what stands before them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar

import pytest

from outrider import async_llm
from outrider.async_llm import AsyncLLM
from outrider.base.types import Event, Origin
from outrider.engine.control.switch import SpeculationState
from outrider.engine.setup import set_up
from outrider.engine.worker.messages import Gauges, Ready, Stepped
from outrider.engine.worker.restarts import Deaths

STATE = SpeculationState(True, "ngram", 4)
SOON = 120.0


class Player:
    """Stands for ``WorkerProcess``: keeps what it is sent, and answers what a test wants."""

    lives: ClassVar[list[Player]] = []
    failures: ClassVar[list[OSError]] = []

    def __init__(self, spec: Any, generation: int, take: Any, ended: Any) -> None:
        if self.failures:
            raise self.failures.pop()
        self.spec = spec
        self.generation = generation
        self.take = take
        self.ended = ended
        self.sent: list[Any] = []
        self.killed = False
        self.unsent: set[object] = set()
        self.lives.append(self)
        take(self, set_up(spec.model, spec.drafter, spec.options).facts)

    def ready(self) -> None:
        self.take(self, Ready(("ngram", "none"), ("ngram", "none"), STATE, "budget", 999, 256, 4))

    def send(self, command: Any, key: object) -> None:
        self.sent.append(command)

    def withdraw(self, key: object) -> bool:
        return key in self.unsent

    def kill(self) -> None:
        self.killed = True

    def die(self, code: int = -9) -> None:
        self.ended(self, code)

    def step(self, *ids: str, end: bool = False) -> None:
        reason = "length" if end else None
        events = [Event(id, 0, 5, "", Origin.PLAIN, finish_reason=reason) for id in ids]
        self.take(self, Stepped(events, Gauges(generation=self.generation)))


def played(monkeypatch: pytest.MonkeyPatch) -> list[Player]:
    """Have players stand for workers; return every one so far. Starts follow without a pause."""
    monkeypatch.setattr(async_llm, "WorkerProcess", Player)
    monkeypatch.setattr(Deaths, "pause", 0.0)
    monkeypatch.setattr(Player, "lives", [])
    monkeypatch.setattr(Player, "failures", [])
    return Player.lives


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Return a test that runs in an event loop."""

    @wraps(test)
    def runs(*arguments: Any, **more: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **more), SOON))

    return runs


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def opened(folder: Path, lives: list[Player]) -> AsyncLLM:
    llm = AsyncLLM(folder)
    llm.launch()
    lives[-1].ready()
    await llm.start()
    return llm


async def start_again(llm: AsyncLLM, lives: list[Player]) -> None:
    """Let the worker of the next life be ready."""
    await settle()
    lives[-1].ready()
    await llm.start()
