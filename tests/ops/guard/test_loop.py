"""The whole guard against stand-ins: what it changes, says, writes, and does after kill -9."""

import json
import signal
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from outrider.cli import app
from outrider.errors import ConfigError
from outrider.ops.guard.loop import Guard
from outrider.ops.guard.policy import SIGNALS
from outrider.ops.guard.states import DraftingState
from outrider.ops.guard.store import GuardStore
from tests.support.guarding import Fleet, start, until


def fail(fleet: Fleet, guard: Guard) -> None:
    """Let the engine fail until traffic moved."""
    fleet.turn(guard)
    fleet.engine.serve(good=50, failed=50)
    fleet.turn(guard)


def test_errors_move_traffic_and_health_brings_it_back(fleet: Fleet) -> None:
    guard = fleet.guard(webhook=fleet.webhook)
    fail(fleet, guard)
    assert fleet.proxy.weights == {"llm/engine": 0, "llm/standby": 100}
    assert fleet.history()[-2:] == [("decided", "shift"), ("done", "shift")]
    assert [each["kind"] for each in fleet.heard][-2:] == ["decided", "done"]
    samples = {s.name: s.value for m in guard.events.registry.collect() for s in m.samples
               if s.value}  # fmt: skip
    assert samples["outrider_guard_actions_total"] == 1
    assert samples["outrider_guard_standby_warm"] == 1
    shares = []
    for _ in range(40):
        fleet.engine.serve(good=20)
        fleet.turn(guard)
        shares.append(fleet.proxy.weights["llm/engine"])
    assert sorted(set(shares)) == [0, 5, 25, 50, 100]
    assert shares == sorted(shares)
    assert fleet.proxy.weights == {"llm/engine": 100, "llm/standby": 1}
    # Back to normal it says nothing more about weights.
    fleet.proxy.weights["llm/engine"] = 70
    fleet.turn(guard)
    assert fleet.proxy.weights["llm/engine"] == 70


def test_weak_drafting_is_reduced_on_the_engine_and_restored(fleet: Fleet) -> None:
    guard = fleet.guard()
    for _ in range(12):
        fleet.engine.draft(500, 50)
        fleet.turn(guard)
    assert fleet.engine.posts == [
        {"enabled": True, "num_speculative_tokens": 2}, {"enabled": False}
    ]  # fmt: skip
    for _ in range(60):
        if fleet.engine.enabled:
            fleet.engine.draft(500, 450)
        fleet.turn(guard)
    assert (fleet.engine.enabled, fleet.engine.length) == (True, 4)
    assert guard.state.mode == "normal"
    assert guard.state.own_drafting is None
    assert fleet.proxy.weights["llm/engine"] == 100, "traffic stayed"


def test_what_forgets_its_setting_gets_it_again(fleet: Fleet) -> None:
    guard = fleet.guard()
    fail(fleet, guard)
    fleet.proxy.weights.update({"llm/engine": 100, "llm/standby": 1})  # HAProxy was reloaded
    fleet.turn(guard)
    assert fleet.proxy.weights == {"llm/engine": 0, "llm/standby": 100}
    assert ("drift", "") in fleet.history()


def test_a_switch_that_breaks_in_between_leaves_the_old_state_and_an_alert(fleet: Fleet) -> None:
    guard = fleet.guard()
    fleet.turn(guard)
    fleet.engine.serve(good=50, failed=50)
    fleet.proxy.stuck.set()  # it is silent, and sets nothing
    fleet.turn(guard)
    assert guard.state.mode == "normal"
    assert fleet.history()[-2:] == [("failed", "shift"), ("alert", "failed")]
    fleet.engine.serve(good=50, failed=50)
    fleet.turn(guard)
    assert fleet.history().count(("failed", "shift")) == 1, "it is tried again, and told once"
    fleet.proxy.broken = True
    fleet.turn(guard)
    assert ("alert", "traffic_switch") in fleet.history()
    fleet.proxy.stuck.clear()
    fleet.proxy.broken = False
    fleet.engine.serve(good=50, failed=50)
    fleet.turn(guard)
    assert fleet.proxy.weights == {"llm/engine": 0, "llm/standby": 100}
    assert guard.state.own_weights == (100, 1)


