"""``outrider tune`` beside an exhaustive search: what its choice loses, and the time it takes.

The exhaustive search runs every setting in every round, interleaved, and picks the highest mean
logarithm of speeds. Then the setting that the race has chosen and the one of the search take turns
in rounds of their own, so that no luck in picking counts. All use the same engine in the same
process, and loading counts for neither.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from math import exp, log
from statistics import fmean, median
from typing import Annotated, Any

import typer
from tqdm import tqdm

from outrider.bench.intervals import median_interval, shown
from outrider.bench.machine import machine
from outrider.bench.race import PLAIN_SETTING, SCREENINGS, Run, Setting, race
from outrider.bench.tune import Workbench, frozen
from outrider.bench.workload import CODE, Workload
from outrider.cli.common import JsonFile, numbers, write_json

from .common import POCKET, PROMPTS, Prompts, read_prompts, table

COLUMNS = ("T", "batch size", "tune", "exhaustive", "speed / best", "runs", "time")


def exhaustive(
    measure: Callable[[Setting, int], Run], settings: Sequence[Setting], rounds: int
) -> dict[Setting, list[float]]:
    """Return the speeds of all settings, a value a round."""
    speeds: dict[Setting, list[float]] = {each: [] for each in settings}
    for number in tqdm(range(rounds), leave=False, disable=None):
        turn = number % len(settings)
        for each in (*settings[turn:], *settings[:turn]):
            speeds[each].append(measure(each, number).speed)
    return speeds


def duel(
    measure: Callable[[Setting, int], Run], chosen: Setting, best: Setting, rounds: int
) -> dict[str, Any]:
    """Return the chosen setting's speed over that of the best one, in rounds of their own."""
    if chosen == best:
        return {"ratio": 1.0, "interval": None}
    ratios = []
    for number in tqdm(range(rounds), leave=False, disable=None):
        pair = (chosen, best) if number % 2 else (best, chosen)
        speeds = {each: measure(each, number).speed for each in pair}
        ratios.append(speeds[chosen] / speeds[best])
    return {"ratio": median(ratios), "interval": median_interval(ratios)}


def both(bench: Workbench, size: int, rounds: int, duels: int) -> dict[str, Any]:
    """Return what a race and an exhaustive search find at a batch size, and their times."""
    begin = time.perf_counter()
    found = race(bench.cell(size), bench.families, bench.others)
    raced = time.perf_counter() - begin
    settings = [PLAIN_SETTING, *bench.others]
    settings += [Setting(d, k) for d, lengths in bench.families.items() for k in lengths]
    begin = time.perf_counter()
    speeds = exhaustive(bench.cell(size), settings, rounds)
    took = time.perf_counter() - begin
    best = max(speeds, key=lambda each: fmean(map(log, speeds[each])))
    return {
        "batch_size": size,
        "chosen": str(found.winner),
        "best": str(best),
        **duel(bench.cell(size), found.winner, best, duels),
        "loss_at_most": found.loss,
        "runs": SCREENINGS * len(found.screened) + sum(map(len, found.runs.values())),
        "exhaustive_runs": len(settings) * rounds,
        "seconds": raced,
        "exhaustive_seconds": took,
        "speeds": {str(each): values for each, values in speeds.items()},
        "promised": {str(each): value for each, value in found.promised.items()},
    }


def lines(cells: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the table of cells."""
    yield from table(
        COLUMNS,
        (
            (
                f"{c['temperature']:g}", c["batch_size"], c["chosen"], c["best"],
                f"{c['ratio']:.3f} {shown(c['interval'], '.3f')}".rstrip(),
                f"{c['runs']} of {c['exhaustive_runs']}",
                f"{c['seconds'] / c['exhaustive_seconds']:.0%}",
            )
            for c in cells
        ),
    )  # fmt: skip


def main(
    prompts: Prompts = PROMPTS,
    model: Annotated[str, typer.Option(help="A checkpoint's folder.")] = POCKET,
    lengths: Annotated[str, typer.Option(help="Draft lengths K.")] = "1,2,3,4,5,6,7,8,9,10",
    batch_sizes: Annotated[str, typer.Option(help="Sequences at once.")] = "1,8",
    temperatures: Annotated[str, typer.Option(help="Of sampling.")] = "0,1",
    max_tokens: Annotated[int, typer.Option(help="Output tokens of each prompt.")] = 64,
    rounds: Annotated[int, typer.Option(min=2, help="Of the exhaustive search.")] = 8,
    duels: Annotated[int, typer.Option(min=2, help="Rounds of chosen and best.")] = 60,
    json_: JsonFile = None,
) -> None:
    """Compare the race with an exhaustive search."""
    workload = Workload.of_prompts(CODE, read_prompts(prompts))
    sizes, cells = sorted(numbers(batch_sizes, int, "--batch-sizes")), []
    for temperature in numbers(temperatures, float, "--temperatures"):
        bench = Workbench(
            model,
            workload,
            lengths=numbers(lengths, int, "--lengths"),
            most=sizes[-1],
            max_tokens=max_tokens,
            temperature=temperature,
        )
        with frozen():
            cells += [{"temperature": temperature, **both(bench, s, rounds, duels)} for s in sizes]
    mean = exp(fmean(log(cell["ratio"]) for cell in cells))
    share = sum(c["seconds"] for c in cells) / sum(c["exhaustive_seconds"] for c in cells)
    report = {"machine": machine(), "rounds": rounds, "cells": cells, "ratio": mean, "time": share}
    write_json(report, json_)
    if json_ != "-":
        print("\n".join(lines(cells)))
        print(f"\n{mean:.3f} of the best speed on average, in {share:.0%} of the time")
