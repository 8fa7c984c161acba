"""A smaller checkpoint as drafter, with a cache of its own under the target's page ids."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ..base.config import EngineConfig
from ..base.types import (
    NO_NODES,
    Draft,
    DraftBudget,
    DraftNodes,
    Scheduled,
    SequenceState,
    StepRecord,
)
from ..checkpoints.checkpoint import open_checkpoint
from ..checkpoints.families import Architecture
from ..errors import ModelError
from ..models.base import Model, Store
from ..models.decide import DraftInput
from ..models.load import cannot_go_back, load_model
from ..models.rows import Segment
from ..native.interface import Choices
from ..native.rates import GUESSED
from ..sampling.shared_noise import Noise
from .base import Drafter, DrafterContext, FolderSpec, Needs
from .states import PageNotes

BRANCHES = 4
"""Children of a node of a tree, at most."""
NODES = 16
"""Nodes of a tree, at most, where the engine chooses chains or trees."""
USUAL = 2
"""Tokens of a sequence that a step finds unread, at most, where the last one drafted too."""
CATCH_UP = 256
"""Tokens that are read in a step at most to catch up, so that no stream waits for long."""
MOST_WIDTH = 8
"""Rows of one sequence that are run at a level of its tree, at most."""
KNOWN_BUDGETS = 256


@dataclass
class CachedState:
    """The part of a sequence that is in the drafter's cache.

    The first ``num_computed`` entries are the sequence's tokens. Behind the first ``base`` of them
    lie those nodes of the last draft that were run, on ``pages``, the first of which holds the
    entry at ``base``. The first ``noted`` pages are noted as whole.
    """

    num_computed: int = 0
    noted: int = 0
    base: int = 0
    nodes: DraftNodes = NO_NODES
    pages: array[int] = field(default_factory=lambda: array("i"))


def keep_accepted(
    store: Store, page_size: int, state: CachedState, committed: Sequence[int]
) -> int:
    """Move what was computed of the committed tokens to its place; return how many they are."""
    nodes, last, count = state.nodes, -1, 0
    first, length = state.base // page_size, len(committed)
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
                slots.append(
                    state.pages[place // page_size - first] * page_size + place % page_size
                )
        count += 1
    if sources:
        store.move(sources, targets)
    state.nodes = NO_NODES
    return count


@dataclass(frozen=True)
class ModelSpec(FolderSpec):
    """A checkpoint in ``folder`` that is smaller than the target and has its tokenizer."""

    name = "model"
    wants = "a smaller checkpoint with the target's tokenizer; memory for its weights and cache"
    costs = "a forward for each token of depth"
    prior = 0.65
    kind = "checkpoint"
    proposes = "a smaller model, proposes {k} tokens"
    suits = "any text, where the checkpoint is far smaller than the target and agrees with it"

    def needs(self, context: DrafterContext) -> Needs:
        config, target = context.config, context.model
        model = load_model(
            open_checkpoint(self.files),
            str(target.dtype).removeprefix("torch."),
            target.device,
            context.max_model_len,
            config.drafter_recipe,
            config.window_of(self.name),
            target,
        )
        if not model.truncates:
            why = cannot_go_back(self.folder, model)
            raise ModelError(f"{why}, so it cannot draft; give another or drafter='ngram'.")
        longest, most = config.max_draft_length, config.max_draft_nodes
        if most is None and config.num_speculative_tokens is None and not context.needs_logits:
            most = NODES if model.trees and target.trees else None
        nodes = max(longest, most or 0)
        if nodes > longest and not model.trees:
            raise ModelError(
                f"{self.folder}: a {model.shape.family!r} model has no native path and drafts "
                "chains only; leave out max_draft_nodes."
            )
        page_bytes, added = model.page_bytes(config.page_size), model.added_bytes(target)
        return Needs(page_bytes, max_nodes=nodes, loaded=model, weight_bytes=added)

    def make(self, context: DrafterContext) -> ModelDrafter:
        config = context.config
        return ModelDrafter(
            context.needs.loaded,
            context.num_pages,
            config.page_size,
            config.max_num_batched_tokens,
            config.max_draft_length,
            context.needs.max_nodes,
            context.needs_logits,
        )


def num_nodes(config: EngineConfig, longest: int) -> int:
    """Return the most nodes of a draft of trees, where the engine chooses chains or trees."""
    most = config.max_draft_nodes
    if most is None and config.num_speculative_tokens is None:
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


class ModelDrafter(Drafter):
    """Drafts with a smaller model, token by token, with the target's noise and processors.

    x = argmax(log q + g): the coupled draw from the drafter's own pipeline, so that x equals the
    target's y as often as two logits with shared noise can agree.

    Args:
        model: the drafter's model; its tokenizer is the target's.
        num_pages, page_size: those of the target's pool, whose page ids it uses.
        max_rows: rows that sequences may catch up with in one step, all together.
        max_length: longest draft.
        max_nodes: most nodes of a draft; more than ``max_length`` makes trees.
        needs_logits: whether drafts carry the logits that they were drawn from, for the ratio
        rules.
    """

    name = "model"

    def __init__(
        self,
        model: Model,
        num_pages: int,
        page_size: int,
        max_rows: int,
        max_length: int,
        max_nodes: int,
        needs_logits: bool = False,
    ) -> None:
        self._model = model
        self.max_length, self.max_nodes = max_length, max_nodes
        self._store = model.new_store(num_pages, page_size)
        self._max_rows = min(max_rows, CATCH_UP)
        shape = model.shape
        self._reach = shape.reach if isinstance(shape, Architecture) else None
        self._shares = model.paged and self._reach is None  # else pages lack a beginning
        self._needs_logits = needs_logits
        self._page_size = page_size
        self._states: dict[str, CachedState] = {}
        self._notes = PageNotes(page_size)

    @property
    def model(self) -> Model:
        return self._model

    def propose(
        self, batch: Sequence[Scheduled], budgets: Sequence[DraftBudget], noise: Noise
    ) -> Draft:
        found = [NO_NODES] * len(batch)
        segments: list[Segment] = []
        inputs: list[DraftInput | None] = []
        running: list[tuple[int, CachedState]] = []
        size, vocabulary = self._page_size, self._model.shape.vocab_size
        room, self.catching_up = self._max_rows, False
        for i, (item, budget) in enumerate(zip(batch, budgets, strict=True)):
            if not budget.depth:
                continue  # catching up can wait: a prompt's first token waits for the target alone
            sequence, known = item.sequence, item.sequence.tokens
            state = self._states.get(sequence.id)
            if state is None:
                state = self._states[sequence.id] = self._known(sequence)
            start, stop = self._first_needed(sequence, state), item.start + item.count
            behind = known[start : min(stop, start + max(room, USUAL))]
            if stop - start > USUAL:
                room -= len(behind)
                self.catching_up = True
            if behind and max(behind) >= vocabulary:
                continue  # the target has said what this model has no embedding for
            pages = sequence.pages
            self._notes.overwrite(sequence, start)
            state.num_computed = start + len(behind)
            state.base, state.nodes = len(known), NO_NODES
            if behind:
                draws, prompt = state.num_computed == len(known), sequence.prompt_length
                segments.append(Segment(behind, start, pages, draws, prompt, (), (), sequence.id))
                inputs.append(DraftInput(sequence, draft_limits(budget)) if draws else None)
                state.pages = pages[len(known) // size :]
                running.append((i, state))
        if segments:
            drafts = self._model.draft(segments, self._store, inputs, noise, self._needs_logits)
            for (i, state), nodes in zip(running, drafts, strict=True):
                state.nodes = found[i] = nodes
        return Draft(found)

    def _first_needed(self, sequence: SequenceState, state: CachedState) -> int:
        """Return the first position that what is drafted next depends on and that is not read."""
        if self._reach is None:
            return state.num_computed
        return max(state.num_computed, len(sequence.tokens) - self._reach)

    def num_unread(self, sequence: SequenceState) -> int:
        state = self._states.get(sequence.id) or self._known(sequence)
        return len(sequence.tokens) - self._first_needed(sequence, state)

    def observe(self, record: StepRecord) -> None:
        """Keep what was drafted and committed alike; the rest is computed anew when needed."""
        if not self._states:
            return
        for item in record.plan.batch:
            state = self._states.get(item.sequence.id)
            if state is None:
                continue
            committed = item.sequence.tokens[state.base :]
            if state.num_computed == state.base and committed:
                state.num_computed += keep_accepted(self._store, self._page_size, state, committed)
            if self._shares:
                state.noted = self._notes.note(item.sequence, state.noted, state.num_computed)

    def _known(self, sequence: SequenceState) -> CachedState:
        """Return the state of a new sequence whose beginning others may have computed."""
        noted = self._notes.num_whole(sequence) if self._shares else 0
        return CachedState(noted * self._page_size, noted)

    def release(self, seq_id: str, ended: bool) -> None:
        self._states.pop(seq_id, None)
        self._store.release(seq_id)