def test_a_switch_of_drafting_that_refuses_does_not_undo_what_moved(fleet: Fleet) -> None:
    guard = fleet.guard()
    fleet.turn(guard)
    fleet.engine.refuses = True
    fleet.engine.metrics["vllm:kv_cache_usage_perc"] = 0.94
    for _ in range(6):
        fleet.turn(guard)
    assert fleet.proxy.weights == {"llm/engine": 50, "llm/standby": 50}
    assert guard.state.mode == "relieved"
    assert guard.state.drafting.level == "own"
    told = fleet.history()
    assert told.count(("done", "relieve")) == 1
    assert ("failed", "reduce") in told
    assert ("alert", "failed") in told
    assert not fleet.engine.posts
    fleet.engine.refuses = False
    for _ in range(8):
        fleet.turn(guard)
    assert fleet.engine.posts == [{"enabled": True, "num_speculative_tokens": 2}]
    assert ("clear", "failed") in fleet.history()


def test_dry_runs_decide_once_and_change_nothing(fleet: Fleet) -> None:
    guard = fleet.guard(dry_run=True)
    fail(fleet, guard)
    for _ in range(3):
        fleet.turn(guard)
    assert fleet.proxy.weights["llm/engine"] == 100
    assert fleet.history().count(("decided", "shift")) == 1
    assert not any(kind == "done" for kind, _ in fleet.history())
    assert all(entry["dry_run"] for entry in GuardStore(fleet.policy.folder).history())


def test_a_cold_standby_keeps_traffic_where_it_is(fleet: Fleet) -> None:
    guard = fleet.guard()
    fleet.standby.cold = True
    fail(fleet, guard)
    assert fleet.proxy.weights["llm/engine"] == 100
    assert ("alert", "standby_cold") in fleet.history()
    fleet.standby.cold = False
    fleet.engine.serve(good=50, failed=50)
    fleet.turn(guard)
    assert fleet.proxy.weights["llm/engine"] == 0
    assert ("clear", "standby_cold") in fleet.history()


def test_two_guards_never_act_at_once(fleet: Fleet) -> None:
    first, second = fleet.guard(), fleet.guard()
    fleet.turn(first)
    fleet.engine.serve(good=50, failed=50)
    assert fleet.turn(second) is None
    assert fleet.proxy.weights["llm/engine"] == 100
    fleet.turn(first)
    assert fleet.proxy.weights["llm/engine"] == 0
    first.lease.release()  # as its end does
    assert fleet.turn(second) is not None
    assert second.state.mode == "standby"
    assert second.state.own_weights == (100, 1)


def test_a_guard_that_loses_its_lease_while_it_looks_does_not_act(fleet: Fleet) -> None:
    class Right:
        answers: ClassVar[list[str | None]] = [None, None, None, "another has it"]

        def hold(self, now: float) -> str | None:
            return self.answers.pop(0)

        def release(self) -> None:
            pass

    guard = Guard(fleet.policy, right=Right(), clock=lambda: fleet.now)
    fleet.turn(guard)
    fleet.engine.serve(good=50, failed=50)
    assert fleet.turn(guard) is None
    assert fleet.proxy.weights["llm/engine"] == 100
    assert GuardStore(fleet.policy.folder).load(fleet.policy.engine.url).mode == "normal"


