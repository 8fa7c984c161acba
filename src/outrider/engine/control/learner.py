"""Learns from steps: what their parts took, and which drafted tokens were accepted."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from ...base.trees import num_alike, sizes
from ...base.types import Draft, DraftBudget, DraftNodes, Scheduled, SequenceState, StepRecord
from ...native.rates import MARGINS
from .choices import PLAIN, Choice, DrafterView, Knowledge, Stream, counts_by_depth

Peek = Callable[[str, SequenceState, int], DraftNodes | None]
"""Returns a drafter's draft of a depth after a sequence, see ``Drafter.peek``."""


class ChosenDraft(NamedTuple):
    """The choice for a sequence, with the name of its drafter and the draft's budget."""

    stream: Stream
    choice: Choice
    drafter: str
    budget: DraftBudget


@dataclass
class StepWindow:
    """Steps since the last one that was looked at.

    ``emitted`` tokens and ``took`` seconds are those of steps with drafts, ``all`` the seconds of
    all steps. The step that is looked at took ``last`` seconds and ``gave`` that many tokens; its
    forward was ``slow`` times as long as expected.
    """

    streams: int
    emitted: int = 0
    took: float = 0.0
    all: float = 0.0
    last: float = 0.0
    gave: int = 0
    slow: float = 1.0


class Shadow(NamedTuple):
    """An unverified draft after the first ``base`` tokens of a sequence."""

    method: str
    stream: Stream
    sequence: SequenceState
    base: int
    draft: DraftNodes


