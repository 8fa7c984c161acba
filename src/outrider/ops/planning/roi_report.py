"""The return on speculation as Markdown and as one HTML page."""

from __future__ import annotations

from html import escape

from ...errors import ConfigError
from ..markdown import html, listed, section, table
from .roi import CASES, Roi

ROWS = (
    ("speedup", "speedup"), ("cost", "cost of the work"),
    ("device_hours_saved", "device hours freed a month"), ("saved_a_month", "saved a month"),
    ("latency_value_a_month", "value of latency a month"),
    ("break_even_days", "break-even, days after the work"), ("break_even_date", "break-even on"),
    ("roi", "return of 12 months"), ("net_first_year", "net of 12 months"),
)  # fmt: skip


def roi_markdown(answer: Roi) -> str:
    """Return the figures as Markdown; every number has its evidence beside it."""
    rows = [
        (label, *(getattr(answer.cases[case], name) or "never" for case in CASES))
        for name, label in ROWS
    ]
    least, most = answer.days
    effort: dict[str, object] = {
        "work": f"{f'{least:g} to ' * (least < most)}{most:g} days (assumed)"
    }
    if answer.memory:
        effort["memory"] = f"{answer.memory[0]:+.0%} to {answer.memory[1]:+.0%} (assumed)"
    effort["spent a month today"] = answer.spent_a_month
    lines = [f"# Return on speculation: {answer.option}", "", *table(("", *CASES), rows)]
    for title, figures in (
        ("Effort", effort), ("Capacity, base case", answer.capacity),
        ("Seconds of a request", answer.latency),
    ):  # fmt: skip
        lines += section(title, listed(figures) if figures else [])
    return "\n".join([*lines, *(f"- {note}" for note in answer.notes)]) + "\n"


def roi_plot(answer: Roi) -> str:
    """Return the plot of the balance by month as an SVG element."""
    from ...base.plots import Series, line_chart

    months = list(range(13))
    series = [Series(name, months, [f.value for f in answer.balance[name]]) for name in CASES]
    return line_chart("Gained so far, less the cost", "months", "$ (modelled)", series, 0.0)


def roi_html(answer: Roi) -> str:
    """Return the figures and the plot as one HTML page that loads nothing."""
    try:
        picture = roi_plot(answer)
    except ConfigError as error:
        picture = f"<p>{escape(str(error))}</p>"
    return html(f"Return on speculation: {answer.option}", roi_markdown(answer), picture)
