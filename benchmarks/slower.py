"""Measures what drafter auto costs where drafts do not pay: its speed beside plain decoding.

Every start is a process of its own with two engines, one of them plain, made in turns of order,
since two plain engines of one process differ by 2 to 10 % for as long as it lives. Both take a load
when they are new and more of them afterwards, in turns. A start gives two ratios of a cell: of new
engines and of warm ones. Their geometric mean over starts has Student's interval.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from math import log
from multiprocessing import get_context
from typing import Annotated, NamedTuple

import typer
from tqdm import tqdm

from outrider.base.types import SamplingParams
from outrider.bench.machine import machine
from outrider.bench.offline import turned
from outrider.bench.record import run_all
from outrider.checkpoints.families import find_folder
from outrider.checkpoints.tokenizers import read_codec
from outrider.cli.bench import named_workload
from outrider.cli.common import JsonFile, write_json
from outrider.llm import LLM

from .common import POCKET, Model, table
from .portfolio.figures import estimate

MEMORY = "1500MiB"
"""Each engine's."""
ALONE = 6
"""Prompts of a load without batches, one after the other."""
ENGINES = ("none", "auto")


class Cell(NamedTuple):
    """A load: its temperature, and how many requests decode together."""

    temperature: float
    batch: int


def start(
    model: str, workload: str, cell: Cell, prompts: int, tokens: int, loads: int, number: int
) -> dict[str, float]:
    """Return log(plain / auto) of the seconds that loads took, of new engines and of warm ones.

    Args:
        model, workload: their names.
        cell: temperature and batch.
        prompts, tokens: of a load; ``tokens`` are those of each answer.
        loads: those of warm engines.
        number: of the start, by which the order is turned.
    """
    codec = read_codec(find_folder(model))
    items = named_workload(workload).first(prompts if cell.batch > 1 else ALONE).items
    texts = [item.encode(codec) for item in items]
    params = [
        SamplingParams(temperature=cell.temperature, seed=i, max_tokens=tokens, ignore_eos=True)
        for i in range(len(texts))
    ]

    def seconds(llm: LLM) -> float:
        gc.collect()
        begin = time.perf_counter()
        run_all(llm, texts, params, cell.batch)
        return time.perf_counter() - begin

    engines: dict[str, LLM] = {}
    new: dict[str, float] = {}
    for name in turned(ENGINES, number):
        engines[name] = LLM(model, drafter=name, enable_prefix_caching=False, memory=MEMORY)
        new[name] = seconds(engines[name])
    warm: defaultdict[str, float] = defaultdict(float)
    for load in range(loads):
        for name in turned(ENGINES, number + load):
            warm[name] += seconds(engines[name])
    return {
        kind: log(found["none"] / found["auto"]) for kind, found in (("new", new), ("warm", warm))
    }


def main(
    model: Model = POCKET,
    workload: Annotated[str, typer.Option(help="A workload of outrider bench.")] = "code",
    temperatures: Annotated[str, typer.Option("--temperature", help="Some of them: 0,1.")] = "0,1",
    batches: Annotated[str, typer.Option("--batch-size", help="Some of them: 8,32.")] = "8,32",
    starts: Annotated[int, typer.Option(min=1, help="Processes of each cell.")] = 8,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of a load.")] = 32,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 96,
    loads: Annotated[int, typer.Option(min=1, help="Loads of warm engines.")] = 3,
    json_: JsonFile = None,
) -> None:
    """Measure drafter auto beside plain decoding, in many processes."""
    cells = [
        Cell(float(heat), int(size))
        for heat in temperatures.split(",")
        for size in batches.split(",")
    ]
    found: dict[tuple[Cell, str], list[float]] = defaultdict(list)
    work = [(number, cell) for number in range(starts) for cell in cells]
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for number, cell in tqdm(work, leave=False, disable=None):
            given = model, workload, cell, prompts, tokens, loads, number
            for kind, ratio in pool.submit(start, *given).result().items():
                found[cell, kind].append(ratio)
    rows = [
        (f"T = {cell.temperature:g}, {cell.batch} together", kind, str(estimate(logs)))
        for (cell, kind), logs in found.items()
    ]
    rows.append(("all", "", str(estimate([each for logs in found.values() for each in logs]))))
    print("\n".join(table(("load", "engines", "auto / plain"), rows)))
    report = [
        {**cell._asdict(), "engines": kind, "log_ratios": logs}
        for (cell, kind), logs in found.items()
    ]
    settings = {"model": model, "workload": workload, "tokens": tokens, "loads": loads}
    write_json({"machine": machine(), **settings, "cells": report}, json_)
