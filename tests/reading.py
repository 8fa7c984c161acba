"""Hostile input for every reader of the guard, in a process with limits on time and memory.

Run as ``python tests/reading.py READER EXAMPLES``: it ends with 0 where each input gave a value or
one sentence.
"""

from __future__ import annotations

import json
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.cli import guard as commands
from outrider.errors import EndpointError, OutriderError
from outrider.guard import events, policy, sources, watch
from outrider.guard.lease import KubernetesLease
from outrider.guard.loop import Guard
from outrider.guard.sources import Prometheus, figures_of, names_of, side
from outrider.guard.states import State
from outrider.guard.store import AUDIT, COMMAND, STATE, STATUS, Store
from outrider.guard.switches import speculation, webhook
from outrider.guard.switches.haproxy import HAProxy
from outrider.guard.switches.httproute import HTTPRoute
from outrider.guard.switches.speculation import Speculation
from outrider.guard.switches.webhook import Webhook
from outrider.outside.documents import parse_json, parse_toml, parse_yaml
from outrider.outside.http import Answer, call
from outrider.scraping import Reader

SECONDS = 10.0
"""Of processor time, for one input."""
SPARE = 512 << 20
"""Bytes that a reader may take beside what is loaded."""
FOLDER = Path(tempfile.mkdtemp())

KEYS = st.sampled_from(
    ["engine", "standby", "metadata", "resourceVersion", "spec", "rules", "backendRefs", "name",
     "weight", "holderIdentity", "leaseDurationSeconds", "renewTime", "leaseTransitions", "data",
     "id", "choices", "error", "message", "enabled", "num_speculative_tokens", "draft_length",
     "status", "result", "resultType", "value", "force", "time", "kind", "text", "action", "alert",
     "url", "signals", "source", "queries", "traffic", "window", "interval", "recovery", "stages"]
)  # fmt: skip
LETTERS = st.characters(exclude_categories=())
WORDS = st.text(LETTERS, max_size=12) | st.sampled_from(
    ["\ud800", "\x1b[2J", "\u2028", "a\nb: forged", "nan", "1e999", "success", "vector", "scalar"]
)
NUMBERS = st.integers() | st.floats() | st.sampled_from([10**400, -(10**400), 2**63, 1e308, -1])
LEAVES = st.none() | st.booleans() | NUMBERS | WORDS
VALUES = st.recursive(
    LEAVES,
    lambda each: st.lists(each, max_size=4) | st.dictionaries(KEYS | WORDS, each, max_size=4),
    max_leaves=12,
)
BOMBS = [
    b"[" * 100_000, b'{"a":' * 50_000, b"1e999", b"9" * 5_000, b"9" * 400, b"\xff", b"", b"\x00",
    b'"\\ud800"', b"[" + b"[]," * 50_000 + b"[]]", b"null", b"- " * 20_000, b"a." * 50_000 + b"a=1",
    b"a = " + b"[" * 50_000, b"x: &x [*x]", b"?" * 10_000, b'"' * 10_000, b"a: 1" + b":59" * 9_000,
    b"a0: &a0 [x,x,x]\n" + b"".join(b"a%d: &a%d [*a%d,*a%d,*a%d]\n" % ((i, i, *(i - 1,) * 3))
                                    for i in range(1, 40)),
]  # fmt: skip
TRACK = {"level": "own", "since": 1.0, "cause": "", "wait": 0.0, "retry_at": 0.0, "stage": 0,
         "errors": 0.0}  # fmt: skip
