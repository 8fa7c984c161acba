"""Hazards of the native step, each in a process of its own.

    python -m tests.support.native_hazards NAME...

A process that comes through says "unharmed" last. Several names are forked, one after the other,
from a process that has imported all and started nothing; it ends at the first that fails.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from array import array
from pathlib import Path

import numpy as np

from outrider import LLM, SamplingParams
from outrider.base.types import Request
from outrider.errors import ModelError
from outrider.native import choice
from outrider.native.cores import Cores
from outrider.native.interface import DraftBudget, DraftNodes
from outrider.native.library import Library
from outrider.native.native_sampling import NativePipeline
from outrider.sampling.pipeline import RequestPipeline
from tests.support import REPOSITORY
from tests.support.loading import native_model

POCKET = REPOSITORY / "src/outrider/pocket/model"
CPU = "cpu"
M_MMAP_THRESHOLD = -3
"""As in glibc's malloc.h: what is at least so large is mapped, and unmapped when it is freed."""


def best() -> Library:
    found = choice.library()
    assert found is not None
    return found


def unstarted() -> Library:
    """The library that ``best`` would start, without its pool."""
    return choice._find(choice.fastest())


class Drafts:
    """A model, a cache and a pipeline of its own, and a long call that uses all three."""

    def __init__(self, length: int, step: Library | None = None) -> None:
        self.length = length
        self.step = step or best()
        self.model = native_model(self.step, POCKET, "float32", 256)
        self.stores = [self.model.new_store(17, 16) for _ in range(2)]
        asked = Request("r", (1, 2, 3), SamplingParams(presence_penalty=0.5), 7)
        self.pipeline = NativePipeline(
            RequestPipeline(asked, self.model.shape.vocab_size), 0, self.step
        )
        self.words = array("i", [3, 0, 0, 16, 1, 0, 3, 0, 1, 2, 3, *range(1, 17)])

    def __call__(self, store: int = 0) -> list[DraftNodes]:
        handles = self.model.handle, self.stores[store].handle
        limits, vocabulary = [DraftBudget(self.length, self.length)], self.model.shape.vocab_size
        return self.step.draft(*handles, self.words, vocabulary, [self.pipeline.handle], limits)


def exits() -> None:
    """The process ends while a daemon thread generates; nothing is freed under it."""

    def told(self: Library, kind: str, handle: int) -> None:
        if ending and threading.current_thread() is threading.main_thread():
            print("freed at exit", flush=True)
        free(self, kind, handle)

    ending: list[bool] = []
    free, Library.free = Library.free, told  # type: ignore[method-assign]
    llm = LLM(POCKET, drafter="model", num_speculative_tokens=4)
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    threading.Thread(target=llm.generate, args=([[5, 6, 7]] * 4, params), daemon=True).start()
    while not llm.engine.counts.steps:
        time.sleep(0.01)
    ending.append(True)


def released() -> None:
    """Model, cache and pipeline are freed while a call is in them."""
    drafts = Drafts(60)
    expected, found = drafts(), []
    thread = threading.Thread(target=lambda: found.append(drafts()))
    before = drafts.step.nanoseconds
    thread.start()
    time.sleep(0.02)
    drafts.step.free("pipeline", drafts.pipeline.handle)
    drafts.step.free("store", drafts.stores[0].handle)
    drafts.step.free("model", drafts.model.handle)
    thread.join()
    assert drafts.step.nanoseconds > before
    assert found == [expected]
    print("unharmed", flush=True)
    os._exit(0)  # what was freed by hand must not be freed again


