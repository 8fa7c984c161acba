"""Measures what steps cost on this machine, and keeps it between starts."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from ..base.homes import cache_home
from ..base.threads import allowed_threads, cpu_name
from ..drafters.base import Drafter
from ..models.base import RowsModel, Store
from ..native.choice import library
from .control.costs import Costs, Curve, DraftCosts
from .control.kept_costs import read_costs, write_costs
from .control.tuning import USUAL

ROWS = (1, 16, 6, 4, 8, 2, 64, 32, 12, 256, 3, 128, 24, 48, 96, 192)
"""Row counts to measure, in this order while time is left: the curve's shape comes first."""
FEWEST_FORWARDS, MOST_ROUNDS = 3, 5
"""Forwards that are measured in any case, and the most measurements of each row count."""
QUICK_SECONDS, THOROUGH_SECONDS = 0.2, 1.0
"""Seconds to measure each model when an engine is made, and while a server is idle."""
BATCH_OF_DRAFTS = 8  # sequences drafted in one pass to measure the cost of each
BYTES_PER_SECOND = 1e10  # speed at which attention reads the cache, about
VERSION = 4
T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work that can pause between its steps, and returns a value."""


def measure(
    model: RowsModel,
    page_size: int,
    most_rows: int,
    seconds: float,
    forward: Callable[[RowsModel, Store, int], float],
) -> Steps[tuple[Curve, float]]:
    """Return the seconds of a model's forward by rows, and the seconds that a context token adds.

    The forwards take about ``seconds`` in total, and it yields between them; ``forward`` runs that
    many rows and returns the seconds they took.
    """
    rows = [n for n in ROWS if n <= max(2, most_rows)]
    store = model.new_store(max(rows) + 1, page_size)
    took: dict[int, float] = {}
    # Not recorded: the first forward touches its memory for the first time.
    spent = forward(model, store, rows[0])
    # In rounds, since other work may slow the machine for a while.
    for number in range(MOST_ROUNDS * len(rows)):
        if number >= FEWEST_FORWARDS and spent > seconds:
            break
        yield
        count = rows[number % len(rows)]
        second = forward(model, store, count)
        spent += second
        took[count] = min(took.get(count, inf), second)
    per_context = model.page_bytes(page_size) / page_size / BYTES_PER_SECOND
    known = sorted(took)
    return Curve(tuple(known), plausible(known, [took[n] for n in known])), per_context


def plausible(rows: Sequence[int], seconds: Sequence[float]) -> tuple[float, ...]:
    """Return the seconds corrected to never fall with rows, nor grow faster than the rows do."""
    likely = [*accumulate(reversed(seconds), min)][::-1]
    for i in range(1, len(likely)):
        likely[i] = min(likely[i], likely[i - 1] * rows[i] / rows[i - 1])
    return tuple(likely)


def measure_cold(model: RowsModel, target: RowsModel, page_size: int, warm: float) -> float:
    """Return the seconds by which a drafter's first pass in a step exceeds a ``warm`` pass.

    The target's forward before it has evicted the drafter's weights from the CPU's caches.
    """
    stores = target.new_store(2, page_size), model.new_store(2, page_size)
    took = []
    for _ in range(FEWEST_FORWARDS):
        _forward(target, stores[0], 1)
        took.append(_pass(model, stores[1], 1))
    return max(0.0, min(took) - warm)


def _forward(model: RowsModel, store: Store, rows: int) -> float:
    """Return the seconds of a forward of as many sequences of one row each."""
    begin = time.perf_counter()
    model.try_rows(rows, store)
    return time.perf_counter() - begin


def _pass(model: RowsModel, store: Store, rows: int) -> float:
    """Return a forward's seconds without Python's part, since a draft's passes share one call."""
    clock = library()
    before = clock.nanoseconds if clock else 0
    seconds = _forward(model, store, rows)
    native = clock.nanoseconds - before if clock else 0
    return native / 1e9 if native else seconds  # a model that is not native has no such time


def find_costs(
    model: RowsModel,
    drafters: Mapping[str, Drafter],
    merging: Sequence[str],
    page_size: int,
    most_rows: int,
    key: Mapping[str, Any],
) -> tuple[Costs, Steps[None]]:
    """Return the costs of steps, kept under ``key`` or else measured quickly, and later work.

    That work measures thoroughly, one forward at a time, and keeps the result for later starts.
    ``merging`` are the names of drafters whose drafts are merged.
    """
    file = costs_file({**key, "rows": most_rows, "names": [*drafters, *merging]})
    kept = read_costs(file)
    if kept is not None and kept.drafters.keys() == {*drafters, *merging}:
        return kept, _keep(None, file)
    what = model, drafters, merging, page_size, most_rows
    return finished(_all_costs(*what, QUICK_SECONDS)), _keep(
        _all_costs(*what, THOROUGH_SECONDS), file
    )


def finished(steps: Steps[T]) -> T:
    """Run all steps and return their value."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def _keep(steps: Steps[Costs] | None, file: Path) -> Steps[None]:
    """Measure, and keep the result in ``file``."""
    if steps is not None:
        write_costs(file, (yield from steps))


def _all_costs(
    model: RowsModel,
    drafters: Mapping[str, Drafter],
    merging: Sequence[str],
    page_size: int,
    most_rows: int,
    seconds: float,
) -> Steps[Costs]:
    """Measure the costs of steps, with about ``seconds`` of forwards per model."""
    target, per_context = yield from measure(model, page_size, most_rows, seconds, _forward)
    by_name = {name: DraftCosts(None, USUAL.call, USUAL.per_sequence) for name in merging}
    for name, drafter in drafters.items():
        passes, call, more = None, USUAL.call, USUAL.per_sequence
        if drafter.model is model:
            passes = Curve(target.rows, tuple(drafter.share * s for s in target.seconds))
        elif drafter.model is not None:
            passes, _ = yield from measure(drafter.model, page_size, most_rows, seconds, _pass)
            if rows := drafter.rows_at_once:
                one = passes.at(rows)
                each = (passes.at(BATCH_OF_DRAFTS * rows) - one) / (BATCH_OF_DRAFTS - 1)
                passes, call, more = None, call + max(one - each, 0.0), more + each
            else:
                call += measure_cold(drafter.model, model, page_size, passes.at(1))
        by_name[name] = DraftCosts(passes, call, more, drafter.repeats)
    return Costs(target, by_name, per_context)


def costs_file(key: Mapping[str, Any]) -> Path:
    """Return where costs are kept on this machine."""
    native = library()
    isa = native.isa if native else "off"
    whole = {**key, "cpu": cpu_name(), "isa": isa, "threads": allowed_threads(), "version": VERSION}
    name = hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()
    return cache_home() / "costs" / f"{name[:32]}.json"
