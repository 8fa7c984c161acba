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
"""Rows of the forwards that are measured, as far as the time goes: the curve's shape first."""
FEWEST_FORWARDS, MOST_ROUNDS = 3, 5
"""Forwards that are measured in any case, and how often each is at most."""
QUICK_SECONDS, THOROUGH_SECONDS = 0.2, 1.0
"""Seconds that may go into each model when an engine is made, and while a server is idle."""
BATCH_OF_DRAFTS = 8  # sequences whose drafts in one pass tell what each of them costs
BYTES_PER_SECOND = 1e10  # speed at which attention reads the cache, about
VERSION = 4
T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work that can rest between its steps, and comes to a value."""


def measure(
    model: RowsModel,
    page_size: int,
    most_rows: int,
    seconds: float,
    forward: Callable[[RowsModel, Store, int], float],
) -> Steps[tuple[Curve, float]]:
    """Return the seconds of a model's forward by rows, and what a token of context adds.

    Its forwards take about ``seconds``, and it yields after each; ``forward`` runs as many rows
    and returns what they took.
    """
    rows = [n for n in ROWS if n <= max(2, most_rows)]
    store = model.new_store(max(rows) + 1, page_size)
    took: dict[int, float] = {}
    # The first one no measurement should pay the first touch for.
    spent = forward(model, store, rows[0])
    # Round after round, since others may use the machine for a while.
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
    """Return seconds by rows that do not fall, and no more than double with twice the rows."""
    likely = [*accumulate(reversed(seconds), min)][::-1]
    for i in range(1, len(likely)):
        likely[i] = min(likely[i], likely[i - 1] * rows[i] / rows[i - 1])
    return tuple(likely)


def measure_cold(model: RowsModel, target: RowsModel, page_size: int, warm: float) -> float:
    """Return what a drafter's first pass of a step takes beyond the ``warm`` seconds of another.

    The target's forward before it has driven the drafter's weights out of the caches.
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
    """Return the seconds of a forward without Python's part; a draft's passes share one call."""
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
    """Return what steps cost, as it is kept under ``key``, else measured for a moment.

    With it comes what is to be done when there is time, forward by forward: measure thoroughly, and
    keep that for other starts. ``merging`` are the names of drafters whose drafts are merged.
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
    """Return what all steps come to."""
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
    """Return what steps cost; a model's forwards take about ``seconds``."""
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