def test_a_guard_killed_in_the_middle_ends_where_another_would(fleet: Fleet) -> None:
    fleet.file.write_text(fleet.file.read_text().replace("window = 60", "window = 20"))
    store = GuardStore(fleet.policy.folder)
    fleet.proxy.stuck.set()  # it takes the command, and the guard dies before it is done
    guard = start(fleet)
    until(lambda: store.status() is not None)
    fleet.engine.serve(good=50, failed=50)
    assert fleet.proxy.asked.wait(30)
    guard.send_signal(signal.SIGKILL)
    guard.wait()
    guard.stderr.close()
    assert json.loads((store.folder / "state.json").read_text())["traffic"]["level"] in (
        "standby", "own",
    )  # fmt: skip
    fleet.proxy.stuck.clear()
    fleet.engine.serve(good=50, failed=50)
    again = start(fleet)
    try:
        until(lambda: fleet.proxy.weights == {"llm/engine": 0, "llm/standby": 100} or not
              fleet.engine.serve(good=5, failed=5))  # fmt: skip
        until(lambda: store.status()["mode"] == "standby")
        assert store.load(fleet.policy.engine.url).own_weights == (100, 1)
    finally:
        again.terminate()
        again.wait()
        again.stderr.close()
    assert again.returncode == 0
    assert fleet.proxy.weights["llm/engine"] == 0, "its end changes nothing"


def invoke(fleet: Fleet, *words: str) -> Any:
    command, *rest = words
    return CliRunner().invoke(app, ["ops", "guard", command, "--policy", str(fleet.file), *rest])


def test_commands_show_and_steer_a_guard(fleet: Fleet) -> None:
    none = invoke(fleet, "status")
    assert none.exit_code == 2
    assert "No guard has run" in none.stderr
    assert invoke(fleet, "force", "sideways").exit_code == 2
    assert "no guard is running" in invoke(fleet, "force", "standby").stderr
    guard = fleet.guard()
    fleet.turn(guard)
    assert fleet.proxy.weights["llm/engine"] == 0
    shown = invoke(fleet, "status").stdout
    assert "state    standby" in shown
    assert "forced   standby" in shown
    signals = [line.split()[1].strip(":") for line in shown.splitlines() if "signal   " in line]
    assert signals == sorted(SIGNALS)
    document = json.loads(invoke(fleet, "status", "--json").stdout)
    assert document["mode"] == "standby"
    assert document["seen"]["warm"] is True
    assert invoke(fleet, "release").exit_code == 0
    fleet.turn(guard, 70)
    assert guard.state.mode == "probing"
    fleet.turn(guard, 1)
    shown = invoke(fleet, "status").stdout
    assert "signal   p99: no figure" in shown
    assert "next     cooldown: a change was made a moment ago" in shown
    told = invoke(fleet, "history").stdout
    assert "a person moved traffic" in told
    entries = json.loads(invoke(fleet, "history", "--json", "--last", "3").stdout)
    assert len(entries) == 3
    assert "probe" in [entry.get("action") for entry in entries]


def test_a_damaged_or_foreign_state_is_refused(fleet: Fleet) -> None:
    fleet.turn(fleet.guard())
    file = Path(fleet.policy.folder) / "state.json"
    whole = file.read_text()
    for damaged in ("", "{", "[]", "{}", whole.replace('"own"', '"other"'),
                    whole.replace('"seen": ', '"seen": "x')):  # fmt: skip
        file.write_text(damaged)
        with pytest.raises(ConfigError, match="remove it to start again"):
            fleet.guard()
    file.write_text(whole.replace(fleet.policy.engine.url, "http://other"))
    with pytest.raises(ConfigError, match="belongs to a guard of http://other"):
        fleet.guard()
    file.write_text(whole.replace(fleet.policy.engine.url, "http://\\u001b[2J\\n" + "x" * 5000))
    with pytest.raises(ConfigError, match="belongs to a guard of") as refused:
        fleet.guard()
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 600


def test_the_audit_survives_a_torn_line(tmp_path: Path) -> None:
    store = GuardStore(tmp_path)
    store.record({"text": "a", "figure": float("inf")})
    with (tmp_path / "audit.jsonl").open("a") as file:
        file.write('{"text": "to')
    assert [entry["figure"] for entry in store.history()] == ["inf"]
    store.record({"text": "b"})
    assert [entry["text"] for entry in store.history()] == ["a", "b"]


def test_a_drafting_switch_shows_what_it_has(fleet: Fleet) -> None:
    guard = fleet.guard()
    fleet.turn(guard)
    assert guard.drafting.read() == DraftingState(True, 4, 4)
