"""The return on speculation as Markdown and as one HTML page."""

from __future__ import annotations

from html import escape

from .chart import Series, line_chart
from .report import table
from .roi import CASES, Roi

ROWS = (
    ("speedup", "speedup"), ("cost", "cost of the work"),
    ("device_hours_saved", "device hours freed a month"), ("saved_a_month", "saved a month"),
    ("latency_value_a_month", "value of latency a month"),
    ("break_even_days", "break-even, days after the work"), ("break_even_date", "break-even on"),
    ("roi", "return of 12 months"), ("net_first_year", "net of 12 months"),
)  # fmt: skip


def _rows(found: Roi) -> list[tuple[str, ...]]:
    return [
        (label, *(str(getattr(found.cases[case], name) or "never") for case in CASES))
        for name, label in ROWS
    ]


def _lists(found: Roi) -> dict[str, list[str]]:
    """Return the lists below the table, by heading."""
    parts = {"Capacity, base case": found.capacity, "Seconds of a request": found.latency}
    lists = {
        title: [f"{name.replace('_', ' ')}: {figure}" for name, figure in figures.items()]
        for title, figures in parts.items()
    }
    least, most = found.days
    effort = [f"work: {f'{least:g} to ' * (least < most)}{most:g} days (assumed)"]
    if found.memory:
        effort.append(f"memory: {found.memory[0]:+.0%} to {found.memory[1]:+.0%} (assumed)")
    effort.append(f"spent a month today: {found.spent_a_month}")
    return {name: lines for name, lines in {"Effort": effort, **lists}.items() if lines}


def roi_markdown(found: Roi) -> str:
    """Return the figures as Markdown; every number has its evidence beside it."""
    lines = [f"# Return on speculation: {found.option}", "", *table(("", *CASES), _rows(found))]
    for title, entries in _lists(found).items():
        lines += [f"## {title}", "", *(f"- {entry}" for entry in entries), ""]
    lines += [f"- {note}" for note in found.notes]
    return "\n".join(lines) + "\n"


def roi_plot(found: Roi) -> str:
    """Return the plot of the balance by month as an SVG element."""
    months = list(range(13))
    series = [Series(n, months, [f.value for f in found.balance[n]]) for n in CASES]
    return line_chart("Gained so far, less the cost", "months", "$ (modelled)", series, 0.0)


def roi_html(found: Roi) -> str:
    """Return the figures and the plot as one HTML page that loads nothing."""
    cells = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in _rows(found)
    )
    names = "".join(f"<th>{name}</th>" for name in ("", *CASES))
    lists = "".join(
        f"<h2>{escape(title)}</h2><ul>"
        + "".join(f"<li>{escape(entry)}</li>" for entry in entries)
        + "</ul>"
        for title, entries in {**_lists(found), "Notes": found.notes}.items()
    )
    title = f"Return on speculation: {escape(found.option)}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        "<style>body{font:16px sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
        "td,th{text-align:left;padding:.2rem 1rem .2rem 0}</style>"
        f"<h1>{title}</h1><table><tr>{names}</tr>{cells}</table>{roi_plot(found)}{lists}</html>\n"
    )
