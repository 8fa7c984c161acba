"""The report as one HTML file that needs nothing else: tables, definitions, plots in SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 430, 260, 64, 44, 30
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em;
       color: #222; background: #fff }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums }
th, td { padding: .2em .7em; border-bottom: 1px solid #ddd; text-align: right }
th:first-child, td:first-child { text-align: left }
.plots { display: flex; flex-wrap: wrap; gap: 1em }
.warning { background: #fff3cd; padding: .5em 1em; border-left: 4px solid #d39e00 }
dt { font-weight: 600; font-family: monospace } svg { font: 12px system-ui, sans-serif }
"""
Line = tuple[str, list[tuple[float, float]]]
"""A name and its points."""


def number(value: Any) -> str:
    """Return a figure as people read it, a dash for none."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.2f}" if abs(value) < 100 else f"{value:,.0f}"
    return str(value)


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return an HTML table."""
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    lines = ("".join(f"<td>{escape(number(cell))}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><tr>{top}</tr>{body}</table>"


def plot(title: str, across: str, up: str, lines: Sequence[Line]) -> str:
    """Return a line plot as SVG, with axes from 0; nothing where there are no points."""
    points = [point for _, line in lines for point in line]
    if not points:
        return ""
    right = max(x for x, _ in points) or 1.0
    high = (max(y for _, y in points) or 1.0) * 1.05
    wide, tall = WIDTH - LEFT - 12, HEIGHT - BOTTOM - TOP

    def at(x: float, y: float) -> str:
        return f"{LEFT + wide * x / right:.1f},{TOP + tall * (1 - y / high):.1f}"

    parts = [f'<text x="{LEFT}" y="16" font-weight="600">{escape(title)}</text>']
    for i in range(5):
        y, x = high * i / 4, right * i / 4
        level, place = TOP + tall * (1 - i / 4), LEFT + wide * i / 4
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - 12}" y1="{level:.1f}" y2="{level:.1f}" '
            f'stroke="#e5e5e5"/><text x="{LEFT - 6}" y="{level + 4:.1f}" text-anchor="end">'
            f'{y:.3g}</text><text x="{place:.1f}" y="{HEIGHT - BOTTOM + 16}" '
            f'text-anchor="middle">{x:.3g}</text>'
        )
    for i, (name, line) in enumerate(lines):
        colour, path = COLOURS[i % len(COLOURS)], " ".join(at(x, y) for x, y in sorted(line))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(line) <= 40:
            spots = (at(x, y).split(",") for x, y in line)
            parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in spots]
        parts.append(
            f'<text x="{WIDTH - 14}" y="{TOP + 12 + 15 * i}" text-anchor="end" fill="{colour}">'
            f"{escape(name)}</text>"
        )
    parts.append(
        f'<text x="{LEFT + wide / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(across)}</text>'
        f'<text transform="translate(14 {TOP + tall / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(up)}</text>"
    )
    return f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">{"".join(parts)}</svg>'


def percentiles(run: dict[str, Any], name: str) -> list[tuple[float, float]]:
    """Return a latency by percentile, without those that were not measured."""
    pairs = ((p, run[f"p{p}_{name}_ms"]) for p in (50, 90, 95, 99))
    return [(float(p), value) for p, value in pairs if value is not None]


def plots(runs: Sequence[dict[str, Any]]) -> str:
    """Return the plots: by load where there are several, by percentile, over time."""
    drawn = []
    across = "requests at once (the most)"

    def by_load(key: str) -> list[tuple[float, float]]:
        return [(r["max_concurrent_requests"], r[key]) for r in runs if r[key] is not None]

    if len(runs) > 1:
        drawn.append(plot(
            "Throughput by load", across, "tokens/s", [("output", by_load("output_throughput"))]
        ))  # fmt: skip
        for name in ("ttft", "tpot", "e2el"):
            lines = [(f"P{p}", by_load(f"p{p}_{name}_ms")) for p in (50, 95, 99)]
            drawn.append(plot(f"{name.upper()} by load", across, "ms", lines))
    shown = runs[:6]
    for name in ("ttft", "itl", "e2el"):
        lines = [(run["label"], percentiles(run, name)) for run in shown]
        drawn.append(plot(f"{name.upper()} by percentile", "percentile", "ms", lines))
    lines = [
        (run["label"], [(float(i), n) for i, n in enumerate(run["tokens_per_second_series"])])
        for run in shown
    ]
    drawn.append(plot("Output tokens over time", "seconds", "tokens in that second", lines))
    return f'<div class="plots">{"".join(drawn)}</div>'


COLUMNS = {
    "load": "label", "ok": "completed", "failed": "failed", "requests/s": "request_throughput",
    "tokens/s": "output_throughput", "goodput/s": "request_goodput",
    **{
        f"{name.upper().replace('E2EL', 'E2E')} P{p}": f"p{p}_{name}_ms"
        for name in ("ttft", "itl", "tpot", "e2el") for p in (50, 90, 95, 99)
    },
    "acceptance %": "spec_decode_acceptance_rate", "length": "spec_decode_acceptance_length",
}  # fmt: skip
"""Of the table: heading and key. Latencies are in milliseconds."""


def page(report: dict[str, Any]) -> str:
    """Return the report as a whole HTML page."""
    runs = report["runs"]
    first = runs[0]
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        f"<title>Load of {escape(first['endpoint'])}</title><style>{STYLE}</style>",
        f"<h1>Load of {escape(first['endpoint'])}</h1>",
        f"<p>model {escape(first['model_id'])} · data set {escape(first['dataset'])} · "
        f"{escape(first['date'])} · latencies in milliseconds</p>",
        *(f'<p class="warning">{escape(text)}</p>' for text in report["warnings"]),
        table(list(COLUMNS), [[run.get(key) for key in COLUMNS.values()] for run in runs]),
        *_comparisons(report),
        plots(runs),
        "<h2>What limits it</h2>",
        f"<p><b>{escape(report['bottleneck']['points_to'])}</b>: "
        f"{escape(report['bottleneck']['evidence'])}. A hint, no proof.</p>",
        table(("load", "quantity", "mean", "deviation", "deviation / mean", "peak"), [
            (run["label"], name, *(each[key] for key in ("mean", "std", "variation", "peak")))
            for run in runs for name, each in run["machine"].items() if isinstance(each, dict)
        ]),
        "<h2>Definitions</h2><dl>",
        *(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in report["definitions"].items()),
        "</dl></html>",
    ]  # fmt: skip
    return "\n".join(parts)


def _comparisons(report: dict[str, Any]) -> list[str]:
    """Return a table for each pair of sides."""
    tables = []
    for each in report.get("comparison", ()):
        first, second = each["sides"]
        heads = ("figure, median over rounds", first, second, f"{second} / {first}", "from", "to")
        rows = [
            (key, value[first], value[second], value["ratio"], *(value["interval"] or (None, None)))
            for key, value in each.items() if isinstance(value, dict)
        ]  # fmt: skip
        tables.append(f"<h2>{escape(second)} beside {escape(first)}, {escape(each['label'])}</h2>")
        tables.append(table(heads, rows))
    return tables
