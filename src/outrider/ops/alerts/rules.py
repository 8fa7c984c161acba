"""Alert rules from ``data/alerts.toml``: Prometheus' rules file, or the operator's manifest."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import yaml

from ...base.tables import table
from ...errors import ConfigError, shown
from ..diagnose.facts import number
from ..metrics import names_of
from ..planning.advice import load_advice
from .observed import BY
from .observed import records as observed_records

LATENCIES = {"e2e": "E2E", "ttft": "TTFT"}
BREAK_EVEN = "break_even"
ONLY_ADVISED = "OutriderAcceptanceBelowBreakEven"
"""The alert that needs a known break-even."""
GROUP = "outrider"


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # yaml has no types
    """Writes texts of several lines as blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> Any:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def read_data(name: str) -> str:
    """Return a data file of this package."""
    return (files(__package__) / "data" / name).read_text(encoding="utf-8")


def source() -> dict[str, Any]:
    """Return the thresholds, records and alerts; do not change what it holds."""
    return table("outrider.ops.alerts", "alerts")


def thresholds(others: Mapping[str, object] | None = None) -> dict[str, float]:
    """Return all thresholds: the defaults, and those given instead.

    Raises ConfigError: there is no such threshold, or its value is no number from 0 on.
    """
    limits = {name: float(each["value"]) for name, each in source()["threshold"].items()}
    for name, value in (others or {}).items():
        if name not in limits:
            near = difflib.get_close_matches(name, limits, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(limits)}."
            raise ConfigError(f"there is no threshold {shown(name)}; {hint}")
        limits[name] = number(f"threshold {name}", value)
        if "share" in source()["threshold"][name] and limits[name] > 1:
            raise ConfigError(f"threshold {name} is {shown(value)}; give a share from 0 to 1.")
    return limits


def break_even_of(file: Path) -> float:
    """Return the break-even acceptance from a file of ``outrider ops advise --out``.

    Raises ConfigError: the file cannot be read, or has none.
    """
    even = load_advice(file).break_even
    if even is None:
        raise ConfigError(
            f"--advice {file} has no break-even acceptance: drafting never wins, or it was made "
            "without --hardware; drop --advice, or ask again with --hardware."
        )
    return even.value


def groups(
    latency: str = "e2e",
    break_even: float | None = None,
    others: Mapping[str, object] | None = None,
) -> list[dict[str, Any]]:
    """Return the groups of rules as a rules file has them.

    Args:
        latency: whose P99 alerts, e2e or ttft.
        break_even: acceptance below which speculation loses time; it adds an alert beside the
            plain thresholds of acceptance.
        others: thresholds instead of the defaults.

    Raises ConfigError: latency or a threshold is none.
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
    alerts = [rule for each in wanted(break_even) for rule in _alerts(each, values)]
    return [
        {"name": GROUP, "rules": [*records, *alerts]},
        {"name": f"{GROUP}-observed", "rules": observed_records()},
    ]


def wanted(break_even: float | None) -> list[dict[str, Any]]:
    """Return the alerts of the source that hold with or without a known break-even."""
    return [
        each for each in source()["alert"]
        if break_even is not None or each["name"] != ONLY_ADVISED
    ]  # fmt: skip


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
    form: str,
    latency: str = "e2e",
    break_even: float | None = None,
    others: Mapping[str, object] | None = None,
) -> str:
    """Return the rules as YAML: form prometheus or kubernetes; see ``groups`` for the others.

    Raises ConfigError: the form is neither.
    """
    spec: dict[str, Any] = {"groups": groups(latency, break_even, others)}
    if form == "kubernetes":
        spec = {
            "apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule",
            "metadata": {"name": "outrider", "labels": {"app.kubernetes.io/name": "outrider"}},
            "spec": spec,
        }  # fmt: skip
    elif form != "prometheus":
        raise ConfigError(f"--format {shown(form)} is not known; give prometheus or kubernetes.")
    text: str = yaml.dump(spec, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
    return text