class Learner:
    """Looks at as many steps as a small share of the time allows, and updates costs and survival.

    Methods that cost next to nothing (``shadowed``) also draft beside the chosen one, by ``peek``;
    these drafts are not verified but scored against the tokens emitted later. Costs are not learned
    from steps in which ``preparing`` drafters catch up.
    """

    def __init__(
        self,
        known: Knowledge,
        shadowed: frozenset[str],
        drafters: Mapping[str, DrafterView],
        preparing: Collection[str],
        peek: Peek,
    ) -> None:
        self._costs, self._survival, self._methods, self._tuning = known
        self._shadowed, self._drafters = shadowed, drafters
        self._preparing, self._peek = preparing, peek
        self.looking = False  # True if the next step is looked at
        self._new = False  # True if few drafts of a method in use were looked at
        self._turn = 0
        self._looks_at: Counter[str] = Counter()
        self._every = 1
        self._window = StepWindow(0)
        self._longest = inf  # most seconds that a step counts with if a drafter reads in it
        self._step_seconds = self._look_seconds = self._review_seconds = 0.0
        """Running means: of a step, of looking at one, and of comparing choices."""
        self._choosing = self.cutting = 0.0
        """Seconds that choosing for the present step took, and cutting its drafts."""
        self._shadows: list[Shadow] = []
        self._shadow_seconds = 0.0  # a running mean of what casting and following shadows takes
        self._shadow_every = 1
        self._all_known = False  # True if shadowed methods were known when one was cast last
        self._casts = 0
        self._next = 0  # the sequence that got the last shadow, by its place in the batch

    def begin(self) -> None:
        """Begin a step."""
        self.looking = self._new or self._turn % self._every == 0
        self._choosing = self.cutting = 0.0

    def reviewed(self, seconds: float) -> int | None:
        """Take in what comparing choices took; return after how many steps it may be done again."""
        if not self._step_seconds:
            return None
        self._review_seconds = self._smoothed(self._review_seconds, seconds)
        tuning = self._tuning
        most = tuning.most_review_steps
        return self._steps_for(self._review_seconds, tuning.own_share, 1, most)

    def chosen(self, chosen: Mapping[str, ChosenDraft], tries: bool, seconds: float) -> None:
        """Take in what was chosen for the step, whether it tries something, and what that took."""
        self._new = self._is_new(chosen, tries)
        self.looking = self.looking or tries or self._new
        self._choosing = seconds

    def _smoothed(self, before: float, value: float) -> float:
        return before + self._tuning.smoothing * (value - before) if before else value

    def _steps_for(self, seconds: float, share: float, least: int, most: int) -> int:
        """Return after how many steps something that takes so long may be done again."""
        allowed = min(share * self._step_seconds, self._tuning.own_seconds)
        return max(least, min(most, round(seconds / allowed)))

    def _is_new(self, chosen: Mapping[str, ChosenDraft], tries: bool) -> bool:
        few = self._tuning.new_drafts
        methods = {each.choice.method for each in chosen.values()}
        return not tries and any(self._looks_at[name] < few for name in methods)

    def learn(
        self,
        record: StepRecord,
        whole: Draft,
        chosen: Mapping[str, ChosenDraft],
        tries: bool,
        cold: bool,
    ) -> StepWindow | None:
        """Take in a step, with its ``whole`` drafts before they were cut, and the choices for it.

        Its drafters are ``cold`` if they have not drafted for long. Returns the steps since the
        last look if costs were learned from this one, else None.
        """
        begin = time.perf_counter()
        plan, seconds = record.plan, record.seconds.step
        self._step_seconds = self._smoothed(self._step_seconds, seconds)
        count, window, seen = len(chosen), self._window, None
        if plan.rows == plan.decoding == count:  # else prompts ran too
            if window.streams != count:
                window = self._window = StepWindow(count)
            if record.drafters and not tries:  # a trial has its own price
                window.emitted += len(record.events)
                # All tokens to come pay for what a drafter reads now, not this step alone.
                reads = any(self._catches_up(name) for name in record.seconds.drafters)
                longest = min(self._longest, self._step_seconds) if reads else self._longest
                window.took += min(seconds, longest)
            window.all += seconds
            preparing = any(self._drafters[name].catching_up for name in self._preparing)
            if self.looking and not preparing:
                seen, self._window = window, StepWindow(count)
                self._learn_costs(record, whole, chosen, window, cold)
        if self.looking:
            counts = Counter([each.choice.method for each in chosen.values()])
            most = self._tuning.new_drafts_at_once
            self._looks_at.update({name: min(n, most) for name, n in counts.items()})
            self._new = self._is_new(chosen, tries)
            self._score(plan.batch, whole, chosen)
            tuning, own = self._tuning, time.perf_counter() - begin + self.cutting
            self._look_seconds = self._smoothed(self._look_seconds, own)
            most = tuning.most_look_steps
            self._every = self._steps_for(self._look_seconds, tuning.own_share, 1, most)
        if self._shadowed and self._turn % self._shadow_every == 0:
            self._shadow([item.sequence for item in plan.batch], chosen)
        self._turn += 1
        return seen

    def _shadow(self, sequences: list[SequenceState], chosen: Mapping[str, ChosenDraft]) -> None:
        """Score shadows whose fate is known, cast others, and set when that is done again."""
        begin, tuning = time.perf_counter(), self._tuning
        self._follow()
        self._cast(sequences, chosen)
        own = time.perf_counter() - begin
        self._shadow_seconds = self._smoothed(self._shadow_seconds, own)
        if self._all_known:
            share, most = tuning.own_share, tuning.most_shadow_steps
        else:
            share, most = tuning.shadow_share, tuning.most_look_steps
        self._shadow_every = self._steps_for(self._shadow_seconds, share, 1, most)

    def _learn_costs(
        self,
        record: StepRecord,
        whole: Draft,
        chosen: Mapping[str, ChosenDraft],
        window: StepWindow,
        cold: bool,
    ) -> None:
        costs, methods, plan, seconds = self._costs, self._methods, record.plan, record.seconds
        streams = plan.decoding
        context = sum([len(item.sequence.tokens) for item in plan.batch])
        committed = streams + sum([len(nodes.tokens) for nodes in record.draft])
        step = seconds.step - self._choosing - self.cutting
        expected = costs.verify(committed, context)
        window.last, window.gave = step, len(record.events)
        window.slow = seconds.verify / expected
        longest = self._tuning.spike * seconds.step
        self._longest = min(self._longest, 2 * longest) * 0.8 + 0.2 * longest
        expected += costs.host(streams)
        drafting = [
            (
                chosen[item.sequence.id].choice.method,
                max(1, len(sizes(nodes.parents))),
                item.drafter,
            )
            for item, nodes in zip(plan.batch, whole, strict=True)
            if item.budget.depth
        ]
        used = [(methods[name], depth, source) for name, depth, source in drafting]
        rows, own = (
            counts_by_depth(
                (name, depth, method.width)
                for method, depth, source in used
                for name in (method.parts_of(source) if only_asked else method.parts)
            )
            for only_asked in (False, True)
        )
        ahead = {name: self._ahead_share(name) for name in rows}
        if not cold and not any(self._catches_up(name) for name in rows):
            expected += sum(
                [costs.draft(name, by_depth) * (1 - ahead[name]) for name, by_depth in rows.items()]
            )
            names = {name for name, *_ in drafting} or {PLAIN.method}
            if len(names) == 1 and len(drafting) in (0, streams):
                costs.observe_step(names.pop(), step / expected)
        costs.observe_verify(committed, context, seconds.verify, seconds.experts)
        costs.observe_host(streams, step - seconds.verify - sum(seconds.drafters.values()))
        for name, by_depth in own.items():
            if name in seconds.drafters and not cold and not self._catches_up(name):
                costs.observe_ahead(name, ahead[name])
                if not ahead[name]:
                    costs.observe_draft(name, by_depth, seconds.drafters[name])

    def _catches_up(self, name: str) -> bool:
        drafter = self._drafters.get(name)
        return drafter is not None and drafter.catching_up

    def _ahead_share(self, name: str) -> float:
        drafter = self._drafters.get(name)
        return 0.0 if drafter is None else drafter.ahead_share

    def _score(
        self, batch: list[Scheduled], whole: Draft, chosen: Mapping[str, ChosenDraft]
    ) -> None:
        """Score drafts, whose nodes are scored even if they were not verified."""
        places: Iterable[int] = range(len(batch))
        most, first = self._tuning.scored_sequences, 0
        if len(batch) > most:
            first = self._turn * most
            places = range(first, first + most)
        for i in places:
            index = i % len(batch)
            item = batch[index]
            one = chosen.get(item.sequence.id)
            if one is None:
                continue
            if item.budget.depth:
                self._score_one(item, one, whole[index])

    def _score_one(self, item: Scheduled, chosen: ChosenDraft, nodes: DraftNodes) -> None:
        """Score the draft of one sequence."""
        survival, stream, name = self._survival, chosen.stream, chosen.choice.method
        workload, method = stream.workload, self._methods[name]
        scored = method.scored(item.drafter) or name
        emitted = item.sequence.tokens[item.start + item.count :]
        tokens, parents, margins = nodes.tokens, nodes.parents, nodes.margins
        if len(margins) != len(tokens):  # a grammar has cut the draft, or added to it
            margins = ()
        node, straight = -1, 0
        for depth, token in enumerate(emitted):
            below = [i for i, parent in enumerate(parents) if parent == node]
            node = next((i for i in below if tokens[i] == token), -1)
            for rank, i in enumerate(below if margins else ()):
                bin = bisect_right(MARGINS, margins[i])
                survival.observe_node(scored, workload, depth + 1, rank, bin, i == node)
            if node < 0:
                break
            straight += straight == depth and node == below[0]
        asked, accepted = item.budget.depth, len(emitted) - 1
        survival.observe(name, workload, stream.id, asked, accepted)
        survival.observe_size(name, workload, sizes(parents), asked, method.nodes(1))
        narrow = method.drafters[0]
        if narrow != name and not method.otherwise:  # its chain is the first children
            judged = min(asked, len(emitted), straight + 1)
            survival.observe(narrow, workload, stream.id, asked, straight, judged)

    def _cast(self, sequences: Sequence[SequenceState], chosen: Mapping[str, ChosenDraft]) -> None:
        """Let methods that are not in use draft after some sequences; all take turns."""
        followed = {shadow.stream.id for shadow in self._shadows}
        survival, sure = self._survival, self._tuning.sure_tokens
        for _ in range(min(len(sequences), self._tuning.shadowed_sequences)):
            self._next = (self._next + 1) % len(sequences)
            sequence = sequences[self._next]
            one = chosen.get(sequence.id)
            if one is None or sequence.id in followed or sequence.finish_reason is not None:
                continue
            stream, taken = one.stream, one.choice.method
            names = [name for name in stream.methods if name in self._shadowed and name != taken]
            if not names:
                continue
            self._all_known = all(survival.judged(n, stream.workload) >= sure for n in names)
            self._casts += 1
            name = names[self._casts % len(names)]
            draft = self._peek(name, sequence, min(self._tuning.shadow_depth, stream.max_depth))
            if draft is not None:
                self._shadows.append(Shadow(name, stream, sequence, len(sequence.tokens), draft))

    def _follow(self) -> None:
        """Score the drafts of shadows whose fate is known by now."""
        left: list[Shadow] = []
        for shadow in self._shadows:
            asked = min(self._tuning.shadow_depth, shadow.stream.max_depth)
            emitted = shadow.sequence.tokens[shadow.base : shadow.base + asked]
            tokens, margins = shadow.draft.tokens, shadow.draft.margins
            accepted = num_alike(tokens, emitted)
            known = accepted < len(emitted) or len(emitted) == asked
            if not known and shadow.sequence.finish_reason is None:
                left.append(shadow)
                continue
            survival, judged = self._survival, min(len(emitted), accepted + 1)
            key = shadow.method, shadow.stream.workload
            survival.observe(*key, shadow.stream.id, asked, accepted, judged)
            survival.observe_size(*key, [1] * len(tokens), asked, 1)
            for depth, margin in enumerate(margins[:judged]):
                bin = bisect_right(MARGINS, margin)
                survival.observe_node(*key, depth + 1, 0, bin, depth < accepted)
        self._shadows = left

    def release(self, id: str) -> None:
        """Forget the drafts for a sequence that ended."""
        self._shadows = [shadow for shadow in self._shadows if shadow.stream.id != id]
