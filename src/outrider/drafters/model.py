"""A smaller checkpoint as drafter, with a cache of its own under the target's page ids."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..base.methods import TOGETHER
from ..base.trees import is_chain
from ..base.types import (
    NO_NODES,
    Draft,
    DraftBudget,
    Scheduled,
    SequenceState,
    StepRecord,
)
from ..checkpoints.architecture import Architecture
from ..checkpoints.checkpoint import open_checkpoint
from ..errors import ModelError
from ..models.base import Model
from ..models.decide import DraftInput
from ..models.kept_weights import files_of
from ..models.load import check_drafts, load_model
from ..models.native import NativeTransformer
from ..models.native_model import NativeModel
from ..models.rows import Segment
from ..sampling.shared_noise import Noise
from .ahead import Ahead, Chain, Duels, behind, first_of, joined, may_go_on
from .base import Drafter, DrafterContext, FolderSpec, Needs
from .forward import NODES, CachedDrafter, CachedState, draft_limits
from .likely import LikelyIds, likely_ids
from .states import PageNotes

USUAL_UNREAD = 2
"""Most unread tokens of a sequence in a step if the last step drafted too."""


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
    placed = True

    def needs(self, context: DrafterContext) -> Needs:
        config, target = context.config, context.model
        checkpoint = open_checkpoint(self.files)
        model = load_model(
            checkpoint,
            str(target.dtype),
            target.device,
            context.max_model_len,
            config.drafter_recipe,
            config.window_of(self.name),
            target,
            keeps=config.repack_cache,
            cpus=config.placement and config.placement.drafter,
            coded_cache=config.coded_cache,
        )
        check_drafts(self.folder, model)
        longest, most = config.max_draft_length, config.max_draft_nodes
        if most is None and config.num_speculative_tokens is None and not context.needs_logits:
            most = NODES if model.trees and target.trees else None
        nodes = max(longest, most or 0)
        if nodes > longest and not model.trees:
            has = "layers that keep states" if model.shape.stateful else "no native path"
            raise ModelError(
                f"{self.folder}: a {model.shape.family!r} model has {has} and drafts chains only; "
                "leave out max_draft_nodes."
            )
        likely = None
        if isinstance(model, NativeTransformer):
            likely = likely_ids(model, files_of(checkpoint), context)
        return Needs(
            model.page_bytes(config.page_size),
            max_nodes=nodes,
            loaded=(model, likely),
            weight_bytes=model.added_bytes(target),
            state_bytes=model.state_bytes(nodes),
        )

    def make(self, context: DrafterContext) -> Drafter:
        return ModelDrafter(context)


class ModelDrafter(CachedDrafter[Model]):
    """Drafts with a smaller model, token by token, with the target's noise and processors.

    x = argmax(log q + g) is the coupled draw from the drafter's processed logits, so that x equals
    the target's y as often as two distributions with shared noise can agree.
    """

    name = "model"

    def __init__(self, context: DrafterContext) -> None:
        model: Model
        likely: LikelyIds | None
        model, likely = context.needs.loaded
        store = model.new_store(context.num_pages, context.config.page_size)
        super().__init__(context, model, store, likely)
        shape = model.shape
        self._vocabulary = shape.vocab_size
        self._reach = shape.reach if isinstance(shape, Architecture) else None
        self._stateful = shape.stateful
        # With a reach early pages may be unread, and states cannot be shared by pages.
        self._shares = model.paged and self._reach is None and not self._stateful
        self._notes = PageNotes(self._page_size)
        self._ahead: Ahead | None = None
        self._queued: list[CachedState] = []
        self.repeats = self._stateful
        cores, wanted = model.library.cores if isinstance(model, NativeModel) else None, None
        if cores is not None and not context.needs_logits and not self._stateful:
            wanted = context.config.draft_ahead
            self.ahead = self.max_length + 1 if wanted is None else wanted
        if cores is not None and self.ahead:
            self._ahead = Ahead(model, self._store, cores)
        self._pays = Duels() if wanted is None else None

    def propose(
        self, batch: Sequence[Scheduled], budgets: Sequence[DraftBudget], noise: Noise
    ) -> Draft:
        if self._ahead is not None:
            self._ahead.stop()  # a step that failed was not observed
        draft = super().propose(batch, budgets, noise)
        if self._ahead is None:
            return draft
        going = self._pays is None or self._pays.on(len(batch))
        chains: list[Chain] = []
        drafted = ready = 0
        for i, (item, budget) in enumerate(zip(batch, budgets, strict=True)):
            sequence, state = item.sequence, self._states.get(item.sequence.id)
            if state is None or not budget.depth:
                continue
            queue, state.queue = state.queue, NO_NODES
            drafted += 1
            ready += len(queue.tokens) >= budget.depth
            if queue.tokens:
                state.nodes = joined(queue, draft[i])
                draft[i] = first_of(state.nodes, budget.depth)
            if going and may_go_on(sequence, state.nodes, noise):
                chains.append(self._chain(item, state, budget))
        self.ahead_share = ready / max(1, drafted)
        self._ahead.start(chains, noise)
        return draft

    def _chain(self, item: Scheduled, state: CachedState, budget: DraftBudget) -> Chain:
        """Return a sequence's draft as a chain to extend, as far as limits and pages allow."""
        sequence, nodes, base = item.sequence, state.nodes, state.base
        room = min(sequence.limit - 1, len(sequence.pages) * self._page_size) - base
        most = min(budget.depth + self.ahead, room)
        pages, lists = sequence.pages[:], ([*nodes.tokens], [*nodes.margins])
        return Chain(sequence, base, *lists, pages, most, budget.rates)

    def _rows(self, item: Scheduled, budget: DraftBudget) -> Segment | None:
        sequence, known = item.sequence, item.sequence.tokens
        state = self._states.get(sequence.id)
        if state is None:
            state = self._states[sequence.id] = self._known(sequence)
        if state.queue.tokens:
            if self._follows(sequence, state, budget):
                return self._behind_queue(sequence, state, budget)
            state.queue = NO_NODES
        # The last token is read again if nothing else is left to draft from.
        start, stop = self._first_needed(sequence, state), item.start + item.count
        if start < state.num_computed:
            self._store.release(sequence.id)
        start = min(start, len(known) - 1)
        behind = known[start : min(stop, start + max(self._room, USUAL_UNREAD))]
        if stop - start > USUAL_UNREAD:
            self._room -= len(behind)
            self.catching_up = True
        if behind and max(behind) >= self._vocabulary:
            return None  # the target emitted an id that this model has no embedding for
        pages = sequence.pages
        self._notes.overwrite(sequence, start)
        state.num_computed = start + len(behind)
        state.base, state.nodes = len(known), NO_NODES
        if not behind:
            return None
        state.pages = pages[len(known) // self._page_size :]
        draws, prompt = state.num_computed == len(known), sequence.prompt_length
        return Segment(behind, start, pages, draws, prompt, (), (), sequence.id)

    def _follows(self, sequence: SequenceState, state: CachedState, budget: DraftBudget) -> bool:
        """Return True if the queue that was drafted ahead can begin the next draft."""
        known, size = len(sequence.tokens), self._page_size
        # Other pages may have been written to by others since.
        first, last = known // size, -(-(known + len(state.queue.tokens) - 1) // size)
        before = state.pages[first - state.base // size : last - state.base // size]
        chain = budget.nodes <= budget.depth and state.num_computed == known
        return chain and sequence.pages[first:last] == before

    def _behind_queue(
        self, sequence: SequenceState, state: CachedState, budget: DraftBudget
    ) -> Segment | None:
        """Return the row from which to extend the queue; None if the queue is long enough."""
        known, queue = len(sequence.tokens), state.queue.tokens
        self._notes.overwrite(sequence, known)
        state.base, state.nodes = known, NO_NODES
        state.pages = sequence.pages[known // self._page_size :]
        if len(queue) >= budget.depth:
            return None
        place, prompt = known + len(queue) - 1, sequence.prompt_length
        return Segment(queue[-1:], place, sequence.pages, 1, prompt, (), (), sequence.id)

    def _asked(self, item: Scheduled, budget: DraftBudget) -> DraftInput:
        if self._stateful:  # a chain, even if a merged draft has room for more
            budget = budget._replace(nodes=min(budget.nodes, budget.depth))
        queued = len(self._states[item.sequence.id].queue.tokens)
        if not queued:
            return super()._asked(item, budget)
        depth = budget.depth - queued
        limits = draft_limits(budget._replace(depth=depth, nodes=depth))
        return DraftInput(item.sequence, limits, len(item.sequence.tokens) + queued)

    def _first_needed(self, sequence: SequenceState, state: CachedState) -> int:
        """Return the first unread position that the next draft depends on.

        A state that has all tokens cannot go back to draft after the last one: it begins anew.
        """
        if self._stateful and state.num_computed == len(sequence.tokens):
            return 0
        if self._reach is None:
            return state.num_computed
        return max(state.num_computed, len(sequence.tokens) - self._reach)

    def num_unread(self, sequence: SequenceState) -> int:
        state = self._states.get(sequence.id) or self._known(sequence)
        return len(sequence.tokens) - self._first_needed(sequence, state)

    def observe(self, record: StepRecord) -> None:
        """Keep entries of drafted tokens that were committed; others are computed when needed."""
        if self._ahead is not None:
            self._end_ahead(self._ahead, record)
        self._learn(record)
        if not self._states:
            return
        for item in record.plan.batch:
            state = self._states.get(item.sequence.id)
            if state is None:
                continue
            committed = item.sequence.tokens[state.base :]
            if state.num_computed == state.base and committed:
                whole = state.nodes
                # A state takes in the last token when it is read again to draft after it.
                self._keep_accepted(state, committed[:-1] if self._stateful else committed)
                alike = state.num_computed == len(item.sequence.tokens)
                if self._ahead is not None and alike and is_chain(whole.parents):
                    state.queue = behind(whole, len(committed))
                    self._queued.append(state)
            if self._shares:
                state.noted = self._notes.note(item.sequence, state.noted, state.num_computed)

    def _end_ahead(self, ahead: Ahead, record: StepRecord) -> None:
        """Stop drafting ahead, take in its chains and its gain, and drop unused queues."""
        begin = time.perf_counter()
        for chain in ahead.stop():
            state = self._states.get(chain.sequence.id)
            if state is not None:
                state.nodes = chain.nodes
        for state in self._queued:
            state.queue = NO_NODES
        self._queued.clear()
        plan, names = record.plan, record.drafters
        own = names and all(self.name in name.split(TOGETHER) for name in names)
        if self._pays is not None and plan.rows == plan.decoding and own:
            seconds = record.seconds.step + time.perf_counter() - begin
            self._pays.observe(plan.decoding, len(record.events), seconds)

    def _known(self, sequence: SequenceState) -> CachedState:
        """Return the state of a new sequence, whose prefix others may have computed."""
        noted = self._notes.num_whole(sequence) if self._shares else 0
        return CachedState(noted * self._page_size, noted)
