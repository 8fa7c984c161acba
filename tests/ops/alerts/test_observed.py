"""Recording rules give what the exporter gives, with the same values, from the engines' pages."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from outrider.ops.alerts.exporter import Exporter
from outrider.ops.alerts.rules import render
from tests.support.promql import EXPOSITIONS, check, needs_promtool, samples, scraped, series
from tests.support.watching import Replay

LIVE = ("_throughput", "_up", "goodput")
"""What depends on the exporter's own times."""


@needs_promtool
@pytest.mark.parametrize("name", ["vllm", "sglang", "llamacpp", "trtllm"])
def test_rules_record_what_the_exporter_exports(name: str, tmp_path: Path) -> None:
    text = (EXPOSITIONS / f"{name}.prom").read_text()
    registry = CollectorRegistry()
    registry.register(Exporter(Replay(text)))
    expected = [
        each for each in samples(generate_latest(registry).decode())
        if not any(part in each.name for part in LIVE)
    ]  # fmt: skip
    assert len(expected) > 5
    check(tmp_path, render("prometheus"), [{
        "input_series": series(scraped(text, "llm", "a:1")),
        "promql_expr_test": [{
            "expr": f"abs({sample.name}{{{labels(sample.labels)}}} - {sample.value!r}) < bool 1e-6",
            "eval_time": "10m",
            "exp_samples": [{"labels": f'{{{all_labels(sample.labels)}}}', "value": 1}],
        } for sample in expected],
    }])  # fmt: skip


def labels(of: dict[str, str]) -> str:
    return ",".join(f'{name}="{value}"' for name, value in of.items() if value)


def all_labels(of: dict[str, str]) -> str:
    return labels({**of, "job": "llm", "instance": "a:1"})


@needs_promtool
def test_outrider_is_told_from_vllm(tmp_path: Path) -> None:
    text = (EXPOSITIONS / "vllm.prom").read_text()
    values = scraped(text, "theirs", "a:1") | scraped(
        text + "outrider_draft_length 4\n", "ours", "b:1"
    )
    check(tmp_path, render("prometheus"), [{
        "input_series": series(values),
        "promql_expr_test": [{
            "expr": "count by (engine, job) (outrider_observed_acceptance)", "eval_time": "10m",
            "exp_samples": [{"labels": '{engine="vllm", job="theirs"}', "value": 1},
                            {"labels": '{engine="outrider", job="ours"}', "value": 1}],
        }],
    }])  # fmt: skip