GOOD: dict[str, Any] = {
    "state": State(engine="http://e").to_json()
    | {"own_weights": [1, 2], "own_drafting": {"enabled": True, "length": 4, "in_use": 4},
       "pending": {"p99": 5.0}, "traffic": TRACK | {"level": "standby"}},
    "status": {"time": 1.0, "engine": "e", "mode": "normal", "forced": None, "dry_run": False,
               "runtime_switch": True, "alerts": {"a": "b"}, "reasons": {"c": "d"}},
    "command": {"force": "plain"},
    "audit": {"time": 1.0, "kind": "note", "text": "x", "action": "shift"},
    "lease": {"metadata": {"name": "x"}, "spec": {"holderIdentity": "other", "renewTime": "x",
              "leaseDurationSeconds": 30, "leaseTransitions": 1}},
    "route": {"metadata": {"resourceVersion": "1"}, "spec": {"rules": [{"backendRefs": [
              {"name": "a", "weight": 1}, {"name": "b"}]}]}},
    "weights": {"engine": 100, "standby": 0},
    "switch": {"enabled": True, "num_speculative_tokens": 4, "draft_length": 4},
    "models": {"data": [{"id": "tiny"}]},
    "choices": {"choices": [{"text": "a"}]},
    "query": {"status": "success", "data": {"resultType": "vector",
              "result": [{"metric": {}, "value": [0, "1"]}]}},
}  # fmt: skip
POLICY = b"""
folder = "%s"
window = 30
[engine]
url = "http://e"
[standby]
url = "http://s"
[source]
kind = "scrape"
[traffic]
kind = "webhook"
url = "http://t"
[signals]
p99 = { above = 5.0, clear = 3.0, for = 1 }
[recovery]
stages = [0.1, 0.5]
"""
PAGE = b"""# TYPE x counter
vllm:request_success_total{a="b"} 5
vllm:e2e_request_latency_seconds_bucket{le="0.5"} 3
vllm:e2e_request_latency_seconds_bucket{le="+Inf"} 5
vllm:kv_cache_usage_perc 0.5
vllm:num_requests_running 1
outrider_request_errors_total{code="503"} 2
outrider_draft_length 4
"""


def mutated(document: Any, draw: Callable[[Any], Any]) -> Any:
    """A copy of a document with some of its values exchanged or left out."""
    document = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(1, 3))):
        at = document
        while isinstance(at, dict | list) and at:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            key = draw(st.sampled_from(keys))
            if draw(st.booleans()) or not isinstance(at[key], dict | list):
                if isinstance(at, dict) and draw(st.integers(0, 5)) == 0:
                    del at[key]
                else:
                    at[key] = draw(VALUES)
                break
            at = at[key]
    return document


@st.composite
def bodies(draw: Any, *goods: str) -> bytes:
    """Bytes where JSON is awaited."""
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return bytes(draw(st.binary(max_size=60)))
    if kind == 1:
        return bytes(draw(st.sampled_from(BOMBS)))
    if kind <= 3:
        return json.dumps(draw(VALUES)).encode()
    good = GOOD[draw(st.sampled_from(goods))]
    text = json.dumps(good if kind == 9 else mutated(good, draw)).encode()
    return draw(spoiled(text)) if kind == 4 else text


@st.composite
def spoiled(draw: Any, text: bytes) -> bytes:
    """A text with some of its bytes exchanged, doubled or left out."""
    parts = bytearray(text)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(parts)))
        how = draw(st.integers(0, 3))
        piece = draw(st.binary(max_size=6) | st.sampled_from([b"\xed\xa0\x80", b"\xe2\x80\xa8"]))
        if how == 0:
            del parts[at : at + draw(st.integers(1, 20))]
        elif how == 1:
            parts[at:at] = piece
        elif how == 2:
            parts[at : at + len(piece)] = piece
        else:
            parts[at:at] = parts[max(0, at - 30) : at] * draw(st.integers(1, 3))
    return bytes(parts)


def sentence(error: OutriderError) -> None:
    """Check that an error can be shown."""
    said = str(error)
    assert said, error
    assert said.isprintable(), ascii(said)
    assert len(said) < 3000, len(said)


def quiet(work: Callable[[], Any]) -> Any:
    """What a reader returns; None where it says a sentence."""
    try:
        return work()
    except OutriderError as error:
        sentence(error)
        return None


def read_policies() -> Any:
    @given(st.data())
    def check(data: st.DataObject) -> None:
        good = POLICY % str(FOLDER).encode()
        text = data.draw(spoiled(good) | st.sampled_from(BOMBS) | st.binary(max_size=99))
        file = FOLDER / "policy.toml"
        file.write_bytes(text)
        quiet(lambda: policy.read(file))
        document = mutated(policy_document(), data.draw)
        quiet(lambda: policy.parse(document))

    return check


def policy_document() -> dict[str, Any]:
    return parse_toml(POLICY % str(FOLDER).encode(), "it")


