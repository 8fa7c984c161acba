"""Stand-ins of what a guard watches and switches: a server, HAProxy, Kubernetes' API server."""

from __future__ import annotations

import copy
import json
import os
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from outrider.ops.guard.loop import Guard
from outrider.ops.guard.policy import Policy, read
from outrider.ops.guard.store import GuardStore

Reply = tuple[int, Any]


@contextmanager
def http(answer: Callable[[str, str, Any, Any], Reply]) -> Iterator[str]:
    """Serve ``answer(method, path, body, headers)`` as JSON, or as text; give the address."""

    class Handler(BaseHTTPRequestHandler):
        def reply(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = json.loads(data) if data else None
            status, said = answer(self.command, self.path, body, self.headers)
            sent = (said if isinstance(said, str) else json.dumps(said)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        do_GET = do_POST = do_PUT = do_PATCH = reply

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass
class Engine:
    """A server with Outrider's metrics and switch; ``serve`` counts requests."""

    dead: bool = False
    cold: bool = False
    enabled: bool = True
    length: int | None = 4
    in_use: int = 4
    refuses: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    posts: list[Any] = field(default_factory=list)

    def serve(self, good: int = 0, failed: int = 0, seconds: float = 0.4) -> None:
        """Count requests of so many seconds each."""
        for name, count in (
            ("vllm:request_success_total", good),
            ("vllm:generation_tokens_total", 10 * good),
            ('outrider_request_errors_total{code="503"}', failed),
            *((f'vllm:e2e_request_latency_seconds_bucket{{le="{le}"}}', good * (seconds <= le))
              for le in (0.5, 1.0, 10.0)),
            ('vllm:e2e_request_latency_seconds_bucket{le="+Inf"}', good),
        ):  # fmt: skip
            self.metrics[name] = self.metrics.get(name, 0) + count

    def draft(self, drafted: int, accepted: int) -> None:
        """Count drafted tokens."""
        for what, count in (("draft", drafted), ("accepted", accepted)):
            name = f"vllm:spec_decode_num_{what}_tokens_total"
            self.metrics[name] = self.metrics.get(name, 0) + count

    def answer(self, method: str, path: str, body: Any, headers: Any) -> Reply:
        if self.dead:
            return 503, {"error": {"message": "dead"}}
        if path == "/metrics":
            gauges = {"outrider_draft_length": self.in_use if self.enabled else 0}
            lines = {**self.metrics, **gauges}
            return 200, "\n".join(f"{name} {value}" for name, value in lines.items()) + "\n"
        if path == "/v1/models":
            return 200, {"data": [{"id": "tiny"}]}
        if path == "/v1/completions":
            return (503, {}) if self.cold else (200, {"choices": [{"text": "a"}]})
        if path == "/v1/speculation":
            if body is not None and self.refuses:
                return 403, {"error": {"message": "from this machine only"}}
            if body is not None:
                self.posts.append(body)
                self.enabled = body.get("enabled", self.enabled)
                self.length = body.get("num_speculative_tokens", self.length)
                self.in_use = self.length or self.in_use
            return 200, {
                "enabled": self.enabled,
                "num_speculative_tokens": self.length,
                "draft_length": self.in_use if self.enabled else 0,
            }
        return 404, {}


class HAProxy:
    """HAProxy's runtime API on a unix socket, with weights of backend ``llm``.

    ``stuck`` is set while it takes commands and answers none that set something.
    """

    def __init__(self, path: Path) -> None:
        self.weights = {"llm/engine": 100, "llm/standby": 1}
        self.commands: list[str] = []
        self.stuck = threading.Event()
        self.asked = threading.Event()
        self.broken = False
        proxy = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                said = proxy.say(self.rfile.readline().decode().strip())
                if said is not None:
                    self.wfile.write(f"{said}\n".encode())

        self.server = socketserver.ThreadingUnixStreamServer(str(path), Handler)
        self.server.daemon_threads = True
        self.address = f"unix:{path}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self._thread.start()

    def say(self, command: str) -> str | None:
        self.commands.append(command)
        words = command.split()
        if self.broken:
            return None
        if len(words) < 3 or words[1] != "weight":
            return "Unknown command."
        if words[2] not in self.weights:
            return "No such server."
        if words[0] == "get":
            return f"{self.weights[words[2]]} (initial 100)"
        self.asked.set()
        if self.stuck.is_set():
            return None
        self.weights[words[2]] = int(words[3])
        return ""

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


class Cluster:
    """An API server with the rule of ``resourceVersion``: a write to an old version conflicts.

    ``before_write`` is called ahead of each write, for changes by others in between.
    """

    def __init__(self, *objects: tuple[str, dict[str, Any]]) -> None:
        self.objects = {path: copy.deepcopy(each) for path, each in objects}
        self.before_write: Callable[[Cluster], None] = lambda _: None
        self.writes = 0
        self.version = 1
        for each in self.objects.values():
            each.setdefault("metadata", {})["resourceVersion"] = "1"

    def touch(self, path: str, change: Callable[[dict[str, Any]], None]) -> None:
        """Change an object as somebody else."""
        change(self.objects[path])
        self._stamp(path)

    def _stamp(self, path: str) -> None:
        self.version += 1
        self.objects[path]["metadata"]["resourceVersion"] = str(self.version)

    def answer(self, method: str, path: str, body: Any, headers: Any) -> Reply:
        if method == "POST":
            path = f"{path}/{body['metadata']['name']}"
            if path in self.objects:
                return 409, {"message": "already exists"}
            self.objects[path] = body
            self._stamp(path)
            return 201, body
        if path not in self.objects:
            return 404, {"message": "not found"}
        if method == "GET":
            return 200, self.objects[path]
        self.before_write(self)
        found = copy.deepcopy(self.objects[path])
        if method == "PUT":
            changed = body
        else:
            assert headers["Content-Type"] == "application/json-patch+json"
            changed = copy.deepcopy(found)
            for step in body:
                if not patch(changed, step):
                    return 422, {"message": "the test failed"}
        if changed["metadata"]["resourceVersion"] != found["metadata"]["resourceVersion"]:
            return 409, {"message": "the object has been modified"}
        self.objects[path] = changed
        self.writes += 1
        self._stamp(path)
        return 200, self.objects[path]


def patch(document: Any, step: dict[str, Any]) -> bool:
    """Apply a step of a JSON patch (RFC 6902) to an object; False where it fails."""
    *parents, last = step["path"].strip("/").split("/")
    try:
        for name in parents:
            document = document[int(name) if isinstance(document, list) else name]
        if step["op"] == "test":
            return bool(document[last] == step["value"])
        if step["op"] == "replace":
            _ = document[last]
    except (LookupError, TypeError):
        return False
    document[last] = step["value"]
    return True


POLICY = """
folder = "{folder}"
interval = 0.1
window = {window}
[engine]
url = "{engine}"
[standby]
url = "{standby}"
[traffic]
kind = "haproxy"
address = "{proxy}"
backend = "llm"
engine = "engine"
standby = "standby"
[minimum]
requests = 10
drafted = 100
[recovery]
cooldown = 60
wait = 60
hold = 60
"""


class Fleet:
    """An engine, a standby and HAProxy, a policy for them, and a clock that is set by hand."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.engine, self.standby = Engine(), Engine(enabled=False)
        self.proxy = HAProxy(folder / "admin.sock")
        stack.callback(self.proxy.close)
        self.now = time.time()
        self.file = folder / "policy.toml"
        self.heard: list[Any] = []

        def hear(method: str, path: str, body: Any, headers: Any) -> tuple[int, Any]:
            self.heard.append(body)
            return 200, {}

        self.webhook = stack.enter_context(http(hear))
        urls = [stack.enter_context(http(each.answer)) for each in (self.engine, self.standby)]
        text = POLICY.format(
            folder=folder / "guard", engine=urls[0], standby=urls[1], proxy=self.proxy.address,
            window=60,
        )  # fmt: skip
        self.file.write_text(text)

    @property
    def policy(self) -> Policy:
        return read(self.file)

    def guard(self, **changes: Any) -> Guard:
        return Guard(replace(self.policy, **changes), clock=lambda: self.now)

    def turn(self, guard: Guard, seconds: float = 10) -> Any:
        self.now += seconds
        return guard.turn()

    def history(self) -> list[tuple[str, str]]:
        entries = GuardStore(self.policy.folder).history()
        return [(e["kind"], e.get("action") or e.get("alert", "")) for e in entries]


def start(fleet: Fleet) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "outrider", "ops", "guard", "run", "--policy", str(fleet.file)],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "NO_COLOR": "1"},
    )  # fmt: skip


def until(true: Any, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
