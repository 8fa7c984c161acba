"""The peers' report as one figure: a row a pair and kind of load, a panel a dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ...errors import ConfigError
from .report import heading, label

PANEL = (4.6, 3.4)
DPI = 130
BAR = 0.38
AXES = {
    "decode": "decode tokens/s, (N-1)/(T(N)-T(1))",
    "batch": "output tokens/s of all requests",
    "prefill": "prompt tokens/s, N/T(1)",
}
"""What the speed of each kind of load is."""
PEERS = ("outrider", "transformers", "llama.cpp", "openvino", "vllm")


def draw(report: dict[str, Any], file: Path) -> None:
    """Write the figure of a report with at least one run to ``file``, a PNG.

    Speeds are medians, whiskers their confidence intervals.

    Raises:
        ConfigError: the file cannot be written.
    """
    rows = [
        (pair, kind, [run for run in pair["runs"] if run["load"].startswith(kind)])
        for pair in report["pairs"]
        for kind in AXES
    ]
    rows = [row for row in rows if row[2]]
    dtypes = list(dict.fromkeys(run["dtype"] for _, _, runs in rows for run in runs))
    size = (PANEL[0] * len(dtypes), PANEL[1] * len(rows) + 0.5)
    figure = Figure(size, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    for i, (pair, kind, runs) in enumerate(rows):
        for j, dtype in enumerate(dtypes):
            panel = figure.add_subplot(len(rows), len(dtypes), i * len(dtypes) + j + 1)
            shown = [run for run in runs if run["dtype"] == dtype]
            title = f"{label(pair)}, {dtype}"
            panel.set_title(
                f"{title}, {shown[0]['load']}" if kind == "prefill" and shown else title, fontsize=9
            )
            if not j:
                panel.set_ylabel(AXES[kind], fontsize=8)
            if not shown:
                panel.set_axis_off()
            elif kind == "batch":
                _throughputs(panel, shown)
            else:
                _speeds(panel, shown)
    figure.suptitle(heading(report), fontsize=9)
    try:
        figure.savefig(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written ({error.strerror}); give another.") from None


def _whiskers(runs: list[dict[str, Any]]) -> tuple[list[float], list[list[float]]]:
    """Speeds, and how far their intervals reach below and above."""
    speeds = [run["tokens_per_second"] for run in runs]
    bounds = [run["tokens_per_second_interval"] or (speed, speed)
              for run, speed in zip(runs, speeds, strict=True)]  # fmt: skip
    below = [speed - low for speed, (low, _) in zip(speeds, bounds, strict=True)]
    above = [high - speed for speed, (_, high) in zip(speeds, bounds, strict=True)]
    return speeds, [below, above]


def _speeds(panel: Axes, runs: list[dict[str, Any]]) -> None:
    """Two bars a peer, one where nothing drafts."""
    names = list(dict.fromkeys(run["peer"] for run in runs))
    colours = colormaps["tab10"]
    drafts = any(run["mode"] != "plain" for run in runs)
    for offset, text, drafting in ((-BAR / 2, "plain", False), (BAR / 2, "speculative", True)):
        shown = [run for run in runs if (run["mode"] != "plain") == drafting]
        if not shown:
            continue
        places = [names.index(run["peer"]) + (offset if drafts else 0) for run in shown]
        heights, whiskers = _whiskers(shown)
        panel.bar(
            places, heights, BAR, yerr=whiskers, capsize=3, label=text, color=colours(int(drafting))
        )
        for x, run in zip(places, shown, strict=True):
            if drafting:
                said = f"{run['mode']}\nK={run['num_speculative_tokens']}"
                panel.annotate(
                    said, (x, 0), (0, 3), textcoords="offset points", ha="center", fontsize=6
                )
    panel.set_xticks(range(len(names)), names, rotation=20, ha="right", fontsize=8)
    if drafts:
        panel.margins(y=0.2)  # room for the legend
        panel.legend(fontsize=7, ncols=2)


def _throughputs(panel: Axes, runs: list[dict[str, Any]]) -> None:
    """A line a peer and kind of decoding over the number of requests at a time."""
    sizes = sorted({_size(run) for run in runs})
    for peer in dict.fromkeys(run["peer"] for run in runs):
        colour = colormaps["tab10"](PEERS.index(peer) if peer in PEERS else len(PEERS))
        for text, drafting, style in (("plain", False, "--"), ("speculative", True, "-")):
            shown = [run for run in runs
                     if run["peer"] == peer and (run["mode"] != "plain") == drafting]  # fmt: skip
            shown.sort(key=_size)
            if shown:
                speeds, whiskers = _whiskers(shown)
                panel.errorbar(
                    [_size(run) for run in shown], speeds, whiskers, fmt=f"{style}o", capsize=2,
                    color=colour, markersize=3, linewidth=1, label=f"{peer}, {text}",
                )  # fmt: skip
    panel.set_xscale("log", base=2)
    panel.set_xticks(sizes, [str(size) for size in sizes])
    panel.set_xlabel("requests at a time", fontsize=8)
    panel.set_ylim(bottom=0)
    panel.legend(fontsize=6)


def _size(run: dict[str, Any]) -> int:
    """N of the load "batch N"."""
    return int(run["load"].split()[1])
