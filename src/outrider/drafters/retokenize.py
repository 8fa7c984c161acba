"""A small model with another tokenizer drafts the tokens that it shares with the target.

Timor et al., "Accelerating LLM inference with lossless speculative decoding algorithms for
heterogeneous vocabularies", 2025, algorithm 4 (token-level intersection).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from ..base.types import NO_NODES, Draft, DraftBudget, Scheduled, SequenceState, StepRecord
from ..cache.pages import PagePool, extend_keys
from ..checkpoints.checkpoint import open_checkpoint
from ..checkpoints.folders import find_folder
from ..checkpoints.tokenizers import has_tokenizer, read_codec
from ..errors import ConfigError, ModelError
from ..models.load import check_drafts, load_model
from ..models.native import NativeTransformer
from ..models.rows import Segment
from ..sampling.shared_noise import Noise
from ..text.intersection import intersection, pieces_of
from ..text.reencode import Context, Reencoder
from .base import Drafter, DrafterContext, DrafterSpec, Needs
from .forward import CachedDrafter, CachedState, num_nodes
from .heads import native_target

FORM = "retokenize:"
"""Stands before the checkpoint's folder."""
IDS_PER_TOKEN = 4
"""Most ids of the drafter per token of the target's context."""
USUAL_UNREAD = 16
"""Most unread ids of a sequence in a step if the last step drafted too."""
STEP_TOKENS = 1024
"""Most tokens of the target that a step encodes, so that no stream waits for long."""
LEAST_STEP_TOKENS = 32
"""Tokens of one sequence that a step may encode even beyond that."""


def folder_named(option: str) -> str | None:
    """Return the folder or hub name in ``retokenize:PATH``, None for another option."""
    return option.removeprefix(FORM) if option.startswith(FORM) else None


@dataclass(frozen=True)
class RetokenizeSpec(DrafterSpec):
    """A checkpoint in ``folder`` that is smaller than the target, with a tokenizer of its own."""

    name = "retokenize"
    wants = "retokenize:PATH, a smaller checkpoint with another tokenizer; memory as for model"
    costs = "as model"
    prior = 0.35
    suits = "targets whose tokenizer no small checkpoint has"
    retokenizes = True
    placed = True
    folder: Path

    @classmethod
    def recognise(cls, option: str | Path) -> Self | None:
        if option in (cls.name, FORM):
            raise ConfigError(f"drafter {cls.name!r} wants a folder; give {FORM}PATH.")
        named = folder_named(option) if isinstance(option, str) else None
        return None if named is None else cls(find_folder(named))

    def needs(self, context: DrafterContext) -> Needs:
        config, target = context.config, native_target(self.name, context)
        tokenizer = context.tokenizer
        if tokenizer is None:
            raise ConfigError(
                f"drafter {self.name!r} reads the target's text, and the target has no tokenizer; "
                "give a drafter that shares its token ids."
            )
        checkpoint = open_checkpoint(self.files)
        if not has_tokenizer(self.files):
            raise ModelError(f"{self.folder} has no tokenizer; give a folder with tokenizer.json.")
        model = load_model(
            checkpoint,
            str(target.dtype),
            target.device,
            min(checkpoint.shape.context, IDS_PER_TOKEN * context.max_model_len),
            config.drafter_recipe,
            config.window_of(self.name),
            keeps=config.repack_cache,
            cpus=config.placement and config.placement.drafter,
            coded_cache=config.coded_cache,
        )
        if not isinstance(model, NativeTransformer):
            raise ModelError(
                f"{self.folder}: drafter {self.name!r} needs a model that the native step runs; "
                "give one of a native family."
            )
        check_drafts(self.folder, model, chains=False)
        own = read_codec(self.files).backend
        theirs = pieces_of(tokenizer, target.shape.vocab_size, "the target")
        ours = pieces_of(own, model.shape.vocab_size, str(self.folder))
        shared = intersection(theirs, ours)
        if not shared.count:
            raise ModelError(f"{self.folder} shares no token with the target; give another.")
        model.library.set_ids(model.handle, shared.targets, shared.inputs)
        return Needs(
            model.page_bytes(config.page_size),
            max_nodes=num_nodes(config, config.max_draft_length, target),
            loaded=(model, Reencoder(tokenizer, own, theirs, ours, shared)),
            weight_bytes=model.added_bytes(None),
            note=str(shared),
        )

    def make(self, context: DrafterContext) -> Drafter:
        return RetokenizeDrafter(context)


@dataclass
class _TextState(CachedState):
    """A sequence's text in the drafter's ids, and the part of it that is in the drafter's cache.

    ``table`` holds its pages, ``keys`` the keys of full ones. ``told`` is how many tokens of the
    target there were when it was last drafted for. It ``waits`` if no page was free for it.
    """

    context: Context = field(default_factory=lambda: Context(0))
    table: array[int] = field(default_factory=lambda: array("i"))
    keys: list[bytes] = field(default_factory=list)
    told: int = 0
    waits: bool = False


