"""Speculation that adapts: choices before a step, cuts of its drafts, and lessons from it."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from math import inf
from operator import mul
from typing import NamedTuple

from ..base.trees import is_chain, sizes
from ..base.types import NO_DRAFT, Draft, DraftBudget, Scheduled, SequenceState, Speculation
from ..drafters.base import Drafter, NoSpec
from ..native.interface import MARGINS
from ..native.rates import DEPTHS, RANKS
from .control.controller import Controller
from .control.costs import SPIKE, smoothed
from .control.outlook import PLAIN, Choice, Method, Stream, counts_by_depth, parts_of
from .scheduler import Plan
from .shadows import Peek, Shadows

OWN, OWN_SECONDS = 0.002, 1e-4
"""Share of the time that looking at steps may take, and that choosing may take; and the seconds
of a step that each may take at most."""
SELDOMLY, REVIEWED = 24, (16, 192)
"""Steps of which at least one is looked at, and after which choices are compared again."""
NEW, SHADOWED = 32, 2
"""Drafts of a method whose steps are all looked at, and looks of which one casts a shadow after
that."""
MOST_NEW = 4
"""Drafts of one step that count as new, so that the costs of a method rest on several steps."""
OBSERVED = 12
"""Sequences whose drafts are scored in a step, at most; they take turns."""
TREE = " tree"
"""Ends the name of a method that drafts trees."""


class Freedom(NamedTuple):
    """The choices that a request leaves to the controller, see ``Stream``."""

    methods: tuple[str, ...]
    bound: int
    fixed: Choice | None = None


@dataclass
class _Window:
    """Steps since the last one that was looked at.

    ``emitted`` tokens and ``took`` seconds are those of steps with drafts, ``all`` all seconds.
    """

    streams: int
    emitted: int = 0
    took: float = 0.0
    all: float = 0.0


def methods_of(
    drafters: Mapping[str, Drafter], bound: int, together: Sequence[tuple[str, ...]], trees: bool
) -> dict[str, Method]:
    """Return the methods of an engine by name.

    Args:
        drafters: by name; ``none`` among them.
        bound: the longest draft.
        together: drafters whose drafts are merged.
        trees: whether the target can verify trees.
    """
    methods: dict[str, Method] = {}
    for name, drafter in drafters.items():
        longest = min(bound, drafter.max_length)
        if not longest:
            continue
        methods[name] = Method((name,), longest)
        if trees and drafter.max_nodes > longest:
            most = drafter.max_nodes
            methods[name + TREE] = Method((name,), longest, -(-most // longest), most)
    for names in together if trees else ():
        method = Method(names, min(methods[name].longest for name in names))
        methods[method.drafter] = method
    return methods


class Adaptive:
    """Applies a controller's choices to sequences, and tells it what came of them.

    Args:
        controller: chooses.
        drafters: by name.
        peeks: whether a choice may look at drafts, which the coupled rule allows.
    """

    def __init__(
        self, controller: Controller, drafters: Mapping[str, Drafter], peeks: bool
    ) -> None:
        self.controller = controller
        self._drafters = drafters
        self._peeks = peeks
        self._preparing = [
            each for each in drafters.values() if type(each).prepare is not Drafter.prepare
        ]
        self._streams: dict[str, Stream] = {}
        self._sequences: list[SequenceState] = []
        self._by_id: dict[str, SequenceState] = {}
        self._context = 0
        self._window = _Window(0)
        self._longest = inf
        self._every = 1
        self._worth = 0.0
        self._looks = 0
        self._looks_at: Counter[str] = Counter()
        self._new = False
        self._looking = False
        self._step = self._own_look = self._own_choice = self._own = self._own_cut = 0.0
        self._chosen: dict[str, tuple[Choice, str, DraftBudget]] = {}
        self._budgets: dict[tuple[Choice, str, int], DraftBudget] = {}
        self._priced: dict[DraftBudget, DraftBudget] = {}
        self._tables: dict[tuple[str, str], list[list[list[float]]]] = {}
        self._whole: Draft | None = None
        self._shadows = Shadows(controller)
        self._turn = 0
        self.peek: Peek = lambda name, *behind: drafters[name].peek(*behind)
        self.num_unread: Callable[[str, SequenceState], int] = lambda name, sequence: drafters[
            name
        ].num_unread(sequence)
        """Calls of drafters; the speculator switches off those that fail."""
        controller.unread = self._num_unread

    def plan(
        self, sequences: list[SequenceState], freedom: Callable[[Speculation], Freedom]
    ) -> None:
        """Choose how to draft in the next step for sequences that decode.

        ``freedom`` says what a request leaves open.
        """
        self._looking = self._new or self._turn % self._every == 0
        self._own = 0.0
        if sequences == self._sequences and (
            not self._chosen or self.controller.steady(len(sequences))
        ):
            return
        self._sequences = sequences
        # Only a comparison looks at how far known sequences are.
        known = {} if self.controller.due(len(sequences)) else self._streams
        streams = [known.get(s.id) or self._stream(s, freedom) for s in sequences]
        self._streams = {stream.id: stream for stream in streams}
        self._by_id = {sequence.id: sequence for sequence in sequences}
        self._context = sum([stream.context for stream in streams])
        self._chosen = {}
        free = any(stream.methods or stream.fixed not in (None, PLAIN) for stream in streams)
        if not streams or not (free or self._preparing):
            self._looking = False
            return  # nothing is left to choose
        before, begin = self.controller.reviewed, time.perf_counter()
        choices = self.controller.decide(streams)
        self._looking = self._looking or self.controller.tries
        if self.controller.reviewed != before:
            self._budgets.clear()
            self._tables.clear()
            if self._step:
                self._own_choice = smoothed(self._own_choice or None, time.perf_counter() - begin)
                self.controller.review_steps = self._within(self._own_choice, *REVIEWED)
        for stream, choice in zip(streams, choices, strict=True):
            budget = self._budget(choice, stream, len(streams)) if choice.depth else NO_DRAFT
            method = self.controller.methods.get(choice.method)
            name = NoSpec.name if method is None else method.drafter
            self._chosen[stream.id] = choice, name, budget
        self._new = self._is_new()
        self._looking = self._looking or self._new
        self._own = time.perf_counter() - begin

    def _stream(self, sequence: SequenceState, freedom: Callable[[Speculation], Freedom]) -> Stream:
        length, workload = len(sequence.tokens), sequence.workload
        free = self._ready(freedom(sequence.request.speculation), workload)
        return Stream(sequence.id, workload, length, *free, left=sequence.limit - length)

    def _ready(self, freedom: Freedom, workload: str) -> Freedom:
        """Return the freedom without the methods whose drafters cannot draft for a workload yet."""
        if not self._preparing:
            return freedom
        waiting = {each.name for each in self._preparing if not each.ready(workload)}
        methods = self.controller.methods
        kept = [name for name in freedom.methods if waiting.isdisjoint(methods[name].drafters)]
        return freedom._replace(methods=tuple(kept))

    def _is_new(self) -> bool:
        """Return True where a method is in use of which few drafts were looked at."""
        methods = {choice.method for choice, _, _ in self._chosen.values()}
        return not self.controller.tries and any(self._looks_at[name] < NEW for name in methods)

    def _num_unread(self, id: str, name: str) -> int:
        return self.num_unread(name, self._by_id[id])

    def rest(self) -> None:
        """Let the next step go without choices."""
        self._sequences, self._by_id, self._streams, self._chosen = [], {}, {}, {}
        self._looking = False

    def budget(self, sequence: SequenceState) -> tuple[str, DraftBudget] | None:
        """Return who drafts for a sequence and how far; None where nothing was chosen."""
        found = self._chosen.get(sequence.id)
        if found is None:
            return None
        _, name, budget = found
        if self._looking or budget.rates is None:
            return name, budget
        priced = self._priced.get(budget)  # its drafter leaves out what is not worth a row
        if priced is None:
            priced = self._priced[budget] = budget._replace(worth=self._worth)
        return name, priced

    def _budget(self, choice: Choice, stream: Stream, sequences: int) -> DraftBudget:
        key = choice, stream.workload, sequences
        budget = self._budgets.get(key)
        if budget is None:
            method, survival = self.controller.methods[choice.method], self.controller.survival
            nodes = method.nodes(choice.depth)
            budget = DraftBudget(choice.depth, nodes)
            if self._peeks and stream.fixed is None:
                least = self.controller.least(choice, stream.workload, sequences)
                rates = survival.rates(choice.method, stream.workload)
                budget = DraftBudget(choice.depth, nodes, least, rates=rates)
            self._budgets[key] = budget
        return budget

    def cut(self, plan: Plan, draft: Draft, spent: float) -> Draft:
        """Return ``draft`` without the nodes that are not worth their rows.

        In steps that are looked at drafts are whole, and the price of a row is found anew.

        Args:
            plan: the step.
            draft: its drafts.
            spent: seconds that they took.
        """
        self._whole, self._own_cut = draft, 0.0
        if not self._peeks or draft.margins is None or self.controller.tries:
            return draft  # a trial is to show what all its rows take
        begin = time.perf_counter()
        chances: dict[int, list[float]] = {}
        rows = plan.rows
        for i, item in enumerate(plan.batch):
            nodes = draft.tokens[i]
            known = draft.survivals[i] if draft.survivals else None
            done = known and not self._looking  # by its drafter
            if done or item.budget.rates is None or len(draft.margins[i]) != len(nodes):
                rows += len(nodes)
            elif nodes:
                chances[i] = known or self._survivals(draft, i, item.sequence)
        if not chances:
            return draft
        flat = [chance for each in chances.values() for chance in each]
        if self._looking:
            self._worth = self.controller.worth(flat, rows, len(self._sequences), spent)
            self._priced.clear()
        if min(flat) < self._worth:
            draft = self._without(draft, chances)
        self._own_cut = time.perf_counter() - begin
        if self._looking:
            self._own += self._own_cut
        return draft

    def _without(self, draft: Draft, chances: Mapping[int, Sequence[float]]) -> Draft:
        """Return ``draft`` without nodes that are not worth a row, by the ``chances`` of some."""
        worth = self._worth
        cut = draft._replace(tokens=[*draft.tokens], parents=[*draft.parents])
        for i, survivals in chances.items():
            kept = [node for node, survival in enumerate(survivals) if survival >= worth]
            most = len(kept)
            if not most or kept[-1] == most - 1:
                cut.tokens[i], cut.parents[i] = draft.tokens[i][:most], draft.parents[i][:most]
                continue
            place = {-1: -1} | {node: place for place, node in enumerate(kept)}
            cut.tokens[i] = [draft.tokens[i][node] for node in kept]
            cut.parents[i] = [place[draft.parents[i][node]] for node in kept]
        return cut

    def _survivals(self, draft: Draft, index: int, sequence: SequenceState) -> list[float]:
        """Return the chance of each node of a draft that it and all before it are accepted."""
        assert draft.margins is not None
        key = self._chosen[sequence.id][0].method, sequence.workload
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = self.controller.survival.rates(*key).table.tolist()
        parents, margins = draft.parents[index], draft.margins[index]
        if is_chain(parents):
            first = chain([level[0] for level in table], repeat(table[-1][0]))
            rates = zip(first, margins, strict=False)
            return [*accumulate([rate[bisect_right(MARGINS, m)] for rate, m in rates], mul)]
        found: list[float] = []
        depths: list[int] = []
        children = [0] * (len(parents) + 1)
        for parent, margin in zip(parents, margins, strict=True):
            depth = 0 if parent < 0 else depths[parent] + 1
            rank = children[parent + 1]
            children[parent + 1] += 1
            rate = table[min(depth, DEPTHS - 1)][min(rank, RANKS - 1)]
            before = 1.0 if parent < 0 else found[parent]
            found.append(before * rate[bisect_right(MARGINS, margin)])
            depths.append(depth)
        return found

    def learn(self, plan: Plan, draft: Draft, emitted: int, seconds: Seconds) -> None:
        """Take in a step that is committed.

        Args:
            plan: the step.
            draft: what was verified.
            emitted: tokens.
            seconds: what its parts took.
        """
        if not self._chosen:
            return
        begin = time.perf_counter()
        self._step = smoothed(self._step or None, seconds.step)
        count, window = len(self._sequences), self._window
        if count and plan.rows == plan.decoding == count:  # else prompts ran beside
            if window.streams != count:
                window = self._window = _Window(count)
            if any(draft.tokens):
                window.emitted += emitted
                window.took += min(seconds.step, self._longest)
            window.all += seconds.step
            if self._looking and not any(each.catching_up for each in self._preparing):
                self._learn_costs(plan, draft, seconds)
        if self._looking:
            self._looks += 1
            drafts = Counter([choice.method for choice, _, _ in self._chosen.values()])
            self._looks_at.update({name: min(n, MOST_NEW) for name, n in drafts.items()})
            self._new = self._is_new()
            if self._whole is not None:
                self._score(plan.batch)
            self._shadows.follow()
            own = time.perf_counter() - begin + self._own_cut
            self._own_look = smoothed(self._own_look or None, own)
            self._every = self._within(self._own_look, 1, SELDOMLY)
        self._whole = None
        self._turn += 1

    def _within(self, own: float, least: int, most: int) -> int:
        """Return after how many steps something that takes ``own`` seconds may be done again."""
        return max(least, min(most, round(own / min(OWN * self._step, OWN_SECONDS))))

    def _learn_costs(self, plan: Plan, draft: Draft, seconds: Seconds) -> None:
        controller, costs = self.controller, self.controller.costs
        context = self._context = sum([len(s.tokens) for s in self._sequences])
        committed = plan.decoding + sum([len(tokens) for tokens in draft.tokens])
        step = seconds.step - self._own  # which is not what steps of this choice take
        expected = costs.verify(committed, context)
        slow = seconds.verify / expected
        window, self._window = self._window, _Window(plan.decoding)
        if controller.tries:
            controller.observe_trial(step / max(1.0, slow))
        controller.observe(window.streams, window.emitted, window.took, window.all, slow)
        longest = SPIKE * seconds.step
        self._longest = min(self._longest, 2 * longest) * 0.8 + 0.2 * longest
        expected += costs.host(plan.decoding)
        whole = self._whole or draft
        drafting = [
            (self._chosen[item.sequence.id][0].method, max(1, len(sizes(parents))))
            for item, parents in zip(plan.batch, whole.parents, strict=True)
            if item.budget.depth
        ]
        methods = [(controller.methods[name], depth) for name, depth in drafting]
        rows = counts_by_depth(
            (name, depth, method.width) for method, depth in methods for name in parts_of(method)
        )
        if not any(self._catches_up(name) for name in rows):
            expected += sum([costs.draft(name, by_depth) for name, by_depth in rows.items()])
            names = {name for name, _ in drafting} or {PLAIN.method}
            if len(names) == 1 and len(drafting) in (0, plan.decoding):
                costs.observe_step(names.pop(), step / expected)
        costs.observe_verify(committed, context, seconds.verify)
        rest = step - seconds.verify - sum(seconds.draft.values())
        costs.observe_host(plan.decoding, rest)
        for name, by_depth in rows.items():
            if name in seconds.draft and not self._catches_up(name):
                costs.observe_draft(name, by_depth, seconds.draft[name])

    def _catches_up(self, name: str) -> bool:
        drafter = self._drafters.get(name)
        return drafter is not None and drafter.catching_up

    def _score(self, batch: Sequence[Scheduled]) -> None:
        """Score drafts; single nodes also where they were not verified."""
        items = range(len(batch))
        if len(batch) > OBSERVED:
            first = self._turn * OBSERVED
            items = range(first, first + OBSERVED)
        for i in items:
            index = i % len(batch)
            item = batch[index]
            stream = self._streams.get(item.sequence.id)
            if stream is None:
                continue
            if item.budget.depth:
                self._score_one(item, stream, index)
            if i == items[0] and (self._new or self._looks % SHADOWED == 0):
                taken = self._chosen[stream.id][0].method
                self._shadows.cast(item.sequence, stream, taken, self._turn, self.peek)

    def _score_one(self, item: Scheduled, stream: Stream, index: int) -> None:
        """Score the draft of one sequence."""
        draft = self._whole
        assert draft is not None
        choice = self._chosen[stream.id][0]
        survival, workload = self.controller.survival, stream.workload
        emitted = item.sequence.tokens[item.start + item.count :]
        tokens, parents = draft.tokens[index], draft.parents[index]
        margins = draft.margins[index] if draft.margins else []
        if len(margins) != len(tokens):  # a grammar has cut the draft, or added to it
            margins = []
        node, straight = -1, 0
        for depth, token in enumerate(emitted):
            below = [i for i, parent in enumerate(parents) if parent == node]
            node = next((i for i in below if tokens[i] == token), -1)
            for rank, i in enumerate(below if margins else ()):
                bin = bisect_right(MARGINS, margins[i])
                survival.observe_node(choice.method, workload, depth + 1, rank, bin, i == node)
            if node < 0:
                break
            straight += straight == depth and node == below[0]
        asked, accepted = item.budget.depth, len(emitted) - 1
        survival.observe(choice.method, workload, stream.id, asked, accepted)
        method = self.controller.methods[choice.method]
        survival.observe_size(choice.method, workload, sizes(parents), asked, method.nodes(1))
        narrow = method.drafters[0]
        if narrow != choice.method:  # whose chain is what the first children are
            judged = min(asked, len(emitted), straight + 1)
            survival.observe(narrow, workload, stream.id, asked, straight, judged)

    def release(self, id: str) -> None:
        """Forget a sequence that ended."""
        self._shadows.release(id)
        self.controller.release(id)


class Seconds(NamedTuple):
    """The seconds of a step, of its verifying, and of its drafting by drafter."""

    step: float
    verify: float
    draft: Mapping[str, float]
