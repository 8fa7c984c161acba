"""The report of an adaptation as one HTML file that loads nothing."""

from __future__ import annotations

from html import escape
from typing import Any

from ..bench.load.page import STYLE, plot, table

HEADS = (
    "prompts", "data", "samples", "T", "acceptance length", "95 % interval", "accepted", "speedup",
    "tokens/s",
)  # fmt: skip
TRAININGS = "data", "learning rate", "samples", "domain", "95 % interval", "general", "result"
DEFINITIONS = {
    "acceptance length": "1 + accepted / drafts: the tokens that a verify step of the target "
    "gives. It is measured by the engine that serves, one request at a time.",
    "95 % interval": "over prompts.",
    "accepted": "accepted / drafted tokens.",
    "speedup": "over plain decoding, the median of rounds that take turns with it; that of a slow "
    "target is timed once.",
    "domain": "prompts of the domain that nothing was trained on.",
    "general": "bundled prompts of chat, prose and edits, which show what is forgotten.",
    "data": "the share of the domain's samples that a drafter was trained on; 0 % is the drafter "
    "before.",
}


def rows(report: dict[str, Any]) -> list[list[Any]]:
    """Return the table's lines: each point, on the domain's and on general prompts."""
    return [
        [
            kind, f"{point['share']:.0%}", point["samples"], f"{served['temperature']:g}",
            served["acceptance_length"],
            "[{:.2f} {:.2f}]".format(*served["interval"]),
            f"{served['acceptance_rate']:.0%}", served["speedup"], served["tokens_per_second"],
        ]
        for kind in ("domain", "general")
        for point in report["points"]
        for served in point[kind]
    ]  # fmt: skip


def trainings(report: dict[str, Any]) -> list[list[Any]]:
    """Return a line for each training: its gain over the drafter before training."""
    return [
        [
            f"{point['share']:.0%}", f"{point['rate']:g}", point["samples"],
            f"{point['gain']['gain']:+.1%}",
            f"[{point['gain']['low']:+.1%} {point['gain']['high']:+.1%}]",
            f"{point['kept']['gain']:+.1%}", "yes" if point == best_of(report) else "",
        ]
        for point in [*report["rates"], *report["points"][2:]]
    ]  # fmt: skip


def best_of(report: dict[str, Any]) -> dict[str, Any]:
    """Return the point whose drafter is the result."""
    found: dict[str, Any] = next(
        point for point in report["points"][1:] if point["share"] == report["best_share"]
    )
    return found


def page(report: dict[str, Any]) -> str:
    """Return the page."""
    points, verdict, machine = report["points"], report["verdict"], report["machine"]
    lines = {
        f"{kind}, T = {before['temperature']:g}": [
            (point["samples"], point[kind][i]["acceptance_length"]) for point in points
        ]
        for kind in ("domain", "general")
        for i, before in enumerate(points[0][kind])
    }
    by_samples = plot("Acceptance length by samples", "samples", "acceptance length", lines)
    shares: dict[str, list[tuple[float, Any]]] = {
        name: [(i + 1, share) for i, share in enumerate(point["domain"][0]["by_position"])]
        for name, point in (("before", points[0]), ("after", best_of(report)))
    }
    heat, count = points[0]["domain"][0]["temperature"], len(points[0]["domain"][0]["lengths"])
    by_position = plot(
        f"Accepted by position, domain, T = {heat:g}", "position", "share of drafts", shares
    )
    mark = "deploy" if verdict["deploy"] else "do not deploy"
    definitions = (f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in DEFINITIONS.items())
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>Adaptation</title>"
        f"<style>{STYLE}</style><h1>{mark.capitalize()}</h1>"
        f"<p class=warning>{escape(verdict['why'])}</p><dl>"
        f"<dt>target</dt><dd>{escape(report['target'])}</dd>"
        f"<dt>drafter before</dt><dd>{escape(report['drafter'])} ({escape(report['kind'])})</dd>"
        f"<dt>drafter after</dt><dd>{escape(report['adapted'])}</dd>"
        f"<dt>prompts</dt><dd>{escape(report['prompts'])}, of which {count} were measured on</dd>"
        f"<dt>draft length</dt><dd>K = {report['num_speculative_tokens']}</dd>"
        f"<dt>machine</dt><dd>{escape(str(machine.get('cpu')))}, {machine.get('threads')} threads, "
        f"{escape(str(machine.get('date')))}</dd></dl>"
        f"<div class=plots>{by_samples}{by_position}</div>"
        f"<h2>Before and after</h2>{table(HEADS, rows(report))}"
        "<h2>Trainings</h2><p>Gain of acceptance length over the drafter before, prompt by prompt, "
        f"at all temperatures.</p>{table(TRAININGS, trainings(report))}"
        f"<h2>Definitions</h2><dl>{''.join(definitions)}</dl></html>"
    )
