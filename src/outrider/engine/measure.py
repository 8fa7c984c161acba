"""Measures what steps cost on this machine, and keeps it between starts."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..drafters.base import Drafter
from ..models.base import RowsModel, Store
from ..native.choice import library
from ..native.threads import allowed_threads, cpu_name
from .control.costs import Costs, Curve, DraftCosts
from .control.kept_costs import read_costs, write_costs
from .control.tuning import USUAL

logger = logging.getLogger("outrider")

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Rows of the forwards that are measured, as far as the time goes."""
FEWEST_FORWARDS, MOST_ROUNDS = 3, 5
"""Forwards that are measured in any case, and how often each is at most."""
QUICK_SECONDS, THOROUGH_SECONDS = 0.2, 1.0
"""Seconds that may go into each model when an engine is made, and when a server starts."""
BATCH_OF_DRAFTS = 8  # sequences whose drafts in one pass tell what each of them costs
BYTES_PER_SECOND = 1e10  # speed at which attention reads the cache, about
VERSION = 2


def measure(
    model: RowsModel,
    page_size: int,
    most_rows: int,
    seconds: float,
    forward: Callable[[RowsModel, Store, int], float],
) -> tuple[Curve, float]:
    """Return the seconds of a model's forward by rows, and what a token of context adds.

    Measuring takes about ``seconds``; ``forward`` runs as many rows and returns what they took.
    """
    rows = [n for n in ROWS if n <= max(2, most_rows)]
    store = model.new_store(rows[-1] + 1, page_size)
    begin = time.perf_counter()
    took: list[float] = []
    forward(model, store, rows[0])  # which no measurement should pay the first touch for
    # Round after round, since others may use the machine for a while.
    for number in range(MOST_ROUNDS * len(rows)):
        if number >= FEWEST_FORWARDS and time.perf_counter() - begin > seconds:
            break
        place = number % len(rows)
        second = forward(model, store, rows[place])
        if place == len(took):
            took.append(second)
        took[place] = min(took[place], second)
    per_context = model.page_bytes(page_size) / page_size / BYTES_PER_SECOND
    return Curve(tuple(rows[: len(took)]), plausible(rows, took)), per_context


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
    thorough: bool = False,
) -> Costs:
    """Return what steps cost: as it is kept under ``key``, else measured.

    ``merging`` are the names of drafters whose drafts are merged. If ``thorough``, measuring takes
    seconds, and the result is kept.
    """
    file = _file({**key, "rows": most_rows, "names": [*drafters, *merging]})
    kept = read_costs(file)
    if kept is not None and kept.drafters.keys() == {*drafters, *merging}:
        return kept
    seconds = THOROUGH_SECONDS if thorough else QUICK_SECONDS
    if thorough:
        logger.info("measuring what steps cost, for a second or two")
    target, per_context = measure(model, page_size, most_rows, seconds, _forward)
    by_name = {name: DraftCosts(None, USUAL.call, USUAL.per_sequence) for name in merging}
    for name, drafter in drafters.items():
        passes, call, more = None, USUAL.call, USUAL.per_sequence
        if drafter.model is model:
            passes = Curve(target.rows, tuple(drafter.share * s for s in target.seconds))
        elif drafter.model is not None:
            passes, _ = measure(drafter.model, page_size, most_rows, seconds, _pass)
            if rows := drafter.rows_at_once:
                one = passes.at(rows)
                each = (passes.at(BATCH_OF_DRAFTS * rows) - one) / (BATCH_OF_DRAFTS - 1)
                passes, call, more = None, call + max(one - each, 0.0), more + each
            else:
                call += measure_cold(drafter.model, model, page_size, passes.at(1))
        by_name[name] = DraftCosts(passes, call, more)
    costs = Costs(target, by_name, per_context)
    if thorough:
        write_costs(file, costs)
    return costs


def _file(key: Mapping[str, Any]) -> Path:
    """Return where costs are kept on this machine."""
    native = library()
    isa = native.isa if native else "off"
    whole = {**key, "cpu": cpu_name(), "isa": isa, "threads": allowed_threads(), "version": VERSION}
    name = hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "outrider" / "costs" / f"{name[:32]}.json"
