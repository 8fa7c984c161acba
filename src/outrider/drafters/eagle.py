"""EAGLE-3: a layer on the target's hidden states drafts, with a cache of its own.

Li et al., "EAGLE-3: Scaling up inference acceleration of large language models via training-time
test", 2025; heads that draft in one pass: Hui et al., "P-EAGLE: parallel-drafting EAGLE", 2026.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from ..base.config import EngineConfig
from ..base.types import Draft, DraftBudget, Scheduled, SequenceState, StepRecord
from ..checkpoints.heads import EAGLE1, EAGLE3, PEAGLE
from ..models.native import NativeTransformer
from ..models.native_block import NativeBlock
from ..models.native_eagle1 import NativeEagle1
from ..models.native_heads import NativeHead
from ..models.native_mtp import JoinedModel
from ..models.native_store import FEW_ROWS, LASTING_ROWS, HiddenRoom
from ..models.rows import Segment
from ..sampling.shared_noise import Noise
from .base import Drafter, DrafterContext, Needs
from .forward import ForwardDrafter, num_nodes
from .heads import HeadSpec, native_target
from .likely import LikelyIds
from .states import PageNotes, StateRing, Waiting

HeadT = TypeVar("HeadT", bound=NativeHead | JoinedModel | NativeBlock)
UNREAD_STATES = 4096
"""Most states that wait to be read, of all sequences together, or those of a step if more; a
sequence that has more unread drafts from a shorter context."""
WAITING_PROMPT_ROWS = 1024
"""Most prompt rows, of all sequences, whose states can wait until the first token is emitted."""
UNSEEN_ROWS = 128
"""Most rows that wait to be taken in, from steps in which others drafted."""
SURE_ROWS = LASTING_ROWS - UNSEEN_ROWS - 2 * FEW_ROWS
"""Rows of later steps up to which a row may wait for its state to be made."""
AWAKE_STEPS = 64
"""Steps for which a step with drafts keeps a head awake; asleep it drops older states."""
MOST_AWAKE_STEPS = 256
"""Most steps without a draft after which a head sleeps."""
WAITING_ROWS = 32
"""Other rows whose states are made together: one per step would read a matrix for one row."""


@dataclass(frozen=True)
class EagleSpec(HeadSpec):
    """An EAGLE-1, EAGLE-3 or P-EAGLE checkpoint in ``folder``."""

    name = "eagle3"
    wants = "an EAGLE head of any kind trained for the target; memory for it and its cache"
    costs = "a layer for each token of depth"
    prior = 0.8
    kind = "EAGLE head"
    proposes = "a head on the target's hidden states, proposes {k} tokens"
    kinds = (EAGLE1, EAGLE3, PEAGLE)

    def needs(self, context: DrafterContext) -> Needs:
        config, head, target = context.config, self.head(), native_target(self.name, context)
        make = NativeEagle1 if head.kind == EAGLE1 else NativeHead
        model = make(head, target, context.max_model_len, config.drafter_quantization)
        return replace(head_needs(config, model, target), loaded=(model, None))

    def make(self, context: DrafterContext) -> Drafter:
        return EagleDrafter(context)


def head_needs(
    config: EngineConfig,
    model: NativeHead | JoinedModel | NativeBlock,
    target: NativeTransformer,
    longest: int | None = None,
) -> Needs:
    """Return the needs of a head that drafts ``longest`` tokens, beside its target."""
    nodes = num_nodes(config, longest or config.max_draft_length, target)
    width = 4 * model.hidden_size
    layers = tuple(sorted({*model.target_layers}))
    waiting_bytes = 4 * WAITING_PROMPT_ROWS * len(layers) * target.hidden_size
    return Needs(
        model.page_bytes(config.page_size) + width,
        width * _room(config, nodes) + waiting_bytes,
        nodes,
        layers,
        weight_bytes=model.added_bytes(target),
    )


def _room(config: EngineConfig, nodes: int) -> int:
    """Return the most states that wait to be read."""
    return max(UNREAD_STATES, config.max_num_batched_tokens + config.max_num_seqs * (1 + nodes))


@dataclass
class _HeadState:
    """The part of a sequence that is in the head's cache.

    Entries at positions from ``first`` to ``num_computed`` are the sequence's. The first ``noted``
    pages are noted as complete.
    """

    first: int = 1
    num_computed: int = 1
    noted: int = 0


class Unseen(NamedTuple):
    """A step that was not taken in yet: its batch, accepted nodes, first rows and states."""

    batch: Sequence[Scheduled]
    paths: Sequence[Sequence[int]]
    firsts: Sequence[int]
    room: HiddenRoom


class EagleDrafter(ForwardDrafter[HeadT], Generic[HeadT]):
    """Drafts with a head that reads each token with the target's state of the token before it.

    So a token's cache entry depends on the tokens up to it, as in any KV cache, and pages are
    shared as the target's are. The first token has no state before it, and so no entry.
    """

    name = "eagle3"
    _ahead = 0
    """Positions by which an entry lies before the token that it is counted with."""

    def __init__(self, context: DrafterContext) -> None:
        model: HeadT
        likely: LikelyIds | None
        config, (model, likely) = context.config, context.needs.loaded
        store = model.new_store(context.num_pages, config.page_size)
        super().__init__(context, model, store, likely)
        self.target_layers = context.needs.target_layers
        self.max_length = min(self.max_length, model.longest or self.max_length)
        self.rows_at_once = self.max_length if model.mask_state is not None else 0
        self._window = config.window_of(self.name)
        self._usual = self.max_length + 1
        self._ring = StateRing(_room(config, self.max_nodes), model.hidden_size)
        self._end_states = np.zeros((context.num_pages, model.hidden_size), np.float32)
        """States of each page's last token, from which others continue after a shared prefix."""
        self._notes = PageNotes(self._page_size)
        self._ended: dict[int, bytes] = {}  # pages whose last token's state is kept, or waits
        self._unseen = deque[Unseen]()
        self._num_unseen = 0
        """Rows of steps that were not taken in yet."""
        self._drafts = False
        """True if this head drafts in the present step."""
        self._awake = MOST_AWAKE_STEPS
        """Steps without drafts until it sleeps."""
        self._waiting: dict[str, list[Waiting]] = {}
        self._prompts: set[str] = set()  # sequences whose first token is not out yet

    def propose(
        self, batch: Sequence[Scheduled], budgets: Sequence[DraftBudget], noise: Noise
    ) -> Draft:
        wanted = {
            item.sequence.id
            for item, budget in zip(batch, budgets, strict=True)
            if budget.depth and item.start + item.count >= 2
        }
        if wanted:
            self._drafts = True
            self._see()
            if self._waiting:
                self._make([n for n in self._waiting if n in wanted or n not in self._prompts])
        return super().propose(batch, budgets, noise)

    def _rows(self, item: Scheduled, budget: DraftBudget) -> Segment | None:
        sequence, stop = item.sequence, item.start + item.count
        if stop < 2:
            return None
        state = self._state(sequence, stop)
        start = state.num_computed
        if start >= stop:
            return None  # the state of the token before the last one is not known
        end = min(stop, start + max(self._room, self._usual))
        if stop - start > self._usual:
            self._room -= end - start
            self.catching_up = True
        segment = self._segment(sequence, state, end)
        state.num_computed = end
        self._notes.overwrite(sequence, start - self._ahead)
        if end < stop:
            return segment
        return self._model.behind(segment, budget.depth, sequence.tokens[stop - 1])

    def _segment(self, sequence: SequenceState, state: _HeadState, end: int) -> Segment:
        """Return the rows of a sequence that are to be read next, up to ``end``."""
        start = state.num_computed
        known = self._ring.first_known(sequence.id, end - 1)
        states = self._ring.read(sequence.id, max(known, start - 1), end - 1)
        if end - start > self._usual:  # old states, which new ones may overwrite
            states = states.copy()
        if known > start - 1:  # the first state ends a page that another sequence computed
            page = sequence.pages[start // self._page_size - 1]
            if any(page in each.ends for parts in self._waiting.values() for each in parts):
                self._make([*self._waiting])
            states = np.concatenate([self._end_states[page : page + 1], states])
        self._ring.forget(sequence.id, end - 1)
        first = state.first if self._window is None else max(state.first, end - self._window)
        ahead = self._ahead
        return Segment(
            sequence.tokens[start - ahead : end - ahead],
            start - ahead,
            sequence.pages,
            0,
            sequence.prompt_length,
            key=sequence.id,
            first=min(first, start) - ahead,
            states=states,
        )

    def _state(self, sequence: SequenceState, stop: int) -> _HeadState:
        """Return a sequence's state; its context starts later if states have been lost."""
        state = self._states.get(sequence.id)
        if state is None:
            state = self._states[sequence.id] = self._known(sequence)
        known = self._ring.first_known(sequence.id, stop - 1)
        begin = known if self._has_end(sequence, known) else known + 1
        if self._window is not None:
            begin = max(begin, stop - self._window)
        if begin > state.num_computed:
            state.first, state.num_computed, state.noted = begin, begin, 0
        return state

    def num_unread(self, sequence: SequenceState) -> int:
        state = self._states.get(sequence.id) or self._known(sequence)
        unread = len(sequence.tokens) - state.num_computed
        return unread if self._awake else min(unread, self._num_unseen)

    def observe(self, record: StepRecord) -> None:
        """Keep a step, and take it in at once if this head drafted or a prompt was read.

        Steps in which others draft wait, so that they cost next to nothing. A head that has not
        drafted for long keeps only the latest ones, and later drafts from a shorter context.
        """
        self._learn(record)
        states, plan = record.states, record.plan
        assert states is not None
        room = states.layers
        assert isinstance(room, HiddenRoom)
        self._unseen.append(Unseen(plan.batch, record.verdict.path, states.first, room))
        self._num_unseen += room.count
        many = self._num_unseen >= UNSEEN_ROWS or room.number is None
        if not self._awake and not self._drafts:
            self._let_go(room)
        elif many or self._drafts or plan.rows != plan.decoding:
            self._see()
        more = AWAKE_STEPS if self._drafts else -1
        self._awake = max(0, min(self._awake + more, MOST_AWAKE_STEPS))
        if not self._awake and self._waiting:
            self._see()
            self._make([*self._waiting])
        self._drafts = False

    def _let_go(self, room: HiddenRoom) -> None:
        """Drop all but the latest steps; all if the next one overwrites the last one's states."""
        most = 0 if room.number is None else UNSEEN_ROWS
        while self._num_unseen > most:
            self._num_unseen -= self._unseen.popleft().room.count

    def _see(self) -> None:
        """Take in the steps that were kept."""
        if self._unseen:
            for each in self._unseen:
                self._see_one(*each)
            self._make_some(self._unseen[-1].room)
            self._unseen.clear()
            self._num_unseen = 0

    def _see_one(
        self,
        batch: Sequence[Scheduled],
        paths: Sequence[Sequence[int]],
        firsts: Sequence[int],
        room: HiddenRoom,
    ) -> None:
        """Keep the hidden states of committed rows, and make states of them, at once or later."""
        waiting = self._waiting
        hidden, offset, number = room.room.array, room.first, room.number
        # There may be layers in between that other drafters want.
        order = [room.room.layers.index(layer) for layer in self._model.target_layers]
        now: list[tuple[str, Waiting]] = []
        for item, path, first in zip(batch, paths, firsts, strict=True):
            start, sequence, name = item.start, item.sequence, item.sequence.id
            if not sequence.pages:
                continue  # it has ended, or begins anew
            begin: int = offset + first
            stop: int = begin + item.count
            rows = [*range(begin, stop)]
            if path:
                rows += [stop + node for node in path]
            ends = self._ends(sequence, start, len(rows))
            parts = waiting.setdefault(name, [])
            if item.samples:
                self._prompts.discard(name)
                waits = number is not None and len(rows) <= WAITING_ROWS
            else:
                self._prompts.add(name)
                waits = self._num_waiting(waiting) + len(rows) <= WAITING_PROMPT_ROWS
            if parts and parts[-1].goes_on(hidden, start):
                parts[-1].add(rows, ends)
            else:
                part = Waiting(hidden, order, rows, start, ends, number)
                parts.append(part.copied() if waits and not item.samples else part)
            if not waits:
                now += [(name, each) for each in waiting.pop(name)]
            state = self._states.get(name)
            if state is not None and state.first == 1:
                whole = state.num_computed - self._ahead
                state.noted = self._notes.note(sequence, state.noted, whole)
        if now:
            self._fuse(now)

    def _make_some(self, room: HiddenRoom) -> None:
        """Make the states of decoding sequences, if they are many or next steps need the room.

        Sequences whose prompt was read in chunks have copies.
        """
        others = [name for name in self._waiting if name not in self._prompts]
        parts = [part for name in others for part in self._waiting[name]]
        if sum([len(part.rows) for part in parts]) >= WAITING_ROWS:
            self._make(others)
        elif room.number is not None:
            oldest = room.number + room.count - SURE_ROWS
            if any(part.number is not None and part.number < oldest for part in parts):
                self._make(others)

    def _ends(self, sequence: SequenceState, start: int, count: int) -> dict[int, int]:
        """Return by page which of ``count`` tokens from ``start`` on is its last one, if any.

        A sequence that has ended has given its pages back.
        """
        size = self._page_size
        if not sequence.pages or start % size + count < size:
            return {}
        ends: dict[int, int] = {}
        for last in range(-(start + 1) % size, count, size):
            number = (start + last) // size
            page = sequence.pages[number]
            ends[page] = last
            if number < len(sequence.keys):
                self._ended[page] = sequence.keys[number]
        return ends

    def _has_end(self, sequence: SequenceState, position: int) -> bool:
        """Return True if the state before a position is that of a page's last token, and kept.

        It is not kept if the sequence that computed the token ended with it.
        """
        number, between = divmod(position, self._page_size)
        if between or not 0 < number <= len(sequence.keys):
            return False
        return self._ended.get(sequence.pages[number - 1]) == sequence.keys[number - 1]

    def _num_waiting(self, sequences: Iterable[str]) -> int:
        return sum(len(part.rows) for name in sequences for part in self._waiting[name])

    def _make(self, sequences: Iterable[str]) -> None:
        """Make the states of sequences that have waited."""
        self._fuse([(name, part) for name in sequences for part in self._waiting.pop(name)])

    def _fuse(self, parts: Sequence[tuple[str, Waiting]]) -> None:
        """Make states, together for parts in one array as far as the ring has room."""
        begin = count = 0
        for end, (_, part) in enumerate(parts):
            if (
                part.hidden is not parts[begin][1].hidden
                or count + len(part.rows) > self._ring.room
            ):
                self._fuse_together(parts[begin:end])
                begin, count = end, 0
            count += len(part.rows)
        self._fuse_together(parts[begin:])

    def _fuse_together(self, parts: Sequence[tuple[str, Waiting]]) -> None:
        ring, pages, at = self._ring, list[int](), list[int]()
        which, to = array("i"), array("i")
        for name, part in parts:
            places = ring.append(name, part.start, len(part.rows))
            which.extend(part.rows)
            to += places
            pages += part.ends
            at += [places[n] for n in part.ends.values()]
        if which:
            hidden = parts[0][1].hidden
            layers = [hidden[i] for i in parts[0][1].order]
            self._model.fuse(layers, which, ring.states, to)
        if pages:
            self._end_states[pages] = ring.states[at]

    def _known(self, sequence: SequenceState) -> _HeadState:
        """Return the state of a new sequence, whose prefix others may have computed."""
        noted = self._notes.num_whole(sequence)
        return _HeadState(1, max(1, noted * self._page_size + self._ahead), noted)

    def release(self, seq_id: str, ended: bool) -> None:
        if self._awake:
            self._see()
        if any(each.ends for each in self._waiting.get(seq_id, ())):
            self._make([seq_id])  # others may continue after its pages
        self._waiting.pop(seq_id, None)
        self._prompts.discard(seq_id)
        self._ring.release(seq_id)
        super().release(seq_id, ended)
