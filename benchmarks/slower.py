"""Measures what drafter auto costs where drafts do not pay: its speed beside plain decoding.

A plain engine and one with auto share their weights and take the same load, in turns step by step:
machines change the speed of their memory within seconds, by more than what is measured here. A load
is given to new engines and to the same ones again. Every start is a process of its own, in which
the engines are made in turns of order. The ratios of a cell have the geometric mean over starts and
Student's interval. Outputs are compared, too.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import cycle, islice, product
from math import exp, log
from multiprocessing import get_context
from statistics import mean
from typing import Annotated, NamedTuple

import typer
from tqdm import tqdm

from outrider.base.methods import AUTO, NONE
from outrider.base.types import Event, SamplingParams
from outrider.bench.machine import machine
from outrider.bench.offline import turned
from outrider.checkpoints.folders import find_folder
from outrider.checkpoints.tokenizers import read_codec
from outrider.cli.bench import named_workload
from outrider.cli.common import AsJson, Out, write_report
from outrider.engine.build import build_engine
from outrider.engine.setup import set_up
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.models import base

from .common import POCKET, Model, table
from .portfolio.figures import estimate

MEMORY = "1500MiB"
"""Each engine's."""
ALONE = 6
"""Prompts of a load without batches, one after the other."""
ENGINES = (NONE, AUTO)
LEAST = 0.98
"""Share of plain decoding's speed that auto must reach."""


class Cell(NamedTuple):
    """A load: its workload and temperature, and how many requests decode together."""

    workload: str
    temperature: float
    batch: int


class Start(NamedTuple):
    """The results of a cell in one process, by ``new`` engines and by ``warm`` ones.

    ``logs`` are log(plain / auto) of the seconds, ``drafted`` and ``accepted`` the tokens of auto,
    ``tried`` the share of its time that trials took, and ``differing`` its outputs that differ.
    """

    logs: dict[str, float]
    drafted: int
    accepted: int
    tried: float
    differing: int


def opened(folder: str, drafter: str, target: base.Model | None) -> LLM:
    """Return a new engine; it takes the weights of ``target`` where there is one."""
    setup = set_up(folder, drafter, {"enable_prefix_caching": False, "memory": MEMORY})
    return LLM.from_engine(setup, build_engine(setup, model=target))


def loaded(
    engines: Mapping[str, LLM],
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    batch: int,
    turn: int,
) -> tuple[dict[str, float], int]:
    """Return the seconds in which each engine continued ``prompts``, ``batch`` at a time.

    With them comes the number of outputs that differ. Who reads a batch's prompts first depends on
    ``turn``.
    """
    seconds, differing = dict.fromkeys(engines, 0.0), 0
    for number, first in enumerate(range(0, len(prompts), batch), turn):
        some = slice(first, first + batch)
        outputs: dict[str, list[list[int | None]]] = {
            name: [[] for _ in prompts[some]] for name in engines
        }
        places: dict[tuple[str, str], int] = {}
        step, busy = 0, [*engines]
        while busy:
            for name in turned(busy, number + step):
                llm, events, states = engines[name], list[Event](), []
                begin = time.perf_counter()
                if step:
                    events = llm.engine.step()
                    llm.engine.settle()
                else:
                    states = llm.start(prompts[some], params[some], offline=True)
                seconds[name] += time.perf_counter() - begin
                places |= {(name, state.request.id): i for i, state in enumerate(states)}
                for event in events:
                    outputs[name][places[name, event.request_id]].append(event.token_id)
            step += 1
            busy = [name for name, llm in engines.items() if llm.engine.has_work]
        plain, auto = outputs.values()
        differing += sum(a != b for a, b in zip(plain, auto, strict=True))
    return seconds, differing


