"""Readers of the guard; see ``hostile_readers``."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import tomllib
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import strategies as st

from outrider.errors import EndpointError
from tests.support.hostile.inputs import damaged, jsons, tomls
from tests.support.hostile.readers import (
    PAGE_PIECES,
    PAGES,
    STATUSES,
    Made,
    answering,
    check_said,
    in_file,
    reader,
)

POLICY = """
folder = "guard"
interval = 5.0
window = 30.0
listen = "127.0.0.1:9177"
webhook = "http://hook:1/x"
advice = "advice.json"
dry_run = false
[engine]
url = "http://e:8000/v1"
kind = "outrider"
key_env = "KEY"
[standby]
url = "http://s:8000"
[source]
kind = "prometheus"
url = "http://p:9090"
engine = 'instance="e:8000"'
standby = 'instance="s:8000"'
queries = {p99 = "max(x{$MATCHER}[$WINDOW])"}
[traffic]
kind = "haproxy"
address = "tcp:127.0.0.1:9999"
backend = "b"
engine = "e"
standby = "s"
[signals]
acceptance = {below = 0.5, clear = 0.6, for = 20}
memory = {above = 0.9}
[minimum]
requests = 10
[recovery]
stages = [0.05, 0.25]
cooldown = 60
[lease]
kind = "kubernetes"
namespace = "n"
seconds = 30
"""


@reader("guard policy")
def guard_policy(folder: Path) -> Made:
    from outrider.ops.guard.policy import read

    route = POLICY.replace('advice = "advice.json"\n', "").replace(
        'kind = "haproxy"', 'kind = "httproute"\nnamespace = "n"\nroute = "r"\nurl = "http://k:1"'
    )
    return tomls(POLICY, route), in_file(folder, "guard.toml", read)


def guard_documents() -> tuple[Any, Any]:
    """A state and a status as a guard writes them."""
    from outrider.ops.guard.states import State

    state = State(
        engine="http://e:8000", pending={"p99": 3.0}, own_weights=(100, 0),
        own_drafting={"enabled": True, "length": 4, "in_use": 4},
    ).to_json()  # fmt: skip
    status = {
        "time": 1.0, "engine": "http://e:8000", "mode": "normal", "forced": None, "dry_run": False,
        "runtime_switch": True, "alerts": {"a": "b"}, "reasons": {"p99": "good"},
    }  # fmt: skip
    return json.loads(json.dumps(state)), status


@reader("guard state")
def guard_state(folder: Path) -> Made:
    from outrider.ops.guard.states import carried_over
    from outrider.ops.guard.store import GuardStore

    store = GuardStore(folder)

    def read(_: Path) -> None:
        state = store.load("http://e:8000")
        carried_over(state, 5.0, 3600.0)
        store.save(state)
        assert store.load("http://e:8000") == state

    return jsons(guard_documents()[0]), in_file(folder, "state.json", read)


@reader("guard status")
def guard_status(folder: Path) -> Made:
    from outrider.ops.guard.store import GuardStore

    return jsons(guard_documents()[1]), in_file(
        folder, "status.json", lambda _: GuardStore(folder).status()
    )


@reader("guard command")
def guard_command(folder: Path) -> Made:
    from outrider.ops.guard.store import GuardStore

    return jsons({"force": "plain"}), in_file(
        folder, "command.json", lambda _: GuardStore(folder).commanded()
    )


AUDIT = "".join(
    json.dumps({"time": number, "kind": "action", "text": "x", "mode": "plain", "more": [1]}) + "\n"
    for number in range(3)
)


@reader("guard history")
def guard_history(folder: Path) -> Made:
    from typer.testing import CliRunner

    from outrider.cli import app

    (folder / "guard").mkdir(parents=True)
    policy = folder / "guard.toml"
    policy.write_text(f'folder = "{folder}/guard"\n[engine]\nurl = "http://e:8000"\n')
    runner = CliRunner()

    def show(_: Path) -> None:
        done = runner.invoke(app, ["ops", "guard", "history", str(policy)], catch_exceptions=True)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        for line in done.output.split("\n"):
            check_said(line, 20_000)

    return damaged(AUDIT), in_file(folder / "guard", "audit.jsonl", show)


def policy_of(**parts: Any) -> Any:
    """A policy with an engine, a standby and more."""
    from outrider.ops.guard.policy import parse

    document = {"engine": {"url": "http://e:8000"}, "standby": {"url": "http://s:8000"}}
    return parse({**document, **parts})


SWITCH = {"enabled": True, "num_speculative_tokens": 4, "draft_length": 3}


@reader("switch: speculation")
def switch_speculation(folder: Path) -> Made:
    from outrider.ops.guard import switches
    from outrider.ops.guard.policy import GuardedServer

    own = switches.SpeculationSwitch(GuardedServer("http://e:8000"))
    error = {"error": {"message": "no", "code": 400}}

    def call(case: tuple[bytes, int]) -> None:
        with answering([switches], *case):
            own.read()
            own.set({"enabled": False})

    return st.tuples(jsons(SWITCH, error), STATUSES), call


WEIGHTS = {"engine": 100, "standby": 0}


def check_weights(weights: tuple[int, int]) -> None:
    assert all(type(each) is int and each >= 0 for each in weights)


@reader("switch: webhook")
def switch_webhook(folder: Path) -> Made:
    from outrider.ops.guard import switches
    from outrider.ops.guard.policy import PolicyTraffic

    own = switches.Webhook(PolicyTraffic("webhook", url="http://w:1/x"))

    def call(case: tuple[bytes, int]) -> None:
        with answering([switches], *case):
            check_weights(own.read())
            own.set((100, 0))

    return st.tuples(jsons(WEIGHTS), STATUSES), call


ROUTE: dict[str, Any] = {
    "metadata": {"resourceVersion": "7", "name": "r"},
    "spec": {
        "rules": [
            {"backendRefs": [{"name": "e", "weight": 100}, {"name": "s", "weight": 0}]},
            {"backendRefs": [{"name": "e"}, {"name": "s", "weight": 1}]},
        ]
    },
    "message": "conflict",
}


@reader("switch: HTTPRoute")
def switch_route(folder: Path) -> Made:
    from outrider.ops.guard import kubernetes
    from outrider.ops.guard.policy import PolicyTraffic
    from outrider.ops.guard.switches import HTTPRoute

    names = {"engine": "e", "standby": "s", "namespace": "n", "route": "r"}
    own = HTTPRoute(PolicyTraffic("httproute", url="http://k:1", **names))

    def call(case: tuple[bytes, int]) -> None:
        with answering([kubernetes], *case):
            own.set((90, 10))
            check_weights(own.read())

    even = {**ROUTE, "spec": {"rules": ROUTE["spec"]["rules"][:1]}}
    return st.tuples(jsons(even, ROUTE), STATUSES), call


@reader("lease: Kubernetes")
def lease_kubernetes(folder: Path) -> Made:
    from outrider.ops.guard import kubernetes
    from outrider.ops.guard.lease import KubernetesLease

    policy = policy_of(lease={"kind": "kubernetes", "namespace": "n", "url": "http://k:1"})
    own = KubernetesLease(policy)
    sample = {
        "metadata": {"name": "outrider-guard", "resourceVersion": "3"},
        "spec": {
            "holderIdentity": "other_1", "leaseDurationSeconds": 30, "leaseTransitions": 2,
            "renewTime": "2026-01-01T00:00:00.000000Z", "acquireTime": "2026-01-01T00:00:00Z",
        },
    }  # fmt: skip

    def call(case: tuple[bytes, int]) -> None:
        with answering([kubernetes], *case):
            for now in (0.0, 100.0):
                check_said(own.hold(now) or "")

    return st.tuples(jsons(sample), STATUSES), call


@reader("lease: file")
def lease_file(folder: Path) -> Made:
    import fcntl

    from outrider.ops.guard.lease import FileLease

    def read(path: Path) -> None:
        other = os.open(path, os.O_RDWR)
        try:
            fcntl.flock(other, fcntl.LOCK_EX)
            check_said(FileLease(path).hold(0.0) or "")
        finally:
            os.close(other)

    return damaged("1234\n"), in_file(folder, "lease", read)


@reader("guard: Prometheus")
def guard_prometheus(folder: Path) -> Made:
    from outrider.ops.guard import sources

    source = {"kind": "prometheus", "url": "http://p:1", "engine": 'a="b"', "standby": 'a="c"'}
    own = sources.Prometheus(policy_of(source=source))
    value = {"status": "success", "error": "x",
             "data": {"resultType": "vector",
                      "result": [{"metric": {}, "value": [1.0, "0.5"]}]}}  # fmt: skip
    scalar = {"status": "success", "data": {"resultType": "scalar", "result": [1.0, "0.5"]}}

    def call(case: tuple[bytes, int]) -> None:
        with answering([sources], *case):
            own.read(0.0)

    return st.tuples(jsons(value, scalar), STATUSES), call


@reader("guard: pages")
def guard_pages(folder: Path) -> Made:
    from outrider.ops.guard import sources
    from outrider.ops.metrics import page

    own = [
        sources.Scrapes(policy_of(engine={"url": "http://e:1", "kind": kind}))
        for kind in ("vllm", "sglang", "llamacpp", "trtllm")
    ]
    clock = iter(range(10**9))

    def call(case: tuple[bytes, int]) -> None:
        with answering([page], *case):
            for each in own:
                for side in each.read(float(next(clock))):
                    assert side.errors is None or 0 <= side.errors <= 1

    return st.tuples(damaged(*PAGES, pieces=PAGE_PIECES), STATUSES), call


ANSWER = {"data": [{"id": "m"}], "choices": [{"text": "x"}]}


@reader("guard: probe")
def guard_probe(folder: Path) -> Made:
    from outrider.ops.guard import loop
    from outrider.ops.guard.policy import GuardedServer

    def call(case: tuple[bytes, int]) -> None:
        with answering([loop], *case):
            loop.is_warm(GuardedServer("http://e:1"), 1.0)

    return st.tuples(jsons(ANSWER), STATUSES), call


GUARDED = """
window = 30
webhook = "http://w:1"
minimum = {requests = 0, drafted = 0}
signals = {p99 = {above = 5.0, clear = 3.0, for = 1}}
recovery = {stages = [0.1, 0.5]}
[engine]
url = "http://e:1"
[standby]
url = "http://s:1"
[source]
kind = "scrape"
[traffic]
kind = "webhook"
url = "http://t:1"
"""
PAGE = b"""# TYPE x counter
outrider_requests_total{status="200"} 5
vllm:request_success_total{a="b"} 5
vllm:e2e_request_latency_seconds_bucket{le="0.5"} 3
vllm:e2e_request_latency_seconds_bucket{le="+Inf"} 5
vllm:kv_cache_usage_perc 0.5
vllm:num_requests_running 1
outrider_request_errors_total{code="503"} 2
outrider_draft_length 4
"""
Step = tuple[float, bytes | None, float | None]
"""Seconds that pass, a command that a person left, and what the clock is set by at a death."""


@reader("guard: whole")
def guard_whole(folder: Path) -> Made:
    """Turns of guards whose every answer is hostile, over deaths and clocks that are set."""
    from outrider.base.outside.http import Answer
    from outrider.ops.guard import events, loop, switches
    from outrider.ops.guard.loop import Guard
    from outrider.ops.guard.policy import parse
    from outrider.ops.guard.store import AUDIT, COMMAND
    from outrider.ops.metrics import page as pages

    folder.mkdir(parents=True)
    answer = st.tuples(
        st.sampled_from([True] + [False] * 5), st.sampled_from([200, 200, 200, 503]),
        st.one_of(st.just(PAGE), damaged(PAGE, pieces=PAGE_PIECES)),
        jsons(WEIGHTS, SWITCH, ANSWER),
    )  # fmt: skip
    step = st.tuples(
        st.sampled_from([1.0, 10.0, 200.0, 1e5]),
        st.none() | st.none() | jsons({"force": "plain"}, {"force": None}),
        st.none() | st.none() | st.sampled_from([-1e5, 0.0, 1e5]),
    )

    def call(case: tuple[list[Step], list[tuple[bool, int, bytes, bytes]]]) -> None:
        steps, answers = case
        turning = itertools.cycle(answers)

        def answered(url: str, *_: Any, take: Any = None, **__: Any) -> Answer:
            fails, status, page, body = next(turning)
            if fails:
                raise EndpointError("http://x cannot be reached.")
            if take is not None:
                take(page)
                return Answer(status, b"")
            return Answer(status, body)

        own = parse(tomllib.loads(GUARDED) | {"folder": tempfile.mkdtemp(dir=folder)})
        now = [1e9]
        with ExitStack() as stack:
            for module in (loop, switches, pages, events):
                stack.enter_context(patch.object(module, "call", answered))
            guard = Guard(own, clock=partial(now.__getitem__, 0))
            for seconds, command, death in steps:
                now[0] += seconds
                if command is not None:
                    (guard.store.folder / COMMAND).write_bytes(command)
                guard.turn()
                if death is not None:
                    guard.lease.release()
                    now[0] += death
                    guard = Guard(own, clock=partial(now.__getitem__, 0))
            guard.lease.release()
        shown = guard.store.status()
        assert shown is not None
        for text in (*shown["alerts"].values(), *shown["reasons"].values()):
            check_said(text)
        lines = (guard.store.folder / AUDIT).read_bytes().splitlines()
        assert len(guard.store.history()) == len(lines)
        assert Guard(own, clock=partial(now.__getitem__, 0)).state == guard.state

    return st.tuples(
        st.lists(step, min_size=1, max_size=4), st.lists(answer, min_size=1, max_size=12)
    ), call
