"""The peers' report as one figure: decode speed, plain and best speculative, a panel a dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ...errors import ConfigError
from .report import heading

PANEL = (4.6, 3.6)
DPI = 130
BAR = 0.38


def draw(report: dict[str, Any], file: Path) -> None:
    """Write the figure of a report with at least one run to ``file``, a PNG.

    Bars are medians, whiskers their confidence intervals.

    Raises:
        ConfigError: the file cannot be written.
    """
    runs = report["runs"]
    dtypes = list(dict.fromkeys(run["dtype"] for run in runs))
    figure = Figure((PANEL[0] * len(dtypes), PANEL[1] + 0.6), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    for i, dtype in enumerate(dtypes):
        panel = figure.add_subplot(1, len(dtypes), i + 1)
        _speeds(panel, [run for run in runs if run["dtype"] == dtype])
        panel.set_title(dtype)
        if not i:
            panel.set_ylabel("decode tokens/s, (N-1)/(T(N)-T(1))")
    figure.suptitle(heading(report).replace(" · ", "\n", 1), fontsize=9)
    try:
        figure.savefig(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written ({error.strerror}); give another.") from None


def _speeds(panel: Axes, runs: list[dict[str, Any]]) -> None:
    """Two bars a peer."""
    names = list(dict.fromkeys(run["peer"] for run in runs))
    colours = colormaps["tab10"]
    for offset, label, drafting in ((-BAR / 2, "plain", False), (BAR / 2, "speculative", True)):
        shown = [run for run in runs if (run["mode"] != "plain") == drafting]
        if not shown:
            continue
        heights = [run["tokens_per_second"] for run in shown]
        bounds = [run["tokens_per_second_interval"] or (h, h)
                  for run, h in zip(shown, heights, strict=True)]  # fmt: skip
        below = [h - low for h, (low, _) in zip(heights, bounds, strict=True)]
        above = [high - h for h, (_, high) in zip(heights, bounds, strict=True)]
        places = [names.index(run["peer"]) + offset for run in shown]
        panel.bar(
            places, heights, BAR, yerr=[below, above], capsize=3, label=label,
            color=colours(int(drafting)),
        )  # fmt: skip
        for x, run in zip(places, shown, strict=True):
            if drafting:
                text = f"{run['mode']}\nK={run['num_speculative_tokens']}"
                panel.annotate(
                    text, (x, 0), (0, 3), textcoords="offset points", ha="center", fontsize=6
                )
    panel.set_xticks(range(len(names)), names, rotation=20, ha="right", fontsize=8)
    panel.legend(fontsize=7)
