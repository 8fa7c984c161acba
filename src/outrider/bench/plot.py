"""The report as one figure: speedup by draft length, and acceptance by position."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from math import ceil
from pathlib import Path
from textwrap import fill
from typing import Any, Literal

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..errors import ConfigError
from .report import heading

Run = dict[str, Any]
COLUMNS = 3
PANEL = (4.4, 3.6)
DPI = 130
Style = tuple[str, Literal["-", "--", ":", "-."]]
STYLES: tuple[Style, ...] = (("o", "-"), ("s", "--"), ("^", ":"), ("D", "-."))
"""Marker and line of each temperature, in turn."""
SPREAD = 0.4
"""The share of the space between two K over which the lines' points are spread."""
LONGEST_NAME = 32
# Inches of figure that a letter of 10 points takes at most, and a line's sample in the legend.
LETTER, HANDLE = 0.085, 0.7


def draw(report: dict[str, Any], file: Path) -> None:
    """Write the figure of a report with at least one drafter to ``file``, a PNG.

    A panel a batch size shows the speedup by K, with the confidence interval of its median, and the
    last panel acceptance by position at the largest K: the share of drafts accepted up to each
    position. A colour is a drafter, and a line's style a temperature.

    Raises:
        ConfigError: the file cannot be written.
    """
    runs = [run for run in report["runs"] if run["num_speculative_tokens"]]
    drafters = _distinct(runs, "drafter")
    colours = {name: colormaps["tab10"](i % 10) for i, name in enumerate(drafters)}
    temperatures = _distinct(runs, "temperature")
    styles = {t: STYLES[i % len(STYLES)] for i, t in enumerate(temperatures)}
    sizes = _distinct(runs, "batch_size")
    rows, columns = ceil((len(sizes) + 1) / COLUMNS), min(len(sizes) + 1, COLUMNS)
    width = PANEL[0] * columns
    figure = Figure((width, PANEL[1] * rows + 1.2), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    panels = [figure.add_subplot(rows, columns, i + 1) for i in range(len(sizes) + 1)]
    for panel, size in zip(panels, sizes, strict=False):
        same = [run for run in runs if run["batch_size"] == size]
        _speedups(panel, same, colours, styles)
        panel.set_title(f"speedup, batch size {size}")
    top = max(panel.get_ylim()[1] for panel in panels[:-1])
    for panel in panels[:-1]:
        panel.set_ylim(0, top)
    # What is accepted does not depend on the batch: the first size speaks for all.
    _acceptance(panels[-1], [run for run in runs if run["batch_size"] == sizes[0]], colours, styles)
    letters = int(width / LETTER)
    title = "\n".join(fill(line, letters) for line in _title(report))
    figure.suptitle(title, fontsize=10)
    names = [
        name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME :]}" for name in drafters
    ]
    handles = [
        Line2D([], [], color=colours[name], label=shown)
        for name, shown in zip(drafters, names, strict=True)
    ]
    handles += [
        Line2D([], [], color="0.3", marker=styles[t][0], linestyle=styles[t][1], label=f"T = {t:g}")
        for t in temperatures
    ]
    handles.append(Line2D([], [], color="0.6", linewidth=1, label="plain"))
    fits = int(width / (HANDLE + LETTER * max(map(len, [*names, "T = 0.7"]))))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=max(1, min(len(handles), fits))
    )
    try:
        figure.savefig(file, format="png")
    except OSError as error:
        raise ConfigError(f"the plot cannot be written to {file}: {error.strerror}.") from None


def _distinct(runs: Sequence[Run], key: str) -> list[Any]:
    """The values of ``key``, in the order they come."""
    return list(dict.fromkeys(run[key] for run in runs))


def _title(report: dict[str, Any]) -> list[str]:
    """The report's heading, and what the error bars are."""
    confidence = report["intervals"]["confidence"]
    bars = f", bars: their {confidence:.1%} confidence intervals" if confidence else ""
    return [*heading(report), f"speedup: medians of {report['rounds']} rounds{bars}"]


def _lines(runs: Sequence[Run]) -> list[tuple[str, float, list[Run]]]:
    """The runs of each (drafter, temperature), by K."""

    def line(run: Run) -> tuple[str, float]:
        return run["drafter"], run["temperature"]

    ordered = sorted(runs, key=lambda run: (*line(run), run["num_speculative_tokens"]))
    return [(*key, list(group)) for key, group in groupby(ordered, line)]


def _speedups(
    panel: Axes, runs: Sequence[Run], colours: dict[str, Any], styles: dict[float, Style]
) -> None:
    """Speedup over K with error bars; lines stand a little apart so that no bar hides another."""
    lines = _lines(runs)
    lengths = sorted({run["num_speculative_tokens"] for run in runs})
    space = min((b - a for a, b in pairwise(lengths)), default=1)
    step = SPREAD * space / len(lines)
    for i, (drafter, temperature, points) in enumerate(lines):
        x = [run["num_speculative_tokens"] + step * (i - (len(lines) - 1) / 2) for run in points]
        y = [run["speedup"] for run in points]
        bounds = [run["speedup_interval"] or (run["speedup"],) * 2 for run in points]
        errors = [
            [v - low for v, (low, _) in zip(y, bounds, strict=True)],
            [high - v for v, (_, high) in zip(y, bounds, strict=True)],
        ]
        marker, style = styles[temperature]
        panel.errorbar(
            x, y, errors, color=colours[drafter], marker=marker, linestyle=style, markersize=4,
            linewidth=1.2, capsize=3,
        )  # fmt: skip
    panel.axhline(1, color="0.6", linewidth=1, zorder=0)
    panel.set_xticks(lengths)
    panel.set_xlim(lengths[0] - space / 2, lengths[-1] + space / 2)
    panel.set_xlabel("draft length K, tokens")
    panel.set_ylabel("decode speed, times plain")
    panel.grid(axis="y", color="0.92")


def _acceptance(
    panel: Axes, runs: Sequence[Run], colours: dict[str, Any], styles: dict[float, Style]
) -> None:
    """Survival over positions, each drafter at its largest K."""
    longest = 1
    for drafter, temperature, points in _lines(runs):
        survival = points[-1]["acceptance_by_position"] or []
        longest = max(longest, len(survival))
        marker, style = styles[temperature]
        panel.plot(
            range(1, len(survival) + 1), survival, color=colours[drafter], marker=marker,
            linestyle=style, markersize=4, linewidth=1.2,
        )  # fmt: skip
    panel.set_ylim(0, 1.03)
    panel.set_xticks(range(1, longest + 1))
    panel.set_xlim(0.5, longest + 0.5)
    panel.set_xlabel("position in the draft, tokens")
    panel.set_ylabel("share of drafts accepted up to it")
    panel.set_title(f"acceptance by position, K = {max(r['num_speculative_tokens'] for r in runs)}")
    panel.grid(axis="y", color="0.92")
