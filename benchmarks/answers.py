"""Two builds of Outrider asked the same: every output of theirs, on every instruction set.

Requests are random, with all kinds of sampling options, and run on engines of several kinds: with
and without drafters, quantised, and in a cache so small that sequences are preempted.
"""

import json
import os
import subprocess
import sys
import tempfile
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm

from outrider.errors import OutriderError
from outrider.native.choice import available

ROOT = Path(__file__).parents[1]
OFF = "off"
"""The instruction set of an engine without native code."""


def answers(folder: Path, isa: str, requests: int, seed: int) -> list[dict[str, Any]]:
    """Return the outputs of the package below ``folder`` on one instruction set."""
    with tempfile.TemporaryDirectory() as made:
        file = Path(made, "answers.json")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OUTRIDER_NATIVE_ISA": isa}
        worker = sys.executable, "-P", "-m", "benchmarks.answers_worker"
        arguments = str(folder.resolve()), str(requests), str(seed), str(file)
        done = subprocess.run(
            [*worker, *arguments], env=environment, capture_output=True, text=True, check=False
        )
        if not file.exists():
            why = (done.stderr.strip().splitlines() or ["no reason"])[-1]
            raise OutriderError(f"{folder} does not answer on {isa}: {why}.")
        outputs: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
        return outputs


def differing(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[str]:
    """Return a line for each output that is not the same in both builds."""
    return [
        f"{a['engine']}, request {a['request']}: {a['options']}"
        for a, b in zip(old, new, strict=True)
        if a != b
    ]


def main(
    old: Annotated[Path, typer.Argument(help="Folder that holds the old package.", exists=True)],
    new: Annotated[Path, typer.Argument(help="Folder that holds the new package.", exists=True)],
    requests: Annotated[int, typer.Option(min=1, help="Requests of each instruction set.")] = 250,
    isas: Annotated[str, typer.Option(help="Instruction sets, with commas; all by default.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Of the requests.")] = 0,
) -> None:
    """Ask two builds the same."""
    names = isas.split(",") if isas else [*available(), OFF]
    wrong: dict[str, list[str]] = {}
    for isa in tqdm(names, leave=False, disable=None):
        both = [answers(folder, isa, requests, seed) for folder in (old, new)]
        wrong[isa] = differing(*both)
        outputs = sum(len(answer["outputs"]) for answer in both[0])
        tqdm.write(f"{isa}: {len(both[0])} requests, {outputs} outputs, {len(wrong[isa])} differ")
    lines = [*chain.from_iterable(wrong.values())]
    if lines:
        raise OutriderError("answers differ:\n" + "\n".join(lines[:20]))
