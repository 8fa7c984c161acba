"""Two builds of Outrider beside each other: what a change did to the speed of decoding.

Each build answers in a process of its own, in the same environment: ``outrider`` comes from the
folder that is given, with the libraries that lie in it. Both processes stay alive, and one of them
is stopped while the other decodes. A cell is a mode and a batch size; a start has fresh processes,
a pair for each mode, since two starts of one build differ by more than two rounds of one start. In
a start a cell runs several times in the order old, new, new, old; its value is the median ratio.
Intervals are Student's, of the mean logarithm over starts. Outputs of both builds are compared,
token by token.
"""

import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import log
from pathlib import Path
from statistics import fmean, median
from typing import Annotated

import typer
from tqdm import tqdm

from outrider.bench.machine import machine
from outrider.cli.common import Out, write_json
from outrider.errors import OutriderError

from .common import table
from .peers.pairs import Pair, find_pair
from .peers.session import Session
from .portfolio.figures import estimate

MODES = ("plain", "ngram", "draft")
BATCHES = (1, 8)
PROMPTS = 8
ALONE = 2
"""Prompts of a run at batch 1, one after the other."""
LENGTH = 4
"""Draft length K."""
TEMPERATURE = 0.7

Cell = tuple[str, int]
"""A mode and a batch size."""


@contextmanager
def opened(folder: Path, pair: Pair, mode: str, tokens: int, log: Path) -> Iterator[Session]:
    """Yield a build with its models loaded, stopped."""
    spec = {
        "package": str(folder.resolve()), "target": str(pair.target), "drafter": str(pair.drafter),
        "dtype": "bfloat16", "drafter_dtype": "int8", "mode": mode, "k": LENGTH, "threads": None,
        "context": tokens + max(map(len, pair.prompts)), "parallel": max(BATCHES),
    }  # fmt: skip
    command = (sys.executable, "-P", "-m", "benchmarks.builds_worker")
    session = Session(command, spec, log, {"PYTHONPATH": str(Path(__file__).parents[1])})
    session.process.send_signal(signal.SIGSTOP)
    try:
        yield session
    finally:
        session.process.send_signal(signal.SIGCONT)
        session.close()


def decode(
    session: Session, prompts: Sequence[list[int]], batch: int, tokens: int, seed: int
) -> tuple[float, list[list[int]]]:
    """Return the seconds of decoding prompts in batches, and their output ids."""
    session.process.send_signal(signal.SIGCONT)
    answers = [
        session.run(list(prompts[i : i + batch]), tokens, TEMPERATURE, seed + i)
        for i in range(0, len(prompts), batch)
    ]
    session.process.send_signal(signal.SIGSTOP)
    return sum(each.seconds for each in answers), [ids for each in answers for ids in each.ids]


def compare(
    old: Session, new: Session, pair: Pair, cell: Cell, tokens: int, pairs: int, seed: int
) -> float:
    """Return the median of log(old / new) of a cell's times in one start."""
    mode, batch = cell
    ratios: list[float] = []
    for number in range(pairs + 1):  # the first warms up
        first = seed + number
        count = PROMPTS if batch > 1 else ALONE
        prompts = [pair.prompts[(first + i) % len(pair.prompts)] for i in range(count)]
        order = (old, new) if number % 2 else (new, old)
        decoded = {each: decode(each, prompts, batch, tokens, first) for each in order}
        if decoded[old][1] != decoded[new][1]:
            raise OutriderError(
                f"outputs differ: {pair.name}, {mode}, batch {batch}, seed {first}."
            )
        ratios.append(log(decoded[old][0] / decoded[new][0]))
    return median(ratios[1:])


def run_start(
    pair: Pair, old: Path, new: Path, start: int, tokens: int, pairs: int
) -> dict[Cell, float]:
    """Return log(old / new) of each cell's time in fresh processes."""
    ratios: dict[Cell, float] = {}
    folders = (old, new) if start % 2 else (new, old)
    for mode in MODES if pair.drafter else MODES[:-1]:
        with ExitStack() as stack:
            logs = stack.enter_context(tempfile.TemporaryDirectory())
            sides = {
                folder: stack.enter_context(opened(folder, pair, mode, tokens, Path(logs, str(i))))
                for i, folder in enumerate(folders)
            }
            for cell in ((mode, batch) for batch in BATCHES):
                seed = 1000 * start
                ratios[cell] = compare(sides[old], sides[new], pair, cell, tokens, pairs, seed)
    return ratios


def report_lines(starts: Mapping[str, Sequence[Mapping[Cell, float]]]) -> list[str]:
    """Return the table: speed of the new build over the old one by cell, pair and together."""
    rows: list[tuple[str, str]] = []
    for pair, values in starts.items():
        for mode, batch in values[0]:
            logs = [start[mode, batch] for start in values]
            rows.append((f"{pair}, {mode}, batch {batch}", str(estimate(logs))))
        rows.append((pair, str(estimate([fmean(start.values()) for start in values]))))
    if len(starts) > 1:
        logs = [
            fmean(value for start in each for value in start.values())
            for each in zip(*starts.values(), strict=True)
        ]
        rows.append(("together", str(estimate(logs))))
    return list(table(("cell", "new / old"), rows))


def main(
    old: Annotated[Path, typer.Argument(help="Folder that holds the old package.", exists=True)],
    new: Annotated[Path, typer.Argument(help="Folder that holds the new package.", exists=True)],
    pair: Annotated[str, typer.Option(help="Pairs of models: pocket,planted.")] = "pocket",
    starts: Annotated[int, typer.Option(min=2, help="Fresh pairs of processes.")] = 7,
    pairs: Annotated[int, typer.Option(min=1, help="Comparisons of a cell in a start.")] = 8,
    tokens: Annotated[int, typer.Option(min=2, help="Output tokens of each prompt.")] = 64,
    out: Out = None,
) -> None:
    """Measure two builds beside each other."""
    if old.resolve() == new.resolve():
        raise OutriderError(f"both builds are in {old}; give two folders.")
    models = [find_pair(name) for name in pair.split(",")]
    starts_by_pair: dict[str, list[dict[Cell, float]]] = {each.name: [] for each in models}
    for start in tqdm(range(starts), leave=False, disable=None):
        for each in models:
            starts_by_pair[each.name].append(run_start(each, old, new, start, tokens, pairs))
    print("\n".join(report_lines(starts_by_pair)))
    rows = {
        name: [
            {f"{mode}/{batch}": value for (mode, batch), value in each.items()} for each in values
        ]
        for name, values in starts_by_pair.items()
    }
    settings = {"tokens": tokens, "pairs": pairs}
    write_json({"machine": machine(), **settings, "log_ratio": rows}, out)
