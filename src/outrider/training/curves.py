"""The curves of a training: a table that grows, and its picture."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from ..base.kept import naming, part_of

CURVES = "curves.csv"
COLUMNS = ("step", "seconds", "tokens", "rate", "loss", "acceptance_length", "coupled_length")
PICTURE = "curves.png"
PANELS: tuple[tuple[str, dict[str, str]], ...] = (
    ("loss", {"loss": "loss"}),
    (
        "forecast acceptance length, held out",
        {"acceptance_length": "T = 0", "coupled_length": "T = 1"},
    ),
)


def add_to_curves(file: Path, row: Sequence[object]) -> None:
    """Add a row of ``COLUMNS`` to the table in a file, which begins with their names."""
    new = not file.exists()
    with naming(file), file.open("a", encoding="utf-8", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerows([COLUMNS, row] if new else [row])


def cut_curves(file: Path, step: int) -> None:
    """Drop the rows after a step, which will come again, and rows that are cut or malformed."""
    if not file.exists():
        return
    kept = [",".join(COLUMNS)]
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            figures = [float(figure) for figure in line.split(",")]
            if len(figures) == len(COLUMNS) and figures[0] <= step:
                kept.append(line)
    with part_of(file) as part:
        part.write_text("\n".join([*kept, ""]), encoding="utf-8")


def last_step(file: Path) -> int | None:
    """Return the step of the last row of the table in a file, None if it has none."""
    rows = file.read_text(encoding="utf-8").splitlines()[1:] if file.exists() else []
    return int(rows[-1].partition(",")[0]) if rows else None


def draw_curves(folder: Path) -> None:
    """Write a picture of the curves in a training's folder, if matplotlib is installed."""
    file = folder / CURVES
    if find_spec("matplotlib") is None or not file.exists():
        return
    from ..base.plots import add_legend, paneled, save

    with file.open(encoding="utf-8", newline="") as opened:
        rows = [*csv.DictReader(opened)]
    steps = [int(row["step"]) for row in rows]
    figure, panels = paneled(len(PANELS), f"training in {folder.parent.name}", margin=0.4)
    for panel, (name, columns) in zip(panels, PANELS, strict=True):
        for column, label in columns.items():
            panel.plot(steps, [float(row[column]) for row in rows], "o-", markersize=3, label=label)
        panel.set(xlabel="step", title=name)
        panel.grid(axis="y", color="0.92")
        add_legend(panel, 8)
    save(figure, folder / PICTURE)
