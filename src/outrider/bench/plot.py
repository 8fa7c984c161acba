"""A report as a PNG: speedups by draft length, and acceptance by position."""

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from textwrap import fill
from typing import Any

from ..errors import ConfigError
from .report import heading

try:
    from matplotlib import colormaps as colormaps
    from matplotlib.axes import Axes as Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ModuleNotFoundError:
    raise ConfigError("a plot needs matplotlib; run: pip install 'outrider[plot]'") from None

Run = dict[str, Any]
COLUMNS = 3
PANEL = (4.4, 3.6)
STYLES = ("o-", "s--", "^:", "D-.")
"""Marker and line, by temperature; the colour is the drafter's."""
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
    sizes = list(dict.fromkeys(run["batch_size"] for run in runs))
    lines = list(dict.fromkeys((run["drafter"], run["temperature"]) for run in runs))
    rows, columns = ceil((len(sizes) + 1) / COLUMNS), min(len(sizes) + 1, COLUMNS)
    confidence = report["intervals"]["confidence"]
    bars = f", bars: their {confidence:.1%} confidence intervals" if confidence else ""
    title = [*heading(report), f"speedup: medians of {report['rounds']} rounds{bars}"]
    figure = new_figure(PANEL[0] * columns, PANEL[1] * rows + 1.2, "\n".join(title))
    panels = [figure.add_subplot(rows, columns, i + 1) for i in range(len(sizes) + 1)]
    for panel, size in zip(panels, sizes, strict=False):
        panel.sharey(panels[0])
        panel.axhline(1, color="0.6", linewidth=1, zorder=0)
        for drafter, temperature in lines:
            points = _line(runs, drafter, temperature, size)
            panel.errorbar(
                [run["num_speculative_tokens"] for run in points], *whiskers(points, "speedup"),
                capsize=3, **_style(lines, drafter, temperature),
            )  # fmt: skip
        _describe(panel, f"speedup, batch size {size}", "draft length K, tokens", "times plain")
    # Acceptance does not depend on the batch: the first size speaks for all.
    for drafter, temperature in lines:
        survival = _line(runs, drafter, temperature, sizes[0])[-1]["acceptance_by_position"] or []
        places = range(1, len(survival) + 1)
        panels[-1].plot(places, survival, **_style(lines, drafter, temperature))
    _describe(
        panels[-1], "acceptance by position, largest K", "position in the draft, tokens",
        "share of drafts accepted up to it",
    )  # fmt: skip
    figure.legend(handles=panels[-1].lines, loc="outside lower center", ncols=columns)
    save(figure, file)


def _line(runs: Sequence[Run], drafter: str, temperature: float, size: int) -> list[Run]:
    """Return the runs of a line, by K."""
    key = drafter, temperature, size
    points = [r for r in runs if (r["drafter"], r["temperature"], r["batch_size"]) == key]
    return sorted(points, key=lambda run: run["num_speculative_tokens"])


def _style(lines: list[tuple[str, float]], drafter: str, temperature: float) -> dict[str, Any]:
    """Return what a line looks like, and its label."""
    drafters, temperatures = (list(dict.fromkeys(part)) for part in zip(*lines, strict=True))
    name = drafter if len(drafter) <= LONGEST_NAME else f"…{drafter[1 - LONGEST_NAME :]}"
    form = STYLES[temperatures.index(temperature) % len(STYLES)]
    return {
        "color": colormaps["tab10"](drafters.index(drafter) % 10), "marker": form[0],
        "linestyle": form[1:], "markersize": 4, "linewidth": 1.2,
        "label": f"{name}, T = {temperature:g}",
    }  # fmt: skip


def _describe(panel: Axes, title: str, across: str, up: str) -> None:
    """Name a panel and its axes, which begin at 0 and have whole numbers across."""
    panel.set(title=title, xlabel=across, ylabel=up)
    panel.set_ylim(bottom=0)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.grid(axis="y", color="0.92")
