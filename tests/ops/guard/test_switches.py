"""Switches of traffic against stand-ins of HAProxy and of Kubernetes' API server; leases."""

import copy
import socket
import threading
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from outrider.base.outside.http import call
from outrider.errors import ConfigError, EndpointError
from outrider.ops.guard import kubernetes
from outrider.ops.guard.lease import FileLease, KubernetesLease
from outrider.ops.guard.loop import is_warm
from outrider.ops.guard.policy import GuardedServer, Policy, PolicyTraffic, parse
from outrider.ops.guard.sources import Prometheus, figures_of, queries, side
from outrider.ops.guard.switches import HAProxy as Switch
from outrider.ops.guard.switches import HTTPRoute, SpeculationSwitch, SwitchError, Webhook
from outrider.ops.metrics import Figures
from outrider.ops.metrics import parse as page
from tests.support.guarding import Cluster, Engine, HAProxy, http

PATH = "/apis/gateway.networking.k8s.io/v1/namespaces/llm/httproutes/chat"
ROUTE = {
    "apiVersion": "gateway.networking.k8s.io/v1",
    "kind": "HTTPRoute",
    "metadata": {"name": "chat", "namespace": "llm", "labels": {"team": "a"}, "generation": 3},
    "spec": {
        "hostnames": ["llm.example"],
        "rules": [
            {
                "matches": [{"path": {"value": "/v1"}}],
                "backendRefs": [
                    {"name": "plain", "port": 8000, "weight": 1},
                    {"name": "speculative", "port": 8000, "weight": 100},
                ],
            },
            {"backendRefs": [{"name": "docs", "port": 80}]},
        ],
    },
}
LEASE = "/apis/coordination.k8s.io/v1/namespaces/llm/leases/outrider-guard"


def route_switch(url: str) -> HTTPRoute:
    return HTTPRoute(
        PolicyTraffic(
            kind="httproute", url=url, namespace="llm", route="chat", engine="speculative",
            standby="plain",
        )
    )  # fmt: skip


def without_version(document: dict[str, Any]) -> dict[str, Any]:
    document = copy.deepcopy(document)
    document["metadata"].pop("resourceVersion", None)
    return document


def test_an_httproute_gets_weights_and_nothing_else() -> None:
    cluster = Cluster((PATH, ROUTE))
    with http(cluster.answer) as url:
        switch = route_switch(url)
        assert switch.read() == (100, 1)
        switch.set((25, 75))
        assert switch.read() == (25, 75)
    expected = copy.deepcopy(ROUTE)
    refs = expected["spec"]["rules"][0]["backendRefs"]
    refs[0]["weight"], refs[1]["weight"] = 75, 25
    assert without_version(cluster.objects[PATH]) == expected


def test_a_route_without_written_weights_gets_them() -> None:
    bare = copy.deepcopy(ROUTE)
    for each in bare["spec"]["rules"][0]["backendRefs"]:
        del each["weight"]
    cluster = Cluster((PATH, bare))
    with http(cluster.answer) as url:
        assert route_switch(url).read() == (1, 1)
        route_switch(url).set((0, 100))
        assert route_switch(url).read() == (0, 100)


def test_a_conflict_is_read_again_and_the_others_change_stays() -> None:
    cluster = Cluster((PATH, ROUTE))

    def reorder(document: dict[str, Any]) -> None:
        document["spec"]["hostnames"].append("new.example")
        document["spec"]["rules"].insert(0, {"backendRefs": [{"name": "first", "port": 1}]})

    def once(own: Cluster) -> None:
        own.before_write = lambda _: None
        own.touch(PATH, reorder)

    cluster.before_write = once
    with http(cluster.answer) as url:
        route_switch(url).set((0, 100))
        assert route_switch(url).read() == (0, 100)
    found = cluster.objects[PATH]["spec"]
    assert found["hostnames"] == ["llm.example", "new.example"]
    assert found["rules"][0] == {"backendRefs": [{"name": "first", "port": 1}]}
    assert cluster.writes == 1


def test_endless_conflicts_and_foreign_routes_are_errors() -> None:
    cluster = Cluster((PATH, ROUTE), (f"{PATH}-x", {"spec": {"rules": [{"backendRefs": []}]}}))
    cluster.before_write = lambda own: own.touch(PATH, lambda _: None)
    with http(cluster.answer) as url:
        with pytest.raises(SwitchError, match="modified"):
            route_switch(url).set((0, 100))
        assert without_version(cluster.objects[PATH]) == ROUTE
        for name, reason in (("chat-x", "no rule has the backends"), ("none", "not found")):
            traffic = PolicyTraffic(
                kind="httproute", url=url, namespace="llm", route=name, engine="a", standby="b"
            )
            with pytest.raises(SwitchError, match=reason):
                HTTPRoute(traffic).read()
    with pytest.raises(SwitchError, match="cannot be reached"):
        route_switch(url).read()


