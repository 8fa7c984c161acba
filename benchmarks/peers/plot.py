"""The peers' report as one figure: a row a pair and kind of load, a panel a dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes

from outrider.bench.plot import new_figure, save, whiskers

from .report import heading, label

PANEL = (4.6, 3.4)
BAR = 0.38
AXES = {
    "decode": "decode tokens/s, (N-1)/(T(N)-T(1))",
    "batch": "output tokens/s of all requests",
    "prefill": "prompt tokens/s, N/T(1)",
}
"""What the speed of each kind of load is."""
KINDS = (("plain", False, "--"), ("speculative", True, "-"))
"""Label, whether a run drafts, and its line."""


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
    figure = new_figure(PANEL[0] * len(dtypes), PANEL[1] * len(rows) + 0.5, heading(report))
    for i, (pair, kind, runs) in enumerate(rows):
        for j, dtype in enumerate(dtypes):
            panel = figure.add_subplot(len(rows), len(dtypes), i * len(dtypes) + j + 1)
            panel.set_title(f"{label(pair)}, {dtype}, {kind}", fontsize=9)
            panel.set_ylabel(AXES[kind], fontsize=8)
            shown = [run for run in runs if run["dtype"] == dtype]
            if kind == "batch":
                _throughputs(panel, shown)
            else:
                _speeds(panel, shown)
            panel.legend(fontsize=7)
    save(figure, file)


def _speeds(panel: Axes, runs: list[dict[str, Any]]) -> None:
    """Draw two bars a peer: plain, and the best of its speculative modes."""
    names = list(dict.fromkeys(run["peer"] for run in runs))
    for text, drafting, _ in KINDS:
        shown = [run for run in runs if (run["mode"] != "plain") == drafting]
        if not shown:
            continue
        places = [names.index(run["peer"]) + BAR * (drafting - 0.5) for run in shown]
        heights, bars = whiskers(shown, "tokens_per_second")
        drawn = panel.bar(places, heights, BAR, yerr=bars, capsize=3, label=text)
        if drafting:
            modes = [f"{run['mode']}\nK={run['num_speculative_tokens']}" for run in shown]
            panel.bar_label(drawn, modes, label_type="center", fontsize=6)
    panel.set_xticks(range(len(names)), names, rotation=20, ha="right", fontsize=8)
    panel.margins(y=0.2)  # room for the legend


def _throughputs(panel: Axes, runs: list[dict[str, Any]]) -> None:
    """Draw a line a peer and kind of decoding over the number of requests at a time."""
    sizes = {run["load"]: int(run["load"].split()[1]) for run in runs}
    for i, peer in enumerate(dict.fromkeys(run["peer"] for run in runs)):
        for text, drafting, line in KINDS:
            shown = [r for r in runs if r["peer"] == peer and (r["mode"] != "plain") == drafting]
            shown.sort(key=lambda run: sizes[run["load"]])
            panel.errorbar(
                [sizes[run["load"]] for run in shown], *whiskers(shown, "tokens_per_second"),
                fmt=f"{line}o", capsize=2, color=colormaps["tab10"](i), markersize=3, linewidth=1,
                label=f"{peer}, {text}",
            )  # fmt: skip
    panel.set_xscale("log", base=2)
    panel.set_xticks(list(sizes.values()), [str(size) for size in sizes.values()])
    panel.set_xlabel("requests at a time", fontsize=8)
    panel.set_ylim(bottom=0)
