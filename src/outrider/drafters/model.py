"""A smaller checkpoint as drafter, with a cache of its own under the target's page ids."""

from __future__ import annotations

from dataclasses import dataclass

from ..base.types import NO_NODES, DraftBudget, Scheduled, SequenceState, StepRecord
from ..checkpoints.checkpoint import open_checkpoint
from ..checkpoints.families import Architecture
from ..errors import ModelError
from ..models.base import Model
from ..models.load import cannot_go_back, load_model
from ..models.rows import Segment
from .base import Drafter, DrafterContext, FolderSpec, Needs
from .forward import NODES, CachedDrafter, CachedState
from .states import PageNotes

USUAL_UNREAD = 2
"""Tokens of a sequence that a step finds unread, at most, where the last one drafted too."""


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
            str(target.dtype),
            target.device,
            context.max_model_len,
            config.drafter_recipe,
            config.window_of(self.name),
            target,
            keeps=config.repack_cache,
            coded_cache=config.coded_cache,
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

    def make(self, context: DrafterContext) -> Drafter:
        return ModelDrafter(context)


class ModelDrafter(CachedDrafter[Model]):
    """Drafts with a smaller model, token by token, with the target's noise and processors.

    x = argmax(log q + g): the coupled draw from the drafter's own pipeline, so that x equals the
    target's y as often as two logits with shared noise can agree.
    """

    name = "model"

    def __init__(self, context: DrafterContext) -> None:
        model: Model = context.needs.loaded
        super().__init__(
            context, model, model.new_store(context.num_pages, context.config.page_size)
        )
        shape = model.shape
        self._vocabulary = shape.vocab_size
        self._reach = shape.reach if isinstance(shape, Architecture) else None
        self._shares = model.paged and self._reach is None  # else pages lack a beginning
        self._notes = PageNotes(self._page_size)

    def _rows(self, item: Scheduled, budget: DraftBudget) -> Segment | None:
        sequence, known = item.sequence, item.sequence.tokens
        state = self._states.get(sequence.id)
        if state is None:
            state = self._states[sequence.id] = self._known(sequence)
        start, stop = self._first_needed(sequence, state), item.start + item.count
        behind = known[start : min(stop, start + max(self._room, USUAL_UNREAD))]
        if stop - start > USUAL_UNREAD:
            self._room -= len(behind)
            self.catching_up = True
        if behind and max(behind) >= self._vocabulary:
            return None  # the target has said what this model has no embedding for
        pages = sequence.pages
        self._notes.overwrite(sequence, start)
        state.num_computed = start + len(behind)
        state.base, state.nodes = len(known), NO_NODES
        if not behind:
            return None
        state.pages = pages[len(known) // self._page_size :]
        draws, prompt = state.num_computed == len(known), sequence.prompt_length
        return Segment(behind, start, pages, draws, prompt, (), (), sequence.id)

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
                self._keep_accepted(state, committed)
            if self._shares:
                state.noted = self._notes.note(item.sequence, state.noted, state.num_computed)

    def _known(self, sequence: SequenceState) -> CachedState:
        """Return the state of a new sequence whose beginning others may have computed."""
        noted = self._notes.num_whole(sequence) if self._shares else 0
        return CachedState(noted * self._page_size, noted)
