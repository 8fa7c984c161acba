"""The common part of drafters that run a model of rows: the step's rows, and what a cache keeps."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Generic, TypeVar

from ..base.config import EngineConfig
from ..base.types import NO_NODES, Draft, DraftBudget, DraftNodes, Scheduled, StepRecord
from ..models.base import Model, RowsModel, Store
from ..models.decide import DraftInput
from ..models.rows import Segment
from ..native.interface import Choices
from ..native.rates import GUESSED
from ..sampling.shared_noise import Noise
from .base import Drafter, DrafterContext
from .likely import LikelyIds

BRANCHES = 4
"""Children of a node of a tree, at most."""
NODES = 16
"""Nodes of a tree, at most, where the engine chooses chains or trees."""
CATCH_UP = 256
"""Tokens that are read in a step at most to catch up, so that no stream waits for long."""
MOST_WIDTH = 8
"""Rows of one sequence that are run at a level of its tree, at most."""
KNOWN_BUDGETS = 256

ModelT = TypeVar("ModelT", bound=RowsModel)


def num_nodes(config: EngineConfig, longest: int, target: Model) -> int:
    """Return the most nodes of a draft; ``NODES`` where the engine chooses chains or trees."""
    most = config.max_draft_nodes
    if most is None and config.num_speculative_tokens is None and target.trees:
        most = NODES
    return max(longest, most or 0)


@lru_cache(KNOWN_BUDGETS)
def draft_limits(budget: DraftBudget, choices: Choices | None = None) -> DraftBudget:
    """Return the limits of a draft: of a tree where there may be more nodes than levels.

    ``choices`` are the only nodes of trees, of which the likeliest are kept; None for any.
    """
    depth, nodes, rates = budget.depth, budget.nodes, budget.rates or GUESSED
    if nodes <= depth:
        return budget._replace(nodes=depth)
    if choices is not None:
        return budget._replace(width=nodes, branches=choices.branches, rates=rates, choices=choices)
    width = max(1, min(MOST_WIDTH, nodes // max(1, depth - 1)))
    return budget._replace(width=width, branches=BRANCHES, rates=rates)


class ForwardDrafter(Drafter, Generic[ModelT]):
    """Drafts by forwards of a model, with its ``store``, over the rows that each sequence lacks.

    Drafts come from ``likely`` ids where there is a list of them.
    """

    _choices: Choices | None = None
    """The only nodes of trees; None for any."""

    def __init__(
        self, context: DrafterContext, model: ModelT, store: Store, likely: LikelyIds | None = None
    ) -> None:
        config = context.config
        self._model, self._store, self._likely = model, store, likely
        self.max_length, self.max_nodes = config.max_draft_length, context.needs.max_nodes
        self._needs_logits = context.needs_logits
        self._page_size = config.page_size
        self._max_rows = min(config.max_num_batched_tokens, CATCH_UP)
        self._room = 0
        """Rows that sequences may still catch up with in this step, all together."""
        self._states: dict[str, Any] = {}

    @property
    def model(self) -> ModelT:
        return self._model

    def propose(
        self, batch: Sequence[Scheduled], budgets: Sequence[DraftBudget], noise: Noise
    ) -> Draft:
        if self._likely is not None:
            pairs = zip(batch, budgets, strict=True)
            self._likely.choose(item.sequence.id for item, budget in pairs if budget.depth)
        draft = Draft([NO_NODES] * len(batch))
        segments: list[Segment] = []
        inputs: list[DraftInput | None] = []
        running: list[int] = []
        self._room, self.catching_up = self._max_rows, False
        for i, (item, budget) in enumerate(zip(batch, budgets, strict=True)):
            # Catching up can wait: a prompt's first token waits for the target alone.
            segment = self._rows(item, budget) if budget.depth else None
            if segment is not None:
                inputs.append(self._asked(item, budget) if segment.logits else None)
                segments.append(segment)
                running.append(i)
        if segments:
            drafts = self._model.draft(segments, self._store, inputs, noise, self._needs_logits)
            for i, nodes in zip(running, drafts, strict=True):
                draft[i] = nodes
        return draft

    def _asked(self, item: Scheduled, budget: DraftBudget) -> DraftInput:
        """Return what is to be drafted after a sequence's rows."""
        return DraftInput(item.sequence, draft_limits(budget, self._choices))

    @abstractmethod
    def _rows(self, item: Scheduled, budget: DraftBudget) -> Segment | None:
        """Return the rows to read next; a draft begins after those that want logits."""

    def _learn(self, record: StepRecord) -> None:
        """Update the list of likely ids from what a step has committed."""
        if self._likely is not None:
            for item in record.plan.batch:
                self._likely.learn(item.sequence)

    def release(self, seq_id: str, ended: bool) -> None:
        self._states.pop(seq_id, None)
        self._store.release(seq_id)
        if self._likely is not None:
            self._likely.release(seq_id)


@dataclass
class CachedState:
    """The part of a sequence that is in the drafter's cache.

    The first ``num_computed`` entries are the sequence's tokens. After the first ``base`` of them
    come the nodes of the last draft that were run, on ``pages``, the first of which holds the
    entry at ``base``. The first ``noted`` pages are noted as complete.
    """

    num_computed: int = 0
    noted: int = 0
    base: int = 0
    nodes: DraftNodes = NO_NODES
    pages: array[int] = field(default_factory=lambda: array("i"))
    queue: DraftNodes = NO_NODES
    """A chain that was drafted ahead after the sequence's tokens: all but its last node are in the
    cache, after ``num_computed``."""


class CachedDrafter(ForwardDrafter[ModelT]):
    """Keeps cache entries of drafted tokens that are committed; states are ``CachedState``."""

    def propose(
        self, batch: Sequence[Scheduled], budgets: Sequence[DraftBudget], noise: Noise
    ) -> Draft:
        draft = super().propose(batch, budgets, noise)
        for item, nodes in zip(batch, draft, strict=True):
            if nodes is not NO_NODES:
                self._states[item.sequence.id].nodes = nodes
        return draft

    def _keep_accepted(self, state: CachedState, committed: Sequence[int]) -> None:
        """Move the entries of drafted tokens that were committed to their places."""
        nodes, last, count = state.nodes, -1, 0
        size, length = self._page_size, len(committed)
        first = state.base // size
        sources: list[int] = []
        targets: list[int] = []
        rows = zip(nodes.tokens, nodes.parents, nodes.runs, strict=False)
        for node, (token, parent, run) in enumerate(rows):
            if parent != last or count == length or token != committed[count]:
                continue
            if run < 0:
                break
            last = node
            if run != count:
                for slots, place in ((sources, state.base + run), (targets, state.base + count)):
                    slots.append(state.pages[place // size - first] * size + place % size)
            count += 1
        if sources:
            self._store.move(sources, targets)
        state.num_computed += count
        state.nodes = NO_NODES
