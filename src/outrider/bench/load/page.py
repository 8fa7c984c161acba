"""The report as one HTML file that loads nothing: tables, definitions, plots in SVG."""

from collections.abc import Sequence
from html import escape
from typing import Any

from ...base.plots import NAME_SPACE, Series, line_chart

DRAWN_RUNS = 6  # most runs whose latencies by percentile and tokens over time are drawn
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em;
       color: #222; background: #fff }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums }
th, td { padding: .2em .7em; border-bottom: 1px solid #ddd; text-align: right }
th:first-child, td:first-child { text-align: left }
.plots { display: flex; flex-wrap: wrap; gap: 1em }
.warning { background: #fff3cd; padding: .5em 1em; border-left: 4px solid #d39e00 }
dt { font-weight: 600; font-family: monospace }
"""


def number(value: Any) -> str:
    """Return a figure in readable form, a dash for None."""
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


def plot(title: str, across: str, up: str, lines: dict[str, list[tuple[float, Any]]]) -> str:
    """Return a line plot of points by name, without unmeasured ones."""
    known = {name: [at for at in line if at[1] is not None] for name, line in lines.items()}
    series = [
        Series(name, *zip(*sorted(line), strict=True)) for name, line in known.items() if line
    ]
    return line_chart(title, across, up, series).replace(NAME_SPACE, "") if series else ""


def plots(runs: Sequence[dict[str, Any]]) -> str:
    """Return the plots: by load if there are several, by percentile, and over time."""
    drawn = []

    def by_load(key: str) -> list[tuple[float, Any]]:
        return [(run["max_concurrent_requests"], run[key]) for run in runs]

    if len(runs) > 1:
        across = "requests at once (the most)"
        speed = {"output": by_load("output_throughput")}
        drawn.append(plot("Throughput by load", across, "tokens/s", speed))
        for name in ("ttft", "tpot", "e2el"):
            lines = {f"P{p}": by_load(f"p{p}_{name}_ms") for p in (50, 95, 99)}
            drawn.append(plot(f"{name.upper()} by load", across, "ms", lines))
    some = runs[:DRAWN_RUNS]
    for name in ("ttft", "itl", "e2el"):
        lines = {
            run["label"]: [(p, run[f"p{p}_{name}_ms"]) for p in (50, 90, 95, 99)] for run in some
        }
        drawn.append(plot(f"{name.upper()} by percentile", "percentile", "ms", lines))
    lines = {run["label"]: list(enumerate(run["tokens_per_second_series"])) for run in some}
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
"""Headings of the table and their keys. Latencies are in milliseconds."""


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
