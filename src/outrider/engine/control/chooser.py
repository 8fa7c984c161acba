"""Chooses who drafts for each sequence and how far, or that a step is plain.

A ``Chooser`` obeys the switch and the requests. An ``AdaptiveChooser`` also compares, by expected
tokens per second of the whole batch, the ways to draft that they leave open; drafting nothing is
among them (Liu et al., "Optimizing speculative decoding for serving large language models using
goodput", 2024, choose a depth so). A drafter goes on behind a node only where that is worth another
pass, and of what was drafted those nodes are verified that are worth their rows (``prices``). Both
look at what is known of the nodes themselves, which the coupled rule allows and the ratio rules do
not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from math import log2
from typing import Protocol

from ...base.methods import NONE
from ...base.types import (
    NO_DRAFT,
    Draft,
    DraftBudget,
    DraftNodes,
    Plan,
    SequenceState,
    StepRecord,
)
from .choices import PLAIN, Choice, DrafterView, Freedom, Group, Knowledge, Method, Stream
from .costs import CostModel
from .guards import Guards
from .learner import Chosen, Learner
from .outlook import Outlook
from .prices import Prices, without
from .survival import Survival
from .switch import Menu
from .trials import Review, Trials
from .tuning import USUAL, Tuning


class Chooser:
    """Chooses as the switch and each request say; now and then a step is plain, to measure that.

    Args:
        menu: what the switch and requests say.
        costs: told what steps took.
        tries_plain: whether steps may be plain, which changes no output under the coupled rule.
    """

    menu: Menu

    def __init__(
        self, menu: Menu | None, costs: CostModel, tries_plain: bool = True, tuning: Tuning = USUAL
    ) -> None:
        if menu is not None:  # else an engine will bring it
            self.menu = menu
        self.costs, self.tries_plain, self._tuning = costs, tries_plain, tuning
        self.max_rows: int | None = None
        """Rows that the next step may have, so that no stream waits long for another's prompt."""
        self._plain = False
        """Whether the next step tries plain decoding."""
        self._drafted: dict[int, int] = {}
        """By number of sequences, the steps with drafts since a plain one."""

    def choose(self, sequences: list[SequenceState]) -> None:
        """Choose for the next step, in which these sequences decode."""
        self._plain = self._plain_is_due(len(sequences))
        self._bound(sequences)

    def _bound(self, sequences: Sequence[SequenceState]) -> None:
        self.max_rows = None
        if not all(sequence.request.offline for sequence in sequences):
            chunk = self.costs.chunk()
            self.max_rows = None if chunk is None else len(sequences) + chunk

    def _plain_is_due(self, streams: int) -> bool:
        if not self.tries_plain:
            return False
        known = self.costs.knows_plain(streams)
        every = self._tuning.sure_steps if known else self._tuning.plain_steps
        return self._drafted.get(streams, 0) >= every

    def budget(self, sequence: SequenceState) -> tuple[str, DraftBudget]:
        """Return who drafts for a sequence in the next step, and how far its draft may go."""
        name, budget = self.menu.fixed(sequence)
        return name, NO_DRAFT if self._plain else budget

    def cut(self, plan: Plan, draft: Draft) -> Draft:
        """Return ``draft`` without the nodes that are not worth verifying."""
        return draft

    def learn(self, record: StepRecord) -> None:
        """Take in a step that is committed."""
        self.costs.observe(record)
        streams = record.plan.decoding
        if record.plan.rows == streams:
            self._drafted[streams] = self._drafted.get(streams, 0) + 1 if record.drafters else 0

    def release(self, id: str) -> None:
        """Forget a sequence that ended."""


class DrafterCalls(Protocol):
    """Calls of drafters that may fail; whoever makes them switches those off that do."""

    def peek(self, name: str, sequence: SequenceState, depth: int) -> DraftNodes | None: ...
    def num_unread(self, name: str, sequence: SequenceState) -> int: ...


