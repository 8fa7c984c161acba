"""The report of an adaptation as one HTML file that loads nothing."""

from __future__ import annotations

from html import escape
from typing import Any

from ..bench.load.page import STYLE, plot, table

RATES = "learning rate", "gain", "kept of general"
HEADS = (
    "prompts", "trained on", "samples", "T", "tokens a step", "95 %", "accepted", "speedup",
    "tokens/s",
)  # fmt: skip


def rows(report: dict[str, Any]) -> list[list[Any]]:
    """Return the lines of the table: each point, of the domain and of general prompts."""
    return [
        [
            kind, f"{point['share']:.0%}", point["samples"], served["temperature"],
            served["acceptance_length"],
            "[{:.2f} {:.2f}]".format(*served["interval"]),
            f"{served['acceptance_rate']:.0%}", served["speedup"], served["tokens_per_second"],
        ]
        for kind in ("domain", "general")
        for point in report["points"]
        for served in point[kind]
    ]  # fmt: skip


def page(report: dict[str, Any]) -> str:
    """Return the page."""
    points, verdict = report["points"], report["verdict"]
    heats = range(len(points[0]["domain"]))
    lines = {
        f"{kind}, T = {points[0][kind][i]['temperature']:g}": [
            (point["samples"], point[kind][i]["acceptance_length"]) for point in points
        ]
        for kind in ("domain", "general")
        for i in heats
    }
    drawn = plot("Tokens a step by samples", "samples", "tokens a step", lines)
    by_position: dict[str, list[tuple[float, Any]]] = {
        name: [(i + 1, share) for i, share in enumerate(point["domain"][0]["by_position"])]
        for name, point in (("before", points[0]), ("after", points[-1]))
    }
    deeper = plot("Accepted by position, domain", "position", "share", by_position)
    first = points[1]
    rates = [
        [f"{p['rate']:g}", f"{p['gain']['gain']:+.1%}", f"{p['kept']['gain']:+.1%}"]
        for p in report["rates"]
    ]
    mark = "deploy" if verdict["deploy"] else "do not deploy"
    return (
        f"<!doctype html><meta charset=utf-8><title>Adaptation</title><style>{STYLE}</style>"
        f"<h1>{escape(mark)}</h1><p class=warning>{escape(verdict['why'])}</p>"
        f"<p>{escape(report['kind'])} {escape(report['drafter'])} for "
        f"{escape(report['target'])}, K = {report['num_speculative_tokens']}, "
        f"{escape(str(report['machine'].get('cpu')))}.</p>"
        f"<div class=plots>{drawn}{deeper}</div>{table(HEADS, rows(report))}"
        f"<p>Learning rates on {first['share']:.0%} of the data:</p>{table(RATES, rates)}"
    )
