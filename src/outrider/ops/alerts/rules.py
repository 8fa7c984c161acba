"""Alert rules from ``data/alerts.toml``: Prometheus' rules file, or the operator's manifest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import yaml

from ...base.tables import table
from ...errors import ConfigError, shown
from ..diagnose.facts import check_thresholds
from ..metrics import names_of
from ..planning.advice import load_advice
from .observed import BY
from .observed import records as observed_records

LATENCIES = {"e2e": "E2E", "ttft": "TTFT"}
BREAK_EVEN = "break_even"
ONLY_ADVISED = "OutriderAcceptanceBelowBreakEven"
GROUP = "outrider"


class _BlockDumper(yaml.SafeDumper):  # type: ignore[misc]  # yaml has no types
    """Writes texts of several lines as blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> Any:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_BlockDumper.add_representer(str, _text)


def read_data(name: str) -> str:
    """Return a data file of this package."""
    return (files(__package__) / "data" / name).read_text(encoding="utf-8")


def source() -> dict[str, Any]:
    """Return the thresholds, records and alerts; do not change the table, which is shared."""
    return table("outrider.ops.alerts", "alerts")


def thresholds(others: Mapping[str, object] | None = None) -> dict[str, float]:
    """Return all thresholds: the defaults, replaced by valid ones in ``others``."""
    known = source()["threshold"]
    return check_thresholds(others or {}, known, f"known are {', '.join(known)}.")


def break_even_of(file: Path) -> float:
    """Return the break-even acceptance in a file of ``outrider ops advise --out``."""
    even = load_advice(file).break_even
    if even is None:
        raise ConfigError(
            f"--advice {file} has no break-even acceptance: drafting never wins, or it was made "
            "without --hardware; drop --advice, or ask again with --hardware."
        )
    return even.value


def groups(
    latency: str = "e2e", break_even: float | None = None,
    others: Mapping[str, object] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the groups of rules in the form of a rules file.

    The P99 of ``latency`` (e2e or ttft) alerts, and so does acceptance below ``break_even``,
    besides its plain thresholds; ``others`` are thresholds that replace the defaults.
    """
    if latency not in LATENCIES:
        raise ConfigError(f"latency {shown(latency)} is not known; give e2e or ttft.")
    values: dict[str, object] = {
        **thresholds(others), "by": BY, "latency": latency, "histogram": names_of("vllm")[latency],
        "latency_name": LATENCIES[latency], BREAK_EVEN: break_even,
    }  # fmt: skip
    records = [
        {"record": each["name"], "expr": _filled(each["expr"], values)}
        for each in source()["record"]
    ]
    alerts = [
        rule for each in source()["alert"] for rule in _alerts(each, values)
        if break_even is not None or each["name"] != ONLY_ADVISED
    ]  # fmt: skip
    return [
        {"name": GROUP, "rules": [*records, *alerts]},
        {"name": f"{GROUP}-observed", "rules": observed_records()},
    ]


def _alerts(alert: Mapping[str, Any], values: Mapping[str, object]) -> Iterator[dict[str, Any]]:
    for severity, limit in alert["severities"].items():
        filled = {**values, "limit": values.get(limit, "")}
        yield {
            "alert": alert["name"],
            "expr": _filled(alert["expr"], filled),
            "for": alert["for"],
            "labels": {"severity": severity},
            "annotations": {
                "summary": _filled(alert["summary"], filled), "runbook": alert["runbook"].strip(),
            },
        }  # fmt: skip


def _filled(text: str, values: Mapping[str, object]) -> str:
    return Template(text.strip()).safe_substitute(values)


def render(
    form: str, latency: str = "e2e", break_even: float | None = None,
    others: Mapping[str, object] | None = None,
) -> str:  # fmt: skip
    """Return the rules as YAML: form prometheus or kubernetes; see ``groups`` for the others."""
    spec: dict[str, Any] = {"groups": groups(latency, break_even, others)}
    if form == "kubernetes":
        spec = {
            "apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule",
            "metadata": {"name": "outrider", "labels": {"app.kubernetes.io/name": "outrider"}},
            "spec": spec,
        }  # fmt: skip
    elif form != "prometheus":
        raise ConfigError(f"--format {shown(form)} is not known; give prometheus or kubernetes.")
    text: str = yaml.dump(
        spec, Dumper=_BlockDumper, sort_keys=False, allow_unicode=True, width=1000
    )
    return text
