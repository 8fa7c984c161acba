"""Measures what drafter auto costs where drafts do not pay: its speed beside plain decoding.

A plain engine and one with auto share their weights and take the same load, in turns step by step:
machines change the speed of their memory within seconds, by more than what is measured here. A load
is given to new engines and to the same ones again. Every start is a process of its own, in which
the engines are made in turns of order. The ratios of a cell have the geometric mean over starts and
Student's interval.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from math import log
from multiprocessing import get_context
from typing import Annotated, NamedTuple

import typer
from tqdm import tqdm

from outrider.base.methods import AUTO, NONE
from outrider.base.types import SamplingParams
from outrider.bench.machine import machine
from outrider.bench.offline import turned
from outrider.checkpoints.families import find_folder
from outrider.checkpoints.tokenizers import read_codec
from outrider.cli.bench import named_workload
from outrider.cli.common import Out, write_json
from outrider.engine.build import build_engine
from outrider.engine.setup import set_up
from outrider.llm import LLM
from outrider.models import base

from .common import POCKET, Model, table
from .portfolio.figures import estimate

MEMORY = "1500MiB"
"""Each engine's."""
ALONE = 6
"""Prompts of a load without batches, one after the other."""
ENGINES = (NONE, AUTO)


class Cell(NamedTuple):
    """A load: its temperature, and how many requests decode together."""

    temperature: float
    batch: int


def opened(folder: str, drafter: str, target: base.Model | None) -> LLM:
    """Return a new engine; it takes the weights of ``target`` where there is one."""
    setup = set_up(folder, drafter, {"enable_prefix_caching": False, "memory": MEMORY})
    return LLM.from_engine(setup, build_engine(setup, model=target))


def loaded(
    engines: Mapping[str, LLM],
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    batch: int,
) -> dict[str, float]:
    """Return the seconds in which each engine continued ``prompts``, ``batch`` at a time."""
    seconds = dict.fromkeys(engines, 0.0)
    for first in range(0, len(prompts), batch):
        some = slice(first, first + batch)
        number, busy = 0, [*engines]
        while busy:
            for name in turned(busy, number):
                begin = time.perf_counter()
                if number:
                    engines[name].engine.step()
                    engines[name].engine.settle()
                else:
                    engines[name].start(prompts[some], params[some], offline=True)
                seconds[name] += time.perf_counter() - begin
            number += 1
            busy = [name for name, llm in engines.items() if llm.engine.has_work]
    return seconds


def start(
    model: str, workload: str, cell: Cell, prompts: int, tokens: int, loads: int, number: int
) -> dict[str, float]:
    """Return log(plain / auto) of the seconds that loads took, of new engines and of warm ones.

    A load has ``prompts`` with answers of ``tokens`` tokens; warm engines take ``loads``. The
    ``number`` of the start turns the order.
    """
    codec = read_codec(find_folder(model))
    items = named_workload(workload).first(prompts if cell.batch > 1 else ALONE).items
    texts = [item.encode(codec) for item in items]
    params = [
        SamplingParams(temperature=cell.temperature, seed=i, max_tokens=tokens, ignore_eos=True)
        for i in range(len(texts))
    ]
    engines: dict[str, LLM] = {}
    target: base.Model | None = None
    for name in turned(ENGINES, number):
        engines[name] = opened(model, name, target)
        target = engines[name].engine.model
    ratios: dict[str, float] = {}
    for kind, count in (("new", 1), ("warm", loads)):
        took: defaultdict[str, float] = defaultdict(float)
        for _ in range(count):
            gc.collect()
            for name, seconds in loaded(engines, texts, params, cell.batch).items():
                took[name] += seconds
        ratios[kind] = log(took[NONE] / took[AUTO])
    return ratios


def main(
    model: Model = POCKET,
    workload: Annotated[str, typer.Option(help="A workload of outrider bench.")] = "code",
    temperatures: Annotated[str, typer.Option("--temperature", help="Some of them: 0,1.")] = "0,1",
    batches: Annotated[str, typer.Option("--batch-size", help="Some of them: 8,32.")] = "8,32",
    starts: Annotated[int, typer.Option(min=1, help="Processes of each cell.")] = 6,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of a load.")] = 32,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 96,
    loads: Annotated[int, typer.Option(min=1, help="Loads of warm engines.")] = 2,
    out: Out = None,
) -> None:
    """Measure drafter auto beside plain decoding, in many processes."""
    cells = [
        Cell(float(heat), int(size))
        for heat in temperatures.split(",")
        for size in batches.split(",")
    ]
    logs_by_load: dict[tuple[Cell, str], list[float]] = defaultdict(list)
    work = [(number, cell) for number in range(starts) for cell in cells]
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for number, cell in tqdm(work, leave=False, disable=None):
            ratios = pool.submit(start, model, workload, cell, prompts, tokens, loads, number)
            for kind, ratio in ratios.result().items():
                logs_by_load[cell, kind].append(ratio)
    rows = [
        (f"T = {cell.temperature:g}, {cell.batch} together", kind, str(estimate(logs)))
        for (cell, kind), logs in logs_by_load.items()
    ]
    rows.append(
        ("all", "", str(estimate([each for logs in logs_by_load.values() for each in logs])))
    )
    print("\n".join(table(("load", "engines", "auto / plain"), rows)))
    report = [
        {**cell._asdict(), "engines": kind, "log_ratios": logs}
        for (cell, kind), logs in logs_by_load.items()
    ]
    settings = {"model": model, "workload": workload, "tokens": tokens, "loads": loads}
    write_json({"machine": machine(), **settings, "cells": report}, out)
