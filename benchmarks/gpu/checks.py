"""Checks in processes of their own: what one does to the device is gone with it, and so is a hang.

A check is a generator of parts. Time is looked at between parts, and a process that outstays its
seconds is killed, so that all checks together end in time.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any, Literal, NamedTuple

Verdict = Literal["passed", "failed", "skipped"]
STOPS_AT = 0.85
"""Of its seconds, what a check begins new parts in."""
KILL_SECONDS = 5.0


@dataclass(frozen=True)
class Part:
    """A part of a check: its figures, and what is ``wrong``, None where nothing is."""

    name: str
    figures: dict[str, Any]
    wrong: str | None = None


class Check(NamedTuple):
    """A check by name: the generator ``where`` ("module:function") gets the device's name.

    ``weight`` is its share of the time beside those of the others.
    """

    name: str
    where: str
    weight: float


class End(NamedTuple):
    """The end of a check: its verdict, with the reason where that is not plain."""

    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True)
class Result:
    """The outcome of a check: its end, its seconds and its parts."""

    name: str
    end: End
    seconds: float
    parts: list[Part] = field(default_factory=list)


class Skipped(Exception):
    """A check cannot be made here, for the reason that it says."""


def _work(where: str, device: str, seconds: float, said: Connection) -> None:
    """Send a check's parts as they come, and then its end."""
    begin, longest, made = monotonic(), 0.0, 0
    module, _, name = where.partition(":")
    end = End("passed")
    try:
        check: Callable[[str], Iterator[Part]] = getattr(import_module(module), name)
        before = begin
        for part in check(device):
            said.send(part)
            made, now = made + 1, monotonic()
            longest, before = max(longest, now - before), now
            if now - begin + longest > STOPS_AT * seconds:
                end = End("passed", f"stopped after part {made}, since its time was nearly up")
                break
    except Skipped as why:
        end = End("skipped", str(why))
    except Exception as error:
        end = End("failed", f"{type(error).__name__}: {error}")
    said.send(end)


class Processes:
    """Runs checks; every process is forked from one that has imported ``modules`` once."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*modules])

    def run(self, check: Check, device: str, seconds: float) -> Result:
        """Return what became of a check within ``seconds``."""
        begin = monotonic()
        heard, said = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=_work, args=(check.where, device, seconds, said), daemon=True
        )
        process.start()
        said.close()
        parts: list[Part] = []
        end: End | None = None
        while end is None:
            try:
                if heard.poll(max(0.0, begin + seconds - monotonic())):
                    message = heard.recv()
                    if isinstance(message, Part):
                        parts.append(message)
                    else:
                        end = message
                else:
                    end = End("failed", f"did not end within {seconds:.0f} s")
            except EOFError:
                process.join(KILL_SECONDS)
                end = End("failed", f"its process ended with code {process.exitcode}")
        process.join(KILL_SECONDS if end.verdict != "failed" else 0)
        process.kill()
        process.join(KILL_SECONDS)
        wrong = [f"{part.name}: {part.wrong}" for part in parts if part.wrong]
        if wrong and end.verdict != "failed":
            end = End("failed", "; ".join(wrong))
        return Result(check.name, end, monotonic() - begin, parts)
