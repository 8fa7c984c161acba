"""The end of a server: what runs is finished, what comes is refused."""

import contextlib
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Barrier
from typing import Any

import httpx
import pytest

from outrider.bench.served import Served
from outrider.errors import ConfigError

STREAMS = 24
BODY: dict[str, Any] = {
    "prompt": "a", "max_tokens": 250, "ignore_eos": True, "stream": True, "n": 4,
}  # fmt: skip


def streaming(server: Served, body: dict[str, Any]) -> AbstractContextManager[httpx.Response]:
    return httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60)


def test_sigterm_under_load_loses_no_stream(tiny_llama: Path) -> None:
    begun = Barrier(STREAMS + 1)
    with Served(tiny_llama, "--max-num-seqs", "16") as server, ThreadPoolExecutor(STREAMS) as pool:

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
        assert server.stop() == 0


def test_while_it_drains_it_is_not_ready_and_takes_nothing(tiny_llama: Path) -> None:
    body = BODY | {"n": 128}
    with Served(tiny_llama) as server, streaming(server, body) as stream:
        lines = stream.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 10
        while (ready := httpx.get(f"{server.url}/ready")).status_code != 503:
            assert time.monotonic() < deadline
        assert ready.headers["Retry-After"] == "1"
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503
        assert "shutting down" in refused.json()["error"]["message"]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) is not None
        with pytest.raises(httpx.HTTPError):
            for _ in lines:
                pass


def test_a_stream_longer_than_the_timeout_is_cut(tiny_llama: Path) -> None:
    body = BODY | {"n": 128}
    with Served(tiny_llama, "--shutdown-timeout", "0.2") as server:
        with streaming(server, body) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            last = [line for line in lines if line][-2:]
        assert "the engine was shut down" in last[0]
        assert last[1] == "data: [DONE]"
        assert server.stop() == 0


def test_metrics_may_have_a_port_of_their_own(tiny_llama: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Served(tiny_llama, "--metrics-port", str(port)) as server:
        assert httpx.get(f"{server.url}/metrics").status_code == 404
        assert "vllm:num_requests_running" in httpx.get(f"http://127.0.0.1:{port}/metrics").text
        assert httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 404
        foreign = {"Host": "evil.example"}
        assert httpx.get(f"http://127.0.0.1:{port}/metrics", headers=foreign).status_code == 403
        found = httpx.get(f"{server.url}/v1/models", headers={"Origin": "http://elsewhere"})
        assert not any(name.startswith("access-control") for name in found.headers)


def test_sigterm_while_it_loads_ends_it(tiny_llama: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "outrider", "serve", str(tiny_llama), "--port", str(port)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        for _ in range(600):
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 0, said
    assert "Traceback" not in said


@pytest.mark.parametrize("flag", ["--port", "--metrics-port"])
def test_ports_that_are_none(tiny_llama: Path, flag: str) -> None:
    with pytest.raises(ConfigError, match=rf"{flag} is 70000; give .* to 65,535\."):
        Served(tiny_llama, flag, "70000")
