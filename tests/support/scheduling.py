"""What the scheduler's tests share: a made-up model, drafters for it, and a step that asserts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from outrider.base.types import (
    Draft,
    DraftBudget,
    DraftNodes,
    Event,
    Origin,
    Plan,
    Request,
    SamplingParams,
    Scheduled,
    SequenceState,
    StepRecord,
    StepSeconds,
    Verdict,
)
from outrider.cache.pages import PagePool
from outrider.engine.scheduler import Scheduler
from outrider.sampling.acceptance import NOT_FINITE
from outrider.sampling.pipeline import RequestPipeline, SequencePipeline
from outrider.text.stop import StopFinder
from tests.support.pages import check_pages

VOCABULARY = 12
EOS = 11


class Letters:
    """Token 0 is "a", token 1 is "b", and so on."""

    writes = True

    def __init__(self, stop: Iterable[str] = ()) -> None:
        self.finder = StopFinder(tuple(stop))

    def push(self, token: int, may_stop: bool) -> tuple[str, bool]:
        return self.finder.push(chr(97 + token)) if may_stop else (chr(97 + token), False)

    def flush(self) -> str:
        return self.finder.flush()

    @property
    def stopped_by(self) -> str | None:
        return self.finder.stopped_by


def make(
    id: str, prompt: Iterable[int], eos: Iterable[int] = (EOS,), seed: int = 0, **params: object
) -> SequenceState:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    request = Request(id, tuple(prompt), sampling, seed, frozenset(eos))
    text = Letters(sampling.stop or ())
    law = SequencePipeline(RequestPipeline(request, 100))
    return SequenceState(f"{id}/0", request, 0, text, law, list(request.prompt_token_ids))


def next_token(sequence: SequenceState, tokens: list[int]) -> int:
    """What the made-up target says after ``tokens``; ends are masked before min_tokens."""
    state = sequence.request.seed
    for token in tokens[-5:]:
        state = (state * 31 + token * 7 + 3) % 10007
    token = (state + len(tokens)) % VOCABULARY
    early = len(tokens) - sequence.prompt_length < sequence.request.params.min_tokens
    while early and token in sequence.request.end_token_ids:
        token = (token + 1) % VOCABULARY
    return token


Propose = Callable[[SequenceState, int], tuple[list[int], list[int]]]


def nothing(sequence: SequenceState, length: int) -> tuple[list[int], list[int]]:
    return [], []


def chain(right: int) -> Propose:
    """A full chain whose first ``right`` tokens the target agrees with."""

    def propose(sequence: SequenceState, length: int) -> tuple[list[int], list[int]]:
        tokens = list(sequence.tokens)
        for i in range(length):
            y = next_token(sequence, tokens)
            tokens.append(y if i < right else (y + 1) % VOCABULARY)
        return tokens[len(sequence.tokens) :], list(range(-1, length - 1))

    return propose


def ragged(draw: random.Random, max_nodes: int) -> Propose:
    """Trees and chains of any shape, some branches of them right."""

    def propose(sequence: SequenceState, length: int) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        parents: list[int] = []
        paths: list[list[int]] = []
        taken: set[tuple[int, int]] = set()
        most = max_nodes if max_nodes > 4 else length
        for _ in range(draw.randrange(most + 1) if length else 0):
            parent = draw.randrange(-1, len(tokens))
            path = paths[parent] if parent >= 0 else []
            y = next_token(sequence, sequence.tokens + path)
            token = y if draw.random() < 0.7 else draw.randrange(VOCABULARY)
            if len(path) < length and (parent, token) not in taken:
                taken.add((parent, token))
                parents.append(parent)
                tokens.append(token)
                paths.append([*path, token])
        return tokens, parents

    return propose


def record_of(
    batch: list[Scheduled],
    rows: int = 0,
    decoding: int = 0,
    seconds: float = 0.0,
    emitted: int = 0,
    drafter: str | None = None,
) -> StepRecord:
    """Return the record of a step in which a quarter of the time was drafting."""
    took = StepSeconds()
    took.step, took.draft, took.verify = seconds, 0.25 * seconds, 0.75 * seconds
    drafters = set() if drafter is None else {drafter}
    event = Event("a", 0, 5, "", Origin.PLAIN)
    plan = Plan(batch, [], rows, decoding, took)
    return StepRecord(plan, Draft(), Verdict([], [], []), None, [event] * emitted, [], drafters)


@dataclass
class House:
    """A scheduler, a made-up runner, and a cache that remembers what each slot was written for."""

    num_pages: int = 100
    page_size: int = 4
    max_num_seqs: int = 8
    rows: int = 16
    max_len: int = 60
    length: int = 4
    max_nodes: int = 4
    propose: Propose = nothing
    poisoned: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.pool = PagePool(self.num_pages, self.page_size)
        self.scheduler = Scheduler(self.pool, self.max_num_seqs, self.rows, self.max_len)
        self.slots: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.arrived: list[SequenceState] = []
        self.events: dict[str, list[Event]] = {}
        self.preemptions = 0

    def add(self, *sequences: SequenceState) -> None:
        for sequence in sequences:
            self.scheduler.add(sequence)
            self.arrived.append(sequence)
            self.events[sequence.request.id] = []

    def remove(self, sequence: SequenceState) -> None:
        self.scheduler.remove(sequence)
        self.arrived.remove(sequence)
        assert not sequence.pages

    def limit(self, sequence: SequenceState) -> int:
        most = sequence.request.params.max_tokens
        return self.max_len if most is None else min(self.max_len, sequence.prompt_length + most)

    def slot(self, sequence: SequenceState, place: int) -> int:
        return sequence.pages[place // self.page_size] * self.page_size + place % self.page_size

    def check(self) -> None:
        check_pages(self.scheduler)

    def schedule(self) -> Plan:
        nodes = self.max_nodes if self.max_nodes > self.length else self.length
        budget = DraftBudget(self.length, nodes)
        return self.scheduler.schedule(lambda _: ("made-up", budget))

    def step(self) -> Plan:
        """Schedule, draft, verify, commit; assert what DESIGN section 4 says."""
        before = {id(s): list(s.tokens) for s in self.arrived}
        plan = self.schedule()
        self.check()
        self._check_plan(plan)
        drafts = [self.propose(item.sequence, item.budget.depth) for item in plan.batch]
        draft = Draft(DraftNodes(tokens, parents) for tokens, parents in drafts)
        verdict = self.verify(plan, draft)
        held = {id(item.sequence): len(item.sequence.pages) for item in plan.batch}
        events = self.scheduler.commit(plan, draft, verdict).events
        self.check()
        for event in events:
            self.events[event.request_id].append(event)
        for item in plan.batch:
            sequence = item.sequence
            old = before[id(sequence)]
            assert sequence.tokens[: len(old)] == old
            done = self.events[sequence.request.id][-1:]
            if done and done[0].finish_reason is not None:
                assert sequence not in [*self.scheduler.running, *self.scheduler.waiting]
                assert not sequence.pages
                self.arrived.remove(sequence)
                continue
            assert sequence.finish_reason is None
            if item.samples:
                assert sequence.num_computed == len(sequence.tokens) - 1
                assert len(sequence.tokens) > len(old)
                assert len(sequence.pages) <= self.pool.pages_for(len(sequence.tokens))
                assert len(sequence.pages) >= self.pool.pages_for(sequence.num_computed)
            else:
                assert sequence.num_computed == item.start + item.count
                assert sequence.tokens == old
            assert len(sequence.pages) <= held[id(sequence)]
        return plan

    def _check_plan(self, plan: Plan) -> None:
        assert sum(item.count for item in plan.batch) <= self.rows
        assert len(self.scheduler.running) <= self.max_num_seqs
        assert len({id(item.sequence) for item in plan.batch}) == len(plan.batch)
        self.preemptions += len(plan.preempted)
        if self.arrived:  # whoever came first always moves
            assert plan.batch[0].sequence is self.arrived[0]
        order = [id(s) for s in self.arrived]
        for line in (self.scheduler.running, list(self.scheduler.waiting)):
            places = [order.index(id(s)) for s in line]
            assert places == sorted(places)
        for sequence in plan.preempted:
            assert not sequence.pages
            assert sequence.num_computed == 0
            assert sequence in self.scheduler.waiting
        for item in plan.batch:
            sequence = item.sequence
            known = len(sequence.tokens)
            assert item.count >= 1
            assert item.start == sequence.num_computed
            assert item.samples == (item.start + item.count == known)
            assert 0 <= item.budget.depth <= self.length
            if item.budget.depth:
                assert item.samples
                assert known + item.budget.depth < self.limit(sequence)

    def verify(self, plan: Plan, draft: Draft) -> Verdict:
        """Write the rows to the slots, and follow the target through the draft."""
        verdict = Verdict([], [], [])
        for i, item in enumerate(plan.batch):
            sequence, (tokens, parents, *_) = item.sequence, draft[i]
            known = sequence.tokens[: item.start + item.count]
            for place in range(item.start):  # what was computed before is still there
                expected = (sequence.id, tuple(known[: place + 1]))
                assert self.slots[self.slot(sequence, place)] == expected
            for place in range(item.start, len(known)):
                self.slots[self.slot(sequence, place)] = (sequence.id, tuple(known[: place + 1]))
            paths: list[list[int]] = []
            for node, parent in enumerate(parents):
                paths.append([*(paths[parent] if parent >= 0 else []), tokens[node]])
                entry = (sequence.id, (*known, *paths[-1]))
                self.slots[self.slot(sequence, len(known) + node)] = entry
            verdict.errors.append(NOT_FINITE if sequence.id in self.poisoned else None)
            out: list[int] = []
            path: list[int] = []
            if item.samples:
                children = {(p, tokens[n]): n for n, p in enumerate(parents)}
                node_now: int | None = -1
                while node_now is not None:
                    out.append(next_token(sequence, known + out))
                    node_now = children.get((node_now, out[-1]))
                    if node_now is not None:
                        path.append(node_now)
                for depth, node in enumerate(path):
                    source = self.slot(sequence, len(known) + node)
                    self.slots[self.slot(sequence, len(known) + depth)] = self.slots[source]
            verdict.tokens.append(out)
            verdict.path.append(path)
        return verdict

    def run(self, limit: int = 500) -> None:
        for _ in range(limit):
            if not self.arrived:
                assert self.pool.num_free == self.pool.num_usable
                return
            self.step()
        raise AssertionError("not finished")

    def text(self, id: str) -> str:
        return "".join(e.text for e in self.events[id])

    def ids(self, id: str) -> list[int]:
        return [e.token_id for e in self.events[id] if e.token_id is not None]


def expected(sequence: SequenceState, house: House) -> tuple[list[int], str, str]:
    """Tokens, text and finish reason of ``sequence``, decoded one by one without a scheduler."""
    params, tokens = sequence.request.params, list(sequence.request.prompt_token_ids)
    letters, shown = Letters(params.stop or ()), ""
    while True:
        token = next_token(sequence, tokens)
        tokens.append(token)
        output = tokens[sequence.prompt_length :]
        may_stop = len(output) > params.min_tokens
        if token in sequence.request.end_token_ids and may_stop:
            return output, shown + letters.flush(), "stop"
        text, stopped = letters.push(token, may_stop)
        shown += text
        if stopped:
            return output, shown, "stop"
        if len(tokens) >= house.limit(sequence):
            return output, shown + letters.flush(), "length"


def assert_outputs(house: House, sequences: Iterable[SequenceState]) -> None:
    for sequence in sequences:
        id = sequence.request.id
        assert (house.ids(id), house.text(id), house.events[id][-1].finish_reason) == expected(
            sequence, house
        )
        assert [e.finish_reason for e in house.events[id][:-1]] == [None] * (
            len(house.events[id]) - 1
        )
