"""Pictures by matplotlib, which the extra ``plot`` installs: figures as PNG, line charts as SVG."""

import re
from collections.abc import Sequence
from io import StringIO
from math import ceil
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

from ..errors import ConfigError

try:
    from matplotlib import colormaps, rc_context
    from matplotlib.axes import Axes as Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Figure
except ModuleNotFoundError:
    raise ConfigError("a plot needs matplotlib; run: pip install 'outrider[plot]'") from None

PANEL_INCHES = (4.4, 3.6)
PANELS_IN_A_ROW = 3
LETTERS_PER_INCH = 12
"""The least number at 10 points."""
MARKED_POINTS = 40
"""Lines of up to this many points have a mark at each."""
NOT_NEEDED = re.compile(r'^.*?(?=<svg)|<metadata>.*?</metadata>| xmlns:xlink="[^"]*"', re.DOTALL)
NAME_SPACE = ' xmlns="http://www.w3.org/2000/svg"'
"""The namespace of an SVG file; in a page it is not needed."""


class Series(NamedTuple):
    """A line: its name in the legend, and its points."""

    name: str
    across: Sequence[float]
    up: Sequence[float]


def colour(place: int) -> tuple[float, float, float, float]:
    """Return the colour of the line at a place."""
    return colormaps["tab10"](place % 10)


def new_figure(width: float, height: float, title: str) -> Figure:
    """Return an empty figure of a size in inches, its title wrapped to the width."""
    figure = Figure((width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    lines = [fill(line, int(width * LETTERS_PER_INCH)) for line in title.splitlines()]
    figure.suptitle("\n".join(lines), fontsize=10)
    return figure


def paneled(count: int, title: str, margin: float) -> tuple[Figure, list[Axes]]:
    """Return a figure with ``count`` panels in rows, and ``margin`` inches of extra height."""
    rows, columns = ceil(count / PANELS_IN_A_ROW), min(count, PANELS_IN_A_ROW)
    width, height = PANEL_INCHES
    figure = new_figure(width * columns, height * rows + margin, title)
    return figure, [figure.add_subplot(rows, columns, i + 1) for i in range(count)]


def add_legend(panel: Axes, size: float) -> None:
    """Add a legend, with letters of ``size`` points, where it hides the least of a panel."""
    # Without ``loc``, matplotlib warns if finding a place takes a second, as on a busy machine.
    panel.legend(fontsize=size, loc="best")


def save(figure: Figure, file: Path) -> None:
    """Write a figure as a PNG. Raises ConfigError: the file cannot be written."""
    try:
        figure.savefig(file, format="png")
    except OSError as error:
        raise ConfigError(f"the plot cannot be written to {file}: {error.strerror}.") from None


def line_chart(
    title: str, across: str, up: str, series: Sequence[Series], level: float | None = None
) -> str:
    """Return a chart as an SVG element that loads nothing; ``level`` is a height that is marked."""
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "text.parse_math": False}):
        figure = Figure((6.4, 3.6), layout="constrained")
        panel = figure.add_subplot()
        for place, each in enumerate(series):
            marked = "o-" if len(each.across) <= MARKED_POINTS else "-"
            panel.plot(
                each.across, each.up, marked, markersize=3, color=colour(place), label=each.name
            )
        if level is not None:
            panel.axhline(level, color="0.4", linewidth=1, linestyle="--")
        panel.set(title=title, xlabel=across, ylabel=up)
        panel.set_ylim(bottom=min(0.0, *panel.get_ylim()))
        panel.grid(axis="y", color="0.92")
        if series:
            add_legend(panel, 8)
        text = StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return NOT_NEEDED.sub("", text.getvalue()).replace("xlink:href", "href")
