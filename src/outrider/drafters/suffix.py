"""Suffix decoding: draft what most often followed the text's longest suffixes found earlier.

Oliaro et al., "SuffixDecoding" (2024). They are looked up in the sequence itself, and in past
outputs if these are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from ..base.types import (
    NO_NODES,
    Draft,
    DraftBudget,
    DraftNodes,
    Scheduled,
    SequenceState,
    StepRecord,
)
from ..native.choice import library
from ..native.interface import SUFFIX_DEPTH
from ..sampling.shared_noise import Noise
from .base import Drafter, DrafterContext, DrafterSpec, Needs
from .ngram_index import LOOKUP_WINDOW, lookup_window
from .suffix_index import Index, new_index

NATIVE_BYTES = 384
"""Most bytes per token of an index in C++; texts of two words come near."""
PYTHON_BYTES = 16
"""The same in Python."""
PYTHON_DRAFT_BYTES = 56
"""Bytes per token of the longest text while a draft in Python searches it."""
USUAL_UNREAD = 64
"""Most unread tokens in a step if every step drafts."""


class PastOutputs:
    """Past outputs of ``most`` tokens in all, kept apart by ``cache_salt``; the oldest go first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tokens = 0
        self._outputs: deque[tuple[str, int]] = deque()  # salt and length
        self._indices: dict[str, Index] = {}

    def add(self, salt: str, output: Sequence[int]) -> None:
        """Keep the end of an output."""
        kept = output[-self._most :]
        if not kept:
            return
        while self._tokens + len(kept) > self._most:
            oldest, length = self._outputs.popleft()
            self._tokens -= length
            if not self._indices[oldest].drop(length + 1):
                del self._indices[oldest]
        if salt not in self._indices:
            self._indices[salt] = new_index(2 * self._most)  # each output has an end, too
        self._indices[salt].extend(kept, ends=True)
        self._outputs.append((salt, len(kept)))
        self._tokens += len(kept)

    def of(self, salt: str) -> Index | None:
        """Return the index of the outputs with a salt."""
        return self._indices.get(salt)


@dataclass(frozen=True)
class SuffixSpec(DrafterSpec):
    """Suffix decoding; trees where ``max_draft_nodes`` asks for them and they can be verified."""

    name = "suffix"
    wants = "memory for indices, and with suffix_store for past outputs"
    costs = "a lookup, microseconds"
    prior = 0.6
    suits = "text that repeats its prompt, itself or past outputs: edits, agents, forms"

    def needs(self, context: DrafterContext) -> Needs:
        config = context.config
        trees = context.model.trees and not context.needs_logits
        nodes = config.max_draft_nodes or 0 if trees else 0
        token_bytes, once = NATIVE_BYTES, 0
        if library() is None:
            window = min(lookup_window(config, self.name), context.max_model_len)
            longest = max(config.suffix_store, window)
            token_bytes, once = PYTHON_BYTES, PYTHON_DRAFT_BYTES * longest
        return Needs(
            page_bytes=token_bytes * config.page_size,
            fixed_bytes=token_bytes * config.suffix_store + once,
            max_nodes=max(config.max_draft_length, nodes),
        )

    def make(self, context: DrafterContext) -> SuffixDrafter:
        config = context.config
        return SuffixDrafter(
            config.max_draft_length,
            context.needs.max_nodes,
            lookup_window(config, self.name),
            config.suffix_store,
        )


@dataclass
class _IndexState:
    """A sequence's index, and how many of its tokens were given to it."""

    index: Index
    known: int


class SuffixDrafter(Drafter):
    """Drafts what followed most often, see ``SuffixIndex.draft``.

    It searches the last ``window`` tokens of a sequence, and ``store`` tokens of past outputs,
    whichever drafter drafted for them.
    """

    name = "suffix"

    def __init__(
        self, max_length: int, max_nodes: int = 0, window: int = LOOKUP_WINDOW, store: int = 0
    ) -> None:
        self.max_length, self.max_nodes = max_length, max(max_length, max_nodes)
        self._room = window + 1  # its last token is what is looked up
        self._store = PastOutputs(store) if store else None
        self._states: dict[str, _IndexState] = {}
        self._running: dict[str, SequenceState] = {}
        """The sequences whose output the store will keep, by id."""

    def draft(self, sequence: SequenceState, budget: DraftBudget) -> DraftNodes:
        """Return nodes that may follow a sequence; it changes only this drafter's state."""
        tokens, reach = sequence.tokens, self._room + SUFFIX_DEPTH
        state = self._states.get(sequence.id)
        if state is None or len(tokens) - state.known > reach:
            state = _IndexState(new_index(self._room), max(0, len(tokens) - reach))
            self._states[sequence.id] = state
        self.catching_up = self.catching_up or len(tokens) - state.known > USUAL_UNREAD
        if state.known < len(tokens):
            state.index.extend(tokens[state.known :])
            state.known = len(tokens)
        store = self._store and self._store.of(sequence.request.cache_salt)
        tokens, parents, *odds = state.index.draft(store, budget.depth, budget.nodes)
        margins = [log((count + 0.5) / (rest + 0.5)) for count, rest in zip(*odds, strict=True)]
        return DraftNodes(tokens, parents, margins=margins)

    def propose(
        self, batch: Sequence[Scheduled], budgets: Sequence[DraftBudget], noise: Noise
    ) -> Draft:
        self.catching_up = False
        return Draft(
            self.draft(item.sequence, budget) if budget.depth else NO_NODES
            for item, budget in zip(batch, budgets, strict=True)
        )

    def peek(self, sequence: SequenceState, depth: int) -> DraftNodes | None:
        return self.draft(sequence, DraftBudget(depth, depth))

    def observe(self, record: StepRecord) -> None:
        if self._store is not None:
            self._running.update((item.sequence.id, item.sequence) for item in record.plan.batch)

    def release(self, seq_id: str, ended: bool) -> None:
        self._states.pop(seq_id, None)
        sequence = self._running.pop(seq_id, None)
        if sequence is not None and ended and self._store is not None:
            output = sequence.tokens[sequence.prompt_length :]
            self._store.add(sequence.request.cache_salt, output)
