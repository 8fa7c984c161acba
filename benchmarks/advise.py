"""Compares what ``outrider.ops.planning`` predicts of this machine with what it then measures.

Costs are measured at batch sizes 1, 4 and 16, acceptance at K = 8 with one sequence, on one half of
the prompts. On the other half, speedups of K = 1 to 8 at batch sizes 2, 8 and 32 are predicted, and
then measured in rounds, each with the cells in another order: tokens per second of steps in which
the whole batch decodes.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from outrider.base.types import Counts
from outrider.bench.machine import machine
from outrider.bench.steps import profile, timed, tokens_per_second
from outrider.cli.common import Out, numbers, write_json
from outrider.llm import LLM
from outrider.ops.planning import of_counts
from outrider.ops.planning.figure import MEASURED
from outrider.ops.planning.roofline import Steps

from .common import POCKET, PROMPTS, Prompts, Rounds, Tokens, read_prompts, table

CLEAR = 0.1
"""Distance of a speedup from 1 from which on its sign counts."""
LONGEST = 8
COLUMNS = (
    "drafter", "T", "batch", "K", "predicted", "measured", "error", "tokens a step",
    "drafted a step", "time of a step / plain",
)  # fmt: skip
Cell = tuple[int, int]
"""A batch size and a draft length."""


@dataclass(frozen=True)
class Trial:
    """One drafter's engine, the prompts, and how often what is measured."""

    llm: LLM
    prompts: list[str]
    sizes: tuple[int, ...]
    rounds: int
    tokens: int
    temperature: float

    def cells(self) -> tuple[dict[Cell, list[float]], dict[Cell, Counts]]:
        """Return the tokens per second of each cell, a value a round, and its counts."""
        unseen = self.prompts[1::2]
        listed = [(size, k) for size in self.sizes for k in range(LONGEST + 1)]
        speeds: dict[Cell, list[float]] = {cell: [] for cell in listed}
        drafts = {cell: Counts() for cell in listed}
        order = random.Random(0)
        for _ in range(self.rounds):
            order.shuffle(listed)  # what the host does for a while meets any cells
            for size, k in listed:
                steps, counts = timed(self.llm, unseen, size, k, self.tokens, self.temperature)
                speeds[size, k].append(tokens_per_second(steps))
                drafts[size, k].add(counts)
        return speeds, drafts

    def compared(self) -> list[dict[str, Any]]:
        """Return all cells: what was predicted, and what was measured."""
        seen, unseen = self.prompts[::2], self.prompts[1::2]
        costs = profile(self.llm, seen, LONGEST, tokens=self.tokens)
        _, counts = timed(self.llm, seen, 1, LONGEST, self.tokens, self.temperature)
        lengths = [len(self.llm.inputs.encode(text)) for text in unseen]
        context = sum(lengths) / len(lengths) + self.tokens / 2
        name = self.llm.engine.drafter.name
        steps = Steps(costs, name, context, evidence=MEASURED)
        acceptance = of_counts(counts, LONGEST)
        speeds, drafts = self.cells()
        cells = []
        for size, k in sorted(cell for cell in drafts if cell[1]):
            rates = [a / b for a, b in zip(speeds[size, k], speeds[size, 0], strict=True)]
            speedup, drafted = median(rates), acceptance.drafted(k)
            slower = steps.seconds(size, k, drafted) / steps.seconds(size, 0)
            counted, emitted = drafts[size, k], drafts[size, k].emitted / drafts[size, k].steps
            predicted = acceptance.tokens(k) / slower
            cells.append(
                {
                    "drafter": name, "temperature": self.temperature, "batch_size": size,
                    "num_speculative_tokens": k,
                    "predicted": predicted, "speedup": speedup, "speedup_by_round": rates,
                    "error": predicted / speedup - 1,
                    "emitted_per_step": [acceptance.tokens(k), emitted],
                    "drafted_per_step": [drafted, counted.drafted / counted.steps],
                    "step_over_plain": [slower, emitted / speedup],
                }
            )  # fmt: skip
        return cells


def summary(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how far the predictions are off, and how often they are on the wrong side of 1."""
    clear = [each for each in cells if abs(each["speedup"] - 1) > CLEAR]
    right = sum((each["speedup"] > 1) == (each["predicted"] > 1) for each in clear)
    return {
        "cells": len(cells),
        "losing": sum(each["speedup"] < 1 for each in cells),
        "median_error": median(abs(each["error"]) for each in cells),
        "median_bias": median(each["error"] for each in cells),
        "clear_cells": len(clear),
        "right_cells": right,
    }


def said(name: str, cells: Sequence[dict[str, Any]]) -> str:
    """Return a summary as a sentence."""
    total = summary(cells)
    return (
        f"{name}: {total['cells']} cells, {total['losing']} of them slower than plain decoding: "
        f"median error {total['median_error']:.1%} (with its sign {total['median_bias']:+.1%}); on "
        f"the right side of 1 in {total['right_cells']} of {total['clear_cells']} cells beyond 10 %"
    )


def lines(cells: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the cells in Markdown, and what they sum up to."""

    def both(each: dict[str, Any], key: str) -> str:
        return f"{each[key][0]:.2f}, {each[key][1]:.2f}"

    yield from table(
        COLUMNS,
        (
            (
                each["drafter"], f"{each['temperature']:g}", each["batch_size"],
                each["num_speculative_tokens"], f"{each['predicted']:.2f}",
                f"{each['speedup']:.2f}", f"{each['error']:+.0%}", both(each, "emitted_per_step"),
                both(each, "drafted_per_step"), both(each, "step_over_plain"),
            )
            for each in cells
        ),
    )  # fmt: skip
    yield ""
    pairs = sorted({(each["drafter"], each["temperature"]) for each in cells})
    for drafter, temperature in pairs:
        own = [e for e in cells if (e["drafter"], e["temperature"]) == (drafter, temperature)]
        yield said(f"{drafter} at T = {temperature:g}", own)
    yield said("all", cells)


def main(
    model: Annotated[str, typer.Argument(help="A checkpoint's folder.")] = POCKET,
    prompts: Prompts = PROMPTS,
    drafters: Annotated[str, typer.Option(help="With commas.")] = "model,suffix",
    batch_size: Annotated[str, typer.Option(help="Not 1, 4 or 16; with commas.")] = "2,8,32",
    temperature: Annotated[str, typer.Option(help="Of sampling; with commas.")] = "0",
    rounds: Rounds = 3,
    tokens: Tokens = 128,
    join: Annotated[
        list[Path] | None,
        typer.Option(help="Run nothing; put reports of earlier runs together.", exists=True),
    ] = None,
    out: Out = None,
) -> None:
    """Compare predicted speedups with measured ones, in cells that the profile has not seen."""
    cells: list[dict[str, Any]] = []
    if join:
        for file in join:
            cells += json.loads(file.read_text(encoding="utf-8"))["cells"]
    else:
        texts, sizes = read_prompts(prompts), numbers(batch_size, int, "--batch-size")
        for drafter in drafters.split(","):
            llm = LLM(
                model, drafter=drafter, num_speculative_tokens=LONGEST, max_num_seqs=max(sizes)
            )
            for warmth in numbers(temperature, float, "--temperature"):
                cells += Trial(llm, texts, sizes, rounds, tokens, warmth).compared()
    write_json({"machine": machine(), "summary": summary(cells), "cells": cells}, out)
    print("\n".join(lines(cells)))
