"""Two builds of Outrider beside each other: what a change did to the speed of decoding.

Each build answers in a process of its own, in the same environment: ``outrider`` comes from the
folder that is given, with the libraries that lie in it. Both processes stay alive, and one of them
is stopped while the other decodes. A cell is a drafter and a batch size; a start is a fresh pair of
processes, since two starts of one build differ by more than two rounds of one start. In a start a
cell runs several times in the order old, new, new, old; its value is the median ratio. Intervals
are Student's, of the mean logarithm over starts. Outputs of both builds are compared, token by
token.
"""

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import log
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import typer
from tqdm import tqdm

from outrider.bench.machine import machine
from outrider.cli.common import JsonFile, write_json
from outrider.errors import OutriderError

from .common import table
from .peers.pairs import Pair, find_pair
from .portfolio.figures import estimate

DRAFTERS = ("none", "ngram", "model")
BATCHES = (1, 8)
WORKER = Path(__file__).with_name("builds_worker.py")

Cell = tuple[str, int]


@dataclass(frozen=True)
class Answer:
    """What a build did: nanoseconds, and the output tokens of each prompt."""

    took: int
    tokens: list[list[int]]


class Build:
    """A process that runs one build, stopped unless it is asked."""

    def __init__(self, folder: Path, pair: Pair, prompts: Path) -> None:
        drafter = pair.drafter or ""
        command = [sys.executable, str(WORKER), str(folder), str(pair.target), str(drafter)]
        self.folder = folder
        self.process = subprocess.Popen(
            [*command, str(prompts)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()
        self.process.send_signal(signal.SIGSTOP)

    def ask(self, cell: Cell, tokens: int, seed: int) -> Answer:
        """Return what decoding in a cell took, and its outputs."""
        assert self.process.stdin
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write(json.dumps([*cell, tokens, seed]) + "\n")
        self.process.stdin.flush()
        answer = Answer(*self._read())
        self.process.send_signal(signal.SIGSTOP)
        return answer

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()

    def _read(self) -> Any:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            self.end()
            raise OutriderError(f"the build in {self.folder} ended; its own error stands above.")
        return json.loads(line)


def run_start(
    builds: Sequence[Build], cells: Sequence[Cell], tokens: int, pairs: int, seed: int
) -> dict[Cell, float]:
    """Return log(old / new) of each cell's time in one start.

    Raises:
        OutriderError: the builds gave different outputs.
    """
    found: dict[Cell, float] = {}
    for cell in cells:
        ratios: list[float] = []
        for number in range(-1, pairs):  # the first warms up
            order = builds if number % 2 else builds[::-1]
            answers = {build.folder: build.ask(cell, tokens, seed + number + 1) for build in order}
            old, new = (answers[build.folder] for build in builds)
            if old.tokens != new.tokens:
                raise OutriderError(f"outputs differ: drafter {cell[0]}, batch {cell[1]}.")
            ratios.append(log(old.took / new.took))
        found[cell] = median(ratios[1:])
    return found


def report_lines(starts: Mapping[str, Sequence[Mapping[Cell, float]]]) -> list[str]:
    """Return the table: speed of the new build over the old one by cell, pair and together."""
    rows: list[tuple[str, str]] = []
    for pair, values in starts.items():
        for drafter, batch in values[0]:
            logs = [start[drafter, batch] for start in values]
            rows.append((f"{pair}, {drafter}, batch {batch}", str(estimate(logs))))
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
    json_: JsonFile = None,
) -> None:
    """Measure two builds beside each other."""
    if old.resolve() == new.resolve():
        raise OutriderError(f"both builds are in {old}; give two folders.")
    found: dict[str, list[dict[Cell, float]]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for number in tqdm(range(starts), leave=False, disable=None):
            for name in pair.split(","):
                models = find_pair(name)
                prompts = folder / f"{name.replace('/', '-')}.json"
                prompts.write_text(json.dumps([list(each) for each in models.prompts]))
                cells = [
                    (d, b) for d in DRAFTERS if d != "model" or models.drafter for b in BATCHES
                ]
                with ExitStack() as alive:
                    builds: dict[Path, Build] = {}
                    for each in (old, new) if number % 2 else (new, old):
                        builds[each] = Build(each.resolve(), models, prompts)
                        alive.callback(builds[each].end)
                    sides = [builds[old], builds[new]]
                    values = run_start(sides, cells, tokens, pairs, 1000 * number)
                found.setdefault(name, []).append(values)
    print("\n".join(report_lines(found)))
    rows = {
        name: [{f"{d}/{b}": value for (d, b), value in start.items()} for start in values]
        for name, values in found.items()
    }
    settings = {"tokens": tokens, "pairs": pairs}
    write_json({"machine": machine(), **settings, "log_ratio": rows}, json_)
