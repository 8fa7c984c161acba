"""Costs and acceptance in the cells of the portfolio, for simulations with a virtual clock."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from tqdm import tqdm

from outrider.engine.control.choices import Method
from outrider.engine.control.controller import Controller
from outrider.engine.control.costs import CostModel, Costs, Curve, DraftCosts

from .cells import (
    AUTO,
    CHOICES,
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

DIGITS = 9
"""Decimals of a second that are kept."""


class Recording(NamedTuple):
    """The costs and rates that the controller of one cell has learned.

    ``rates`` are P(drafted and accepted | the one before was) by method and depth, of methods that
    were judged.
    """

    concurrency: int
    costs: Costs
    methods: dict[str, Method]
    rates: dict[str, list[float]]


def _learned(model: CostModel) -> Costs:
    """Return the costs as corrected so far, by the rows of the prior."""
    model.count()
    target, machine = model.prior.target, model.target.machine
    drafters: dict[str, DraftCosts] = {}
    for name, prior in model.prior.drafters.items():
        own, passes = model._drafters[name], prior.passes
        if passes is not None:
            seconds = [passes.at(n) * own.at(n) * machine for n in passes.rows]
            passes = Curve(passes.rows, tuple(accumulate(seconds, max)))
        each = own.overall.value * machine
        drafters[name] = DraftCosts(passes, prior.call * each, prior.per_sequence * each)
    curve = Curve(target.rows, tuple(model.verify(rows, 0) for rows in target.rows))
    return Costs(curve, drafters, model.prior.per_context * machine)


def to_json(cell: Cell, controller: Controller) -> dict[str, Any]:
    """Return what a chooser has learned, see ``read``."""
    costs = _learned(controller.costs)
    return {
        "concurrency": cell.concurrency,
        "target": _curve(costs.target),
        "per_context": costs.per_context,
        "drafters": {
            name: {
                "passes": None if each.passes is None else _curve(each.passes),
                "call": round(each.call, DIGITS),
                "per_sequence": round(each.per_sequence, DIGITS),
            }
            for name, each in costs.drafters.items()
        },
        "methods": {
            name: {
                "drafters": controller.methods[name].drafters,
                "longest": controller.methods[name].max_depth,
                "width": controller.methods[name].width,
                **found,
            }
            for name, found in controller.survival.summary().items()
            if name in controller.methods
        },
    }


def _curve(curve: Curve) -> dict[str, Any]:
    return {"rows": curve.rows, "seconds": [round(each, DIGITS) for each in curve.seconds]}


def read(file: Path) -> dict[str, Recording]:
    """Return the recordings of a file by cell."""
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    return {name: _recording(cell) for name, cell in cells.items()}


def _recording(cell: Mapping[str, Any]) -> Recording:
    drafters = {
        name: DraftCosts(
            None if each["passes"] is None else _read_curve(each["passes"]),
            each["call"],
            each["per_sequence"],
        )
        for name, each in cell["drafters"].items()
    }
    methods, rates = {}, {}
    for name, each in cell["methods"].items():
        methods[name] = Method(tuple(each["drafters"]), each["longest"], each["width"])
        curve = [1.0, *each["survival"]]
        rates[name] = [after / before if before else 0.0 for before, after in pairwise(curve)]
        rates[name] += rates[name][-1:] * (each["longest"] - len(rates[name]))
    costs = Costs(_read_curve(cell["target"]), drafters, cell["per_context"])
    return Recording(cell["concurrency"], costs, methods, rates)


def _read_curve(curve: Mapping[str, Any]) -> Curve:
    return Curve(tuple(curve["rows"]), tuple(curve["seconds"]))


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    cells: Cells = "*",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of a cell.")] = 4,
    tokens: CountedTokens = 32,
    replay: ReplayTarget = "100m",
    drafter: ReplayDrafter = "planted:0.7:3m",
) -> None:
    """Record what drafter auto learns of costs and acceptance in the cells of the portfolio."""
    chosen, pair = chosen_cells(cells), Pair(replay, drafter, tokens)
    settings = settings_of(pair, out) | {"rounds": rounds}
    learned: dict[str, Any] = {}
    for workload, group in groupby(chosen, lambda cell: cell.workload):
        source = Source(workload, pair)
        for cell in tqdm(list(group), desc=workload, leave=False, disable=None):
            llm = source.open(CHOICES[AUTO], cell.concurrency)
            for number in range(rounds):
                speed(llm, source.asked(cell, number), cell.concurrency, tokens)
            controller = llm.engine.controller
            assert controller is not None  # auto has one
            learned[cell.name] = to_json(cell, controller)
            del llm, controller
            gc.collect()  # the cache of this cell's engine, before the next one's
            text = json.dumps({"settings": settings, "cells": learned})
            out.write_text(text + "\n", encoding="utf-8")
