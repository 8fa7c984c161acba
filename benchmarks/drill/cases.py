"""The cases of the drill: a fault, what the guard did, and what clients met."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from outrider.errors import ConfigError

from .faults import Crashing, Slow
from .fleet import DRAFT_LENGTH, Fleet, until
from .load import Load, Sent, p99
from .panels import empty, lines

Case = dict[str, Any]
RATE = 5.0
"""Requests a second."""
FEWEST = 5
"""Requests from which on a P99 is worth comparing."""


class Stage:
    """A fleet under load, and how long the drill watches."""

    def __init__(self, fleet: Fleet, quiet: float) -> None:
        self.fleet, self.quiet = fleet, quiet
        self.window = fleet.pace.window

    def load(self, name: str) -> Load:
        """Start a load through HAProxy."""
        return Load(self.fleet.url, RATE, self.fleet.folder / f"{name}.json")

    def wait(self, mode: str, windows: float = 40) -> float:
        """Wait for a state of the guard; when it came there (``time.time``)."""
        until(lambda: self.fleet.mode() == mode, f"the guard is in {mode}", windows * self.window)
        return time.time()

    def acted(self, action: str, since: float) -> float:
        """Wait for an action; the seconds since a time."""

        def times() -> list[float]:
            return [e["time"] for e in self.fleet.done(since) if e["action"] == action]

        until(times, f"the guard does {action}", 20 * self.window)
        return times()[0] - since


def now() -> tuple[float, float]:
    """Return the time of the audit, and that of the load."""
    return time.time(), time.perf_counter()


def failures(requests: list[Sent]) -> list[Sent]:
    """Return the requests that failed."""
    return [one for one in requests if one.error]


def result(stage: Stage, name: str, seconds: float | None, **more: Any) -> Case:
    """Return a case's figures; it passes if each of its checks does."""
    checks: dict[str, bool] = more.pop("checks")
    if seconds is not None:
        more = {"seconds": round(seconds, 1), "windows": round(seconds / stage.window, 2), **more}
        checks["within two windows"] = seconds <= 2 * stage.window
    return {"case": name, "passed": all(checks.values()), **more, "checks": checks}