def read_pages() -> Any:
    names = frozenset(names_of("outrider").values())

    @given(spoiled(PAGE) | st.binary(max_size=200) | st.sampled_from(BOMBS), st.integers(1, 99))
    def check(text: bytes, part: int) -> None:
        for wanted in (names, None):
            reader = Reader(wanted)
            part_ = max(part, len(text) // 500)
            for at in range(0, len(text), part_):
                reader.feed(text[at : at + part_])
            page = reader.page()
            found = side(True, figures_of(page.since(page), names_of("outrider")))
            assert found.errors is None or found.errors >= 0
            assert page.broken >= 0

    return check


HEADS = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", b"HTTP/1.1 100 Continue\r\n\r\n",
    b"HTTP/1.1 302 Found\r\nLocation: http://other/\x1b[2J\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX: y\r\n\r\n",
    b"HTTP/1.0 503 \xff\xfe\r\nX\r\n\r\n", b"HTTP/1.1 204 No\r\n\r\n", b"HTTP/1.1 200\r\n\r\nrest",
]  # fmt: skip


def answering(listener: socket.socket) -> list[bytes]:
    """Answer every connection with the one item of the list that is returned."""
    said: list[bytes] = [b""]

    def serve() -> None:
        while True:
            link, _ = listener.accept()
            with link, suppress(OSError):
                link.recv(65536)
                link.sendall(said[0])

    threading.Thread(target=serve, daemon=True).start()
    return said


def read_heads() -> Any:
    listener = socket.create_server(("127.0.0.1", 0))
    said = answering(listener)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    heads = st.sampled_from(HEADS)

    @given(st.lists(heads | heads.flatmap(spoiled), min_size=1, max_size=4) | st.just([b"\n"] * 9))
    def check(parts: list[bytes]) -> None:
        said[0] = b"".join(parts)
        begin = time.monotonic()
        found = quiet(lambda: call(url, seconds=1.0))
        assert time.monotonic() - begin < 10
        assert found is None or found.json() is not found

    return check


def read_files() -> Any:
    store = Store(FOLDER / "files")

    @given(bodies("state"), bodies("status"), bodies("command"), st.lists(bodies("audit")))
    def check(state: bytes, status: bytes, command: bytes, audit: list[bytes]) -> None:
        (store.folder / STATE).write_bytes(state)
        (store.folder / STATUS).write_bytes(status)
        (store.folder / COMMAND).write_bytes(command)
        (store.folder / AUDIT).write_bytes(b"\n".join(audit))
        kept = quiet(lambda: store.load("http://e"))
        if kept is not None:
            store.save(kept)
            assert store.load("http://e") == kept
        quiet(store.status)
        quiet(store.commanded)
        for entry in store.history():
            assert commands._entry(entry)[:-1].isprintable()

    return check


def read_switches() -> Any:
    route = policy.Traffic("httproute", url="http://k", namespace="n", route="r", engine="a",
                           standby="b")  # fmt: skip
    rules = {"engine": {"url": "http://e"},
             "lease": {"kind": "kubernetes", "url": "http://k", "namespace": "n"}}  # fmt: skip
    asked = {"engine": {"url": "http://e"},
             "source": {"kind": "prometheus", "url": "http://p", "engine": 'a="b"'}}  # fmt: skip

    @given(st.data())
    def check(data: st.DataObject) -> None:
        def answer(*_: Any, **__: Any) -> Answer:
            status = data.draw(st.sampled_from([200, 200, 200, 404, 409, 422, 500]))
            return Answer(status, data.draw(bodies("route", "weights", "switch", "lease", "query")))

        with (
            mock.patch.object(webhook, "call", answer),
            mock.patch.object(speculation, "call", answer),
            mock.patch.object(sources, "call", answer),
            mock.patch("outrider.guard.kubernetes.call", answer),
        ):
            for switch in (Webhook(policy.Traffic(url="http://t")), HTTPRoute(route)):
                weights = quiet(switch.read)
                assert weights is None or all(type(each) is int and each >= 0 for each in weights)
            quiet(lambda: HTTPRoute(route).set((1, 99)))
            quiet(lambda: Speculation(policy.Server("http://e")).read())
            quiet(lambda: Prometheus(policy.parse(asked)).read(0.0))
            lease = KubernetesLease(policy.parse(rules))
            for now in (0.0, 100.0):
                said = lease.hold(now)
                assert said is None or said.isprintable()

    return check


def read_haproxy() -> Any:
    path = FOLDER / "admin.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    said = answering(listener)
    switch = HAProxy(policy.Traffic("haproxy", f"unix:{path}", "b", "e", "s"))
    good = st.just(b"100 (initial 100)\n")

    @given(good | good.flatmap(spoiled) | st.binary() | st.sampled_from(BOMBS))
    def check(text: bytes) -> None:
        said[0] = text
        quiet(switch.read)
        quiet(lambda: switch.set((1, 99)))

    return check


