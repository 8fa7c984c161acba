"""Speculation that adapts: choices before a step, cuts of its drafts, and lessons from it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..drafters.base import ChainDrafter, Drafter
from ..native.interface import DEPTHS, MARGINS, RANKS
from ..types import NO_DRAFT, Draft, DraftBudget, Scheduled, SequenceState
from .controller import Choice, Controller, Method, Stream
from .scheduler import Plan

OBSERVED = 12
"""Sequences whose drafts are scored in a step, at most; they take turns."""
SHADOW_DEPTH = 4
"""Tokens of a draft that is scored without being verified."""
TREE = " tree"
"""Ends the name of a method that drafts trees."""


class Freedom(NamedTuple):
    """What a request leaves to the controller, see ``Stream``."""

    methods: tuple[str, ...]
    bound: int
    fixed: Choice | None = None


class _Shadow(NamedTuple):
    """A draft behind the first ``base`` tokens of a sequence that nobody verifies."""

    method: str
    stream: Stream
    sequence: SequenceState
    base: int
    tokens: list[int]


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
            methods[name + TREE] = Method((name,), longest, -(-drafter.max_nodes // longest))
    for names in together if trees else ():
        longest = min(methods[name].longest for name in names)
        methods["+".join(names)] = Method(names, longest, len(names))
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
        self._streams: dict[str, Stream] = {}
        self._chosen: dict[str, tuple[Choice, DraftBudget]] = {}
        self._budgets: dict[tuple[Choice, str, int], DraftBudget] = {}
        self._tables: dict[tuple[str, str], list[list[list[float]]]] = {}
        self._known_at = -1
        self._whole: Draft | None = None
        self._shadows: list[_Shadow] = []
        self._turn = 0

    def plan(self, sequences: Sequence[tuple[SequenceState, Freedom]]) -> None:
        """Choose how to draft in the next step for sequences that decode."""
        streams = [Stream(s.id, s.workload, len(s.tokens), *freedom) for s, freedom in sequences]
        self._streams = {stream.id: stream for stream in streams}
        self._chosen = {}
        if not streams:
            return
        choices = self.controller.decide(streams)
        if self._known_at != self.controller.reviewed:
            self._known_at = self.controller.reviewed
            self._budgets.clear()
            self._tables.clear()
        for stream, choice in zip(streams, choices, strict=True):
            budget = self._budget(choice, stream, len(streams)) if choice.depth else NO_DRAFT
            self._chosen[stream.id] = choice, budget

    def rest(self) -> None:
        """Let the next step go without choices."""
        self._streams, self._chosen = {}, {}

    def budget(self, sequence: SequenceState) -> tuple[str, DraftBudget] | None:
        """Return who drafts for a sequence and how far; None where nothing was chosen."""
        found = self._chosen.get(sequence.id)
        if found is None:
            return None
        method = self.controller.methods.get(found[0].method)
        return ("none" if method is None else "+".join(method.drafters)), found[1]

    def _budget(self, choice: Choice, stream: Stream, sequences: int) -> DraftBudget:
        key = choice, stream.workload, sequences
        budget = self._budgets.get(key)
        if budget is None:
            method, survival = self.controller.methods[choice.method], self.controller.survival
            nodes = choice.depth * method.width
            budget = DraftBudget(choice.depth, nodes)
            if self._peeks and stream.fixed is None:
                least = self.controller.least(choice.method, sequences, stream.context * sequences)
                rates = survival.rates(choice.method, stream.workload)
                budget = DraftBudget(choice.depth, nodes, least, rates)
            self._budgets[key] = budget
        return budget

    def cut(self, plan: Plan, draft: Draft, spent: float) -> Draft:
        """Return ``draft`` without the nodes that are not worth their rows.

        Args:
            plan: the step.
            draft: its drafts.
            spent: seconds that they took.
        """
        self._whole = draft
        if not self._peeks:
            return draft
        streams: list[Stream] = []
        survivals: list[list[float]] = []
        for i, item in enumerate(plan.batch):
            stream = self._streams.get(item.sequence.id)
            if stream is not None:
                streams.append(stream)
                survivals.append([] if stream.fixed else self._survivals(draft, i, stream))
        if not any(survivals):
            return draft
        lengths = self.controller.cut(streams, [sorted(s, reverse=True) for s in survivals], spent)
        kept = {
            stream.id: (length, survival)
            for stream, length, survival in zip(streams, lengths, survivals, strict=True)
            if length < len(survival)
        }
        if not kept:
            return draft
        draft = draft._replace(tokens=[*draft.tokens], parents=[*draft.parents])
        for i, item in enumerate(plan.batch):
            if item.sequence.id in kept:
                nodes = _likeliest(*kept[item.sequence.id])
                place = {-1: -1} | {node: place for place, node in enumerate(nodes)}
                tokens, parents = draft.tokens[i], draft.parents[i]
                draft.tokens[i] = [tokens[node] for node in nodes]
                draft.parents[i] = [place[parents[node]] for node in nodes]
        return draft

    def _survivals(self, draft: Draft, index: int, stream: Stream) -> list[float]:
        """Return the chance of each node of a draft that it and all before it are accepted."""
        parents = draft.parents[index]
        if not parents:
            return []
        method = self._chosen[stream.id][0].method
        margins = draft.margins[index] if draft.margins and draft.margins[index] else None
        key = method, stream.workload
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = self.controller.survival.rates(*key).tolist()
        found: list[float] = []
        depths: list[int] = []
        children = [0] * (len(parents) + 1)
        curve = None if margins else self.controller.survival.curve(*key, len(parents))
        for node, parent in enumerate(parents):
            depth = 0 if parent < 0 else depths[parent] + 1
            depths.append(depth)
            if curve is not None:
                found.append(curve[depth])
                continue
            assert margins is not None
            before = 1.0 if parent < 0 else found[parent]
            rank = children[parent + 1]
            children[parent + 1] += 1
            bin = bisect_right(MARGINS, margins[node])
            found.append(before * table[min(depth, DEPTHS - 1)][min(rank, RANKS - 1)][bin])
        return found

    def learn(self, plan: Plan, draft: Draft, emitted: int, seconds: Seconds) -> None:
        """Take in a step that is committed.

        Args:
            plan: the step.
            draft: what was verified.
            emitted: tokens.
            seconds: what its parts took.
        """
        if self._streams and plan.rows == plan.decoding == len(self._streams):
            self._learn_costs(plan, draft, emitted, seconds)
        if self._whole is not None:
            self._score(plan.batch, self._whole)
        self._whole = None
        self._follow_shadows()

    def _learn_costs(self, plan: Plan, draft: Draft, emitted: int, seconds: Seconds) -> None:
        controller, count = self.controller, plan.decoding
        context = sum([stream.context for stream in self._streams.values()])
        nodes = sum([len(tokens) for tokens in draft.tokens])
        controller.costs.observe_verify(count + nodes, context, seconds.verify)
        controller.observe(count, context, emitted, nodes > 0, seconds.step)
        rows: dict[str, list[int]] = {}
        for item in plan.batch:
            choice, _ = self._chosen[item.sequence.id]
            if not item.budget.depth:
                continue
            method = controller.methods[choice.method]
            for name in method.drafters:
                by_depth = rows.setdefault(name, [])
                by_depth += [0] * (item.budget.depth - len(by_depth))
                for i in range(item.budget.depth):
                    by_depth[i] += method.width if len(method.drafters) == 1 else 1
        for name, by_depth in rows.items():
            if name in seconds.draft and not self._drafters[name].catching_up:
                controller.costs.observe_draft(name, by_depth, seconds.draft[name])

    def _score(self, batch: Sequence[Scheduled], draft: Draft) -> None:
        """Score drafts against the tokens that were emitted, also what was not verified of them."""
        self._turn += 1
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
                self._score_one(item, stream, draft, index)
            if i == items[0]:
                self._cast_shadow(item.sequence, stream)

    def _score_one(self, item: Scheduled, stream: Stream, draft: Draft, index: int) -> None:
        choice, _ = self._chosen[stream.id]
        survival, workload = self.controller.survival, stream.workload
        emitted = item.sequence.tokens[item.start + item.count :]
        tokens, parents = draft.tokens[index], draft.parents[index]
        margins = draft.margins[index] if draft.margins else None
        asked, node, accepted, straight = item.budget.depth, -1, 0, 0
        for depth, token in enumerate(emitted):
            below = [i for i, parent in enumerate(parents) if parent == node]
            hit = next((i for i in below if tokens[i] == token), None)
            if margins:
                for rank, i in enumerate(below):
                    bin = bisect_right(MARGINS, margins[i])
                    survival.observe_node(choice.method, workload, depth + 1, rank, bin, i == hit)
            if hit is None:
                break
            accepted += 1
            straight += straight == depth and hit == below[0]
            node = hit
        judged = min(asked, len(emitted), accepted + 1)
        survival.observe(choice.method, workload, stream.id, asked, accepted, judged)
        width = self.controller.methods[choice.method].width
        survival.observe_size(choice.method, workload, len(tokens), asked * width)
        if choice.method.endswith(TREE):  # whose first children are what a chain has
            chain, judged = choice.method.removesuffix(TREE), min(judged, straight + 1)
            survival.observe(chain, workload, stream.id, asked, straight, judged)

    def _cast_shadow(self, sequence: SequenceState, stream: Stream) -> None:
        """Let a method that costs next to nothing draft behind a sequence, to be scored later."""
        taken = self._chosen[stream.id][0].method
        names = [n for n in stream.methods if n in self.controller.shadowed and n != taken]
        if not names or self._shadows or sequence.finish_reason is not None:
            return
        name = names[self._turn % len(names)]
        drafter = self._drafters[name]
        assert isinstance(drafter, ChainDrafter)
        tokens = drafter.draft(sequence, min(SHADOW_DEPTH, stream.bound))
        self._shadows.append(_Shadow(name, stream, sequence, len(sequence.tokens), tokens))

    def _follow_shadows(self) -> None:
        """Score shadows whose fate is known by now."""
        left: list[_Shadow] = []
        for shadow in self._shadows:
            asked = min(SHADOW_DEPTH, shadow.stream.bound)
            emitted = shadow.sequence.tokens[shadow.base : shadow.base + asked]
            pairs = zip(shadow.tokens, emitted, strict=False)
            accepted = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            if accepted is None:
                accepted = min(len(shadow.tokens), len(emitted))
            known = accepted < len(emitted) or len(emitted) == asked
            if not known and shadow.sequence.finish_reason is None:
                left.append(shadow)
                continue
            survival, judged = self.controller.survival, min(len(emitted), accepted + 1)
            key = shadow.method, shadow.stream.workload
            survival.observe(*key, shadow.stream.id, asked, accepted, judged)
            survival.observe_size(*key, len(shadow.tokens), asked)
        self._shadows = left

    def release(self, id: str) -> None:
        """Forget a sequence that ended."""
        self._shadows = [shadow for shadow in self._shadows if shadow.stream.id != id]
        self.controller.release(id)


class Seconds(NamedTuple):
    """What a step took, its verifying, and its drafting by drafter."""

    step: float
    verify: float
    draft: Mapping[str, float]


def _likeliest(count: int, survivals: Sequence[float]) -> list[int]:
    """Return the numbers of the likeliest nodes, in their order; none comes without its parent."""
    order = sorted(range(len(survivals)), key=lambda node: -survivals[node])
    return sorted(order[:count])