class AdaptiveChooser(Chooser):
    """Compares what the switch and requests leave open, tries what is not used, and learns.

    ``decide`` needs nothing but the arguments, so that it also runs on a virtual clock. An engine
    adds itself by ``attach``.

    Args:
        costs, survival: what is expected of steps and drafts; both are told what came of them.
        methods: by name.
        shadowed: methods whose drafts are scored without being verified, so that none needs to be
            tried.
        unread: returns how many tokens of a sequence a drafter has missed, by their names.
        review_steps: steps after which choices are compared again; None for the tuning's.
        tuning: constants.
    """

    def __init__(
        self,
        costs: CostModel,
        survival: Survival,
        methods: Mapping[str, Method],
        shadowed: frozenset[str] = frozenset(),
        unread: Callable[[str, str], int] = lambda sequence, drafter: 0,
        review_steps: int | None = None,
        tuning: Tuning = USUAL,
    ) -> None:
        super().__init__(None, costs, tuning=tuning)
        self.survival, self.methods = survival, methods
        self.review_steps = tuning.review_steps if review_steps is None else review_steps
        self.unread, self._shadowed = unread, shadowed
        self._known = Knowledge(costs, survival, methods, tuning)
        self.learner = Learner(self._known, shadowed, {}, (), lambda *_: None)
        self.trials = Trials(self._known, shadowed)
        self.prices = Prices(self._known)
        self._guards = Guards(tuning)
        self.choices: dict[Group, Choice] = {}
        self.counts: dict[Group, int] = {}
        """The sequences of each group, as of the last review."""
        self.review = Review()
        self.step = 0
        self.reviewed = 0
        """The step of the last review."""
        self.paused = False
        """Whether drafting paused at the last step."""
        self._size = 0
        self._drafts = False
        """Whether the last review chose drafts for any group."""
        self._other_since = 0
        """The step since when the batch is twice or half as large as at the last review."""
        self._steady = False
        self._assigned: dict[str, Choice] = {}
        self._seen: set[tuple[str, ...]] = set()
        """The methods that sequences left open at the last review."""

    # Decisions, on any clock

    def decide(self, streams: Sequence[Stream]) -> list[Choice]:
        """Return the choice for each decoding sequence of the next step."""
        self.step += 1
        self._steady, self.trials.now = True, None
        self.paused = self._guards.pauses(len(streams), self.step)
        if self.paused:
            return [stream.fixed or PLAIN for stream in streams]
        due = self._due(len(streams), self.step) or not all(map(self._is_known, streams))
        if due:
            self._compare(streams)
        assigned = self._assigned
        choices = [s.fixed or assigned.get(s.id) or self._joined(s) for s in streams]
        if due:
            self.trials.plan(self.step, streams, choices, self.review_steps)
        elif self.trials.due(len(streams)):
            self._steady = False
            return self.trials.start(self.step, streams, choices)
        return choices

    @property
    def tries(self) -> bool:
        """Whether the last decision tries something that is not used."""
        return self.trials.now is not None

    def steady(self, streams: int) -> bool:
        """Return True, and count a step, where ``decide`` would choose the same again."""
        step = self.step + 1
        if not self._steady or self._due(streams, step) or self.trials.due(streams):
            return False
        self.step = step
        return True

    def due(self, streams: Sequence[Stream]) -> bool:
        """Return True where ``decide`` would compare choices for the next step."""
        return self._due(len(streams), self.step + 1) or not all(map(self._is_known, streams))

    def _due(self, streams: int, step: int) -> bool:
        """Return True where a step compares choices; note since when the batch is another."""
        size, drafts, tuning = self._size, self._drafts, self._tuning
        if streams >= 2 * size or 2 * streams <= size:
            self._other_since = self._other_since or step
            grown = streams > size and (drafts or not size)
            if grown or step - self._other_since >= tuning.lasting_steps:
                return True
        else:
            self._other_since = 0
        every = self.review_steps
        if drafts and abs(streams - size) > size // 4:
            every //= tuning.changed_reviews
        if step < tuning.first_reviewed_steps and drafts:
            every = 1
        return step - self.reviewed >= min(every, max(tuning.first_review_steps, self.reviewed))

    def _is_known(self, stream: Stream) -> bool:
        """Return False where what a new sequence leaves open was never compared."""
        return stream.methods in self._seen or stream.id in self._assigned or not stream.methods

    def _joined(self, stream: Stream) -> Choice:
        """Return the choice for a sequence that came after the last review."""
        group = Group(stream.workload, (), stream.methods, stream.max_depth, None)
        choice = self.choices.get(group)
        if choice is None:
            choice = next((c for g, c in self.choices.items() if g.methods == group.methods), PLAIN)
        choice = choice._replace(depth=min(choice.depth, stream.max_depth))
        self._assigned[stream.id] = choice
        return choice

    def _levels(self, stream: Stream) -> tuple[int, ...]:
        """Return how a sequence differs from its workload, see ``Group``."""
        odds = [self.survival.odds(name, stream.workload, stream.id) for name in stream.methods]
        most = self._tuning.max_level
        levels = tuple([max(-most, min(most, round(log2(each)))) for each in odds])
        return levels if any(levels) else ()

    def _compare(self, streams: Sequence[Stream]) -> None:
        """Choose anew for every group."""
        tuning = self._tuning
        self.reviewed, self._size, self._other_since = self.step, len(streams), 0
        context = sum([stream.context for stream in streams])
        self.survival.count()
        self.costs.count()
        groups = [
            Group(s.workload, () if s.fixed else self._levels(s), s.methods, s.max_depth, s.fixed)
            for s in streams
        ]
        if len(set(groups)) > tuning.max_groups:
            groups = [group._replace(levels=()) for group in groups]
        counts: dict[Group, int] = {}
        for group in groups:
            counts[group] = counts.get(group, 0) + 1
        self.counts = counts
        missed = {stream.id: self._unread(stream) for stream in streams}
        unread: dict[tuple[Group, str], float] = {}
        for stream, group in zip(streams, groups, strict=True):
            horizon = max(1, min(tuning.horizon, stream.left))
            for name, tokens in missed[stream.id].items():
                unread[group, name] = unread.get((group, name), 0.0) + tokens / horizon
        outlook = Outlook(self._known, counts, context, unread)
        speed, choices = outlook.best()
        used = {g: self._assigned.get(s.id, PLAIN) for s, g in zip(streams, groups, strict=True)}
        present = outlook.known(used)
        now, plain = outlook.speed(present), outlook.plain()
        plain_speed = outlook.speed(plain)
        if speed < tuning.better_speedup * now:
            speed, choices = now, present
        drafts = any(option.choice.depth for option in present.values())
        doubt = tuning.doubt * max(0.0, 1 - outlook.judged(choices) / tuning.sure_tokens)
        least = tuning.stay_speedup if drafts else tuning.enter_speedup + doubt
        if speed < least * plain_speed:
            speed, choices = plain_speed, plain
        plain_seconds = self.costs.verify(len(streams), context) + self.costs.host(len(streams))
        seconds = sum(counts[g] * option.tokens for g, option in choices.items()) / speed
        self.review = Review(context, speed, plain_speed, plain_seconds, seconds, missed)
        self.trials.review = self.review
        self.prices.renew(self.review)
        self.choices = {group: option.choice for group, option in choices.items()}
        self._drafts = any(choice.depth for choice in self.choices.values())
        self._assigned = {s.id: self.choices[g] for s, g in zip(streams, groups, strict=True)}
        self._seen = {group.methods for group in groups}

    def _unread(self, stream: Stream) -> dict[str, int]:
        """Return the tokens of a sequence that drafters must read before they can draft."""
        names = {name for method in stream.methods for name in self.methods[method].drafters}
        return {name: self.unread(stream.id, name) for name in names if self.costs.reads(name)}

    def observe(
        self, streams: int, emitted: int, drafting: float, took: float, slow: float = 1.0
    ) -> None:
        """Take in some steps of the same sequences.

        Args:
            streams: sequences.
            emitted: tokens of the steps with drafts.
            drafting: seconds of the steps with drafts.
            took: seconds of all.
            slow: how many times longer than expected the target took for the same rows.
        """
        self.trials.seconds += took
        if drafting:
            lost = drafting / (self.review.plain_seconds * max(1.0, slow)) - emitted / streams
            self._guards.observe(streams, self.step, lost)
            if self._guards.pauses(streams, self.step):
                self._steady = False

    @property
    def pauses(self) -> dict[int, int]:
        """The steps for which drafting still pauses, by the least batch size that they are for."""
        return self._guards.left(self.step)

    # In an engine

    def attach(
        self,
        menu: Menu,
        drafters: Mapping[str, DrafterView],
        preparing: Collection[str],
        calls: DrafterCalls,
        peeks: bool,
    ) -> None:
        """Choose for an engine.

        Args:
            menu: what the switch and requests say.
            drafters: by name.
            preparing: those that must prepare before they can draft for a workload.
            calls: of drafters.
            peeks: whether a choice may look at drafts, which the coupled rule allows.
        """
        self.menu, self._peeks, self.tries_plain = menu, peeks, peeks
        self._preparing = [drafters[name] for name in preparing]
        self.learner = Learner(self._known, self._shadowed, drafters, preparing, calls.peek)
        self.unread = lambda id, name: calls.num_unread(name, self._by_id[id])
        self._version = menu.version
        self._sequences: list[SequenceState] = []
        self._by_id: dict[str, SequenceState] = {}
        self._chosen: dict[str, Chosen] = {}
        self._all_fixed = False
        self._budgets: dict[tuple[Choice, str, int], DraftBudget] = {}
        self._priced: dict[DraftBudget, DraftBudget] = {}
        self._worth = 0.0
        self._whole: Draft | None = None

    def choose(self, sequences: list[SequenceState]) -> None:
        self._bound(sequences)
        learner, menu = self.learner, self.menu
        learner.begin()
        self._plain = self._all_fixed and self._plain_is_due(len(sequences))
        if self._plain or not menu.enabled or self._version != menu.version:
            self._version = menu.version
            self._rest()  # what was chosen may not be allowed any more
            if self._plain or not menu.enabled:
                return
        if sequences == self._sequences and (not self._chosen or self.steady(len(sequences))):
            return
        streams = self._streams(sequences)
        self._sequences, self._chosen = sequences, {}
        self._by_id = {sequence.id: sequence for sequence in sequences}
        free = any(stream.methods for stream in streams)
        self._all_fixed = not free
        free = free or any(stream.fixed not in (None, PLAIN) for stream in streams)
        if not streams or not (free or self._preparing):
            return  # nothing is left to choose
        before, begin = self.reviewed, time.perf_counter()
        choices = self.decide(streams)
        if self.reviewed != before:
            self._budgets.clear()
            steps = learner.reviewed(time.perf_counter() - begin)
            self.review_steps = self.review_steps if steps is None else steps
        for stream, choice in zip(streams, choices, strict=True):
            budget = self._budget(choice, stream, len(streams)) if choice.depth else NO_DRAFT
            method = self.methods.get(choice.method)
            name = NONE if method is None else method.drafter
            self._chosen[stream.id] = Chosen(stream, choice, name, budget)
        learner.chosen(self._chosen, self.tries, time.perf_counter() - begin)

    def _rest(self) -> None:
        """Let the next step go without choices."""
        self._sequences, self._by_id, self._chosen, self._all_fixed = [], {}, {}, False

    def _streams(self, sequences: Sequence[SequenceState]) -> list[Stream]:
        """Return the sequences as choices see them; only a comparison looks at known ones anew."""
        known = self._chosen
        streams = [known[s.id].stream if s.id in known else self._stream(s) for s in sequences]
        if known and self.due(streams):
            return [self._stream(sequence) for sequence in sequences]
        return streams

    def _stream(self, sequence: SequenceState) -> Stream:
        length, workload = len(sequence.tokens), sequence.workload
        free = self._ready(self.menu.freedom(sequence.request.speculation), workload)
        return Stream(sequence.id, workload, length, *free, left=sequence.limit - length)

    def _ready(self, freedom: Freedom, workload: str) -> Freedom:
        """Return the freedom without the methods whose drafters cannot draft for a workload yet."""
        if not self._preparing:
            return freedom
        waiting = {each.name for each in self._preparing if not each.ready(workload)}
        kept = [each for each in freedom.methods if waiting.isdisjoint(self.methods[each].drafters)]
        return freedom._replace(methods=tuple(kept))

    def budget(self, sequence: SequenceState) -> tuple[str, DraftBudget]:
        chosen = self._chosen.get(sequence.id)
        if chosen is None:
            return super().budget(sequence)
        _, _, name, budget = chosen
        if self.learner.looking or budget.rates is None:
            return name, budget
        priced = self._priced.get(budget)  # its drafter leaves out what is not worth a row
        if priced is None:
            priced = self._priced[budget] = budget._replace(worth=self._worth)
        return name, priced

    def _budget(self, choice: Choice, stream: Stream, sequences: int) -> DraftBudget:
        key = choice, stream.workload, sequences
        budget = self._budgets.get(key)
        if budget is None:
            budget = DraftBudget(choice.depth, self.methods[choice.method].nodes(choice.depth))
            if self._peeks and stream.fixed is None:
                least = self.prices.least(choice, stream.workload, sequences)
                rates = self.survival.rates(choice.method, stream.workload)
                budget = budget._replace(least=least, rates=rates)
            self._budgets[key] = budget
        return budget

    def cut(self, plan: Plan, draft: Draft) -> Draft:
        """Return ``draft`` without the nodes that are not worth their rows.

        In steps that are looked at drafts are whole, and the price of a row is found anew.
        """
        self._whole, learner = draft, self.learner
        if not self._peeks or self.tries or not any(nodes.margins for nodes in draft):
            return draft  # a trial is to show what all its rows take
        begin = time.perf_counter()
        chances: dict[int, Sequence[float]] = {}
        rows = plan.rows
        for i, (item, nodes) in enumerate(zip(plan.batch, draft, strict=True)):
            known = nodes.survivals
            done = known and not learner.looking  # by its drafter
            if done or item.budget.rates is None or len(nodes.margins) != len(nodes.tokens):
                rows += len(nodes.tokens)
            elif nodes.tokens:
                _, choice, *_ = self._chosen[item.sequence.id]
                key = choice.method, item.sequence.workload
                chances[i] = known or self.prices.survivals(nodes, *key)
        if not chances:
            return draft
        flat = [chance for each in chances.values() for chance in each]
        if learner.looking:
            spent = sum(plan.seconds.drafters.values())
            self._worth = self.prices.worth(flat, rows, len(self._sequences), spent)
            self._priced.clear()
        if min(flat) < self._worth:
            worth, draft = self._worth, Draft(draft)
            for i, each in chances.items():
                draft[i] = without(draft[i], each, worth)
        learner.cut(time.perf_counter() - begin)
        return draft

    def learn(self, record: StepRecord) -> None:
        if self._chosen:
            whole = self._whole or record.draft
            window = self.learner.learn(record, whole, self._chosen, self.tries)
            self._whole = None
            if window is not None:
                self.trials.observe(window.last / max(1.0, window.slow))
                self.observe(window.streams, window.emitted, window.took, window.all, window.slow)
        super().learn(record)

    def release(self, id: str) -> None:
        self._assigned.pop(id, None)
        self.survival.release(id, self.methods)
        self.learner.release(id)