def read_documents() -> Any:
    texts = st.sampled_from([POLICY, json.dumps(GOOD).encode(), b"a: &x {b: [1, 2]}\nc: *x\n"])

    @given(texts.flatmap(spoiled) | st.sampled_from(BOMBS) | VALUES.map(json.dumps))
    def check(text: bytes | str) -> None:
        for parse in (parse_json, parse_yaml, parse_toml):
            found = quiet(lambda parse=parse: parse(text, "it"))  # type: ignore[misc]
            if found is not None and parse is not parse_toml:
                json.dumps(found, allow_nan=False).encode()
                json.dumps(found, ensure_ascii=False).encode()  # no lone surrogates

    return check


def whole_guards() -> Any:
    """Turns of whole guards whose every answer is hostile, over deaths and clocks that are set."""
    document = policy_document()
    document |= {"webhook": "http://w", "minimum": {"requests": 0, "drafted": 0}}
    pages = st.just(PAGE) | spoiled(PAGE) | st.binary(max_size=50)

    @given(st.data())
    def check(data: st.DataObject) -> None:
        folder = tempfile.mkdtemp(dir=FOLDER)
        own = policy.parse(document | {"folder": folder})

        def answer(url: str, *_: Any, take: Any = None, **__: Any) -> Answer:
            if data.draw(st.integers(0, 5)) == 0:
                raise EndpointError("http://x cannot be reached.")
            status = data.draw(st.sampled_from([200, 200, 200, 503]))
            if take is not None:
                take(data.draw(pages))
                return Answer(status, b"")
            return Answer(status, data.draw(bodies("weights", "switch", "models", "choices")))

        now = [1e9]
        with (
            mock.patch.object(webhook, "call", answer), mock.patch.object(watch, "call", answer),
            mock.patch.object(speculation, "call", answer),
            mock.patch.object(sources, "call", answer), mock.patch.object(events, "call", answer),
        ):  # fmt: skip
            guard = Guard(own, clock=lambda: now[0])
            for _ in range(data.draw(st.integers(1, 4))):
                now[0] += data.draw(st.sampled_from([1.0, 10.0, 200.0, 1e5]))
                guard.turn()
                if data.draw(st.integers(0, 3)) == 0:
                    guard.lease.release()
                    now[0] += data.draw(st.sampled_from([-1e5, 0.0, 1e5]))
                    guard = Guard(own, clock=lambda: now[0])
            guard.lease.release()
        store = Store(folder)
        shown = store.status()
        assert shown is not None
        texts = [*shown["alerts"].values(), *shown["reasons"].values()]
        assert all(text.isprintable() for text in texts)
        lines = (store.folder / AUDIT).read_bytes().splitlines()
        assert len(store.history()) == len(lines)

    return check


READERS: dict[str, Callable[[], Any]] = {
    "policies": read_policies, "pages": read_pages, "heads": read_heads, "files": read_files,
    "switches": read_switches, "haproxy": read_haproxy, "documents": read_documents,
    "guards": whole_guards,
}  # fmt: skip


def limit() -> None:
    """Bound the memory of this process, and the time of each input."""
    held = next(int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text()
                .splitlines() if line.startswith("VmSize"))  # fmt: skip
    resource.setrlimit(resource.RLIMIT_AS, (held + SPARE, held + SPARE))

    def too_long(*_: Any) -> None:
        raise SystemExit(f"an input took more than {SECONDS:g} s of processor time")

    signal.signal(signal.SIGPROF, too_long)


def timed(check: Any) -> Any:
    """A check whose every input has its time."""
    inner = check.hypothesis.inner_test

    def bounded(*given: Any, **named: Any) -> None:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            inner(*given, **named)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    check.hypothesis.inner_test = bounded
    return check


def main(names: str, examples: str) -> None:
    """Run readers, by name or all of them."""
    limit()
    count = int(examples)
    for name in READERS if names == "all" else names.split(","):
        check = settings(
            max_examples=count, deadline=None, database=None, derandomize=count < 1000,
            suppress_health_check=list(HealthCheck),
        )(READERS[name]())  # fmt: skip
        timed(check)()


if __name__ == "__main__":
    main(*sys.argv[1:])
