"""Drafter auto against fixed choices, over workloads, concurrency and temperature."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm

from outrider.bench.offline import turned
from outrider.bench.record import frozen
from outrider.errors import ConfigError, OutriderError

from ..common import table
from .cells import (
    AUTO,
    CHOICES,
    FIXED,
    PLAIN,
    Cell,
    Cells,
    CountedTokens,
    Pair,
    ReplayDrafter,
    ReplayTarget,
    Source,
    chosen_cells,
    settings_of,
)
from .clock import speed
from .figures import LEAST_ROUNDS, Speeds, against, against_best, geometric_mean, mixture, rows

COLUMNS = ("workload/concurrency/T", "best fixed", "auto/best", "auto/plain", "rounds")
WARM_UPS = 2
"""Runs of auto before a cell's rounds, for it to learn; the others have one."""


class Results:
    """The speeds of all rounds so far, in a file that is gone on with if it is of the settings."""

    def __init__(self, file: Path, settings: dict[str, Any]) -> None:
        self._file = file
        self.speeds: dict[str, dict[str, list[float]]] = {}
        self.differing: dict[str, int] = {}
        self._whole = {"settings": settings, "cells": self.speeds, "differing": self.differing}
        if not file.exists():
            return
        try:
            kept = json.loads(file.read_text(encoding="utf-8"))
            same, cells = kept["settings"] == settings, kept["cells"]
            self.differing |= kept["differing"]
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError(
                f"--out is {file}, which holds no such results; give another."
            ) from None
        if not same:
            raise ConfigError(
                f"--out is {file}, which was measured with other settings or on another machine; "
                "give another."
            )
        self.speeds |= cells

    def rounds(self, cell: Cell) -> int:
        """Return the number of a cell's rounds."""
        return len(self.speeds.get(cell.name, {}).get(AUTO, ()))

    def open(self, cell: Cell, rounds: int, half_width: float) -> bool:
        """Return True where a cell may have another round, and needs it."""
        count = self.rounds(cell)
        if not LEAST_ROUNDS <= count < rounds:
            return count < rounds
        return against_best(self.speeds[cell.name]).half_width > half_width

    def add(self, cell: Cell, speeds: dict[str, float], differing: int) -> None:
        """Add a round, and write the file."""
        mine = self.speeds.setdefault(cell.name, {name: [] for name in CHOICES})
        for name, value in speeds.items():
            mine[name].append(value)
        self.differing[cell.name] = self.differing.get(cell.name, 0) + differing
        part = self._file.with_name(self._file.name + ".part")
        part.write_text(json.dumps(self._whole, indent=1) + "\n", encoding="utf-8")
        part.replace(self._file)


def measure(
    cell: Cell, source: Source, tokens: int, results: Results, rounds: int, half_width: float
) -> None:
    """Add up to ``LEAST_ROUNDS`` rounds of a cell to ``results``."""
    engines = {name: source.open(choice, cell.concurrency) for name, choice in CHOICES.items()}
    first = results.rounds(cell)
    for name, llm in engines.items():
        for number in range(WARM_UPS if name == AUTO else 1):
            speed(llm, source.asked(cell, first + number), cell.concurrency, tokens)
    with frozen():
        for number in range(first, first + LEAST_ROUNDS):
            if not results.open(cell, rounds, half_width):
                return
            asked, speeds, outputs = source.asked(cell, number), {}, {}
            for name in turned(list(engines), number):
                gc.collect()
                done = speed(engines[name], asked, cell.concurrency, tokens)
                speeds[name], outputs[name] = done.speed, done.outputs
            differing = sum(differ(mine, outputs[PLAIN]) for mine in outputs.values())
            results.add(cell, speeds, differing)


def differ(mine: list[list[int]], others: list[list[int]]) -> int:
    """Return how many outputs differ as far as both go."""
    pairs = zip(mine, others, strict=True)
    return sum(any(a != b for a, b in zip(x, y, strict=False)) for x, y in pairs)


def show(cells: dict[str, Speeds]) -> Iterator[str]:
    """Yield the lines of the report."""
    yield from table(COLUMNS, rows(cells))
    yield ""
    each = cells.values()
    yield f"geometric mean, auto/best: {geometric_mean([against_best(s) for s in each])}"
    yield f"geometric mean, auto/plain: {geometric_mean([against(s, PLAIN) for s in each])}"
    yield ""
    kinds = [t for t in ("0", "1") if any(name.endswith(f"/{t}") for name in cells)]
    groups = {f"T = {t}": [s for n, s in cells.items() if n.endswith(f"/{t}")] for t in kinds}
    groups["both"] = list(each)
    yield "mixture: time of one fixed choice over auto's, for as many tokens of every cell"
    yield from table(
        ("fixed", *groups),
        [(name, *(str(mixture(group, name)) for group in groups.values())) for name in FIXED],
    )


def main(
    out: Annotated[Path, typer.Option(help="JSON file of the results; one that is there goes on.")],
    cells: Cells = "*",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of a cell at most.")] = 24,
    tokens: CountedTokens = 32,
    half_width: Annotated[
        float, typer.Option(min=0.0, help="Of the 95 % interval of log(auto/best), to reach.")
    ] = 0.03,
    replay: ReplayTarget = "100m",
    drafter: ReplayDrafter = "planted:0.7:3m",
) -> None:
    """Measure drafter auto against fixed choices, interleaved."""
    chosen, pair = chosen_cells(cells), Pair(replay, drafter, tokens)
    settings = settings_of(pair, out)
    results = Results(out, settings)
    while still := [cell for cell in chosen if results.open(cell, rounds, half_width)]:
        for workload, group in groupby(still, lambda cell: cell.workload):
            source = Source(workload, pair)
            for cell in tqdm(list(group), desc=workload, leave=False, disable=None):
                measure(cell, source, tokens, results, rounds, half_width)
                gc.collect()  # the caches of this cell's engines, before the next one's
    speeds: dict[str, Speeds] = {cell.name: results.speeds[cell.name] for cell in chosen}
    print("\n".join(show(speeds)))
    if differing := sum(results.differing[name] for name in speeds):
        raise OutriderError(f"{differing} outputs differ from plain decoding; see {out}.")
