"""Reads and writes the file in which measured costs are kept."""

from __future__ import annotations

import logging
from pathlib import Path

from ...base.kept import read_kept, write_kept
from .costs import Costs, Curve, DraftCosts
from .tuning import USUAL

LONGEST_STEP_SECONDS = 1e6  # no step takes as many seconds
logger = logging.getLogger("outrider")


def read_costs(file: Path) -> Costs | None:
    """Return the costs in a file; None where there are none that make sense."""
    try:
        kept = read_kept(file)
        drafters = {
            name: DraftCosts(passes and _curve(passes), float(call), float(each), bool(repeats))
            for name, (passes, call, each, repeats) in kept["drafters"].items()
        }
        host, each = kept.get("host", (USUAL.host, USUAL.host_per_sequence))
        rest = [float(number) for number in (kept["per_context"], host, each)]
        calls = [n for drafter in drafters.values() for n in (drafter.call, drafter.per_sequence)]
        if not all(0 <= each < LONGEST_STEP_SECONDS for each in (*rest, *calls)):
            return None
        return Costs(_curve(kept["target"]), drafters, *rest)
    except Exception:  # a file may hold anything
        return None


def _curve(points: list[list[float]]) -> Curve:
    rows, seconds = [int(row) for row, _ in points], [float(second) for _, second in points]
    if len(rows) < 2 or rows[0] != 1 or rows != sorted(set(rows)) or seconds[0] <= 0:
        raise ValueError("no curve")
    if seconds != sorted(seconds) or not all(second < LONGEST_STEP_SECONDS for second in seconds):
        raise ValueError("no curve")
    return Curve(tuple(rows), tuple(seconds))


def write_costs(file: Path, costs: Costs) -> None:
    """Keep costs for the next start, if the disk takes them."""

    def points(curve: Curve | None) -> list[tuple[int, float]] | None:
        return curve and list(zip(curve.rows, curve.seconds, strict=True))

    kept = {
        "target": points(costs.target),
        "drafters": {
            n: (points(d.passes), d.call, d.per_sequence, d.repeats)
            for n, d in costs.drafters.items()
        },
        "per_context": costs.per_context,
        "host": (costs.host, costs.host_per_sequence),
    }
    try:
        write_kept(file, kept)
    except OSError as error:
        logger.warning("what steps cost cannot be kept (%s); it is measured at each start", error)