class RetokenizeDrafter(CachedDrafter[NativeTransformer]):
    """Drafts as a model drafter does, from the text in its own ids, on pages of its own.

    It draws from its distribution over the shared tokens alone, with the noise of the target's
    position and ids, so that draws agree as often as the two distributions allow.
    """

    name = "retokenize"

    def __init__(self, context: DrafterContext) -> None:
        (model, self._reencoder), size = context.needs.loaded, context.config.page_size
        store = model.new_store(context.num_pages, size)
        super().__init__(context, model, store)
        self._pool = PagePool(context.num_pages, size)
        self._longest = min(model.max_length, store.num_slots) - self.max_length
        self._text = 0
        """Tokens of the target that this step may still encode."""

    def propose(
        self, batch: Sequence[Scheduled], budgets: Sequence[DraftBudget], noise: Noise
    ) -> Draft:
        self._text = STEP_TOKENS
        return super().propose(batch, budgets, noise)

    def _rows(self, item: Scheduled, budget: DraftBudget) -> Segment | None:
        sequence = item.sequence
        if not sequence.pipeline.native_handle:
            return None
        state = self._states.get(sequence.id)
        if state is None:
            state = self._states[sequence.id] = _TextState(context=Context(len(sequence.tokens)))
        if state.waits or len(state.context.ids) > self._longest:
            return None
        most = max(self._text, LEAST_STEP_TOKENS)
        self._text -= self._reencoder.take(state.context, sequence.tokens, most)
        behind, draws = self._behind(sequence, state, budget, max(self._room, USUAL_UNREAD))
        if not behind:
            return None
        self._room -= len(behind) if len(behind) > USUAL_UNREAD else 0
        end = state.num_computed = state.num_computed + len(behind)
        state.base, state.nodes, state.told = end, NO_NODES, len(sequence.tokens)
        state.pages = state.table[end // self._page_size :]
        return Segment(behind, end - len(behind), state.table, draws, 0, key=sequence.id)

    def _behind(
        self, sequence: SequenceState, state: _TextState, budget: DraftBudget, room: int
    ) -> tuple[list[int], bool]:
        """Return the ids to read next, up to ``room``, and whether a draft begins after them.

        Allocates pages for them and for the draft. A few ids that no draft could follow yet are
        left for later.
        """
        context = state.context
        ids, stop = context.ids, len(context.ids)
        whole = context.taken == len(sequence.tokens) and not context.pending
        state.num_computed = min(state.num_computed, max(0, stop - 1))  # drafts begin there
        if stop - state.num_computed > USUAL_UNREAD:
            self.catching_up = True
            self._share(state, sequence.request.cache_salt)
        elif not whole:
            self.catching_up |= context.taken < len(sequence.tokens)
            return [], False
        start = state.num_computed
        behind = ids[start : start + room]
        end = start + len(behind)
        draws = whole and end == stop
        most = end + (max(budget.depth, budget.nodes) if draws else 0)
        if stop > self._longest or not self._pool.grow(state.table, most):
            self._pool.free(state.table)  # no drafts for it until another sequence is released
            state.num_computed = state.noted = 0
            state.nodes, state.waits = NO_NODES, True
            return [], False
        return behind, draws

    def _share(self, state: _TextState, salt: str) -> None:
        """Take the pages that others have computed of a sequence's next ids."""
        size, done = self._page_size, state.num_computed
        full = (len(state.context.ids) - 1) // size  # the last id is computed anyway
        if done % size or done // size >= full:
            return
        extend_keys(state.keys, state.context.ids, full, size, salt)
        pages = self._pool.find(state.keys[done // size : full])
        if pages:
            self._pool.truncate(state.table, done)
            state.table.extend(self._pool.share(pages))
            state.num_computed += len(pages) * size
            state.noted = state.num_computed // size

    def num_unread(self, sequence: SequenceState) -> int:
        state: _TextState | None = self._states.get(sequence.id)
        if state is None:
            return len(sequence.tokens)
        untaken = len(sequence.tokens) - state.context.taken
        return untaken + len(state.context.ids) - state.num_computed

    def observe(self, record: StepRecord) -> None:
        """Keep entries of drafted tokens that were committed, and let others find full pages."""
        for item in record.plan.batch:
            state = self._states.get(item.sequence.id)
            if state is None or state.nodes is NO_NODES:
                continue
            self._keep_accepted(state, item.sequence.tokens[state.told :])
            full = min(state.num_computed, len(state.context.ids)) // self._page_size
            if full > state.noted:
                extend_keys(
                    state.keys,
                    state.context.ids,
                    full,
                    self._page_size,
                    item.sequence.request.cache_salt,
                )
                for page in range(state.noted, full):
                    self._pool.name(state.table[page], state.keys[page])
                state.noted = full

    def release(self, seq_id: str, ended: bool) -> None:
        state = self._states.pop(seq_id, None)
        if state is not None and state.table:
            self._pool.free(state.table)
            for other in self._states.values():
                other.waits = False
