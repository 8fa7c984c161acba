"""The table of a release: drafter auto beside plain decoding under load, with equal outputs.

A cell is a pair, a temperature and a number of requests that run at once. Both engines share the
target and take turns in every round; a speedup is the median of the rounds' ratios. Speeds are
those of ``portfolio.clock``: tokens a second while so many sequences decode. Every output of auto
is compared with plain decoding's of the same round. The file is written after each cell, and the
same command goes on where it was interrupted.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import typer
from tqdm import tqdm

from outrider import __version__
from outrider.base.plots import add_legend, colour, new_figure, save
from outrider.base.types import SamplingParams
from outrider.bench.machine import machine
from outrider.bench.offline import turned
from outrider.bench.record import frozen
from outrider.cli.common import numbers
from outrider.drafters.registry import sibling
from outrider.engine.build import build_engine, load_target
from outrider.engine.setup import set_up
from outrider.errors import ConfigError, OutriderError
from outrider.llm import LLM
from outrider.models.base import Model

from .common import ratio, table
from .peers.pairs import Pair, find_pair, split_pairs
from .portfolio.cells import ALONE, AUTO, FILLING, PLAIN
from .portfolio.clock import Asked, Decoded, speed
from .portfolio.command import WARM_UPS, differ

COLUMNS = (
    "pair", "T", "requests", "plain, tokens/s", "auto, tokens/s", "speedup", "acceptance length",
    "outputs compared", "different",
)  # fmt: skip
NOTE = (
    "Speeds are tokens a second while so many requests decode, medians over {rounds} rounds of "
    "{tokens} tokens a request, in which both take turns; a speedup is the median of the rounds' "
    "ratios, with its interval. Outputs are compared with plain decoding's, token by token."
)


class Cell(NamedTuple):
    """One comparison: a pair by name, a temperature, and requests at once."""

    pair: str
    temperature: float
    requests: int

    @property
    def name(self) -> str:
        return f"{self.pair}/{self.temperature:g}/{self.requests}"


@dataclass
class Found:
    """The rounds of a cell: tokens a second of both, and what was drafted and compared."""

    pair: str
    temperature: float
    requests: int
    plain: list[float]
    auto: list[float]
    drafts: int = 0
    accepted: int = 0
    compared: int = 0
    different: int = 0
    date: str = ""

    @property
    def acceptance_length(self) -> float | None:
        """Tokens of a step that drafts; None where auto never drafted."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    def row(self) -> list[str]:
        """Return the cells of the table's row."""
        found = ratio(self.auto, self.plain)
        interval = found["interval"]
        shown = f"{found['ratio']:.2f}"
        shown += f" [{interval[0]:.2f} {interval[1]:.2f}]" if interval else ""
        length = self.acceptance_length
        return [
            self.pair, f"{self.temperature:g}", str(self.requests), f"{median(self.plain):.1f}",
            f"{median(self.auto):.1f}", shown, "" if length is None else f"{length:.2f}",
            str(self.compared), str(self.different),
        ]  # fmt: skip


