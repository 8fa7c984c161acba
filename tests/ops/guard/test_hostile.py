"""A guard among hostile servers, damaged files, full disks and clocks that are set."""

import json
import logging
import os
import signal
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cli import app
from outrider.errors import ConfigError, EndpointError
from outrider.ops.guard import sources, states
from outrider.ops.guard.lease import FileLease
from outrider.ops.guard.loop import GuardStop, StoppedError, steady
from outrider.ops.guard.policy import PolicyTraffic, parse
from outrider.ops.guard.sources import Prometheus, Scrapes, side
from outrider.ops.guard.states import GuardTrack, Level, Place, State, carried_over
from outrider.ops.guard.store import GuardStore, StoreError
from outrider.ops.guard.switches import HTTPRoute, SwitchError, Webhook
from outrider.ops.metrics import figures, page
from outrider.ops.metrics.page import Reader
from tests.support.guarding import Cluster, Fleet, http, start, until
from tests.support.peering import drips, peer

FORGED = "no\x1b[2J\r\n2026-01-01 clear: all is well\u2028\u2029\x85{\ud800\u202e"
DAY = 86_400.0


def invoke(fleet: Fleet, command: str, *rest: str) -> Any:
    return CliRunner().invoke(app, ["ops", "guard", command, "--policy", str(fleet.file), *rest])


