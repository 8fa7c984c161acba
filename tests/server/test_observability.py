"""What a server tells of itself besides metrics: log, spans, request ids."""

import asyncio
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from outrider.server.access import Access
from outrider.server.log import _Formatter, log_call, logger
from outrider.server.security import Gate
from outrider.server.settings import Settings
from tests.support.forked import Served

PROMPT = "the secret fox"
TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(scope="module")
def spans() -> Iterator[tuple[str, list[Any]]]:
    """A collector's address, and the spans that came in."""
    found: list[Any] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    found.extend(scope.spans)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{collector.server_port}/v1/traces", found
        collector.shutdown()


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tiny_drafter: Path, spans: tuple[str, list[Any]]) -> Iterator[Served]:
    with Served(
        tiny_llama, "--drafter", tiny_drafter, "--num-speculative-tokens", "4",
        "--log-format", "json", "--log-interval", "0.2",
        "--otlp-traces-endpoint", spans[0], OTEL_BSP_SCHEDULE_DELAY="100",
    ) as found:  # fmt: skip
        yield found


def logged(server: Served, **wanted: Any) -> dict[str, Any]:
    """The first line of the log with such fields."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for line in [json.loads(text) for text in server.lines if text.startswith("{")]:
            if all(line.get(name) == value for name, value in wanted.items()):
                return dict(line)
        time.sleep(0.05)
    raise AssertionError("\n".join(server.lines))


def test_a_call_has_one_id_everywhere(server: Served, spans: tuple[str, list[Any]]) -> None:
    found = httpx.post(
        f"{server.url}/v1/completions",
        json={"prompt": PROMPT, "max_tokens": 30, "temperature": 0.5, "ignore_eos": True},
        headers={"X-Request-Id": "abc-1", "traceparent": f"00-{TRACE}-b7ad6b7169203331-01"},
    )
    assert found.headers["x-request-id"] == "abc-1"
    answer = found.json()
    assert answer["id"] == "cmpl-abc-1"
    line = logged(server, request_id="abc-1")
    assert line["level"] == "info"
    assert line["path"] == "/v1/completions"
    assert line["status"] == 200
    assert line["completion_tokens"] == 30
    assert line["finish_reasons"] == ["length"]
    shown = answer["metrics"]["speculative_decoding"]
    assert line["drafted"] == shown["num_draft_tokens"]
    assert line["accepted"] == shown["num_accepted_draft_tokens"]
    assert 0 < line["ttft_seconds"] <= line["seconds"]
    deadline = time.monotonic() + 60
    while not spans[1] and time.monotonic() < deadline:
        time.sleep(0.05)
    span = spans[1][0]
    kept = {a.key: a.value for a in span.attributes}
    assert span.trace_id.hex() == TRACE
    assert span.name == kept["gen_ai.operation.name"].string_value == "text_completion"
    assert kept["gen_ai.response.id"].string_value == "cmpl-abc-1"
    assert kept["gen_ai.usage.output_tokens"].int_value == 30
    assert kept["gen_ai.request.temperature"].double_value == 0.5
    assert kept["gen_ai.latency.time_to_first_token"].double_value > 0
    assert kept["outrider.draft_tokens"].int_value == shown["num_draft_tokens"]


def test_an_id_of_nonsense_is_replaced(server: Served) -> None:
    for given in ("a b", "x" * 200, ""):
        found = httpx.get(f"{server.url}/version", headers={"X-Request-Id": given})
        assert len(found.headers["x-request-id"]) == 32


def test_failures_are_logged_and_traced(server: Served, spans: tuple[str, list[Any]]) -> None:
    found = httpx.post(
        f"{server.url}/v1/chat/completions", json={"messages": [], "n": 1},
        headers={"X-Request-Id": "bad"},
    )  # fmt: skip
    assert found.status_code == 400
    assert logged(server, request_id="bad")["status"] == 400
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for span in spans[1]:
            kept = {a.key: a.value for a in span.attributes}
            if "error.type" in kept:
                assert kept["error.type"].string_value == "400"
                return
        time.sleep(0.05)
    raise AssertionError("no span of it")


def test_intervals_say_loudly_that_speculation_is_off(server: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True}
    httpx.post(f"{server.url}/v1/completions", json=body)
    line = logged(server, draft_length=4)
    assert line["acceptance_length"] >= 1
    assert line["level"] == "info"
    time.sleep(0.3)  # the interval ends
    for off in ({"enabled": False}, {"num_speculative_tokens": 0}, {"drafter": "none"}):
        before, deadline, said = len(server.lines), time.monotonic() + 60, ""
        httpx.post(f"{server.url}/v1/completions", json=body | {"speculation": off})
        while "no request wanted drafts" not in said and time.monotonic() < deadline:
            said = "\n".join(server.lines[before:])
            time.sleep(0.05)
        assert "no request wanted drafts" in said
        assert "NOTHING WAS DRAFTED" not in said
    httpx.post(f"{server.url}/v1/speculation", json={"enabled": False})
    httpx.post(f"{server.url}/v1/completions", json=body)
    line = logged(server, draft_length=0, reason="switched_off")
    assert line["level"] == "warning"
    assert "SPECULATION IS OFF: switched off" in line["message"]


def test_the_switch_is_for_this_machine_without_keys(server: Served) -> None:
    url = f"{server.url}/v1/speculation"
    evil, own = "http://evil.example", {"Origin": server.url}
    for headers in (
        {"Host": "evil.example", "Origin": evil}, {"Host": "evil.example"}, {"Origin": evil},
        {"Origin": "null"}, {"Origin": "http://127.0.0.1.evil.example"}, {"Forwarded": "for=::1"},
        {"X-Forwarded-For": "127.0.0.1"}, {"X-Forwarded-Proto": "http"}, {"Via": "1.1 a"},
        {"X-Real-IP": "127.0.0.1"},
    ):  # fmt: skip
        found = httpx.post(url, json={"enabled": False}, headers=headers)
        assert found.status_code == 403, headers
    assert httpx.post(url, json={"enabled": True}, headers=own).status_code == 200
    port = server.url.rpartition(":")[2]
    for host in (f"localhost:{port}", f"127.8.8.8:{port}", f"[::1]:{port}"):
        assert httpx.post(url, json={"enabled": True}, headers={"Host": host}).status_code == 200
    assert httpx.get(f"{server.url}/v1/models", headers={"Origin": evil}).status_code == 403


def test_spans_have_names_of_known_paths_only(server: Served, spans: tuple[str, list[Any]]) -> None:
    for i in range(5):
        httpx.post(
            f"{server.url}/rand-{i}", headers={"traceparent": f"00-{i + 1:032x}-{1:016x}-01"}
        )
    ids = {f"{i + 1:032x}" for i in range(5)}
    deadline = time.monotonic() + 60
    while True:
        found = {span.trace_id.hex(): span.name for span in spans[1]}
        if ids <= found.keys():
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert {found[id] for id in ids} == {"unknown"}


def test_calls_without_a_key_have_no_span() -> None:
    recorded: list[Any] = []

    class Spans:
        def record(self, *arguments: Any) -> None:
            recorded.append(arguments)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def call() -> None:
        settings = Settings(names=("x",), api_keys=("key",))
        gate = Access(Gate(app, settings), lambda _: None, Spans())  # type: ignore[arg-type]
        transport = httpx.ASGITransport(gate)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for path in ("/v1/completions", "/rand-1", "/metrics", "/"):
                await client.post(path)
            assert recorded == []
            await client.post("/v1/x", headers={"Authorization": "Bearer key"})
            assert len(recorded) == 1

    asyncio.run(call())


def test_every_line_is_json_and_short(server: Served) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as link:
        link.sendall(b"nonsense\r\n\r\n")
        assert link.recv(1 << 16).startswith(b"HTTP/1.1 400 ")
    assert httpx.get(f"{server.url}/{'x' * 60_000}").status_code == 404
    httpx.post(f"{server.url}/v1/completions", headers={"X-Request-Id": "last"})
    assert logged(server, request_id="last")["status"] == 400
    assert logged(server, error="this is not HTTP/1.1: Invalid method encountered.")
    assert any("listening on" in json.loads(line)["message"] for line in server.lines)
    assert max(map(len, server.lines)) < 2000
    for line in server.lines:
        json.loads(line, parse_constant=pytest.fail)


@pytest.mark.parametrize("form", ["text", "json"])
def test_values_of_any_size_make_short_lines(form: Any) -> None:
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    handler = Kept()
    handler.setFormatter(_Formatter(form))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    began = time.thread_time()
    try:
        for value in (
            float("nan"), float("inf"), -float("inf"), 10**5000, "x" * 10**6, ["y" * 10**5] * 10**4,
            {"a" * 10**5: "b" * 10**5}, [[["z" * 10**5] * 100] * 100], "\ud800", "a\nb",
        ):  # fmt: skip
            log_call({"status": 400, "value": value})
        logger.error("m" * 10**6)
        try:
            raise ValueError("v" * 10**6)
        except ValueError:
            logger.exception("failed")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert time.thread_time() - began < 2  # a GB as a text takes 4 s
    assert len(lines) == 12
    assert max(map(len, lines)) < 40_000
    for line in lines:
        if form == "json":
            json.loads(line, parse_constant=pytest.fail)


def raw(server: Served, data: bytes) -> tuple[int, dict[str, str]]:
    """The status of the answer to some bytes, and its headers."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as link:
        link.sendall(data)
        found = b""
        while b"\r\n\r\n" not in found:
            found += link.recv(1 << 16)
    first, *lines = found.partition(b"\r\n\r\n")[0].decode().split("\r\n")
    return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in lines)