class Report:
    """The cells that are measured, in a file that is gone on with where its settings are these."""

    def __init__(self, file: Path, settings: dict[str, Any]) -> None:
        self._file = file
        self.settings = settings
        self.cells: dict[str, Found] = {}
        if not file.exists():
            if not file.parent.is_dir():
                raise ConfigError(f"--out is {file}, whose folder is not there; make it.")
            return
        try:
            kept = json.loads(file.read_text(encoding="utf-8"))
            same = kept["settings"] == settings
            found = {name: Found(**cell) for name, cell in kept["cells"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(
                f"--out is {file}, which holds no such table; give another."
            ) from None
        if not same:
            raise ConfigError(
                f"--out is {file}, which was measured with other settings, another version or on "
                "another machine; give another."
            )
        self.cells |= found

    def add(self, cell: Cell, found: Found, command: str) -> None:
        """Add a cell, and write the file."""
        self.cells[cell.name] = found
        whole = {
            "command": command, "settings": self.settings, "machine": machine(),
            "cells": {name: asdict(each) for name, each in self.cells.items()},
        }  # fmt: skip
        part = self._file.with_name(self._file.name + ".part")
        part.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        part.replace(self._file)


class Engines:
    """Engines of a pair, which share its target."""

    def __init__(self, pair: Pair, tokens: int) -> None:
        self._pair, self._most = pair, 1 + FILLING * tokens
        self._model: Model | None = None
        beside = pair.drafter is None or pair.drafter == sibling(pair.target)
        self._auto = AUTO if beside else f"{AUTO}+{pair.drafter}"

    def open(self, name: str, requests: int) -> LLM:
        """Return the plain engine, or that of auto, for so many requests at once."""
        options = {
            "max_num_seqs": requests,
            "max_model_len": max(map(len, self._pair.prompts)) + self._most,
            "enable_prefix_caching": True,  # rounds ask the same, and prompts do not count
        }
        setup = set_up(self._pair.target, None if name == PLAIN else self._auto, options)
        if self._model is None:
            self._model = load_target(setup.checkpoint, setup.config)
        return LLM.from_engine(setup, build_engine(setup, model=self._model))

    def asked(self, cell: Cell, number: int) -> list[Asked]:
        """Return what a round asks, prompts with seeds: ``ALONE`` or more, in full batches."""
        count, prompts = -(-ALONE // cell.requests) * cell.requests, self._pair.prompts
        first = number * ALONE if cell.requests == 1 else 0
        return [
            (
                prompts[(first + place) % len(prompts)],
                SamplingParams(
                    temperature=cell.temperature, seed=1000 * (number + 1) + place,
                    max_tokens=self._most, ignore_eos=True,
                ),
            )
            for place in range(count)
        ]  # fmt: skip


def measure(cell: Cell, engines: Engines, rounds: int, tokens: int) -> Found:
    """Return the rounds of a cell."""
    llms = {name: engines.open(name, cell.requests) for name in (PLAIN, AUTO)}
    found = Found(*cell, [], [])
    speeds = {PLAIN: found.plain, AUTO: found.auto}
    for name, llm in llms.items():
        for number in range(WARM_UPS if name == AUTO else 1):
            speed(llm, engines.asked(cell, number), cell.requests, tokens)
    with frozen():
        for number in range(rounds):
            asked, done = engines.asked(cell, number), dict[str, Decoded]()
            for name in turned(list(llms), number):
                gc.collect()
                done[name] = speed(llms[name], asked, cell.requests, tokens)
                speeds[name].append(done[name].speed)
            found.compared += len(done[PLAIN].outputs)
            found.different += differ(done[AUTO].outputs, done[PLAIN].outputs)
            found.drafts += done[AUTO].drafts
            found.accepted += done[AUTO].accepted
    found.date = machine()["date"][:10]
    return found


def markdown(cells: Sequence[Found], settings: dict[str, Any], command: str) -> Iterator[str]:
    """Yield the lines of the table, with where, when and how it was made."""
    yield from table(COLUMNS, (each.row() for each in cells))
    yield ""
    dates = sorted({each.date for each in cells})
    yield (
        f"Outrider {settings['version']}, {settings['cpu']}, {settings['cores']} cores, "
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}: `{command}`"
    )
    yield ""
    yield NOTE.format(**settings)


def draw(cells: Sequence[Found], title: str, file: Path) -> None:
    """Write the figure: tokens a second above, speedups below, a column a pair."""
    pairs = list(dict.fromkeys(each.pair for each in cells))
    heats = list(dict.fromkeys(each.temperature for each in cells))
    figure = new_figure(4.6 * len(pairs), 7.0, title)
    panels = figure.subplots(2, len(pairs), squeeze=False)
    for column, pair in enumerate(pairs):
        speeds, speedups = panels[0][column], panels[1][column]
        for place, heat in enumerate(heats):
            mine = [each for each in cells if (each.pair, each.temperature) == (pair, heat)]
            mine.sort(key=lambda each: each.requests)
            across = [each.requests for each in mine]
            for name, line in ((PLAIN, "o--"), (AUTO, "s-")):
                up = [median(getattr(each, name)) for each in mine]
                label = f"{name}, T = {heat:g}"
                speeds.plot(across, up, line, color=colour(place), markersize=4, label=label)
            ratios = [ratio(each.auto, each.plain)["ratio"] for each in mine]
            speedups.plot(across, ratios, "s-", color=colour(place), label=f"T = {heat:g}")
        speedups.axhline(1, color="0.6", linewidth=1)
        speeds.set(title=pair, ylabel="tokens per second")
        speedups.set(xlabel="requests at once", ylabel="auto over plain")
        for panel in (speeds, speedups):
            panel.set_xscale("log", base=2)
            panel.set_xticks(across, [str(each) for each in across])
            panel.set_ylim(bottom=0)
            panel.grid(axis="y", color="0.92")
            add_legend(panel, 7)
    save(figure, file)


def main(
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE.json",
            help="The table; one that is there goes on. FILE.md and FILE.png stand beside it.",
        ),
    ],
    models: Annotated[
        str,
        typer.Option(
            help="Pairs with commas, as of benchmarks peers --pair: pocket, planted, gqa, 1b, a "
            "checkpoint with a drafter beside it, or TARGET.gguf,DRAFTER.gguf."
        ),
    ] = "pocket,planted",
    requests: Annotated[str, typer.Option(help="Requests at once, with commas.")] = "1,2,4,8,16,32",
    temperatures: Annotated[str, typer.Option(help="Temperatures, with commas.")] = "0,0.8",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each cell.")] = 7,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a request that count.")] = 64,
) -> None:
    """Measure plain decoding and drafter auto under load, as a table with a picture."""
    if out.suffix != ".json":
        raise ConfigError(f"--out is {out}; give a file that ends in .json.")
    sizes = numbers(requests, int, "--requests")
    heats = numbers(temperatures, float, "--temperatures")
    if min(sizes) < 1 or min(heats) < 0:
        raise ConfigError(
            "--requests has a number below 1 or --temperatures one below 0; correct it."
        )
    where = {key: value for key, value in machine().items() if key in ("cpu", "cores", "threads")}
    settings = {"version": __version__, "rounds": rounds, "tokens": tokens, **where}
    command = (
        f"python -m benchmarks release --models {models} --requests {requests} --temperatures "
        f"{temperatures} --rounds {rounds} --tokens {tokens} --out {out.name}"
    )
    report, chosen = Report(out, settings), list[Cell]()
    for which in split_pairs(models):
        pair = find_pair(which)
        engines = Engines(pair, tokens)
        cells = [Cell(pair.name, *each) for each in product(heats, sizes)]
        for cell in tqdm(cells, desc=pair.name, leave=False, disable=None):
            if cell.name not in report.cells:
                report.add(cell, measure(cell, engines, rounds, tokens), command)
                gc.collect()  # the caches of this cell's engines, before the next one's
        chosen += cells
        del engines
    found = [report.cells[cell.name] for cell in chosen]
    lines = list(markdown(found, settings, command))
    out.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    draw(found, lines[-3], out.with_suffix(".png"))
    typer.echo("\n".join(lines))
    if different := sum(each.different for each in found):
        raise OutriderError(f"{different} outputs differ from plain decoding; see {out}.")