def forks() -> None:
    """Children of a process whose other thread is in a forward run forwards themselves."""
    drafts = Drafts(20)
    expected = drafts()
    over = threading.Event()

    def keep_busy() -> None:
        while not over.is_set():
            drafts()

    thread = threading.Thread(target=keep_busy)
    thread.start()
    codes = []
    for _ in range(6):
        time.sleep(0.01)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            os._exit(0 if drafts(1) == expected else 1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        if codes[-1]:
            break
    over.set()
    thread.join()
    assert codes == [0] * 6, codes


def together() -> None:
    """Two models draft in two threads while the pool starts, and others come and go."""
    step = unstarted()
    starts = [threading.Thread(target=step.start, args=(3,)) for _ in range(2)]
    for start in starts:
        start.start()
    pairs = [Drafts(12) for _ in range(2)]  # short: the sanitizer of threads takes its time
    expected = [drafts() for drafts in pairs]
    wrong: list[int] = []

    def keep_busy(number: int) -> None:
        for _ in range(2):
            if pairs[number](number) != expected[number]:
                wrong.append(number)

    threads = [threading.Thread(target=keep_busy, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        passing = Drafts(12)
        assert passing() == expected[0]
        del passing
    for thread in (*starts, *threads):
        thread.join()
    assert not wrong


def own_pools() -> list[Drafts]:
    """Two models, each with a pool of its own, and one pipeline of both."""
    cpus = frozenset(os.sched_getaffinity(0))
    pairs = [Drafts(12, best().on(Cores(cpus), 2)) for _ in range(2)]
    pairs[1].pipeline = pairs[0].pipeline
    return pairs


def apart() -> None:
    """Two models draft at once, each in a pool of its own, while others come and go."""
    pairs, expected = own_pools(), Drafts(12)()
    wrong: list[int] = []

    def keep_busy(number: int) -> None:
        for _ in range(3):
            if pairs[number](number) != expected:
                wrong.append(number)

    threads = [threading.Thread(target=keep_busy, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    passing = Drafts(12)
    assert passing() == expected
    del passing
    for thread in threads:
        thread.join()
    assert not wrong


def forks_apart() -> None:
    """A child of a process with pools that others have drafts in its own."""
    pairs = own_pools()
    expected = pairs[0]()
    thread = threading.Thread(target=pairs[1])
    thread.start()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(0 if pairs[0](1) == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    thread.join()


def address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def limit(more: int | None) -> None:
    most = resource.RLIM_INFINITY if more is None else address_space() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def memory() -> None:
    """There is no memory in the middle of work that several threads share."""
    step = unstarted()
    assert step.start(4) == 4
    width, rows = 1 << 20, 8
    asked = Request("r", (1,), SamplingParams(top_p=0.5), 0)
    pipeline = NativePipeline(RequestPipeline(asked, width), 0, step)
    # A third of all tokens are alike and at the edge of the nucleus, so that they are listed.
    z = np.random.default_rng(0).standard_normal((rows, width), np.float32).round()
    paths: list[list[int]] = [[]] * rows
    # Else malloc may have what one round gave back at hand for the next, beyond any limit.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    for _ in range(3):
        broken = z.copy()
        limit(1 << 20)
        told = "there was memory enough"
        try:
            pipeline.apply(broken, [1], paths)
        except ModelError as error:
            told = str(error)
        limit(None)
        assert "not enough memory" in told, told
    whole = pipeline.apply(z.copy(), [1], paths)
    alone = [pipeline.apply(row[None], [1], [[]]) for row in z]
    assert np.array_equal(np.concatenate(alone), whole)


def threads() -> None:
    """The system starts some of the threads that are asked for."""
    step = unstarted()
    limit(40 << 20)
    started = step.start(64)
    limit(None)
    assert 1 <= started < 64, started
    assert step.start(64) == started
    z = np.random.default_rng(0).standard_normal((8, 1 << 16), np.float32)
    keys = [(1, 2, i, 0) for i in range(8)]
    assert step.draw(z, keys, [True] * 8)[0] == z.argmax(1).tolist()


def forked(names: list[str]) -> str | None:
    """Return the one name, or in a forked process the one that it is for; None when all ended."""
    if len(names) == 1:
        return names[0]
    for name in names:
        child = os.fork()
        if child == 0:
            return name
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            sys.exit(f"{name} ended with {code}")
    return None


if __name__ == "__main__":
    known = exits, released, forks, together, apart, forks_apart, memory, threads
    hazards = {f.__name__: f for f in known}
    if chosen := forked(sys.argv[1:]):
        hazards[chosen]()
        print("unharmed", flush=True)