def start(
    model: str, drafter: str, cell: Cell, prompts: int, tokens: int, loads: int, number: int
) -> Start:
    """Return what a process measured of new engines and of warm ones; one drafts by ``drafter``.

    A load has ``prompts`` with answers of ``tokens`` tokens, the workload's over and over; warm
    engines take ``loads``. The ``number`` of the start turns the order.
    """
    codec = read_codec(find_folder(model))
    items = cycle(named_workload(cell.workload).items)
    count = prompts if cell.batch > 1 else min(ALONE, prompts)
    texts = [item.encode(codec) for item in islice(items, count)]
    params = [
        SamplingParams(temperature=cell.temperature, seed=i, max_tokens=tokens, ignore_eos=True)
        for i in range(len(texts))
    ]
    engines: dict[str, LLM] = {}
    target: base.Model | None = None
    for name in turned(ENGINES, number):
        engines[name] = opened(model, drafter if name == AUTO else name, target)
        target = engines[name].engine.model
    engines = {name: engines[name] for name in ENGINES}
    # Both share weights, whose files' pages must not be touched first by one of them.
    engines[NONE].generate([texts[0]], SamplingParams(max_tokens=1, ignore_eos=True))
    logs: dict[str, float] = {}
    differing = 0
    for kind, times in (("new", 1), ("warm", loads)):
        took: defaultdict[str, float] = defaultdict(float)
        for _ in range(times):
            gc.collect()
            spent, unlike = loaded(engines, texts, params, cell.batch, number)
            differing += unlike
            for name, seconds in spent.items():
                took[name] += seconds
        logs[kind] = log(took[NONE] / took[AUTO])
    engine = engines[AUTO].engine
    trials = None if engine.controller is None else engine.controller.trials
    tried = trials.explored / trials.seconds if trials and trials.seconds else 0.0
    return Start(logs, engine.counts.drafted, engine.counts.accepted, tried, differing)


def main(
    model: Model = POCKET,
    workloads: Annotated[
        str, typer.Option("--workload", help="Some of outrider bench's: prose,edit.")
    ] = "prose,chat,code,edit",
    temperatures: Annotated[
        str, typer.Option("--temperature", help="Some of them: 0,1.")
    ] = "0,0.7,1",
    batches: Annotated[str, typer.Option("--batch-size", help="Some of them: 8,32.")] = "1,8,32",
    drafter: Annotated[
        str, typer.Option(help="A drafter without a given K: auto chooses when it drafts, too.")
    ] = AUTO,
    starts: Annotated[int, typer.Option(min=1, help="Processes of each cell.")] = 4,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of a load.")] = 32,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 96,
    loads: Annotated[int, typer.Option(min=1, help="Loads of warm engines.")] = 1,
    json_: AsJson = False,
    out: Out = None,
) -> None:
    """Measure drafter auto beside plain decoding, in many processes; below 0.98 exits with 1."""
    cells = [
        Cell(name, float(heat), int(size))
        for name, heat, size in product(
            workloads.split(","), temperatures.split(","), batches.split(",")
        )
    ]
    found: dict[Cell, list[Start]] = defaultdict(list)
    work = [(number, cell) for number in range(starts) for cell in cells]
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for number, cell in tqdm(work, leave=False, disable=None):
            started = pool.submit(start, model, drafter, cell, prompts, tokens, loads, number)
            found[cell].append(started.result())
    logs = {
        (cell, kind): [each.logs[kind] for each in some]
        for cell, some in found.items()
        for kind in ("new", "warm")
    }
    if not json_:
        print("\n".join(shown_table(found, logs)))
    report = [
        {
            **cell._asdict(),
            "log_ratios": {kind: logs[cell, kind] for kind in ("new", "warm")},
            "ratio": {kind: exp(mean(logs[cell, kind])) for kind in ("new", "warm")},
            **{name: [getattr(each, name) for each in some] for name in Start._fields[1:]},
        }
        for cell, some in found.items()
    ]
    load = {"tokens": tokens, "prompts": prompts, "loads": loads}
    settings = {"model": model, "drafter": drafter, **load}
    write_report({"machine": machine(), **settings, "cells": report}, json_, out)
    slow = [cell for cell in cells if mean(logs[cell, "warm"]) < log(LEAST)]
    differing = sum(each.differing for some in found.values() for each in some)
    if differing:
        raise OutriderError(f"{differing} outputs differ from plain decoding.")
    if slow:
        raise OutriderError(
            f"auto is below {LEAST} of plain decoding in {len(slow)} of {len(cells)} cells: "
            + ", ".join(f"{name}/{batch}/{heat:g}" for name, heat, batch in slow)
        )


def shown_table(
    found: Mapping[Cell, Sequence[Start]], logs: Mapping[tuple[Cell, str], Sequence[float]]
) -> Iterator[str]:
    """Yield the lines of the table of all cells, and of their mean."""
    rows: list[tuple[str, ...]] = [
        (
            f"{cell.workload}, T = {cell.temperature:g}, {cell.batch} together",
            str(estimate(logs[cell, "new"])),
            str(estimate(logs[cell, "warm"])),
            f"{mean(each.drafted for each in some):.0f}",
            f"{mean(each.accepted for each in some):.0f}",
            f"{mean(each.tried for each in some):.2%}",
        )
        for cell, some in found.items()
    ]
    rows.append(("all", str(estimate([x for each in logs.values() for x in each])), *[""] * 4))
    names = ("load", "new: auto / plain", "warm", "drafted", "accepted", "tried")
    yield from table(names, rows)