def healthy(stage: Stage) -> Case:
    """Without a fault: the guard does nothing; latency is taken as the measure of slowness."""
    with stage.load("healthy") as load:
        time.sleep(4 * stage.window)
        requests = load.stop()
    slo = max(1.0, 5 * p99(requests[len(requests) // 4 :]))
    stage.fleet.values |= {"slow": round(slo, 2), "good": round(0.6 * slo, 2)}
    return result(
        stage, "healthy", None, requests=len(requests), p99=p99(requests), slo=slo,
        checks={"no request fails": not failures(requests), "requests": len(requests) > FEWEST},
    )  # fmt: skip


def weak(stage: Stage) -> Case:
    """The drafter's weights are noise and K is pinned: plain on the engine, traffic stays."""
    stage.fleet.start_guard("guard-weak")
    begin = time.time()
    with stage.load("weak") as load:
        until(lambda: _drafted(stage.fleet), "drafts are counted", 20 * stage.window)
        seconds = stage.acted("plain", time.time())
        time.sleep(stage.window)
        requests = load.stop()
    done = [entry["action"] for entry in stage.fleet.done(begin)]
    stage.fleet.kill("guard")
    moved = {"shift", "relieve"} & set(done)
    return result(
        stage, "noise, K pinned", seconds, actions=done, requests=len(requests),
        checks={"traffic stays": not moved, "no request fails": not failures(requests)},
    )  # fmt: skip


def _drafted(fleet: Fleet) -> bool:
    """Return whether the guard has seen enough drafts to judge by."""
    seen = (fleet.status() or {}).get("seen", {})
    return bool((seen.get("engine", {}).get("drafted") or 0) >= 100)


def chosen(stage: Stage) -> Case:
    """The same with K left to the engine: its controller stops drafting, the guard only records."""
    stage.fleet.set_speculation(enabled=True, num_speculative_tokens=None)
    stage.fleet.start_guard("guard-auto")
    begin = time.time()
    with stage.load("auto") as load:
        seconds = None
        with suppress(ConfigError):
            seconds = until(
                lambda: any(e.get("action") == "record" for e in stage.fleet.audit(begin)),
                "the guard records", 10 * stage.window,
            )  # fmt: skip
        time.sleep(4 * stage.window)
        requests = load.stop()
    done = [entry["action"] for entry in stage.fleet.done(begin)]
    stage.fleet.kill("guard")
    return result(
        stage, "noise, K chosen by the engine", None, recorded_after=seconds, actions=done,
        requests=len(requests),
        checks={
            "the guard only records": set(done) == {"record"},
            "no request fails": not failures(requests),
        },
    )  # fmt: skip


def recovered(stage: Stage, load: Load, begin: float, quiet: float) -> tuple[Case, list[Sent]]:
    """Wait for the return and a quiet time after it; figures of both, and all requests."""
    back = stage.wait("normal") - begin
    at, clock = now()
    time.sleep(quiet)
    later = [entry["action"] for entry in stage.fleet.done(at + 1)]
    requests = load.stop()
    slo = stage.fleet.values["slow"]
    after = p99([one for one in requests if one.at > clock + stage.window])
    checks = {
        "returns by stages": _staged(stage.fleet.done(begin)),
        "no flapping": not later,
        "P99 within its SLO": math.isnan(after) or after <= slo,
    }
    figures = {"back_after": round(back, 1), "quiet": quiet, "p99_after": after, "slo": slo}
    return {**figures, "checks": checks}, requests


def _staged(done: list[dict[str, Any]]) -> bool:
    """Return whether traffic came back by a probe and stages."""
    actions = [entry["action"] for entry in done]
    first = actions.index("shift") if "shift" in actions else len(actions)
    return actions[first:][-3:] == ["probe", "advance", "return"]


def slow(stage: Stage) -> Case:
    """Every token takes longer: traffic moves. The guard is killed and started again meanwhile."""
    assert stage.fleet.engine is not None
    stage.fleet.start_guard("guard-slow")
    with stage.load("slow") as load:
        time.sleep(2 * stage.window)
        with Slow(stage.fleet.engine):
            begin, _ = now()
            until(lambda: _decided(stage.fleet, begin), "the guard decides", 20 * stage.window)
            seconds = time.time() - begin
            stage.fleet.kill("guard")
            stage.fleet.start_guard("guard-slow")
            stage.wait("standby")
            until(lambda: _weights(stage.fleet) == (0, 100), "traffic moved", 2 * stage.window)
        more, requests = recovered(stage, load, begin, stage.quiet)
    stage.fleet.kill("guard")
    checks = more.pop("checks") | {"no request fails": not failures(requests)}
    return result(
        stage, "latency, guard killed in between", seconds, requests=len(requests), **more,
        checks=checks,
    )  # fmt: skip


def _decided(fleet: Fleet, since: float) -> bool:
    return any(e["kind"] == "decided" for e in fleet.audit(since))


def _weights(fleet: Fleet) -> tuple[int, int]:
    from outrider.ops.guard.policy import PolicyTraffic
    from outrider.ops.guard.switches import HAProxy

    return HAProxy(
        PolicyTraffic(
            kind="haproxy", address=f"unix:{fleet.values['socket']}", backend="llm",
            engine="engine", standby="standby",
        )
    ).read()  # fmt: skip


def errors(stage: Stage) -> Case:
    """The engine crashes again and again, so its server answers 503: traffic moves at once."""
    assert stage.fleet.engine is not None
    stage.fleet.start_guard("guard-errors")
    with stage.load("errors") as load:
        time.sleep(2 * stage.window)
        begin, clock = now()
        with Crashing(stage.fleet.engine):
            seconds = stage.acted("shift", begin)
        moved = clock + seconds
        more, requests = recovered(stage, load, begin, stage.quiet)
    stage.fleet.kill("guard")
    lost = failures(requests)
    late = [one for one in lost if one.at > moved + 0.5]
    checks = more.pop("checks") | {"no request fails once traffic moved": not late}
    return result(
        stage, "errors", seconds, requests=len(requests), lost=len(lost), **more, checks=checks
    )


def killed(stage: Stage) -> Case:
    """The speculative server is killed: only requests under way on it are lost."""
    stage.fleet.start_guard("guard-killed")
    with stage.load("killed") as load:
        time.sleep(2 * stage.window)
        begin = time.time()
        stage.fleet.kill_engine()
        clock = time.perf_counter()  # what is sent from here on meets a dead server
        seconds = stage.acted("shift", begin)
        stage.fleet.start_engine()
        more, requests = recovered(stage, load, begin, stage.quiet)
    stage.fleet.kill("guard")
    lost = failures(requests)
    late = [one for one in lost if one.at > clock]
    checks = more.pop("checks") | {"only requests under way are lost": not late}
    return result(
        stage, "kill -9", seconds, requests=len(requests), lost=len(lost), **more, checks=checks
    )


def blind(stage: Stage) -> Case:
    """Prometheus stops and the engine crashes: an alert and no action, until it is back."""
    assert stage.fleet.engine is not None
    stage.fleet.start_guard("guard-blind")
    begin = time.time()
    with stage.load("blind") as load:
        time.sleep(stage.window)
        stage.fleet.kill("prometheus")
        until(lambda: "source" in (stage.fleet.status() or {})["alerts"], "an alert",
              5 * stage.window)  # fmt: skip
        stage.fleet.engine.kill_engine()
        time.sleep(2 * stage.window)
        done = [entry["action"] for entry in stage.fleet.done(begin)]
        stage.fleet.start_prometheus()
        until(lambda: "source" not in (stage.fleet.status() or {})["alerts"], "the alert ends",
              5 * stage.window)  # fmt: skip
        requests = load.stop()
    stage.fleet.kill("guard")
    return result(
        stage, "Prometheus stopped", None, requests=len(requests), actions=done,
        checks={"no action": not done, "an alert": True},
    )  # fmt: skip


def panels(stage: Stage) -> Case:
    """Every panel of the dashboard shows something of this fleet, by Prometheus."""
    fleet, begin = stage.fleet, time.time()
    fleet.start_guard("guard-panels")
    with stage.load("panels") as load:
        with suppress(HTTPError):  # counted among the failed ones
            fleet.ask("/v1/completions", {"model": "nobody", "prompt": "x"})
        # K is the engine's, 1, and none: each has lines of its own.
        for change in ({"num_speculative_tokens": None}, {"num_speculative_tokens": 1}):
            fleet.set_speculation(enabled=True, **change)
            time.sleep(2 * stage.window)
        fleet.tell_guard("force", "plain")
        stage.wait("plain")
        time.sleep(stage.window)
        requests = load.stop()
    fleet.kill("guard")
    missing = empty(fleet.prometheus, begin, stage.window)
    fleet.set_speculation(enabled=True, num_speculative_tokens=DRAFT_LENGTH)
    return result(
        stage, "panels", None, requests=len(requests), lines=len(lines()), empty=missing,
        checks={"every panel has points": not missing},
    )  # fmt: skip


NOISE: dict[str, Callable[[Stage], Case]] = {"weak": weak, "auto": chosen}
"""Cases on a fleet whose drafter is noise."""
GOOD: dict[str, Callable[[Stage], Case]] = {
    "slow": slow, "errors": errors, "killed": killed, "blind": blind, "panels": panels
}  # fmt: skip
"""Cases on a healthy fleet; ``healthy`` comes before them."""


def work_folder(folder: Path, name: str) -> Path:
    """Return a new folder below another."""
    path = folder / name
    path.mkdir(parents=True)
    return path