def test_outside_of_a_pod_the_api_server_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="no pod"):
        kubernetes.Cluster(None)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert kubernetes.Cluster(None).url == "https://[fd00::1]:443"


def test_haproxy_gets_weights_the_gainer_first(tmp_path: Path) -> None:
    proxy = HAProxy(tmp_path / "admin.sock")
    try:
        traffic = PolicyTraffic(
            kind="haproxy", address=proxy.address, backend="llm", engine="engine",
            standby="standby",
        )  # fmt: skip
        switch = Switch(traffic)
        assert switch.read() == (100, 1)
        switch.set((0, 100))
        assert switch.read() == (0, 100)
        sets = [command for command in proxy.commands if command.startswith("set")]
        assert sets == ["set weight llm/standby 100", "set weight llm/engine 0"]
        other = Switch(PolicyTraffic(kind="haproxy", address=proxy.address, backend="x", engine="e",
                               standby="s"))  # fmt: skip
        with pytest.raises(SwitchError, match="No such server"):
            other.read()
        with pytest.raises(SwitchError, match="refuses"):
            other.set((1, 1))
    finally:
        proxy.close()
    with pytest.raises(SwitchError, match="does not answer"):
        switch.read()


def test_a_webhook_tells_and_takes_weights() -> None:
    weights = {"engine": 100, "standby": 0}

    def answer(method: str, path: str, body: Any, headers: Any) -> tuple[int, Any]:
        weights.update(body or {})
        return 200, weights

    with http(answer) as url:
        switch = Webhook(PolicyTraffic(kind="webhook", url=url))
        switch.set((5, 95))
        assert switch.read() == (5, 95)
    with pytest.raises(SwitchError):
        switch.read()
    with http(lambda *_: (200, "ok")) as url, pytest.raises(SwitchError, match="no weights"):
        Webhook(PolicyTraffic(kind="webhook", url=url)).read()


def test_outriders_switch_is_read_and_set() -> None:
    engine = Engine()
    with http(engine.answer) as url:
        switch = SpeculationSwitch(GuardedServer(url + "/v1"))
        assert switch.read().length == 4
        switch.set({"enabled": False})
        assert switch.read().enabled is False
        engine.dead = True
        with pytest.raises(SwitchError, match="HTTP 503: dead"):
            switch.read()


@pytest.mark.parametrize("said", ["", "[]", "null", '"x"', "{}", '{"enabled": 1}', "[" * 9999])
def test_nonsense_of_an_engine_is_one_sentence(said: str) -> None:
    with http(lambda *_: (200, said)) as url, pytest.raises(SwitchError):
        SpeculationSwitch(GuardedServer(url)).read()
    with http(lambda *_: (200, said)) as url:
        assert is_warm(GuardedServer(url), 1.0) is False


def test_an_answer_that_trickles_is_cut_off() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def trickle() -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 999999\r\n\r\n")
            while True:
                connection.sendall(b"x")
                time.sleep(0.01)

    thread = threading.Thread(target=trickle)
    thread.start()
    with listener, pytest.raises(EndpointError, match="does not answer"):
        call(f"http://127.0.0.1:{listener.getsockname()[1]}", seconds=0.2)
    thread.join()


def policy(tmp_path: Path, url: str | None = None) -> Policy:
    return parse(
        {
            "folder": str(tmp_path),
            "engine": {"url": "http://e"},
            "lease": {"kind": "kubernetes", "url": url or "http://k", "namespace": "llm"},
        }
    )


def test_a_file_lease_has_one_holder_and_ends_with_it(tmp_path: Path) -> None:
    first, second = FileLease(tmp_path / "lease"), FileLease(tmp_path / "lease")
    assert first.hold(0) is None
    assert first.hold(1) is None
    assert "Another guard acts" in second.hold(2)
    first.release()
    assert second.hold(3) is None
    second.release()


def test_a_kubernetes_lease_goes_to_another_only_after_its_end(tmp_path: Path) -> None:
    cluster = Cluster()
    with http(cluster.answer) as url:
        first, second = (KubernetesLease(policy(tmp_path, url)) for _ in range(2))
        first._me, second._me = "a", "b"
        # Their clocks differ by years; each counts from the renewals that it saw itself.
        assert first.hold(1e9) is None
        assert "Another guard acts (a)" in second.hold(0)
        assert first.hold(1e9 + 20) is None
        assert "Another guard" in second.hold(20)
        assert "Another guard" in second.hold(49)
        assert second.hold(50) is None
        assert "Another guard acts (b)" in first.hold(1e9 + 51)
        spec = cluster.objects[LEASE]["spec"]
        assert spec["leaseTransitions"] == 2
        renewed = datetime.fromisoformat(spec["renewTime"]).timestamp()
        assert renewed == pytest.approx(time.time(), abs=60)

        # Both see it run out; only one gets it.
        cluster.before_write = lambda own: own.touch(LEASE, lambda _: None)
        assert "a moment ago" in first.hold(1e9 + 200)
    assert "cannot be renewed" in first.hold(1e9 + 201)