def test_a_servers_words_forge_nothing_and_end_nothing(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    guard = fleet.guard()
    answer = fleet.engine.answer

    def forge(method: str, path: str, body: Any, headers: Any) -> tuple[int, Any]:
        if path == "/v1/speculation":
            return 403, {"error": {"message": FORGED}}
        return answer(method, path, body, headers)

    fleet.engine.answer = forge  # type: ignore[method-assign]
    with (
        caplog.at_level(logging.INFO, "outrider.guard"),
        http(lambda *each: fleet.engine.answer(*each)) as url,
    ):
        fleet.file.write_text(fleet.file.read_text().replace(fleet.policy.engine.url, url))
        guard = fleet.guard()
        decision = fleet.turn(guard)
        fleet.engine.answer = answer  # type: ignore[method-assign]
        fleet.turn(guard)
    assert r"\x1b[2J" in decision.alerts["drafting_switch"]
    assert all(record.getMessage().isprintable() for record in caplog.records)
    folder = Path(fleet.policy.folder)
    lines = (folder / "audit.jsonl").read_bytes().splitlines()
    assert len(lines) == len(guard.store.history()) == len(fleet.history())
    for command in ("status", "history"):
        said = invoke(fleet, command)
        assert said.exit_code == 0
        assert all(line.isprintable() for line in said.stdout.split("\n"))


@pytest.mark.parametrize("place", ["engine", "webhook"])
def test_a_guard_that_waits_for_a_head_ends_when_asked(fleet: Fleet, place: str) -> None:
    with peer(drips(b"", b"HTTP/1.1 100 Continue\r\n\r\n")) as (url, asked):
        text = fleet.file.read_text().replace(
            "interval = 0.1", "interval = 0.1\nprobe_timeout = 60"
        )
        if place == "engine":
            text = text.replace(fleet.policy.engine.url, url)
        else:
            traffic = text[text.index("[traffic]") : text.index("[minimum]")]
            text = text.replace(traffic, f'[traffic]\nkind = "webhook"\nurl = "{url}"\n')
        fleet.file.write_text(text)
        guard = start(fleet)
        try:
            until(lambda: asked)
            begin = time.monotonic()
            guard.send_signal(signal.SIGINT)
            assert guard.wait(20) == 0
            assert time.monotonic() - begin < 4  # a call alone may take 5 s
        finally:
            guard.kill()
            guard.wait()
            guard.stderr.close()


def test_a_stop_ends_only_what_changes_nothing() -> None:
    stop = GuardStop()
    with pytest.raises(StoppedError), stop.at_once():
        stop.ask()
    stop.ask()  # while something is changed it only takes note
    with pytest.raises(StoppedError), stop.at_once():
        raise AssertionError("it was asked before")


WEIGHTS = [
    '{"engine": 1e999, "standby": 0}', '{"engine": -5, "standby": 3}',
    '{"engine": true, "standby": 0}', '{"engine": 1.5, "standby": 0}',
    '{"engine": "100", "standby": null}', '{"engine": [], "standby": {}}', "[1, 2]", "null",
    '{"engine": %s, "standby": 0}' % ("9" * 5000), "[" * 10**5,
    '{"engine": 10000000, "standby": 0}',
]  # fmt: skip


@pytest.mark.parametrize("said", WEIGHTS, ids=range(len(WEIGHTS)))
def test_weights_that_are_none_are_one_sentence(said: str) -> None:
    with http(lambda *_: (200, said)) as url, pytest.raises(SwitchError, match="tells no weights"):
        Webhook(PolicyTraffic(kind="webhook", url=url)).read()


PATH = "/apis/gateway.networking.k8s.io/v1/namespaces/n/httproutes/r"


def rules(*references: Any) -> dict[str, Any]:
    return {"spec": {"rules": [{"backendRefs": list(references)}]}}


ROUTES: list[Any] = [
    {"metadata": None, **rules({"name": "a"}, {"name": "b"})},
    {"metadata": [], **rules({"name": "a"}, {"name": "b"})},
    {"metadata": {}, "spec": None}, {"metadata": {}, "spec": {"rules": "abc"}},
    {"metadata": {}, "spec": {"rules": [None]}}, {"metadata": {}, **rules(None)},
    {"metadata": {}, **rules({"name": []})},
    {"metadata": {}, **rules({"name": "a", "weight": "x"})},
    {"metadata": {}, **rules({"name": "a", "weight": -1}, {"name": "b"})},
    {"metadata": {}, **rules({"name": "a", "weight": 10**12}, {"name": "b"})}, [], None, "x",
]  # fmt: skip


def route_switch(url: str) -> HTTPRoute:
    names = {"engine": "a", "standby": "b"}
    return HTTPRoute(PolicyTraffic("httproute", url=url, namespace="n", route="r", **names))


@pytest.mark.parametrize("route", ROUTES, ids=range(len(ROUTES)))
def test_a_route_that_is_none_is_one_sentence(route: Any) -> None:
    with http(lambda *_: (200, route)) as url, pytest.raises(SwitchError) as caught:
        route_switch(url).set((1, 99))
    assert str(caught.value).isprintable()


def test_a_null_weight_is_one_as_kubernetes_has_it() -> None:
    cluster = Cluster((PATH, rules({"name": "a", "weight": None}, {"name": "b", "weight": 3})))
    with http(cluster.answer) as url:
        switch = route_switch(url)
        assert switch.read() == (1, 3)
        switch.set((5, 95))
        assert switch.read() == (5, 95)


# Files

STATUSES = [
    "", "{", "[]", "null", "{}", '{"time": "x"}', "[" * 10**5, '{"time": 1e999}', "\ud800",
    '{"time": 1, "engine": 5}', '{"a": 1, "a": 2}', "9" * 5000, "x" * (2 << 20),
]  # fmt: skip


def test_a_damaged_status_is_one_sentence(fleet: Fleet) -> None:
    guard = fleet.guard()
    fleet.turn(guard)
    file = Path(fleet.policy.folder) / "status.json"
    for number, text in enumerate(STATUSES):
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        for words in (("status",), ("status", "--json")):
            done = invoke(fleet, *words)
            assert done.exit_code == 2, number
            assert "status.json" in done.stderr.replace("\n", ""), number
            assert "Traceback" not in done.output
    assert "no guard is running" in invoke(fleet, "force", "plain").stderr
    fleet.turn(guard)
    assert invoke(fleet, "status").exit_code == 0


def test_a_status_whose_values_are_forged_is_shown_harmlessly(fleet: Fleet) -> None:
    fleet.turn(fleet.guard())
    file = Path(fleet.policy.folder) / "status.json"
    whole = json.loads(file.read_text())
    file.write_text(
        json.dumps(whole | {"mode": FORGED, "forced": FORGED, "engine": FORGED,
                            "reasons": {"a": {FORGED: [FORGED]}}, "alerts": {FORGED: None}})
    )  # fmt: skip
    done = invoke(fleet, "status")
    assert done.exit_code == 0
    assert all(line.isprintable() for line in done.stdout.split("\n"))


def damaged_states() -> list[tuple[str, Any]]:
    track = {"level": "own", "since": 0.0, "cause": "", "wait": 0.0, "retry_at": 0.0, "stage": 0,
             "errors": 0.0}  # fmt: skip
    found: list[tuple[str, Any]] = [
        ("own_weights", [-5, 3]), ("own_weights", [1.5, 2]), ("own_weights", ["1", "2"]),
        ("own_weights", [1]), ("own_weights", {"1": 2}), ("own_weights", 7), ("own_weights", "12"),
        ("own_drafting", {}), ("own_drafting", []), ("own_drafting", {"enabled": True}),
        ("own_drafting", {"enabled": 1, "length": None, "in_use": 1}),
        ("own_drafting", {"enabled": True, "length": "4", "in_use": 1}),
        ("own_drafting", {"enabled": True, "length": 4, "in_use": -1}),
        ("pending", []), ("pending", {"p99": "x"}), ("pending", {"p99": -1}), ("pending", None),
        ("forced", []), ("forced", "sideways"), ("engine", 5), ("engine", None), ("noted", "no"),
        ("reduced_to", 2.5), ("reduced_to", 10**9), ("seen", "1"), ("seen", None), ("seen", 1e300),
        ("seen", True), ("drafting", None), ("traffic", []),
    ]  # fmt: skip
    for name, value in (
        ("level", "none"), ("level", []), ("since", "x"), ("wait", -1), ("retry_at", None),
        ("stage", -1), ("stage", 1.5), ("cause", 5), ("cause", "a\nb"), ("errors", [0]),
    ):  # fmt: skip
        found.append(("traffic", track | {name: value}))
    return found


@pytest.mark.parametrize(("name", "value"), damaged_states())
def test_a_damaged_state_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    store = GuardStore(tmp_path)
    store.save(State(engine="http://a"))
    file = tmp_path / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    with pytest.raises(ConfigError, match=r"state\.json"):
        store.load("http://a")


def test_damaged_lines_of_an_audit_are_left_out(fleet: Fleet) -> None:
    fleet.turn(fleet.guard())
    file = Path(fleet.policy.folder) / "audit.jsonl"
    good = len(fleet.history())
    odd = [
        "[" * 10**5, "\ud800", '{"time": 1e999}', "null", "5", '{"time": "x", "text": "no time"}',
        '{"time": 1e18, "text": "far"}', json.dumps({"time": 1, "text": FORGED, "kind": [FORGED]}),
        '{"time": null, "action": {"a": 1}, "text": 5}', "x" * (3 << 20), '{"a": NaN}', "\x00\x85",
        '{"kind": "note", "text": "one\u2028 entry"}',
    ]  # fmt: skip
    with file.open("ab") as opened:
        opened.write("\n".join(odd).encode("utf-8", "surrogatepass") + b'\n{"torn')
    assert len(GuardStore(fleet.policy.folder).history()) == good + 5
    done = invoke(fleet, "history", "--last", "1000")
    assert done.exit_code == 0
    assert len(done.stdout.split("\n")) == good + 6
    assert all(line.isprintable() for line in done.stdout.split("\n"))
    assert "one" in done.stdout
    assert invoke(fleet, "history", "--json").exit_code == 0


def test_of_a_long_audit_the_end_is_read(tmp_path: Path) -> None:
    store = GuardStore(tmp_path)
    entry = json.dumps({"text": "\u2028" * 1000}).encode() + b"\n"
    with (tmp_path / "audit.jsonl").open("wb") as file:
        file.write(b"{" + b"x" * (1 << 24) + b"\n" + entry * 1000)
    begin = time.process_time()
    assert len(store.history(50)) == 50
    assert time.process_time() - begin < 5
    assert len(store.history(5000)) == 1000


def test_a_files_place_that_is_taken_by_something_else_is_one_sentence(fleet: Fleet) -> None:
    folder = Path(fleet.policy.folder)
    folder.mkdir()
    for name, command in (("status.json", "status"), ("audit.jsonl", "history")):
        os.mkfifo(folder / name)
        done = invoke(fleet, command)
        assert done.exit_code == 2
        assert "is not a regular file" in done.stderr
    (folder / "state.json").mkdir()
    with pytest.raises(ConfigError, match="is not a regular file"):
        fleet.guard()


@pytest.mark.parametrize("text", ["", "{", '{"force": []}', '{"force": "sideways"}', "[" * 10**5])
def test_a_damaged_command_ends_no_guard(fleet: Fleet, text: str) -> None:
    guard = fleet.guard()
    (Path(fleet.policy.folder) / "command.json").write_text(text)
    assert fleet.turn(guard) is not None
    assert guard.state.forced is None
    assert invoke(fleet, "force", "plain").exit_code == 0
    fleet.turn(guard)
    assert guard.state.forced == "plain"


def test_a_full_disk_changes_nothing_and_ends_nothing(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = fleet.guard()
    fleet.turn(guard)
    fleet.engine.serve(good=50, failed=50)

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="No space left"):
        fleet.turn(guard)
    assert fleet.proxy.weights == {"llm/engine": 100, "llm/standby": 1}
    assert guard.state.mode == "normal"
    assert not list(Path(fleet.policy.folder).glob(".*"))
    monkeypatch.undo()
    fleet.engine.serve(good=50, failed=50)
    fleet.turn(guard)
    assert fleet.proxy.weights == {"llm/engine": 0, "llm/standby": 100}


@pytest.mark.parametrize(
    ("error", "alert"), [(StoreError("The disk is full."), "folder"), (TypeError(FORGED), "failed")]
)
def test_an_evaluation_that_fails_is_an_alert_and_ends_no_guard(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, error: Exception, alert: str
) -> None:
    guard = fleet.guard()
    calls: list[int] = []

    def odd() -> None:
        calls.append(1)
        if len(calls) == 3:
            guard.stop.ask()
        if len(calls) > 1:
            raise error

    monkeypatch.setattr(guard, "turn", odd)
    monkeypatch.setattr(guard, "policy", replace(guard.policy, interval=0.01))
    guard.run()
    assert len(calls) == 3
    (entry,) = [each for each in guard.store.history() if each["kind"] == "alert"]
    assert entry["alert"] == alert
    assert entry["text"].isprintable()


def test_a_folder_that_cannot_be_written_is_told_at_the_start(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="Read-only"):
        fleet.guard().run()


def test_a_lock_whose_file_was_removed_is_taken_anew(tmp_path: Path) -> None:
    first, second = FileLease(tmp_path / "lease"), FileLease(tmp_path / "lease")
    assert first.hold(0) is None
    (tmp_path / "lease").unlink()
    assert second.hold(0) is None
    said = first.hold(1)
    assert said is not None
    assert "Another guard acts" in said
    second.release()
    assert first.hold(2) is None
    first.release()


# Clocks


def test_a_clock_set_back_does_not_keep_an_engine_away(fleet: Fleet) -> None:
    guard = fleet.guard()
    fleet.turn(guard)
    fleet.engine.serve(good=50, failed=50)
    fleet.turn(guard)
    assert guard.state.mode == "standby"
    fleet.now -= DAY
    again = fleet.guard()
    guard.lease.release()
    modes = []
    for _ in range(14):
        fleet.turn(again)
        modes.append(again.state.mode)
    assert "probing" in modes


def test_within_a_process_the_walls_clock_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = steady()
    before = clock()
    assert before == pytest.approx(time.time(), abs=5)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert clock() >= before


def test_times_of_a_state_fit_the_clock_it_meets() -> None:
    track = GuardTrack(Place.STANDBY, since=1000.0, cause="errors", wait=120.0, retry_at=1120.0)
    state = State(traffic=track, pending={"p99": 990.0}, seen=1050.0)
    assert carried_over(state, 1060.0, 3600.0) == state
    back = carried_over(state, 100.0, 3600.0)
    assert (back.seen, back.pending["p99"]) == (100.0, 40.0)
    assert (back.traffic.since, back.traffic.retry_at) == (50.0, 170.0)
    assert back.drafting == state.drafting, "no time lies before all clocks began"
    damaged = replace(state, drafting=GuardTrack(Level.PLAIN, 9e9, "", 9e9, 9e10), seen=10.0)
    found = carried_over(damaged, 1000.0, 3600.0).drafting
    assert (found.since, found.wait, found.retry_at) == (1000.0, 3600.0, 4600.0)


# Pages


def hostile_page(line: str, size: int) -> bytes:
    return (line + "\n").encode() * (size // (len(line) + 1))


@pytest.mark.parametrize(
    "line",
    ['other_total{x="y"} 1', "x" * 10_000, "# HELP a b", '{"quoted", a="b"} 1 1 1', "\x85" * 100],
    ids=range(5),
)
def test_a_long_page_is_read_in_little_memory(line: str) -> None:
    whole = hostile_page(line, 1 << 21)
    reader = Reader(frozenset(["vllm:num_requests_running"]))
    tracemalloc.start()
    for at in range(0, len(whole), 65536):
        reader.feed(whole[at : at + 65536])
    reader.feed(b"\nvllm:num_requests_running 3\n")
    found = reader.page()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 19
    assert found.total("vllm:num_requests_running") == 3


def test_an_endless_line_takes_no_memory() -> None:
    reader = Reader()
    tracemalloc.start()
    for _ in range(256):
        reader.feed(b"x" * 65536)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    reader.feed(b"\na 1\n")
    found = reader.page()
    assert (found.total("a"), found.broken) == (1, 1)


def test_a_page_has_no_more_than_so_many_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MOST_SAMPLES", 100)
    reader = Reader(["a"])
    reader.feed(b"".join(b'a_total{x="%d"} 1\n' % i for i in range(300)))
    found = reader.page()
    assert (found.total("a"), found.broken) == (100, 200)


def test_a_page_in_pieces_is_the_page() -> None:
    text = (
        b'# TYPE a counter\na_total{x="\xc3\xbc"} 1\r\nb 2 1234\n\nbroken {\nc NaN\nd 1e999\nlast 4'
    )
    whole = Reader()
    whole.feed(text)
    pieces = Reader()
    for byte in text:
        pieces.feed(bytes([byte]))
    assert pieces.page().samples == (found := whole.page()).samples
    assert set(found.samples) == {"a", "b", "last"}
    assert found.broken == 1


def test_no_more_than_so_many_pages_are_kept(fleet: Fleet) -> None:
    scrapes = Scrapes(replace(fleet.policy, window=1000.0))
    for now in range(0, 1000, 1):
        scrapes._engine._window.pages.append((float(now), page.parse(""))) if now < 1 else None
        if now % 10 == 0:
            scrapes.read(float(now))
    assert len(scrapes._engine._window.pages) <= figures.MOST_PAGES_KEPT + 2


def test_figures_that_are_none_are_left_out() -> None:
    found = side(True, {"done": float("inf"), "failed": -3.0, "p99": float("nan"), "memory": -1.0,
                        "drafted": 1e308, "accepted": float("inf"), "running": None})  # fmt: skip
    assert found == states.Side(up=True, drafted=1e308)
    huge = page.parse('vllm:request_success_total{a="1"} 1e308\nvllm:request_success_total 1e308')
    assert huge.total("vllm:request_success") is None


def test_all_queries_share_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "SOURCE_SECONDS", 0.3)

    def slow(*_: Any) -> tuple[int, Any]:
        time.sleep(0.1)
        return 200, {"status": "success", "data": {"resultType": "vector", "result": []}}

    with http(slow) as url:
        own = {"engine": {"url": "http://e"},
               "source": {"kind": "prometheus", "url": url, "engine": 'job="e"'}}  # fmt: skip
        begin = time.monotonic()
        with pytest.raises(EndpointError, match="answer"):
            Prometheus(parse(own)).read(0)
        assert time.monotonic() - begin < 3


def test_a_key_goes_only_where_the_policy_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GUARDS_KEY", "secret")
    stolen: list[Any] = []

    def steal(method: str, path: str, body: Any, headers: Any) -> tuple[int, Any]:
        stolen.append(headers.get("Authorization"))
        return 200, {}

    with http(steal) as other:
        head = f"HTTP/1.1 302 Found\r\nLocation: {other}\r\nContent-Length: 0\r\n\r\n"
        with peer(lambda link: link.sendall(head.encode())) as (url, asked):
            engine = parse({"engine": {"url": url, "key_env": "GUARDS_KEY"}})
            assert Scrapes(engine).read(0.0)[0].up is False
            with pytest.raises(SwitchError, match="redirects to"):
                Webhook(PolicyTraffic(kind="webhook", url=url, key_env="GUARDS_KEY")).read()
    assert any(b"Bearer secret" in each for each in asked)
    assert not stolen
