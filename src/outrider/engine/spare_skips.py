"""Searches in spare time for sublayers that a target without a drafter model can skip.

The search scores text that the target generates for it, and keeps its result on disk. If a set
pays, ``auto`` has layerskip with it from the next start on, and uses it where steps are faster.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base.kept import read_kept, write_kept
from ..base.types import Request, Row, SamplingParams, SequenceState
from ..drafters.base import DrafterSpec
from ..drafters.layerskip import LAYERS_THAT_RUN, LayerskipSpec
from ..drafters.registry import GroupSpec
from ..drafters.skips import ROWS, WINDOW_SCORES, ScoredWindow, Search, Space, scratch_pages
from ..models.base import Model
from ..models.native import NativeTransformer
from ..models.rows import Segment
from ..native.native_sampling import shared_noise
from .measure import Steps, costs_file

TEXT = 256
"""Tokens of a generated text, after which the next text begins."""
MOST_SUBLAYERS = 10_000
logger = logging.getLogger("outrider")


def is_lone(spec: DrafterSpec) -> bool:
    """Return True for ``auto`` without a drafter that runs a model."""
    return (
        isinstance(spec, GroupSpec)
        and spec.auto
        and all(each.folder is None and each.name != LayerskipSpec.name for each in spec.members)
    )


def with_kept(spec: DrafterSpec, model: Model, file: Path) -> DrafterSpec:
    """Return the drafters of ``auto`` with layerskip, if a set that pays was found and kept."""
    if not isinstance(spec, GroupSpec) or not isinstance(model, NativeTransformer):
        return spec
    kept = read_skips(file)
    if not kept or kept[-1] >= 2 * model.shape.num_layers:
        return spec
    return replace(spec, members=(*spec.members, LayerskipSpec(kept=kept)))


def skips_file(key: Mapping[str, Any]) -> Path:
    """Return the file for the sublayers that run, beside the file for the same model's costs."""
    return costs_file({**key, "searched": LayerskipSpec.name})


def read_skips(file: Path) -> tuple[int, ...] | None:
    """Return the sublayers that run: empty if no set pays, None without a valid result."""
    try:
        kept = read_kept(file)["sublayers"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    plain = isinstance(kept, list) and all(type(each) is int and each >= 0 for each in kept)
    if not plain or kept != sorted(set(kept)) or len(kept) > MOST_SUBLAYERS:
        return None
    return tuple(kept)


def search_later(
    model: NativeTransformer, page_size: int, longest: int, row: float, file: Path
) -> Steps[None]:
    """Search, unless a result is kept, and keep the result; yields after each forward."""
    if read_skips(file) is not None:
        return
    kept = yield from searched(model, page_size, longest, row)
    try:
        write_kept(file, {"sublayers": kept})
    except OSError as error:
        logger.warning("sublayers that can be left out cannot be kept (%s)", error)


def searched(
    model: NativeTransformer, page_size: int, longest: int, row: float
) -> Steps[tuple[int, ...]]:
    """Return the sublayers that run if skipping the others pays; empty if no set pays."""
    shape = model.shape
    least = min(LAYERS_THAT_RUN, shape.num_layers // 2)
    space = replace(Space.of(shape, least, longest), row=row)
    if not space.most:
        return ()
    search = Search(space)
    if search.pays is False:  # no set can
        return ()
    noise = shared_noise(shape.vocab_size)
    pages = -(-(TEXT + 1) // page_size)
    store = model.new_store(pages + scratch_pages(page_size), page_size)
    number = 0
    while True:
        text = _Text(number, pages)
        number += 1
        for _ in range(TEXT // ROWS):
            for _ in range(ROWS):
                text.go_on(model, store, noise)
                yield
            window = ScoredWindow(model, store, pages, text.sequence, noise)
            yield
            for turn in range(WINDOW_SCORES):
                wanted = search.wants
                if wanted is None:
                    return search.sublayers
                search.scored(window.score(space.kept(wanted)), not turn)
                yield


class _Text:
    """A text that the target samples at temperature 1 after one given token."""

    def __init__(self, number: int, pages: int) -> None:
        params = SamplingParams(temperature=1.0)
        request = Request("spare", (number,), params, number)
        no_text: Any = None  # nobody reads it
        self.sequence = SequenceState("spare/0", request, 0, no_text, no_text, [number])
        self.sequence.pages = array("i", range(pages))

    def go_on(self, model: NativeTransformer, store: Any, noise: Any) -> None:
        """Write one more token."""
        sequence = self.sequence
        place, request = len(sequence.tokens) - 1, sequence.request
        last = Segment(sequence.tokens[-1:], place, sequence.pages, 1, 1, key=sequence.id)
        logits = model.forward([last], store, tuple(range(2 * model.shape.num_layers))).logits
        row = Row(sequence.id, request.seed, 0, place + 1, False, place + 1)
        (token,), _ = noise.draw(logits, [row])
        sequence.tokens.append(int(token))