HOSTILE_LEASES: list[Any] = [
    None, [], "x", {"holderIdentity": "c", "leaseDurationSeconds": "text"},
    {"holderIdentity": "c", "leaseDurationSeconds": -1, "renewTime": 5},
    {"holderIdentity": "c", "leaseDurationSeconds": 10**200, "leaseTransitions": "many"},
    {"holderIdentity": {"a": []}, "renewTime": [[]], "leaseTransitions": None},
    {"holderIdentity": "c\x1b[2J\u2028forged", "leaseTransitions": -5},
]  # fmt: skip


@pytest.mark.parametrize("spec", HOSTILE_LEASES, ids=range(len(HOSTILE_LEASES)))
def test_a_lease_of_nonsense_is_taken_once_it_is_old(tmp_path: Path, spec: Any) -> None:
    cluster = Cluster((LEASE, {"metadata": {"name": "outrider-guard"}, "spec": spec}))
    with http(cluster.answer) as url:
        lease = KubernetesLease(policy(tmp_path, url))
        said = lease.hold(0)
        assert said is None or said.isprintable()
        assert lease.hold(86_400) is None
    assert type(cluster.objects[LEASE]["spec"]["leaseTransitions"]) is int


def test_figures_of_scrapes_are_those_of_the_names() -> None:
    engine = Engine()
    engine.serve(good=90, failed=10, seconds=0.8)
    engine.draft(1000, 250)
    for code in (400, 408, 429, 499):  # the clients' own
        engine.metrics[f'outrider_request_errors_total{{code="{code}"}}'] = 70
    engine.metrics["vllm:kv_cache_usage_perc"] = 0.25
    text = engine.answer("GET", "/metrics", None, None)[1]
    seen = Figures.of(page(text))
    assert seen is not None
    found = side(True, figures_of(seen))
    assert (found.requests, found.errors, found.acceptance) == (100, 0.1, 0.25)
    assert (found.memory, found.drafted, found.draft_length) == (0.25, 1000, 4)
    assert found.p99 == pytest.approx(0.5 + 0.5 * 0.99)
    idle = side(True, {"running": 2.0, "tokens": 0.0, "done": 0.0})
    assert idle.p99 == float("inf")


def test_prometheus_is_asked_and_its_silence_told() -> None:
    asked: list[str] = []
    values = {"max(up": 1, "sum(increase(vllm:request_success": 60,
              "sum(increase(outrider_request_errors": 20}  # fmt: skip

    def answer(method: str, path: str, body: Any, headers: Any) -> tuple[int, Any]:
        from urllib.parse import parse_qs, urlsplit

        text = parse_qs(urlsplit(path).query)["query"][0]
        asked.append(text)
        found = [v for start, v in values.items() if text.startswith(start)]
        rows = [{"metric": {}, "value": [0, str(value)]} for value in found]
        if "histogram" in text:
            rows = [{"metric": {}, "value": [0, "NaN"]}]
        return 200, {"status": "success", "data": {"resultType": "vector", "result": rows}}

    own = {
        "window": 30,
        "engine": {"url": "http://e"},
        "source": {"kind": "prometheus", "engine": 'job="e"', "queries": {"memory": "m{$MATCHER}"}},
    }
    with http(answer) as url:
        own["source"]["url"] = url
        engine, standby = Prometheus(parse(own)).read(0)
    assert (engine.up, engine.requests, engine.errors, engine.p99) == (True, 80, 0.25, None)
    assert standby.up is None
    assert 'm{job="e"}' in asked
    assert any('code=~"5.."' in text and "[30000ms]" in text for text in asked)
    with pytest.raises(EndpointError, match="cannot be reached"):
        Prometheus(parse(own)).read(0)
    with http(lambda *_: (400, {"status": "error", "error": "parse error"})) as url:
        own["source"]["url"] = url
        with pytest.raises(EndpointError, match="parse error"):
            Prometheus(parse(own)).read(0)


def test_every_query_is_promql() -> None:
    import shutil
    import subprocess

    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian's package prometheus)")
    lines = ["groups:", "- name: x", "  rules:"]
    for kind in ("outrider", "vllm", "sglang", "trtllm", "llamacpp"):
        for figure, text in queries(kind, 'instance="a:1"', 60).items():
            quoted = text.replace("'", "''")
            lines += [f"  - record: {kind}:{figure}", f"    expr: '{quoted}'"]
    done = subprocess.run(
        [promtool, "check", "rules", "/dev/stdin"], input="\n".join(lines), text=True,
        capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
