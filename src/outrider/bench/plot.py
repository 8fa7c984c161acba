"""A report as a PNG: speedups by draft length, and acceptance by position."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise, product
from math import ceil
from pathlib import Path
from textwrap import fill
from typing import Any, Literal

from ..errors import ConfigError
from .report import heading

try:
    from matplotlib import colormaps
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
except ModuleNotFoundError:
    raise ConfigError("a plot needs matplotlib; run: pip install 'outrider[plot]'") from None

Run = dict[str, Any]
Style = dict[str, Any]
"""What a line looks like: colour (the drafter), marker and line (the temperature)."""
COLUMNS = 3
PANEL = (4.4, 3.6)
STYLES: tuple[tuple[str, Literal["-", "--", ":", "-."]], ...] = (
    ("o", "-"), ("s", "--"), ("^", ":"), ("D", "-."),
)  # fmt: skip
SPREAD = 0.4
"""The share of the space between two K over which the lines' points are spread."""
LONGEST_NAME = 32
LETTERS_PER_INCH = 12
"""At 10 points, at least."""


def new_figure(width: float, height: float, title: str) -> Figure:
    """Return an empty figure of so many inches, with its title wrapped to the width."""
    figure = Figure((width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    lines = [fill(line, int(width * LETTERS_PER_INCH)) for line in title.splitlines()]
    figure.suptitle("\n".join(lines), fontsize=10)
    return figure


def save(figure: Figure, file: Path) -> None:
    """Write a figure as a PNG.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        figure.savefig(file, format="png")
    except OSError as error:
        raise ConfigError(f"the plot cannot be written to {file}: {error.strerror}.") from None


def whiskers(runs: Sequence[Run], name: str) -> tuple[list[float], list[list[float]]]:
    """Return a figure of each run, and how far its interval reaches below and above."""
    values = [run[name] for run in runs]
    bounds = [run[f"{name}_interval"] or (run[name], run[name]) for run in runs]
    pairs = list(zip(values, bounds, strict=True))
    return values, [[v - low for v, (low, _) in pairs], [high - v for v, (_, high) in pairs]]


def draw(report: dict[str, Any], file: Path) -> None:
    """Write the figure of a report with at least one drafter to ``file``, a PNG.

    A panel a batch size shows the speedup by K, with the confidence interval of its median, and the
    last panel acceptance by position at the largest K: the share of drafts accepted up to each
    position. A colour is a drafter, and a line's style a temperature.

    Raises:
        ConfigError: the file cannot be written.
    """
    runs = [run for run in report["runs"] if run["num_speculative_tokens"]]
    drafters, temperatures, sizes = (
        list(dict.fromkeys(run[key] for run in runs))
        for key in ("drafter", "temperature", "batch_size")
    )
    styles: dict[tuple[str, float], Style] = {}
    for (i, drafter), (j, temperature) in product(enumerate(drafters), enumerate(temperatures)):
        marker, line = STYLES[j % len(STYLES)]
        styles[drafter, temperature] = {
            "color": colormaps["tab10"](i % 10), "marker": marker, "linestyle": line,
            "markersize": 4, "linewidth": 1.2,
        }  # fmt: skip
    rows, columns = ceil((len(sizes) + 1) / COLUMNS), min(len(sizes) + 1, COLUMNS)
    confidence = report["intervals"]["confidence"]
    bars = f", bars: their {confidence:.1%} confidence intervals" if confidence else ""
    title = [*heading(report), f"speedup: medians of {report['rounds']} rounds{bars}"]
    figure = new_figure(PANEL[0] * columns, PANEL[1] * rows + 1.2, "\n".join(title))
    first: Axes | None = None
    for i, size in enumerate(sizes):
        first = figure.add_subplot(rows, columns, i + 1, sharey=first)
        _speedups(first, [run for run in runs if run["batch_size"] == size], styles)
        first.set_title(f"speedup, batch size {size}")
        first.set_ylim(bottom=0)
    # Acceptance does not depend on the batch: the first size speaks for all.
    panel = figure.add_subplot(rows, columns, len(sizes) + 1)
    _acceptance(panel, [run for run in runs if run["batch_size"] == sizes[0]], styles)
    handles = [
        Line2D([], [], color=styles[name, temperatures[0]]["color"], label=_shortened(name))
        for name in drafters
    ]
    for temperature in temperatures:
        style = {**styles[drafters[0], temperature], "color": "0.3"}
        handles.append(Line2D([], [], label=f"T = {temperature:g}", **style))
    handles.append(Line2D([], [], color="0.6", linewidth=1, label="plain"))
    figure.legend(handles=handles, loc="outside lower center", ncols=2 * columns)
    save(figure, file)


def _shortened(name: str) -> str:
    """Return a name, or its end if it is long."""
    return name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME :]}"


def _lines(runs: Sequence[Run]) -> list[tuple[tuple[str, float], list[Run]]]:
    """Return the runs of each (drafter, temperature), by K."""

    def line(run: Run) -> tuple[str, float]:
        return run["drafter"], run["temperature"]

    ordered = sorted(runs, key=lambda run: (*line(run), run["num_speculative_tokens"]))
    return [(key, list(group)) for key, group in groupby(ordered, line)]


def _speedups(panel: Axes, runs: Sequence[Run], styles: dict[tuple[str, float], Style]) -> None:
    """Draw speedup over K with error bars, a little apart so that no bar hides another."""
    lines = _lines(runs)
    lengths = sorted({run["num_speculative_tokens"] for run in runs})
    space = min((b - a for a, b in pairwise(lengths)), default=1)
    for i, (key, points) in enumerate(lines):
        shift = SPREAD * space * (i - (len(lines) - 1) / 2) / len(lines)
        places = [run["num_speculative_tokens"] + shift for run in points]
        panel.errorbar(places, *whiskers(points, "speedup"), capsize=3, **styles[key])
    panel.axhline(1, color="0.6", linewidth=1, zorder=0)
    panel.set_xticks(lengths)
    panel.set_xlim(lengths[0] - space / 2, lengths[-1] + space / 2)
    panel.set_xlabel("draft length K, tokens")
    panel.set_ylabel("decode speed, times plain")
    panel.grid(axis="y", color="0.92")


def _acceptance(panel: Axes, runs: Sequence[Run], styles: dict[tuple[str, float], Style]) -> None:
    """Draw survival over positions, each drafter at its largest K."""
    longest = max(run["num_speculative_tokens"] for run in runs)
    for key, points in _lines(runs):
        survival = points[-1]["acceptance_by_position"] or []
        panel.plot(range(1, len(survival) + 1), survival, **styles[key])
    panel.set_ylim(0, 1.03)
    panel.set_xticks(range(1, longest + 1))
    panel.set_xlim(0.5, longest + 0.5)
    panel.set_xlabel("position in the draft, tokens")
    panel.set_ylabel("share of drafts accepted up to it")
    panel.set_title(f"acceptance by position, K = {longest}")
    panel.grid(axis="y", color="0.92")
