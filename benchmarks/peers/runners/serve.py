"""The protocol that every runner speaks: JSON lines over stdin and stdout.

First comes ``{"target", "drafter", "dtype", "drafter_dtype", "mode", "lookup", "k",
"threads", "arguments", "context", "parallel"}``: folders or GGUF files, null without a drafter;
mode is plain, draft, ngram or auto, ``lookup`` one of several kinds of ngram ("" for the first);
k is the draft length, 0 in the modes plain and auto; ``arguments`` are words for the peer's
program; ``context`` is the longest prompt plus output, in tokens, and ``parallel``
how many prompts there are at most at a time. The answer is ``{"ready": true, "version"}``. Then,
one at a time, ``{"prompts", "max_tokens", "temperature", "seed", "k", "once"}`` is answered by
``{"ids", "seconds", "first", "peak_memory"}``: output ids by prompt, seconds of the call T(N), of a
call of its own for one token each T(1) (null where ``once`` leaves it out), and bytes. All prompts
start together and take exactly ``max_tokens`` tokens each: EOS is ignored. The i-th has the seed
``seed`` + i. ``k`` is the draft length, at most the first line's, which some peers are told then
and others only at the start. A failure is answered by ``{"error": sentence}``. stdin's end ends the
runner.

Written for the standard library alone, since peers' environments hold nothing of Outrider.
"""

import contextlib
import glob
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

Spec = dict[str, Any]
Ids = list[list[int]]


class Unsupported(Exception):
    """The peer cannot do that; the message says why."""


class Runner(Protocol):
    """A peer with its models loaded, in one mode."""

    version: str

    def generate(self, prompts: Ids, max_tokens: int, options: Spec) -> Ids:
        """Exactly ``max_tokens`` output ids each; ``options`` holds temperature and seed."""
        ...


def processes(root: int) -> list[int]:
    """A process and everything below it."""
    members = [root]
    for process in members:
        for thread in glob.glob(f"/proc/{process}/task/*/children"):
            with contextlib.suppress(OSError):  # it has ended
                members.extend(map(int, Path(thread).read_text().split()))
    return members


def as_many(ids: list[int], count: int) -> list[int]:
    """Return ids cut or filled up to ``count``: a text read again may come to more or fewer."""
    return [*ids, *[-1] * (count - len(ids))][:count]


def peak_memory() -> int:
    """Return bytes: the largest resident sets of this process and those below it, added up."""
    total = 0
    for process in processes(os.getpid()):
        with contextlib.suppress(OSError, IndexError):
            status = Path(f"/proc/{process}/status").read_text()
            total += 1024 * int(status.partition("VmHWM:")[2].split()[0])
    return total


def serve(make: Callable[[Spec], Runner]) -> None:
    """Speak the protocol until stdin ends; ``make`` is called with the first line."""
    # What libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one who started it closes stdin
    runner: Runner | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if runner is None:
                runner = make(request)
                answer(ready=True, version=runner.version)
                continue
            tokens, times = request["max_tokens"], []
            for count in (tokens,) if request["once"] or tokens == 1 else (1, tokens):
                start = time.perf_counter()
                ids = runner.generate(request["prompts"], count, request)
                times.append(time.perf_counter() - start)
            first = None if request["once"] and tokens > 1 else times[0]
            answer(ids=ids, first=first, seconds=times[-1], peak_memory=peak_memory())
        except Exception as error:
            plain = isinstance(error, Unsupported)
            answer(error=str(error) if plain else f"{type(error).__name__}: {error}")
            if runner is None:
                return
