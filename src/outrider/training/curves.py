"""Draws the curves of a training: its loss, and acceptance on held-out samples."""

from __future__ import annotations

import csv
from importlib.util import find_spec
from pathlib import Path

from .loop import CURVES

PICTURE = "curves.png"
PANELS: tuple[tuple[str, dict[str, str]], ...] = (
    ("loss", {"loss": "loss"}),
    (
        "forecast acceptance length, held out",
        {"acceptance_length": "T = 0", "coupled_length": "T = 1"},
    ),
)


def draw_curves(folder: Path) -> None:
    """Write a picture of the curves in a training's folder, if matplotlib is installed."""
    file = folder / CURVES
    if find_spec("matplotlib") is None or not file.exists():
        return
    from ..base.plots import paneled, save

    with file.open(encoding="utf-8", newline="") as opened:
        rows = [*csv.DictReader(opened)]
    steps = [int(row["step"]) for row in rows]
    figure, panels = paneled(len(PANELS), f"training in {folder.parent.name}", margin=0.4)
    for panel, (name, columns) in zip(panels, PANELS, strict=True):
        for column, label in columns.items():
            panel.plot(steps, [float(row[column]) for row in rows], "o-", markersize=3, label=label)
        panel.set(xlabel="step", title=name)
        panel.grid(axis="y", color="0.92")
        panel.legend(fontsize=8)
    save(figure, folder / PICTURE)
