"""What a server tells of itself besides metrics: log, spans, request ids."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from outrider.bench.served import Served

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
        tiny_llama, "--drafter", tiny_drafter, "--log-format", "json", "--log-interval", "0.2",
        "--otlp-traces-endpoint", spans[0], OTEL_BSP_SCHEDULE_DELAY="100",
    ) as found:  # fmt: skip
        yield found


def logged(server: Served, **wanted: Any) -> dict[str, Any]:
    """The first line of the log with such fields."""
    deadline = time.monotonic() + 20
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
    deadline = time.monotonic() + 20
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
    deadline = time.monotonic() + 20
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
    httpx.post(f"{server.url}/v1/speculation", json={"enabled": False})
    httpx.post(f"{server.url}/v1/completions", json=body)
    line = logged(server, draft_length=0, reason="switched_off")
    assert line["level"] == "warning"
    assert "SPECULATION IS OFF: switched off" in line["message"]


def test_prompts_are_never_logged(server: Served) -> None:
    assert not any("secret" in line for line in server.lines)