def test_every_answer_has_the_calls_id(server: Served) -> None:
    for path, code in (
        ("/", 200), ("/playground/app.js", 200), ("/playground/index.html", 200),
        ("/playground/no.js", 404), ("/playground/../x", 404), ("/health", 200), ("/ready", 200),
        ("/metrics", 200), ("/stats", 200), ("/version", 200), ("/openapi.json", 200),
        ("/v1/models", 200), ("/v1/models/nobody", 404), ("/nowhere", 404), ("/tokenize", 405),
        ("/v1/completions", 405), ("/v1/speculation", 200),
    ):  # fmt: skip
        for method in ("GET", "HEAD", "POST", "DELETE"):
            found = httpx.request(
                method, f"{server.url}{path}", headers={"X-Request-Id": f"mine-{method}"}
            )
            assert found.headers.get_list("x-request-id") == [f"mine-{method}"], (method, path)
            assert found.status_code == code or method != "GET"
    host, mine = b"Host: localhost\r\n", b"X-Request-Id: mine\r\n"
    post = b"POST /v1/completions HTTP/1.1\r\n" + mine
    get = b"GET /v1/models HTTP/1.1\r\n" + mine
    for data, status in (
        (post + host + b"Content-Type: application/json\r\nContent-Length: 1\r\n\r\n{", 400),
        (post + host + b"Content-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}", 400),
        (post + host + b"Content-Length: 99999999\r\n\r\n", 413),
        (post + host + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (post + host + b"Transfer-Encoding: gzip\r\n\r\n", 400),
        (post + host + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (get + b"\r\n", 400),
        (get + host + b"Content-Length: 1\r\n\r\n1", 400),
        (get + b"Host: evil.example\r\n\r\n", 403),
        (get.replace(b"/1.1", b"/1.0") + b"\r\n", 200),
        (get + host + b"a: " + b"b" * (1 << 16) + b"\r\n\r\n", 431),
        (b"nonsense\r\n\r\n", 400),
    ):
        found_status, headers = raw(server, data)
        assert found_status == status, data[:200]
        assert headers["x-request-id"] == "mine" or b"mine" not in data


def test_what_clients_break_off_is_no_failure_of_the_server(server: Served) -> None:
    """An upload, an answer and a stream, by their counts and lines."""

    def failures() -> dict[str, float]:
        text = httpx.get(f"{server.url}/metrics").text
        found = re.findall(r'^outrider_request_errors_total{code="(\d+)".*} (\S+)$', text, re.M)
        return {code: float(count) for code, count in found}

    host, port = server.url.removeprefix("http://").split(":")
    before = failures()
    body = json.dumps({"prompt": "a", "max_tokens": 200, "n": 64, "ignore_eos": True})
    stream = body[:-1] + ', "stream": true}'
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: "
    for id, sent, length, awaited in (
        *((f"upload-{i}", body[:9], 99, b"") for i in range(20)),
        ("answer", body, len(body), b""), ("stream", stream, len(stream), b"data: "),
    ):  # fmt: skip
        with socket.create_connection((host, int(port)), timeout=30) as link:
            fields = f"{id}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
            link.sendall((head + fields + sent).encode())
            found = b""
            while awaited not in found:
                found += link.recv(1 << 10)
            time.sleep(0.1 if id == "answer" else 0.0)
    assert logged(server, request_id="stream")["error"] == "499"
    for id in ("upload-0", "upload-19", "answer"):
        assert logged(server, request_id=id)["status"] == 499
    counted = {code: count - before.get(code, 0) for code, count in failures().items()}
    assert counted.pop("499") == 22
    assert not any(counted.values())


def test_no_page_may_be_shown_in_a_frame(server: Served) -> None:
    for path in ("/", "/playground/index.html", "/playground/icon.svg"):
        found = httpx.get(f"{server.url}{path}").headers
        assert "frame-ancestors 'none'" in found["content-security-policy"]
        assert "default-src 'self'" in found["content-security-policy"]
        assert found["x-frame-options"] == "DENY"


def test_prompts_are_never_logged(server: Served) -> None:
    assert not any("secret" in line for line in server.lines)
