"""The peers' report as one figure: a row a pair and kind of load, a panel a dtype."""

from itertools import product
from pathlib import Path
from typing import Any

from outrider.base.plots import Axes, add_legend, colour, new_figure, save
from outrider.bench.plot import whiskers

from .report import heading, label

PANEL = (4.6, 3.4)
AXES = {
    "decode": "decode tokens/s, (N-1)/(T(N)-T(1))",
    "batch": "output tokens/s of all requests",
    "prefill": "prompt tokens/s, N/T(1)",
}
"""The axis label of each kind of load."""
KINDS = (("plain", False, "o--"), ("speculative", True, "s-"))
"""Label, whether a run drafts, and its marker and line."""


def draw(report: dict[str, Any], file: Path) -> None:
    """Write the figure of a report with at least one run to ``file``, a PNG.

    Speeds are medians, whiskers their confidence intervals.
    """
    rows = [
        (pair, kind, runs)
        for pair in report["pairs"]
        for kind in AXES
        if (runs := [run for run in pair["runs"] if run["load"].startswith(kind)])
    ]
    dtypes = list(dict.fromkeys(run["dtype"] for _, _, runs in rows for run in runs))
    figure = new_figure(PANEL[0] * len(dtypes), PANEL[1] * len(rows) + 0.5, heading(report))
    panels = figure.subplots(len(rows), len(dtypes), squeeze=False)
    for (pair, kind, runs), line in zip(rows, panels, strict=True):
        for dtype, panel in zip(dtypes, line, strict=True):
            panel.set(title=f"{label(pair)}, {dtype}, {kind}", ylabel=AXES[kind])
            _speeds(panel, [run for run in runs if run["dtype"] == dtype])
            panel.tick_params("x", rotation=20)
            panel.set_ylim(bottom=0)
            add_legend(panel, 7)
    save(figure, file)


def _speeds(panel: Axes, runs: list[dict[str, Any]]) -> None:
    """Draw a line a peer, plain (dashed) and with drafts, over the loads."""
    peers = list(dict.fromkeys(run["peer"] for run in runs))
    for peer, (text, drafting, form) in product(peers, KINDS):
        points = [r for r in runs if r["peer"] == peer and (r["mode"] != "plain") == drafting]
        panel.errorbar(
            [run["load"] for run in points], *whiskers(points, "tokens_per_second"), fmt=form,
            capsize=3, color=colour(peers.index(peer)), label=f"{peer}, {text}",
        )  # fmt: skip
