"""Self-speculation: the target drafts for itself, without some of its sublayers.

They are searched for during decoding (see ``skips``), or all after a layer are skipped, for
checkpoints that are trained to exit there (Elhoushi et al., "LayerSkip", 2024).
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path
from typing import Any, Self

import numpy as np

from ..base.fields import Fields, read_object
from ..base.kept import write_kept
from ..base.types import NO_NODES, Draft, DraftBudget, Scheduled, SequenceState
from ..errors import ConfigError, shown
from ..models.base import Store
from ..models.decide import DraftInput
from ..models.native import NativeTransformer
from ..models.rows import Segment
from ..native.interface import MARGINS
from ..native.rates import BINS, DEPTHS, RANKS, Rates
from ..sampling.shared_noise import Noise
from .base import Drafter, DrafterContext, DrafterSpec, Needs
from .forward import draft_limits, num_nodes
from .heads import native_target
from .skips import (
    FEWEST_ROWS,
    ROWS,
    WINDOW_SCORES,
    ScoredWindow,
    Search,
    Skips,
    Space,
    scratch_pages,
)

STEPS_BETWEEN = 8
"""At most one step in so many is preceded by an evaluation."""
SEARCH_SHARE = 0.08
"""Largest share of the time for evaluations, once a set is known to pay."""
UNPAID_SHARE = 0.02
"""The same until then."""
IDLE_SECONDS = 1.0
"""Seconds between two steps after which the engine counts as idle."""
LAYERS_THAT_RUN = 16
"""Least layers that run by default, or half of the layers if that is fewer."""
MOST_WORKLOADS = 64
"""Workloads whose sets are kept."""
NUMBER = r"[0-9]{1,6}"
FORMS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "skip_threshold": (r"[0-9]*\.?[0-9]+", float),
    "min_layers": (NUMBER, int),
    "adaptive": ("true|false", "true".__eq__),
    "exit_layer": (NUMBER, int),
}
"""The patterns of option values after the drafter's name, and their parsers."""
UNKNOWN_FORM = r"(?!)", str
LOGITS_AT_ONCE = 2
"""Sets of logits of a window's rows that are in memory at once."""
SUFFIX = ".json"
KIND = "drafter"
"""The key by which a file says that it holds the sublayers of a drafter."""


