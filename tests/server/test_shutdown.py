"""The end of a server: what runs is finished, what comes is refused."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Barrier
from typing import Any

import httpx
import pytest

from benchmarks.served import Served, engine_of
from outrider.base.stderr import Stderr
from outrider.server.run import SIGNALS, heed
from tests.support import forked

STREAMS = 24
BODY: dict[str, Any] = {
    "prompt": "a", "max_tokens": 250, "ignore_eos": True, "stream": True, "n": 4,
}  # fmt: skip


def streaming(server: Served, body: dict[str, Any]) -> AbstractContextManager[httpx.Response]:
    return httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60)


@contextlib.contextmanager
def terminated(server: Served, number: int = signal.SIGTERM) -> Iterator[Iterator[str]]:
    """Yield the lines of a long stream behind the first, at which the server gets a signal."""
    with streaming(server, BODY | {"prompt": ["a", "b"], "n": 128}) as stream:
        lines = stream.iter_lines()
        next(lines)
        server.process.send_signal(number)
        yield lines


def ended_quietly(server: Served) -> None:
    assert server.stop() == 0
    said = "\n".join(server.lines)
    assert "leaked" not in said
    assert "Traceback" not in said


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def metrics_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def servers(tiny_llama: Path, metrics_port: int) -> Iterator[dict[str, Served]]:
    """Servers to end, made side by side; what "drains" has its metrics at a port of their own.

    One is started as everybody starts it: its resource tracker would tell what it leaves behind.
    """
    options: dict[str, tuple[type[Served], *tuple[str, ...]]] = {
        "loaded": (Served, "--max-num-seqs", "16"),
        "drains": (forked.Served, "--metrics-port", str(metrics_port)),
        "is cut": (forked.Served, "--shutdown-timeout", "0"),
    }
    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
        coming = {n: pool.submit(kind, tiny_llama, *more) for n, (kind, *more) in options.items()}
        yield {name: stack.enter_context(one.result()) for name, one in coming.items()}


def test_sigterm_under_load_loses_no_stream(servers: dict[str, Served]) -> None:
    begun, server = Barrier(STREAMS + 1), servers["loaded"]
    with ThreadPoolExecutor(STREAMS) as pool:

        def stream(seed: int) -> list[str]:
            body = BODY | {"seed": seed}
            with streaming(server, body) as s:
                begun.wait(60)
                return [line for line in s.iter_lines() if line]

        def call() -> list[str]:
            assert httpx.get(f"{server.url}/ready").status_code == 200
            done = [pool.submit(stream, i) for i in range(STREAMS)]
            begun.wait(60)
            server.process.send_signal(signal.SIGTERM)
            return [line for one in done for line in one.result(60)]

        # Whoever has an answer's headers has its first token: all of them run.
        lines = call()
        assert lines.count("data: [DONE]") == STREAMS
        assert sum('"finish_reason":"length"' in line for line in lines) == STREAMS * 4
        assert not any('"error"' in line for line in lines)
        ended_quietly(server)


def test_metrics_may_have_a_port_of_their_own(
    servers: dict[str, Served], metrics_port: int
) -> None:
    server, url = servers["drains"], f"http://127.0.0.1:{metrics_port}"
    assert httpx.get(f"{server.url}/metrics").status_code == 404
    assert "vllm:num_requests_running" in httpx.get(f"{url}/metrics").text
    assert httpx.get(f"{url}/v1/models").status_code == 404
    foreign = {"Host": "evil.example"}
    assert httpx.get(f"{url}/metrics", headers=foreign).status_code == 403
    found = httpx.get(f"{server.url}/v1/models", headers={"Origin": "http://elsewhere"})
    assert not any(name.startswith("access-control") for name in found.headers)


def test_while_it_drains_it_is_not_ready_and_takes_nothing(servers: dict[str, Served]) -> None:
    server = servers["drains"]
    with terminated(server) as lines:
        deadline = time.monotonic() + 60
        while (ready := httpx.get(f"{server.url}/ready")).status_code != 503:
            assert time.monotonic() < deadline
        assert ready.headers["Retry-After"] == "1"
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503
        assert "shutting down" in refused.json()["error"]["message"]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) is not None
        with pytest.raises(httpx.HTTPError):
            for _ in lines:
                pass
    ended_quietly(server)


def test_a_stream_longer_than_the_timeout_is_cut(servers: dict[str, Served]) -> None:
    server = servers["is cut"]
    with terminated(server, signal.SIGINT) as lines:
        last = [line for line in lines if line][-2:]
    assert "the engine was shut down" in last[0]
    assert last[1] == "data: [DONE]"
    ended_quietly(server)


def serve(
    model: Path, *options: str, before: Sequence[str] = (), **given: Any
) -> tuple[str, subprocess.Popen[str]]:
    """A server on a free port that may not be up yet, and its address."""
    port = free_port()
    words = [
        *before,
        sys.executable,
        "-m",
        "outrider",
        "serve",
        str(model),
        "--port",
        str(port),
        *options,
    ]
    return f"http://127.0.0.1:{port}", subprocess.Popen(words, text=True, **given)


@contextlib.contextmanager
def ending(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill in the end a process that a failure leaves, which ``Popen`` would wait for."""
    with process:
        try:
            yield
        finally:
            process.kill()


