"""The dashboard: every panel shows something on real pages, and rules name no metric amiss."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from typer.testing import CliRunner

from outrider.cli import app
from outrider.ops.alerts.exporter import Exporter
from outrider.ops.alerts.rules import groups, render
from outrider.ops.guard.events import Events
from outrider.ops.guard.store import GuardStore
from outrider.ops.metrics import parse
from tests.support import REPOSITORY
from tests.support.forked import Served
from tests.support.promql import EXPOSITIONS, check, names, needs_promtool, samples, scraped, series
from tests.support.watching import Replay, fake_gpus

MONITORING = REPOSITORY / "deploy" / "monitoring"
SDK = "1769699998!10.1.0"
VARIABLES = {
    "$job": ".*", "$instance": ".*", "$model": ".*", "$price": "1", "$__rate_interval": "5m",
}  # fmt: skip


def sdk() -> str:
    try:
        return version("grafana-foundation-sdk")
    except PackageNotFoundError:
        return ""


def panels() -> list[dict[str, Any]]:
    done = CliRunner().invoke(app, ["ops", "alerts", "dashboard"])
    return [panel for panel in json.loads(done.stdout)["panels"] if panel["type"] != "row"]


LINES = [
    (panel["title"], target["expr"]) for panel in panels() for target in panel["targets"]
]  # fmt: skip


@pytest.fixture(scope="module")
def live(tiny_llama: Path) -> Iterator[tuple[str, str]]:
    """Pages of a server of ours whose target drafts for itself: drafting, and switched off."""
    with Served(tiny_llama, "--drafter", tiny_llama) as server:

        def ask() -> str:
            body = {"prompt": "the quick", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            return httpx.get(f"{server.url}/metrics").text

        def switch(**to: Any) -> None:
            httpx.post(f"{server.url}/v1/speculation", json=to).raise_for_status()

        drafting = ask()
        switch(num_speculative_tokens=1)  # drafts whatever they are worth
        deadline = time.monotonic() + 60
        while "outrider_speedup{" not in drafting and time.monotonic() < deadline:
            drafting = ask()
        switch(enabled=False)
        yield drafting, ask()


@pytest.fixture(scope="module")
def pages(live: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Pages by their source: live ones of ours, recorded or written ones of others."""
    found = {"outrider": live[0], "switched off": live[1]}
    guard = Events(GuardStore(tmp_path_factory.mktemp("guard")))
    guard.gauges("normal", True, True)
    guard.tell("done", "traffic moved", action="shift", signal="errors")
    found["guard"] = generate_latest(guard.registry).decode()
    found |= {file.stem: file.read_text() for file in sorted(EXPOSITIONS.glob("*.prom"))}
    registry = CollectorRegistry()
    vllm = Replay(found["vllm"])
    baseline = 0.02
    registry.register(Exporter(vllm, vllm, baseline, fake_gpus, compatible=True))
    found["exporter"] = generate_latest(registry).decode()
    return found


def filled(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


@needs_promtool
def test_every_line_of_every_panel_shows_something(pages: dict[str, str], tmp_path: Path) -> None:
    values: dict[str, str] = {}
    for source in ("outrider", "switched off", "dcgm", "guard", "exporter"):
        values |= scraped(pages[source], source, f"{source}:1")
    check(tmp_path, render("prometheus"), [{
        "input_series": series(values),
        "promql_expr_test": [{
            "expr": f"count({filled(expression)}) > bool 0", "eval_time": "10m",
            "exp_samples": [{"labels": "{}", "value": 1}],
        } for _, expression in LINES],
    }])  # fmt: skip


@needs_promtool
def test_the_panels_of_vllms_names_show_vllm(pages: dict[str, str], tmp_path: Path) -> None:
    lines = [expression for _, expression in LINES
             if all(name.startswith("vllm:") for name in names([filled(expression)]))]  # fmt: skip
    assert len(lines) > 20
    check(tmp_path, render("prometheus"), [{
        "input_series": series(scraped(pages["vllm"], "vllm", "v:1")),
        "promql_expr_test": [{
            "expr": f"count({filled(expression)}) > bool 0", "eval_time": "10m",
            "exp_samples": [{"labels": "{}", "value": 1}],
        } for expression in lines],
    }])  # fmt: skip


def test_rules_and_panels_name_metrics_that_exist(pages: dict[str, str]) -> None:
    existing = {sample.name for page in pages.values() for sample in samples(page)}
    rules = groups()[0]["rules"] + groups("ttft", 0.4)[0]["rules"]
    existing |= {rule["record"] for rule in rules if "record" in rule}
    named = names([rule["expr"] for rule in rules] + [filled(line) for _, line in LINES])
    assert len(named) > 40
    assert named - existing == set()


def test_names_of_metrics_are_found_in_expressions() -> None:
    assert names([
        'sum by (job, le) (rate(a_total{x="b_total"}[5m])) / on (job) group_left (m) c:d > bool 2',
        "(max(e) or f == 0) unless on (x) g",
    ]) == {"a_total", "c:d", "e", "f", "g"}  # fmt: skip


def test_panels_have_ids_sources_and_words() -> None:
    found = panels()
    assert len({panel["id"] for panel in found}) == len(found)
    for panel in found:
        assert panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(target["legendFormat"] for target in panel["targets"])
    variables = re.findall(r"\$\w+", " ".join(expression for _, expression in LINES))
    assert set(variables) == set(VARIABLES)


@pytest.mark.skipif(
    sdk() != SDK, reason=f"the SDK is missing: pip install 'grafana-foundation-sdk=={SDK}'"
)
def test_the_generator_gives_the_committed_file() -> None:
    done = subprocess.run(
        [sys.executable, MONITORING / "dashboard.py"], capture_output=True, text=True, check=True
    )
    file = REPOSITORY / "src" / "outrider" / "ops" / "alerts" / "data" / "dashboard.json"
    assert done.stdout == file.read_text(encoding="utf-8")


def test_provisioning_points_at_the_dashboard() -> None:
    source = yaml.safe_load((MONITORING / "grafana" / "datasource.yaml").read_text())
    [found] = source["datasources"]
    assert found["isDefault"]
    text = (MONITORING / "grafana" / "dashboards.yaml").read_text()
    [provider] = yaml.safe_load(text)["providers"]
    assert f"outrider ops alerts dashboard > {provider['options']['path']}/outrider.json" in text
    dashboard = json.loads(CliRunner().invoke(app, ["ops", "alerts", "dashboard"]).stdout)
    variables = {each["name"]: each for each in dashboard["templating"]["list"]}
    # The source is a variable, which is the default one of this kind.
    assert variables["datasource"]["query"] == found["type"]
    assert set(re.findall(r'"uid": "([^"]*)"', json.dumps(dashboard["panels"]))) == {
        "${datasource}"
    }
    assert set(VARIABLES) <= {f"${name}" for name in variables} | {"$__rate_interval"}


def test_the_dashboard_can_be_provisioned() -> None:
    dashboard = json.loads(CliRunner().invoke(app, ["ops", "alerts", "dashboard"]).stdout)
    assert dashboard["uid"]
    # Of an export for import by hand; provisioning does not fill them in.
    assert not {"id", "__inputs", "__requires"} & dashboard.keys()
    places: set[tuple[int, int]] = set()
    numbers: list[int] = []
    for panel in dashboard["panels"]:
        numbers.append(panel["id"])
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & places, panel["title"]
        places |= cells
    assert len(set(numbers)) == len(numbers)


def test_recorded_pages_are_read_whole() -> None:
    for file in EXPOSITIONS.glob("*.prom"):
        assert parse(file.read_text()).broken == 0, file
