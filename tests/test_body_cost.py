"""A body costs the server no more than its size warrants, in time and in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hostile_bodies import HOSTILE

from outrider.bench.served import Served

MIB = 1 << 20
MOST_MEMORY = 200 * MIB
LONGEST_WAIT = 2.5
"""Ten times what a server promises, for a machine that does other things as well."""
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def strict(tiny_llama: Path) -> Iterator[Served]:
    """A server that runs one sequence and has room for four more to wait."""
    with Served(
        tiny_llama, "--drafter", "ngram", "--max-num-seqs", "1", "--max-queued-requests", "4"
    ) as server:
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, timeout=60)
        yield server


def peak(server: Served) -> int:
    """The most bytes that server and engine held at a time, each for itself."""
    total = 0
    for process in (server.process.pid, server.engine()):
        status = Path(f"/proc/{process}/status").read_text()
        total += 1024 * int(status.partition("VmHWM:")[2].split()[0])
    return total


class Pulse:
    """Asks for /health again and again; ``longest`` is how long an answer took at most."""

    def __init__(self, url: str) -> None:
        self.longest = 0.0
        self._url = f"{url}/health"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _ask(self) -> None:
        with httpx.Client(timeout=60) as client:
            while not self._over.wait(0.01):
                begin = time.monotonic()
                assert client.get(self._url).status_code == 200
                self.longest = max(self.longest, time.monotonic() - begin)


def test_no_hostile_body_takes_much_time_or_memory(strict: Served) -> None:
    before, slow, wrong = strict.memory(), {}, {}
    with httpx.Client(timeout=60) as client:
        for name, (path, make) in HOSTILE.items():
            raw = make()
            assert len(raw) <= 4 * MIB, name
            with Pulse(strict.url) as pulse:
                found = client.post(strict.url + path, content=raw, headers=JSON)
            told = found.json().get("error", {})
            if found.status_code != 400 or len(told.get("message", "x" * 999)) > 300:
                wrong[name] = (found.status_code, found.text[:400])
            if pulse.longest > LONGEST_WAIT:
                slow[name] = pulse.longest
            assert peak(strict) - before < MOST_MEMORY, name
    assert not wrong
    assert not slow
