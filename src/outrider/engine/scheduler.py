"""Chooses the rows and pages of a step: continuous batching, chunked prefill, preemption."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat

from ..base.types import (
    NO_DRAFT,
    Draft,
    DraftBudget,
    Drafted,
    DraftNodes,
    Event,
    HiddenStates,
    Origin,
    Plan,
    Scheduled,
    SequenceState,
    Start,
    StepRecord,
    StepSeconds,
    Verdict,
)
from ..cache.pages import PagePool, extend_keys
from ..cache.snapshots import Snapshots
from ..errors import MemoryBudgetError, shown

logger = logging.getLogger("outrider")
ACCEPTED, BONUS, PLAIN = Origin.ACCEPTED, Origin.BONUS, Origin.PLAIN
new_event = partial(tuple.__new__, Event)
"""Returns an event from its fields, without a Python call for each token."""


def unexpected(error: Exception) -> str:
    """Return the sentence for a request that an unforeseen error ends; log its trace."""
    logger.error("a request failed", exc_info=error)
    return f"an unexpected error ended the request: {shown(error)}"


Choose = Callable[[SequenceState], tuple[str, DraftBudget]]
"""Returns the drafter of a sequence and the budget of its draft."""


class Scheduler:
    """Schedules without phases: a sequence's next rows are its tokens that are not computed yet.

    At most ``max_num_batched_tokens`` committed rows run in a step. Sequences with a common prefix
    share its pages if ``caches`` is set; where layers have states, only up to the longest prefix
    whose states are in ``snapshots``.
    """

    def __init__(
        self,
        pool: PagePool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        caches: bool = True,
        snapshots: Snapshots | None = None,
    ) -> None:
        self.pool, self._caches, self.snapshots = pool, caches, snapshots
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []
        self.preemptions = 0
        self.rows = 0  # committed rows scheduled since the start
        self.queried = self.hit = 0  # tokens looked up in the prefix cache, and found
        self._max_num_seqs, self._max_rows = max_num_seqs, max_num_batched_tokens
        self._max_model_len = max_model_len
        self.ahead = 0
        """Tokens after a draft that get pages too if some are free, for drafting ahead."""

    def add(self, sequence: SequenceState) -> None:
        """Queue a sequence; raise MemoryBudgetError if the pool could not hold it even alone."""
        most = sequence.request.params.max_tokens
        sequence.limit = self._max_model_len
        if most is not None:
            sequence.limit = min(sequence.prompt_length + most, self._max_model_len)
        self.check_holds(sequence.limit)
        place = len(self.waiting)
        while place and self.waiting[place - 1].request.priority > sequence.request.priority:
            place -= 1
        self.waiting.insert(place, sequence)

    def check_holds(self, tokens: int) -> None:
        """Raise MemoryBudgetError if the pool cannot hold a sequence so long even alone."""
        needed = self.pool.pages_for(tokens)
        if needed > self.pool.num_usable:
            raise MemoryBudgetError(
                f"the request may grow to {tokens} tokens, which need {needed} "
                f"cache pages, but the cache has {self.pool.num_usable}; "
                "lower max_tokens or give more memory."
            )

    def take_over(self, other: "Scheduler") -> list[SequenceState]:
        """Queue another scheduler's sequences, running ones first, take its counts; return them.

        They lose their pages. Raises MemoryBudgetError if the pool cannot hold one of them;
        nothing is moved then.
        """
        moved = [*other.running, *other.waiting]
        self.check_holds(max([sequence.limit for sequence in moved], default=0))
        for sequence in other.running:
            other._take_pages(sequence)
        other.running.clear()
        other.waiting.clear()
        self.waiting.extend(moved)
        self.preemptions, self.rows = other.preemptions, other.rows
        self.queried, self.hit = other.queried, other.hit
        return moved

    @property
    def decoding(self) -> list[SequenceState]:
        """The running sequences that only have their last token to compute."""
        return [s for s in self.running if s.num_computed == len(s.tokens) - 1]

    def schedule(
        self, choose: Choose, max_rows: int | None = None, seconds: StepSeconds | None = None
    ) -> Plan:
        """Choose the rows of the next step and give their sequences pages.

        Running sequences go first, oldest first; when pages run out the youngest is preempted and
        will be computed again. Drafts get free pages only and preempt nothing.
        ``seconds`` are those of the step, which has begun.
        """
        chosen: list[tuple[SequenceState, int]] = []
        preempted: list[SequenceState] = []
        room = self._max_rows if max_rows is None else min(self._max_rows, max_rows)
        for sequence in self.running:  # preemption may pop the youngest, at its end
            count = min(len(sequence.tokens) - sequence.num_computed, room)
            if count and self._make_room(sequence, count, preempted):
                chosen.append((sequence, count))
                room -= count
        coming: set[bytes] = set()
        if self.waiting and self._caches:
            coming.update(key for s in self.running for key in s.keys[s.named :])
        place = 0  # in the queue: skips those that wait for pages that others compute now
        most = 0 if preempted else self._max_num_seqs
        while room and place < len(self.waiting) and len(self.running) < most:
            sequence = self.waiting[place]
            if self._comes_soon(sequence, coming):
                place += 1
                continue
            if not self._let_in(sequence):
                break
            del self.waiting[place]
            self.running.append(sequence)
            coming.update(sequence.keys[sequence.named :])
            count = min(len(sequence.tokens) - sequence.num_computed, room)
            chosen.append((sequence, count))
            room -= count
        rows = sum([count for _, count in chosen])
        self.rows += rows
        batch = [self._scheduled(sequence, count, choose) for sequence, count in chosen]
        decoding = sum([item.samples and item.count == 1 for item in batch])
        if self.ahead:
            self._give_ahead(batch)
        return Plan(batch, preempted, rows, decoding, seconds or StepSeconds())

    def _findable(self, sequence: SequenceState) -> list[bytes] | None:
        """Return the keys of pages that others may have computed; None if none can be used.

        The last token is always computed, and so is all of a prompt with log probabilities.
        """
        scored = sequence.request.params.prompt_logprobs is not None and not sequence.sample_index
        if scored or not self._caches:
            return None
        return sequence.keys[: (len(sequence.tokens) - 1) // self.pool.page_size]

    def _comes_soon(self, sequence: SequenceState, coming: set[bytes]) -> bool:
        """Return True if a running sequence computes the next page of a waiting one."""
        if coming.isdisjoint(sequence.keys) or (keys := self._findable(sequence)) is None:
            return False
        known = len(self.pool.find(keys))
        return known < len(keys) and keys[known] in coming

    def _let_in(self, sequence: SequenceState) -> bool:
        """Give a waiting sequence the cached pages of its prefix, and new ones for the rest.

        Returns False unless all of it fits, so that it is not preempted at once.
        """
        pool, tokens, keys = self.pool, len(sequence.tokens), self._findable(sequence)
        shared = pool.find(keys or ())
        if self.snapshots is not None and shared:
            shared = shared[: self.snapshots.longest(sequence.keys[: len(shared)])]
        if pool.pages_for(tokens + 1) - len(shared) > pool.num_free - pool.num_idle(shared):
            return False
        sequence.pages.extend(pool.share(shared))
        if self.snapshots is not None and shared:
            sequence.states = self.snapshots.get(sequence.keys[len(shared) - 1])
        sequence.num_computed, sequence.named = len(shared) * pool.page_size, len(shared)
        pool.grow(sequence.pages, tokens)
        if sequence.start is None:
            sequence.start = Start(time.perf_counter(), sequence.num_computed)
            self.queried += 0 if keys is None else tokens
            self.hit += sequence.num_computed
        return True

    def _name_pages(self, sequence: SequenceState) -> None:
        """Make a sequence's pages that are full of computed tokens findable for others."""
        size = self.pool.page_size
        full = sequence.num_computed // size
        if not self._caches or full == sequence.named:
            return
        salt = sequence.request.cache_salt
        extend_keys(sequence.keys, sequence.tokens, full, size, salt)
        for page in range(sequence.named, full):
            self.pool.name(sequence.pages[page], sequence.keys[page])
        sequence.named = full

    def _make_room(
        self, sequence: SequenceState, count: int, preempted: list[SequenceState]
    ) -> bool:
        """Give a running sequence pages, preempting younger ones; False if it was preempted."""
        while not self.pool.grow(sequence.pages, sequence.num_computed + count):
            youngest = self.running.pop()
            self._take_pages(youngest)
            self.waiting.appendleft(youngest)
            preempted.append(youngest)
            if youngest is sequence:
                return False
        return True

    def _take_pages(self, sequence: SequenceState) -> None:
        """Preempt a running sequence: free its pages, so that all of it is computed again."""
        self.pool.free(sequence.pages)
        sequence.num_computed = sequence.named = 0
        self.preemptions += 1

    def _scheduled(self, sequence: SequenceState, count: int, choose: Choose) -> Scheduled:
        """Return a sequence's rows, with a draft as deep as its limit and the free pages allow."""
        start, known = sequence.num_computed, len(sequence.tokens)
        samples = start + count == known
        drafter, budget = choose(sequence)
        if not samples or count > 1:
            budget = NO_DRAFT
        elif budget.depth:
            budget = self._affordable(sequence, budget)
        return Scheduled(sequence, start, count, samples, drafter, budget)

    def _affordable(self, sequence: SequenceState, budget: DraftBudget) -> DraftBudget:
        """Return ``budget`` as far as the sequence's limit and the free pages allow."""
        known, depth, nodes = len(sequence.tokens), budget.depth, budget.nodes
        branches = nodes > depth
        depth = max(0, min(depth, sequence.limit - known - 1))
        while depth and not self.pool.grow(sequence.pages, known + (nodes if branches else depth)):
            depth -= 1
        if depth == budget.depth:
            return budget
        return budget._replace(depth=depth, nodes=nodes if branches and depth else depth)

    def _give_ahead(self, batch: Sequence[Scheduled]) -> None:
        """Give blank pages to tokens that may be drafted ahead, after the drafts."""
        pool = self.pool
        for item in batch:
            sequence, depth = item.sequence, item.budget.depth
            most = min(len(sequence.tokens) + depth + self.ahead, sequence.limit)
            if depth and pool.pages_for(most) - len(sequence.pages) <= pool.num_blank:
                pool.grow(sequence.pages, most)

    def remove(self, sequence: SequenceState) -> None:
        """Take a sequence out, whatever its state, and free its pages at once."""
        self.pool.free(sequence.pages)
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def commit(
        self, plan: Plan, draft: Draft, verdict: Verdict, states: HiddenStates | None = None
    ) -> StepRecord:
        """Advance counters, emit tokens, truncate pages; finished sequences leave."""
        record = StepRecord(plan, draft, verdict, states, [], [], set())
        events, ended = record.events, record.ended
        for i, item in enumerate(plan.batch):
            sequence = item.sequence
            sequence.num_computed += item.count
            if not item.samples:
                self._name_pages(sequence)
                continue
            error = verdict.errors[i]
            if draft[i].tokens:
                record.drafters.add(item.drafter)
            if error is None:
                try:
                    events += self._emit(item, draft[i], verdict, i)
                except Exception as problem:  # in its text; other sequences continue
                    error = unexpected(problem)
            if error is not None:
                self.remove(sequence)
                ended.append(sequence)
                origin, counts = (sequence.request.id, sequence.sample_index), sequence.counts
                events.append(Event(*origin, None, "", PLAIN, "error", error, counts))
                continue
            # Rows of accepted nodes have their keys and values; the last token has none yet.
            sequence.num_computed = len(sequence.tokens) - 1
            self._name_pages(sequence)
            if sequence.finish_reason is not None:
                self.remove(sequence)
                ended.append(sequence)
            else:
                self.pool.truncate(sequence.pages, len(sequence.tokens))
        self._check(plan)
        plan.seconds.stop()
        return record

    def _emit(
        self, item: Scheduled, draft: DraftNodes, verdict: Verdict, index: int
    ) -> list[Event]:
        """Append tokens up to the first that ends the output, dropping the rest; return events."""
        sequence, path, depth = item.sequence, verdict.path[index], draft.depth
        start = prompt_logprobs = drafted = counts = None
        if sequence.num_output == 0:
            start, prompt_logprobs = sequence.start, sequence.prompt_logprobs or None
        tokens, texts = self._appended(sequence, verdict.tokens[index])
        origins = [PLAIN]
        if depth:
            origins = [*[ACCEPTED] * len(path), BONUS]
            drafted = Drafted(item.drafter, draft.tokens, depth, min(len(path), depth))
        if sequence.finish_reason is not None:
            counts = sequence.counts
            if drafted is not None and len(tokens) < depth:
                drafted = drafted.cut(len(tokens))  # depths beyond the end were not drafted
        if item.count == 1:
            depth, accepted = (0, 0) if drafted is None else (drafted.depth, drafted.accepted)
            sequence.counts.record(depth, len(draft.tokens), accepted, len(tokens))
        others = [None] * (len(tokens) - 1)
        columns = (  # the fields of Event, in order
            repeat(sequence.request.id),
            repeat(sequence.sample_index),
            tokens,
            texts,
            origins,
            [*others, sequence.finish_reason],
            repeat(None),
            [*others, counts],
            (verdict.logprobs and verdict.logprobs[index]) or repeat(None),
            [prompt_logprobs, *others],
            [drafted, *others],
            [start, *others],
            [*others, sequence.stop_reason],
            repeat(0),
        )
        return [*map(new_event, zip(*columns, strict=False))]

    def _appended(
        self, sequence: SequenceState, drawn: list[int]
    ) -> tuple[list[int], Iterable[str]]:
        """Append tokens up to the first that ends the output; return them with their texts."""
        tokens, ends = sequence.tokens, sequence.request.end_token_ids
        goes_on = len(tokens) + len(drawn) < sequence.limit and ends.isdisjoint(drawn)
        if goes_on and not sequence.text.writes:
            tokens += drawn
            return drawn, repeat("")
        texts: list[str] = []
        for token in drawn:
            tokens.append(token)
            texts.append(self._advance(sequence, token))
            if sequence.finish_reason is not None:
                break
        return drawn[: len(texts)], texts

    def _advance(self, sequence: SequenceState, token: int) -> str:
        """Set ``finish_reason`` if the last ``token`` ends the output; return the text to show."""
        request = sequence.request
        may_stop = sequence.num_output > request.params.min_tokens
        # Before min_tokens a grammar allows EOS only if its form is complete.
        complete = request.params.structured_outputs and token in request.eos_token_ids
        if token in request.end_token_ids and (may_stop or complete):
            sequence.finish_reason = "stop"
            if token not in request.eos_token_ids or request.params.ignore_eos:
                sequence.stop_reason = token
            shown = request.params.include_stop_str_in_output
            return (sequence.text.push(token, False)[0] if shown else "") + sequence.text.flush()
        text, stopped = sequence.text.push(token, may_stop)
        if stopped:
            sequence.finish_reason = "stop"
            sequence.stop_reason = sequence.text.stopped_by
            return text
        if len(sequence.tokens) >= sequence.limit:
            sequence.finish_reason = "length"
            text += sequence.text.flush()
        return text

    def _check(self, plan: Plan) -> None:
        """Assert that counters, tokens and pages of a step's sequences fit together."""
        for item in plan.batch:
            sequence = item.sequence
            if sequence.finish_reason is not None or not sequence.pages:
                assert not sequence.pages
                continue
            assert len(sequence.pages) >= self.pool.pages_for(sequence.num_computed)
            if item.samples:
                assert sequence.num_computed == len(sequence.tokens) - 1
            else:
                assert sequence.num_computed < len(sequence.tokens)