def await_status(url: str, status: int = 200) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url).status_code == status:
                return
        time.sleep(0.1)
    raise AssertionError(f"{url} does not answer {status}")


def test_sigterm_while_it_loads_ends_it(tiny_llama: Path) -> None:
    url, process = serve(tiny_llama, stderr=subprocess.PIPE)
    with ending(process):
        await_status(f"{url}/health")
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=120)[1]
    assert process.returncode == 0, said
    assert "Traceback" not in said


@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_ctrl_c_while_the_checkpoint_is_read_ends_both_processes(
    tiny_llama: Path, seconds: float
) -> None:
    """A terminal interrupts the whole group, the new engine too."""
    words = [sys.executable, "-m", "outrider", "serve", "--port", "0", str(tiny_llama)]
    process = subprocess.Popen(
        words,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Shells start jobs in the background with Ctrl+C ignored, which these tests would inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with ending(process):
        while engine_of(process.pid) is None:
            time.sleep(0.001)
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    # CPython ends `python -m` by the signal if it arrives inside an exec of text, as dataclasses
    # do while modules are imported. A shell calls both 130.
    assert (process.returncode in (130, -signal.SIGINT), said) == (True, "interrupted\n")


@contextlib.contextmanager
def nobodys_pipe() -> Iterator[int]:
    """A pipe that is full, and that nobody reads."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"x" * 4096)
    os.set_blocking(write, True)
    yield write
    os.close(read)
    os.close(write)


def serves_and_ends(tiny_llama: Path, stderr: str) -> None:
    with contextlib.ExitStack() as stack:
        given: dict[str, Any] = {}
        if stderr == "full":
            given["stderr"] = stack.enter_context(open("/dev/full", "w"))
        elif stderr == "unread":
            given["stderr"] = stack.enter_context(nobodys_pipe())
        else:
            given["before"] = ("sh", "-c", 'exec "$0" "$@" 2>&-')
        url, process = serve(tiny_llama, "--shutdown-timeout", "0.5", **given)
        stack.enter_context(ending(process))
        await_status(f"{url}/ready")
        for _ in range(3):
            body = {"prompt": "ab", "max_tokens": 2}
            assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
            assert httpx.get(f"{url}/nowhere").status_code == 404
        engine = engine_of(process.pid)
        assert engine is not None
        if stderr == "unread":
            while process.poll() is None:  # the end after three deaths says why, to nobody
                if (engine := engine_of(process.pid)) is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(engine, signal.SIGKILL)
                time.sleep(0.05)
            assert process.returncode == 1
            return
        os.kill(engine, signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        with pytest.raises(ProcessLookupError):
            os.kill(engine, 0)


@pytest.mark.parametrize(
    "kind", ["full", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("closed", "unread"))]
)
def test_it_serves_and_ends_whatever_stderr_does(tiny_llama: Path, kind: str) -> None:
    """One SIGTERM is enough, also with a worker that is stopped."""
    serves_and_ends(tiny_llama, kind)


def test_stderr_never_blocks_and_tells_what_it_dropped() -> None:
    read, write = os.pipe()
    stream = Stderr(write)
    line = "x" * 999 + "\n"
    for _ in range(3000):
        assert stream.write(line) == len(line)
    stream.drain(0.01)
    found, kept, dropped = b"", 0, 0
    while kept + dropped < 3000:
        found += os.read(read, 1 << 16)
        kept = found.count(b"x\n")
        told = re.findall(rb"(\d+) lines were dropped: stderr was too slow\n", found)
        dropped = sum(map(int, told))
    assert (kept >= 1000, kept + dropped) == (True, 3000)
    stream.write("\ud800\n")
    assert os.read(read, 99) == b"\\ud800\n"
    with pytest.raises(TypeError):
        stream.write(b"x")  # type: ignore[arg-type]
    stream.drain()
    os.close(read)
    stream.write("nobody reads\n")
    stream.drain()
    os.close(write)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_busy_loop_hears_every_signal(number: int) -> None:
    """The pipe that wakes it is full of the engine's messages."""
    heard = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        heed(loop, lambda: heard.append(number))
        for _ in range(10_000):
            loop.call_soon_threadsafe(int)
        for _ in range(2):
            signal.raise_signal(number)
        await asyncio.sleep(0)

    before = {each: signal.getsignal(each) for each in SIGNALS}
    try:
        asyncio.run(run())
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert heard == [number, number]
