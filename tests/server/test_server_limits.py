"""Keys, limits, metrics, deaths: a server that is not everybody's friend."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.served import metrics
from outrider import LLM, SamplingParams
from outrider.errors import ConfigError
from tests.support.forked import Served

KEY = {"Authorization": "Bearer second"}
OTHER = {"Authorization": "Bearer first"}


@pytest.fixture(scope="module")
def locked(tiny_llama: Path, tiny_drafter: Path) -> Iterator[Served]:
    with Served(
        tiny_llama, "--drafter", tiny_drafter, "--num-speculative-tokens", "4",
        "--max-body-bytes", "20000",
        "--max-queued-requests", "2", "--max-num-seqs", "1", "--slo", "ttft=10s",
        "--per-request-spec-decode-metrics", "detailed", OUTRIDER_API_KEY="first,second",
    ) as server:  # fmt: skip
        yield server


def post(server: Served, body: dict[str, Any], **more: Any) -> httpx.Response:
    more = {"headers": KEY, "timeout": 60, **more}
    return httpx.post(f"{server.url}/v1/completions", json=body, **more)


def test_every_path_wants_a_key_but_a_few(locked: Served) -> None:
    for path in ("/v1/models", "/version", "/stats", "/v1/speculation", "/docs", "/nothing"):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "second"}):
            found = httpx.get(locked.url + path, headers=headers)
            assert found.status_code == 401, path
            assert found.json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(locked.url + path, headers=KEY).status_code in (200, 404)
    for path in ("/health", "/ready", "/metrics", "/", "/playground/app.js"):
        assert httpx.get(locked.url + path).status_code == 200, path
    assert httpx.post(f"{locked.url}/tokenize", json={"prompt": "a"}).status_code == 401


def test_bodies_are_bounded(locked: Served) -> None:
    assert post(locked, {"prompt": "a" * 30000}).status_code == 413

    def parts() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x" * 1000

    found = httpx.post(f"{locked.url}/v1/completions", content=parts(), headers=KEY)
    assert found.status_code == 413


def test_a_full_queue_says_when_to_come_back(locked: Served) -> None:
    body = {"prompt": "a", "max_tokens": 250, "ignore_eos": True}
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: post(locked, body), range(8)))
    codes = [f.status_code for f in found]
    assert set(codes) == {200, 429}
    refused = found[codes.index(429)]
    assert refused.headers["Retry-After"] == "1"
    assert refused.json()["error"]["type"] == "rate_limit_error"


def test_a_request_may_have_a_deadline(locked: Served) -> None:
    found = post(locked, {"prompt": "a", "max_tokens": 250, "ignore_eos": True, "timeout": 1e-4})
    assert found.status_code == 408
    assert found.json()["error"]["code"] == "timeout"


def test_metrics_are_vllms_and_add_up(locked: Served) -> None:
    post(locked, {"prompt": "a", "max_tokens": 1})  # counted behind whatever was given up before
    before = metrics(locked.url)
    bodies = [{"prompt": "the lazy dog", "max_tokens": 40, "seed": i} for i in range(3)]
    answers = [post(locked, body).json() for body in bodies]
    after = metrics(locked.url)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    shown = [a["metrics"]["speculative_decoding"] for a in answers]
    tokens = sum(a["usage"]["completion_tokens"] for a in answers)
    assert grown["vllm:generation_tokens_total"] == tokens
    assert grown["vllm:prompt_tokens_total"] == sum(a["usage"]["prompt_tokens"] for a in answers)
    assert grown["vllm:request_success_total"] == 3
    assert grown["vllm:spec_decode_num_drafts_total"] == sum(s["num_spec_steps"] for s in shown)
    drafted = sum(s["num_draft_tokens"] for s in shown)
    accepted = sum(s["num_accepted_draft_tokens"] for s in shown)
    assert grown["vllm:spec_decode_num_draft_tokens_total"] == drafted > 0
    assert grown["vllm:spec_decode_num_accepted_tokens_total"] == accepted
    assert grown["vllm:spec_decode_num_accepted_tokens_per_pos_total"] == accepted
    assert grown["outrider_drafted_tokens_per_pos_total"] == drafted
    assert grown["outrider_good_requests_total"] == 3
    for name in (
        "time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
        "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
        "request_generation_tokens", "request_inference_time_seconds",
    ):  # fmt: skip
        assert grown[f"vllm:{name}_count"] == 3, name
    assert grown["outrider_verifying_seconds_total"] > 0
    assert after["vllm:kv_cache_usage_perc"] == after["vllm:num_requests_running"] == 0
    for one in shown:
        assert sum(one["per_step_drafted"]) == one["num_draft_tokens"]
        assert sum(one["per_step_accepted"]) == one["num_accepted_draft_tokens"]
    stats = httpx.get(f"{locked.url}/stats", headers=KEY).json()
    assert stats["total_speculative_tokens"] >= stats["accepted_speculative_tokens"]
    assert stats["latency_p50"] <= stats["latency_p99"]


def test_a_repeated_prompt_is_cached_unless_salted(locked: Served) -> None:
    body = {"prompt": "jumps over the lazy dog " * 4, "max_tokens": 2}
    cached = [
        post(locked, {**body, **more}).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        for more in ({}, {}, {"cache_salt": "x"}, {"cache_salt": "x"}, {"cache_salt": "y"})
    ]
    assert cached[0] == cached[2] == cached[4] == 0
    assert cached[1] == cached[3] > 16


def test_keys_share_no_cached_prefix(locked: Served) -> None:
    body = {"prompt": "the quick brown fox " * 4, "max_tokens": 2}

    def cached(key: dict[str, str], salt: str | None = None) -> int:
        usage = post(locked, {**body, "cache_salt": salt}, headers=key).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached(KEY) == 0
    assert cached(KEY) >= 16
    hits = metrics(locked.url)["vllm:prefix_cache_hits_total"]
    for salt in (None, "1", "1\0"):
        assert cached(OTHER, salt) == 0
    assert metrics(locked.url)["vllm:prefix_cache_hits_total"] == hits
    assert cached(OTHER | {"Authorization": "bearer  first"}) >= 16


def test_hosts_and_origins_are_checked_where_there_is_no_key(locked: Served) -> None:
    foreign = {"Host": "evil.example"}
    for path in ("/health", "/ready", "/metrics", "/", "/playground/app.js"):
        found = httpx.get(locked.url + path, headers=foreign)
        assert (found.status_code, found.json()["error"]["code"]) == (403, "host_not_allowed")
        assert httpx.get(locked.url + path, headers=foreign | KEY).status_code == 200
        found = httpx.get(locked.url + path, headers={"Origin": "http://evil.example"})
        assert found.status_code == 200
    found = httpx.post(f"{locked.url}/health", headers={"Origin": "http://evil.example"})
    assert found.status_code == 403


def test_bodies_of_paths_that_take_none_are_not_read(locked: Served) -> None:
    for method, path in (("POST", "/health"), ("GET", "/v1/models"), ("HEAD", "/")):
        found = httpx.request(method, locked.url + path, content=b"x" * 100, headers=KEY)
        assert found.status_code == 400
        assert found.headers["connection"] == "close"
    assert httpx.put(locked.url + "/v1/completions", headers=KEY).headers["allow"]


def flood(server: Served, path: str, seconds: float) -> bytes:
    """What a connection that sends a body in one-byte chunks is answered."""
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer second\r\n"
    end = time.monotonic() + seconds
    with socket.create_connection((host, int(port)), timeout=seconds) as link:
        try:
            link.sendall(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
            while time.monotonic() < end:
                link.sendall(b"1\r\nx\r\n" * 3000)
        except OSError:  # the server has closed
            pass
        try:
            return link.recv(1 << 16)
        except OSError:
            return b""


@pytest.mark.parametrize("path", ["/health", "/v1/completions"])
def test_one_byte_chunks_starve_nobody(locked: Served, path: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        done = [pool.submit(flood, locked, path, 30.0) for _ in range(8)]
        found = [one.result(60) for one in done]
    assert all(answer.startswith(b"HTTP/1.1 400 ") for answer in found if answer)
    assert any(found)
    assert httpx.get(f"{locked.url}/health").status_code == 200


def test_slow_headers_do_not_hold_a_server(locked: Served) -> None:
    host, port = locked.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as link:
        link.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        assert httpx.get(f"{locked.url}/health").status_code == 200


def test_a_killed_engine_comes_back(tiny_llama: Path) -> None:
    params = SamplingParams(max_tokens=8, temperature=0)
    expected = LLM(tiny_llama, drafter=None).generate("ab", params)[0].outputs[0].text
    body: dict[str, Any] = {"prompt": "ab", "max_tokens": 250, "ignore_eos": True, "stream": True}
    body["n"] = 128
    with Served(tiny_llama) as server:
        call = httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60)
        with call as stream:
            lines = stream.iter_lines()
            next(lines)
            assert server.kill_engine()
            rest = [line for line in lines if line]
        assert "the engine was killed by signal 9" in rest[-2]
        assert rest[-1] == "data: [DONE]"
        deadline = time.monotonic() + 240
        codes, failures = set(), 1  # the stream that broke
        while time.monotonic() < deadline:
            code = httpx.get(f"{server.url}/ready").status_code
            codes.add(code)
            if code == 200:
                break
            refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "ab"})
            assert refused.status_code in (200, 503)
            failures += refused.status_code == 503
            assert refused.status_code == 200 or refused.headers["Retry-After"] == "1"
            time.sleep(0.05)
        assert codes == {200, 503}
        assert metrics(server.url)["outrider_request_errors_total"] == failures
        found = httpx.post(
            f"{server.url}/v1/completions",
            json={"prompt": "ab", "max_tokens": 8, "temperature": 0},
        )
        assert found.json()["choices"][0]["text"] == expected
        deadline = time.monotonic() + 240
        while server.process.poll() is None:  # whether it is ready, or starts again
            assert time.monotonic() < deadline
            with suppress(ProcessLookupError):
                server.kill_engine()
            time.sleep(0.05)
        assert server.process.returncode == 1
        server.stop()  # has read what it said
        assert any("died 3 times" in line for line in server.lines)


def test_a_server_that_cannot_be_says_why(tiny_llama: Path, tmp_path: Path, locked: Served) -> None:
    """A model that is not there, and a port that is taken. Two servers at a time."""
    port = locked.url.rpartition(":")[2]
    with ThreadPoolExecutor(2) as pool:
        absent = pool.submit(Served, tmp_path / "absent")
        taken = pool.submit(Served, tiny_llama, "--port", port)
        with pytest.raises(ConfigError, match=r"error: .*absent"):
            absent.result()
        with pytest.raises(ConfigError, match="cannot listen on"):
            taken.result()