@dataclass(frozen=True)
class LayerskipSpec(DrafterSpec):
    """The target without some of its sublayers.

    Args:
        skip_threshold: probability of a token, by its margin, below which the draft ends with it.
        min_layers: least layers' worth of sublayers that run; None for 16, or half if fewer.
        adaptive: search for the sublayers; if not, they are evenly spread.
        exit_layer: run the layers below it; None for any sublayers.
        kept: run these sublayers, without a search; empty to choose them.
        layers: number in the target that ``kept`` was found for; None if it is known to fit.
    """

    name = "layerskip"
    wants = "a target of a native family"
    costs = "0.3 to 0.8 of the target a token"
    prior = 0.8
    suits = "deep targets without another drafter; seldom below 24 layers"
    options = (
        "layerskip:skip_threshold=0.8,min_layers=16,adaptive=true searches; layerskip:N exits "
        "behind N layers; layerskip:FILE.json runs what outrider train layerskip found"
    )
    skip_threshold: float = 0.8
    min_layers: int | None = None
    adaptive: bool = True
    exit_layer: int | None = None
    kept: tuple[int, ...] = ()
    layers: int | None = None

    @classmethod
    def recognise(cls, option: str | Path) -> Self | None:
        name, colon, rest = str(option).partition(":")
        if name != cls.name:
            return cls._saved(Path(option)) if is_saved(Path(option)) else None
        if rest.endswith(SUFFIX):
            return cls._saved(Path(rest))
        if re.fullmatch(NUMBER, rest):
            return cls(exit_layer=int(rest))
        parts = [part.partition("=") for part in rest.split(",")] if colon else []
        values: dict[str, Any] = {}
        for key, _, text in parts:
            form, read = FORMS.get(key, UNKNOWN_FORM)
            if key in values or not re.fullmatch(form, text):
                raise ConfigError(
                    f"drafter {shown(option)} is no layerskip; give {cls.name}:N, or of "
                    "skip_threshold=0.8, min_layers=16, adaptive=true or false and exit_layer=8 "
                    f"what differs, comma-separated, after {cls.name}:"
                )
            values[key] = read(text)
        return cls(**values)

    @classmethod
    def _saved(cls, file: Path) -> Self:
        """Return the drafter with the sublayers in a file. Raises ModelError if it has none."""
        values = Fields(read_object(file), str(file))
        layers, kept = values.whole("layers", 1), values.listed("sublayers", int)
        if not kept or kept != sorted({*kept}) or not 0 <= kept[0] <= kept[-1] < 2 * layers:
            raise values.refuse("sublayers", f"some of 0 to {2 * layers - 1}, rising")
        return cls(kept=tuple(kept), layers=layers)

    def _space(self, target: NativeTransformer, longest: int) -> Space:
        """Return the sets to choose from.

        Raises ConfigError if an option is out of its range, or nothing can be skipped.
        """
        layers, exit_layer = target.shape.num_layers, self.exit_layer
        least = min(LAYERS_THAT_RUN, layers // 2) if self.min_layers is None else self.min_layers
        if not 0 <= self.skip_threshold <= 1:
            raise ConfigError(f"skip_threshold is {self.skip_threshold}; give 0 to 1.")
        if exit_layer is not None and not 1 <= exit_layer < layers:
            raise ConfigError(
                f"drafter {self.name!r} exits at layer {exit_layer} of {layers}; "
                f"give 1 to {layers - 1}."
            )
        if not 1 <= least <= layers:
            raise ConfigError(f"min_layers is {least}; give 1 to {layers}.")
        if self.layers not in (None, layers):
            raise ConfigError(
                f"drafter {self.name!r} has sublayers of a target of {self.layers} layers, and "
                f"this one has {layers}; give a file that was written for it."
            )
        space = Space.of(target.shape, least, longest)
        if exit_layer is None and not space.most:
            raise ConfigError(
                f"drafter {self.name!r} can leave out none of {layers} layers, of which the first, "
                f"the last and {least} in all are kept; give another drafter."
            )
        return space

    def needs(self, context: DrafterContext) -> Needs:
        config, target = context.config, native_target(self.name, context)
        if target.shape.stateful:
            raise ConfigError(
                f"drafter {self.name!r} runs some of the target's layers, and those of a "
                f"{target.shape.family!r} model keep states; give drafter='suffix'."
            )
        space = self._space(target, config.max_draft_length)
        skips = self._skips(space)
        searches = skips is None
        return Needs(
            fixed_bytes=4 * LOGITS_AT_ONCE * ROWS * target.shape.vocab_size if searches else 0,
            max_nodes=num_nodes(config, config.max_draft_length, target),
            scratch_pages=scratch_pages(config.page_size) if searches else 0,
            loaded=space,
            note=space.told(skips),
        )

    def _skips(self, space: Space) -> Skips | None:
        """Return the sublayers that are skipped; None if they are searched for."""
        if self.exit_layer is not None:
            return frozenset(range(2 * self.exit_layer, 2 * space.layers))
        if self.kept:
            return frozenset(range(2 * space.layers)) - {*self.kept}
        return None if self.adaptive else space.spread()

    def make(self, context: DrafterContext) -> LayerskipDrafter:
        assert isinstance(context.model, NativeTransformer)
        skips = self._skips(context.needs.loaded)
        return LayerskipDrafter(context, context.model, skips, self.skip_threshold)


class LayerskipDrafter(Drafter):
    """Drafts with the target's own cache, and without some of its sublayers.

    The rows of a draft are the sequence's last token, which the cache lacks, and the nodes after
    it. They read the target's committed entries, and their own are overwritten by verification.
    ``skips`` are the sublayers that are skipped; None to search for them.
    """

    name = "layerskip"

    def __init__(
        self,
        context: DrafterContext,
        target: NativeTransformer,
        skips: Skips | None,
        threshold: float,
    ) -> None:
        self._target, self._scratch = target, context.num_pages
        self._space: Space = context.needs.loaded
        self.max_length, self.max_nodes = context.config.max_draft_length, context.needs.max_nodes
        self.share = self._space.cost(self._space.spread() if skips is None else skips)
        self._fixed = None if skips is None else self._space.kept(skips)
        self._sure = sure_rates(threshold)
        self.searches: OrderedDict[str, Search] = OrderedDict()
        """By workload."""
        self._window: ScoredWindow | None = None
        self._turn, self._last = 0, time.perf_counter()
        self._seconds = self.searched = 0.0
        self.evaluations = 0
        """Forwards that the search has run; they took ``searched`` seconds."""

    @property
    def model(self) -> NativeTransformer:
        return self._target

    def attach(self, store: Store) -> None:
        self._store = store

    def measured(self, row: float) -> None:
        self._space = replace(self._space, row=row)

    def prepare(self, sequences: Sequence[SequenceState], noise: Noise) -> bool:
        native = [each for each in sequences if each.pipeline.native_handle]
        self.catching_up = self._fixed is None and self._searched(native, noise)
        return self.catching_up

    def ready(self, workload: str) -> bool:
        return self._fixed is not None or self._search_of(workload).pays is True

    def propose(
        self, batch: Sequence[Scheduled], budgets: Sequence[DraftBudget], noise: Noise
    ) -> Draft:
        draft = Draft([NO_NODES] * len(batch))
        groups: dict[tuple[int, ...], list[int]] = {}
        for i, (item, budget) in enumerate(zip(batch, budgets, strict=True)):
            sequence = item.sequence
            if (
                budget.depth
                and item.count == 1
                and item.start == len(sequence.tokens) - 1
                and sequence.pipeline.native_handle
            ):
                sublayers = self._fixed or self._search_of(sequence.workload).sublayers
                if sublayers:  # empty if no draft pays
                    groups.setdefault(sublayers, []).append(i)
        for sublayers, group in groups.items():
            segments, inputs = [], []
            for i in group:
                sequence, budget = batch[i].sequence, budgets[i]
                start, length = len(sequence.tokens) - 1, sequence.prompt_length
                last, pages = sequence.tokens[start:], sequence.pages
                segments.append(Segment(last, start, pages, 1, length, key=sequence.id))
                if budget.rates is None and budget.nodes <= budget.depth:
                    budget = budget._replace(least=0.5, rates=self._sure)
                inputs.append(DraftInput(sequence, draft_limits(budget)))
            drafts = self._target.draft(segments, self._store, inputs, noise, sublayers=sublayers)
            for i, nodes in zip(group, drafts, strict=True):
                draft[i] = nodes if budgets[i].rates else nodes._replace(survivals=[])
        return draft

    def _search_of(self, workload: str) -> Search:
        """Return the search of a workload; a new one starts from the latest one's result."""
        search = self.searches.get(workload)
        if search is None:
            like = next((s for s in reversed(self.searches.values()) if s.rank), None)
            search = self.searches[workload] = Search(self._space, like)
            if len(self.searches) > MOST_WORKLOADS:
                self.searches.popitem(last=False)
        return search

    def _searched(self, sequences: Sequence[SequenceState], noise: Noise) -> bool:
        """Score a set, if it is time to; return whether one was scored."""
        now = time.perf_counter()
        self._seconds += min(now - self._last, IDLE_SECONDS)
        self._last = now
        self._turn += 1
        if self._turn % STEPS_BETWEEN:
            return False
        for sequence in sequences:
            search = self._search_of(sequence.workload)
            share = SEARCH_SHARE if search.pays else UNPAID_SHARE
            due = self.searched <= share * self._seconds
            if due and search.wants is not None and sequence.num_output >= FEWEST_ROWS:
                self._score(search, search.wants, sequence, noise)
                self.searched += time.perf_counter() - now
                return True
        return False

    def _score(
        self, search: Search, skips: frozenset[int], sequence: SequenceState, noise: Noise
    ) -> None:
        window = self._window
        known = window is not None and window.scored < WINDOW_SCORES
        if window is None or not known or window.sequence.workload != sequence.workload:
            self._window = window = ScoredWindow(
                self._target, self._store, self._scratch, sequence, noise
            )
            self.evaluations += 1
            known = False
        self.evaluations += 1
        search.scored(window.score(self._space.kept(skips)), not known)

    def release(self, seq_id: str, ended: bool) -> None:
        if self._window is not None and self._window.sequence.id == seq_id:
            self._window = None  # the pages that it reads are given back


def save_skips(file: Path, layers: int, sublayers: Sequence[int], more: Mapping[str, Any]) -> None:
    """Write to a file which sublayers of a target's ``layers`` run, and ``more`` about them.

    Raises ConfigError, see ``check_file``.
    """
    check_file(file)
    kept = {KIND: LayerskipSpec.name, "layers": layers, "sublayers": [*sublayers], **more}
    write_kept(file, kept)


def check_file(file: Path) -> None:
    """Raise ConfigError unless a file to write is a ``SUFFIX`` file, new or written before."""
    if file.suffix != SUFFIX:
        raise ConfigError(f"{file} is no name of a {SUFFIX} file; give one.")
    if file.exists() and not is_saved(file):
        raise ConfigError(f"{file} is something else already; give a new file.")


def is_saved(file: Path) -> bool:
    """Return whether a file is one that ``save_skips`` wrote."""
    if file.suffix != SUFFIX or not file.is_file():
        return False
    return read_object(file).get(KIND) == LayerskipSpec.name


def sure_rates(threshold: float) -> Rates:
    """Return rates of 1 for margins that mean a probability of at least ``threshold``, else of 0.

    A margin is taken as log odds against the next candidate.
    """
    table = np.zeros((DEPTHS, RANKS, BINS), np.float32)
    for bin, margin in enumerate((0.0, *MARGINS)):
        chance = 1 / (1 + exp(-margin)) if bin else 0.0
        table[:, :, bin] = chance >= threshold
    return Rates(table)
