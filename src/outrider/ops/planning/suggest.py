"""The known drafters of a model (on disk, published, free), with a forecast for this machine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from shlex import quote
from typing import NamedTuple

import numpy as np

from ...base.methods import BY_NAME
from .acceptance import Acceptance, prior
from .catalogue import (
    Device,
    Shape,
    eagle1_head,
    eagle_head,
    entry_of,
    find_shape,
    fitting,
    heads_of,
)
from .catalogue import data as table
from .figure import Figure, modelled
from .forecast import Forecast
from .roofline import BYTES, Machine, roofline

ON_DISK, PUBLISHED, FREE = "on disk", "published", "free"
TASKS = {"conversation": 1.0}
CONTEXT, OUTPUT = 640.0, 256
"""Mean tokens of a sequence while it decodes, and of its output, as in ``outrider ops advise``."""
LONGEST = 8
MOST_OF_TARGET = 0.6
"""Largest share of the bytes read by a target's step for which a model on disk is suggested."""
LEAST_SKIPPED = 3e9
"""Least parameters of a target for a layerskip forecast, whose figures are of larger targets."""
MATRIX, ROUNDS = 4096, 5
"""Size of the square matrix whose products measure this machine, and their repeats."""
PRODUCT_ROWS = 64
FASTER = {"vnni": {"int8": 3.0, "int4": 3.0}, "bf16": {"bf16": 2.0, "int8": 3.0, "int4": 3.0}}
"""Factors by which products of a dtype are faster than in fp32, by instruction set: assumed."""


class KnownModel(NamedTuple):
    """A model: its path or hub name, its names, its shape, and bits per weight."""

    path: str
    names: tuple[str, ...]
    shape: Shape
    bits: float = 16.0


class Suggestion(NamedTuple):
    """A drafter of a model.

    ``drafter`` is its name for ``--drafter``. ``served`` says whether this engine drafts with it.
    The figures are forecasts for one conversation request; ``command`` is what to run next, None if
    this engine does not draft with it.
    """

    drafter: str
    method: str
    found: str
    served: bool
    k: int | None
    acceptance: Figure | None
    speedup: Figure | None
    command: str | None


def this_machine(isa: str) -> Device:
    """Return this machine as a device; numpy products measure its bandwidth and fp32 arithmetic.

    The speed of smaller dtypes is assumed from ``isa``, the native step's instruction set.
    """
    assumed = table("hardware")["assumed"]
    shares = {key: value for key, value in assumed.items() if not isinstance(value, dict)}
    left = np.ones((MATRIX, MATRIX), np.float32)
    one, rows = np.ones(MATRIX, np.float32), np.ones((MATRIX, PRODUCT_ROWS), np.float32)
    reading = min(_seconds(left, one) for _ in range(ROUNDS))
    computing = min(_seconds(left, rows) for _ in range(ROUNDS))
    bandwidth, flops = left.nbytes / reading, 2 * MATRIX**2 * PRODUCT_ROWS / computing
    fp32 = flops / shares["compute_efficiency"]
    faster = next((each for name, each in FASTER.items() if name in isa), {})
    return Device(
        "this machine", 0.0, bandwidth / shares["bandwidth_efficiency"],
        {dtype: fp32 * faster.get(dtype, 1.0) for dtype in BYTES}, 1.0, 0.0, **shares,
        **assumed["cpu"],
    )  # fmt: skip


def _seconds(left: np.ndarray, right: np.ndarray) -> float:
    begin = time.perf_counter()
    left @ right
    return time.perf_counter() - begin


def entry_for(model: KnownModel) -> str | None:
    """Return the catalogue's entry for a model by its names and sizes; None if there is none."""
    asked = " ".join(name.strip().replace(" ", "-") for name in model.names)
    return entry_of(asked, model.shape)


def suggest(
    model: KnownModel, near: Sequence[KnownModel], here: Device,
    own_heads: Sequence[tuple[str, str]] = (),
) -> list[Suggestion]:  # fmt: skip
    """Return the known drafters of a model, those on disk first, each kind sorted by forecast.

    ``near`` are smaller models on disk with its tokenizer, ``own_heads`` the folders and methods of
    heads on disk that fit it.
    """
    target = model.shape
    entry = entry_for(model)
    found = [_sibling(model, each, ON_DISK, here) for each in near]
    found += [_head(model, method, path, ON_DISK, here) for path, method in own_heads]
    heads = [
        _head(model, each.method, each.checkpoint or "", PUBLISHED, here)
        for each in heads_of(entry)
    ]
    asked, known = entry or model.path, {entry_for(each) for each in near}
    published = [
        _sibling(model, KnownModel(name.checkpoint or "", (), find_shape(name.drafter), model.bits),
                 PUBLISHED, here)
        for name in fitting(asked, target)
        if name.method == "draft_model" and name.drafter not in known
    ]  # fmt: skip
    free = [_free(model, name, here) for name in ("suffix", "ngram", "layerskip")]
    return [*_ranked(found), *_ranked([*heads, *published]), *_ranked(free)]


def _ranked(suggestions: Iterable[Suggestion]) -> list[Suggestion]:
    def worth(each: Suggestion) -> float:
        return 0.0 if each.speedup is None or not each.served else each.speedup.value

    return sorted(suggestions, key=worth, reverse=True)


def dtype_of(bits: float) -> str:
    """Return the roofline's dtype whose weights are closest in size."""
    return min(BYTES, key=lambda name: abs(8 * BYTES[name] - bits))


def _forecast(
    model: KnownModel, method: str, shape: Shape | None, bits: float, accepted: Acceptance,
    here: Device,
) -> Forecast:  # fmt: skip
    machine, own = (Machine(here, 1, dtype_of(each)) for each in (model.bits, bits))
    steps = roofline(model.shape, machine, method, shape, own, CONTEXT)
    return Forecast(steps, accepted, OUTPUT, 0.0, 0.0, None, LONGEST)


def _suggestion(
    model: KnownModel, drafter: str, method: str, found: str, shape: Shape | None, bits: float,
    here: Device,
) -> Suggestion:  # fmt: skip
    known = BY_NAME[method]
    served = known.ours is not None
    command = f"outrider bench {quote(model.path)} --drafter {quote(drafter)}" if served else None
    # MTP layers cost as much as a head; the cost of a block drafter is not modelled.
    costs = known.costs or ("eagle3" if served and not known.checkpoint else None)
    small = costs == "layerskip" and model.shape.parameters < LEAST_SKIPPED
    if costs is None or small:
        return Suggestion(drafter, known.name, found, served, None, None, None, command)
    outlook = _forecast(model, costs, shape, bits, prior(costs, TASKS), here)
    k, speedup = outlook.best(1)
    rate = Figure(
        outlook.acceptance.rate(k), f"accepted / drafted at K = {k}", outlook.acceptance.evidence
    )
    return Suggestion(
        drafter, known.name, found, served, k, rate, modelled(speedup, "times"), command
    )


def _sibling(model: KnownModel, other: KnownModel, found: str, here: Device) -> Suggestion:
    return _suggestion(model, other.path, "draft_model", found, other.shape, other.bits, here)


def _head(model: KnownModel, method: str, checkpoint: str, found: str, here: Device) -> Suggestion:
    shape = eagle1_head(model.shape) if method == "eagle" else eagle_head(model.shape)
    return _suggestion(model, checkpoint, method, found, shape, 16.0, here)


def _free(model: KnownModel, name: str, here: Device) -> Suggestion:
    return _suggestion(model, name, name, FREE, None, model.bits, here)
