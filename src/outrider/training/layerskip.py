"""Searches for the sublayers that a target can skip when it drafts for itself."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ..base.config import EngineConfig
from ..base.types import Request, SamplingParams, SequenceState
from ..drafters.layerskip import LAYERS_THAT_RUN, check_file, save_skips
from ..drafters.skips import (
    FEWEST_ROWS,
    MOST_EVALUATIONS,
    ROWS,
    ScoredWindow,
    Search,
    Space,
    scratch_pages,
)
from ..errors import ConfigError, TrainingError
from ..models.native import NativeTransformer
from ..models.rows import Segment, lone_rows
from ..native.native_sampling import shared_noise
from .forecast import check_search
from .samples import DataFolder, Sample
from .targets import open_target
from .teacher import PAGE_SIZE

WINDOWS = 8
"""Windows of text that every set of sublayers is scored on."""
ROUNDS, MANY = 7, 9
"""Number of timed forward passes, and rows of the larger ones."""


class Found(NamedTuple):
    """Sublayers that run, and the expected results of their drafts.

    ``agreement`` is the chance that a drafted token is the target's, on held-out samples. ``speed``
    is the speedup over plain decoding with drafts of the best length. ``evaluations`` is the number
    of sets that were scored.
    """

    sublayers: tuple[int, ...]
    agreement: float
    speed: float
    evaluations: int


def search_skips(
    target: Path, data: DataFolder, out: Path, min_layers: int | None,
    told: Callable[[int, int], None],
) -> Found:  # fmt: skip
    """Search for sublayers to leave out, and write those that run to ``out``, a .json file.

    ``told`` is called with the number of scored sets, and its maximum. Raises TrainingError:
    nothing can be left out at a gain. ConfigError: the native step does not run the target, or the
    file is something else.
    """
    check_file(out)
    checkpoint, model = open_target(target, data)
    if not isinstance(model, NativeTransformer):
        raise ConfigError(f"{target} is not run by the native step, whose sublayers are left out.")
    windows = WINDOWS * -(-data.about.context // PAGE_SIZE) + scratch_pages(PAGE_SIZE)
    check_search(checkpoint, 2 * windows, out)  # of samples to train on, and of held-out ones
    layers = model.shape.num_layers
    least = max(1, min(LAYERS_THAT_RUN, layers // 2)) if min_layers is None else min_layers
    if not 1 <= least <= layers:
        raise ConfigError(f"min_layers is {least}; give 1 to {layers}.")
    space = Space.of(model.shape, least, EngineConfig().max_draft_length)
    space = replace(space, row=row_cost(model))
    samples = data.read()
    held_out = Panel(model, samples.held_out, data)  # refused before the search, not after it
    search = Search(space) if space.most else None
    if search is not None and search.wants is not None:
        panel = Panel(model, samples.train, data)
        while search.wants is not None:
            search.scored(panel.score(space.kept(search.wants)), False)
            told(search.evaluations, MOST_EVALUATIONS)
    if search is None or not search.sublayers:
        reached = 0.0 if search is None else space.speed(search.chosen, search.agreement or 0.0)
        raise TrainingError(
            f"no sublayers of {target} can be left out at a gain (the best set is expected to "
            f"decode {reached:.2f} times as fast as none); use another drafter."
        )
    agreement = held_out.score(search.sublayers)
    speed = space.speed(search.chosen, agreement)
    found = Found(search.sublayers, agreement, speed, search.evaluations)
    save_skips(out, layers, found.sublayers, {
        "target": str(target), "data": [shard.sha256 for shard in data.shards],
        "agreement": agreement, "speed": speed,
    })  # fmt: skip
    return found


class Panel:
    """Up to ``WINDOWS`` windows of text, each of another sample, on which sets are scored."""

    def __init__(
        self, model: NativeTransformer, samples: Sequence[Sample], data: DataFolder
    ) -> None:
        context, heats = data.about.context, data.about.temperatures
        pages = -(-context // PAGE_SIZE)
        noise, self._windows = shared_noise(model.shape.vocab_size), list[ScoredWindow]()
        chosen: list[tuple[Sample, int, int]] = []
        for sample in samples:
            first, stop = last_answer(sample.said[:context].tolist())
            if stop - first >= FEWEST_ROWS and first:
                chosen.append((sample, first, stop))
        chosen = chosen[:: max(1, len(chosen) // WINDOWS)][:WINDOWS]
        if not chosen:
            raise ConfigError(
                f"{data.folder} has no answers of {FEWEST_ROWS} tokens and more among samples "
                "to train on, or held-out ones; write more and longer ones."
            )
        scratch = len(chosen) * pages
        store = model.new_store(scratch + scratch_pages(PAGE_SIZE), PAGE_SIZE)
        for number, (sample, first, stop) in enumerate(chosen):
            tokens = sample.tokens[: min(stop, first + ROWS)].tolist()
            params = SamplingParams(temperature=heats[sample.prompt % len(heats)])
            request = Request("data", tuple(tokens[:first]), params, number)
            no_text: Any = None  # never read
            sequence = SequenceState(f"data/{number}", request, 0, no_text, no_text, tokens)
            sequence.pages = array("i", range(number * pages, (number + 1) * pages))
            known = Segment(tokens[:-1], 0, sequence.pages, 1, first, key=sequence.id)
            model.run([known], store)
            self._windows.append(ScoredWindow(model, store, scratch, sequence, noise))

    def score(self, sublayers: tuple[int, ...]) -> float:
        """Return the chance that a token drawn by these sublayers is the whole target's."""
        return sum(each.score(sublayers) for each in self._windows) / len(self._windows)


def last_answer(said: list[bool]) -> tuple[int, int]:
    """Return the beginning and end of the last run of what the target said, or (0, 0)."""
    stop = len(said) - said[::-1].index(True) if True in said else 0
    return stop - [*said[:stop][::-1], False].index(False), stop


def row_cost(model: NativeTransformer) -> float:
    """Return the measured time of one more row, as a share of a forward pass of one row."""
    store, best = model.new_store(MANY, PAGE_SIZE), dict[int, float]()
    for _ in range(ROUNDS):
        for count in (1, MANY):
            rows, begin = lone_rows(count), time.perf_counter()
            model.run(rows, store)
            took = time.perf_counter() - begin
            best[count] = min(took, best.get(count, took))
    return max(0.0, best[MANY] / best[1] - 1) / (MANY - 1)
