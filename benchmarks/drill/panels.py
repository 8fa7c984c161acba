"""Whether every panel of the dashboard shows something of a live fleet, asked of Prometheus."""

from __future__ import annotations

import json
import time
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

from outrider.ops.alerts.rules import read_data

VARIABLES = {"$job": ".*", "$instance": ".*", "$model": ".*", "$price": "1"}
ELSEWHERE = ("GPU utilisation", "GPU memory")
"""Panels of machines with GPUs; tests evaluate them on recorded pages."""


def lines() -> list[tuple[str, str]]:
    """Return title and expression of each line of each panel that a machine without GPUs has."""
    return [
        (panel["title"], target["expr"])
        for panel in json.loads(read_data("dashboard.json"))["panels"]
        for target in panel.get("targets", ())
        if panel["title"] not in ELSEWHERE
    ]


def empty(prometheus: str, begin: float, window: float) -> list[str]:
    """Return the lines for which Prometheus has had no point since ``begin``, by the epoch's clock.

    ``window`` is the seconds of a rate.
    """
    return [
        f"{title}: {expression}"
        for title, expression in lines()
        if not _points(prometheus, filled(expression, window), begin)
    ]


def filled(expression: str, window: float) -> str:
    """Return an expression with values in place of the dashboard's variables."""
    for name, value in {**VARIABLES, "$__rate_interval": f"{window:.0f}s"}.items():
        expression = expression.replace(name, value)
    return expression


def _points(prometheus: str, expression: str, begin: float) -> int:
    """Return how many points that are numbers an expression has had."""
    asked = urlencode({"query": expression, "start": begin, "end": time.time(), "step": 1})
    with urlopen(f"{prometheus}/api/v1/query_range?{asked}", timeout=30) as answer:
        reply: dict[str, Any] = json.load(answer)
    series = reply["data"]["result"]
    return sum(value != "NaN" for each in series for _, value in each["values"])
