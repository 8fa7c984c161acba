"""Chooses an engine's drafter and draft length for each sequence, or a plain step.

A ``Chooser`` obeys the switch and the requests. An ``AdaptiveChooser`` lets a ``Controller`` choose
what they leave open.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from ...base.methods import NONE
from ...base.types import (
    NO_DRAFT,
    Draft,
    DraftBudget,
    DraftNodes,
    Plan,
    Scheduled,
    SequenceState,
    StepRecord,
)
from .choices import PLAIN, Choice, DrafterView, Stream
from .controller import Controller
from .costs import CostModel
from .learner import ChosenDraft, Learner, Peek
from .prices import Prices, without
from .switch import Menu
from .tuning import USUAL, Tuning


class Chooser:
    """Obeys the menu: the switch, and each request. It reports to ``costs`` what steps took.

    If it ``tries_plain``, a step is plain now and then, to measure its time. This changes no output
    under the coupled rule.
    """

    def __init__(
        self, menu: Menu, costs: CostModel, tries_plain: bool = True, tuning: Tuning = USUAL
    ) -> None:
        self.menu, self.costs, self.tries_plain, self._tuning = menu, costs, tries_plain, tuning
        self.max_rows: int | None = None
        """Rows that the next step may have, so that no stream waits long for another's prompt."""
        self._plain = False  # True if the next step tries plain decoding
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
        """Return a sequence's drafter in the next step, and the budget of its draft."""
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


class AdaptiveChooser(Chooser):
    """Lets a controller choose what the switch and requests leave open, and learns from each step.

    A drafter extends a node only if that is worth another pass, and drafted nodes are verified only
    if they are worth their rows (``prices``). Both decisions look at the drafted nodes, if the
    acceptance rule allows it (``peeks``): the coupled rule does, the ratio rules do not. Drafters
    that are ``preparing`` must prepare before they can draft for a workload. ``peek`` and
    ``unread`` call ``peek`` and ``num_unread`` of a drafter by its name.
    """

    def __init__(
        self,
        menu: Menu,
        controller: Controller,
        drafters: Mapping[str, DrafterView],
        preparing: Collection[str],
        peek: Peek,
        unread: Callable[[str, SequenceState], int],
        peeks: bool,
    ) -> None:
        super().__init__(menu, controller.costs, peeks, controller.tuning)
        self.controller, self._peeks = controller, peeks
        controller.unread = lambda id, name: unread(name, self._by_id[id])
        self._methods, self._survival = controller.methods, controller.survival
        self._preparing = [drafters[name] for name in preparing]
        self.learner = Learner(controller.known, controller.shadowed, drafters, preparing, peek)
        self.prices = Prices(controller.known)
        self._version = menu.version
        self._sequences: list[SequenceState] = []
        self._by_id: dict[str, SequenceState] = {}
        self._chosen: dict[str, ChosenDraft] = {}
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
            self._version = menu.version  # what was chosen may not be allowed any more
            self._sequences, self._by_id, self._chosen, self._all_fixed = [], {}, {}, False
            if self._plain or not menu.enabled:
                return
        steady = self.controller.steady
        if sequences == self._sequences and (not self._chosen or steady(len(sequences))):
            return
        streams = self._streams(sequences)
        self._sequences, self._chosen = sequences, {}
        self._by_id = {sequence.id: sequence for sequence in sequences}
        free = any(stream.methods for stream in streams)
        self._all_fixed = not free
        free = free or any(stream.fixed not in (None, PLAIN) for stream in streams)
        if not streams or not (free or self._preparing):
            return  # nothing is left to choose
        controller, begin = self.controller, time.perf_counter()
        before = controller.reviewed
        choices = controller.decide(streams)
        if controller.reviewed != before:
            self._budgets.clear()
            self.prices.renew(controller.review)
            steps = learner.reviewed(time.perf_counter() - begin)
            if steps is not None:
                controller.affords(steps)
        for stream, choice in zip(streams, choices, strict=True):
            budget = self._budget(choice, stream, len(streams)) if choice.depth else NO_DRAFT
            method = self._methods.get(choice.method)
            name = NONE if method is None else method.drafter
            self._chosen[stream.id] = ChosenDraft(stream, choice, name, budget)
        learner.chosen(self._chosen, controller.tries, time.perf_counter() - begin)

    def _streams(self, sequences: Sequence[SequenceState]) -> list[Stream]:
        """Return the sequences as streams; known ones are updated only if choices are compared."""
        known = self._chosen
        streams = [known[s.id].stream if s.id in known else self._stream(s) for s in sequences]
        if known and self.controller.due(streams):
            return [self._stream(sequence) for sequence in sequences]
        return streams

    def _stream(self, sequence: SequenceState) -> Stream:
        """Return a sequence with its freedom, without methods that cannot draft for it yet."""
        length, workload = len(sequence.tokens), sequence.workload
        names, depth, fixed = self.menu.freedom(sequence.request.speculation)
        if self._preparing:
            waiting = {each.name for each in self._preparing if not each.ready(workload)}
            names = tuple([n for n in names if waiting.isdisjoint(self._methods[n].drafters)])
        return Stream(sequence.id, workload, length, names, depth, fixed, sequence.limit - length)

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
            budget = DraftBudget(choice.depth, self._methods[choice.method].nodes(choice.depth))
            if self._peeks and stream.fixed is None:
                method = self._methods[choice.method]
                passes = method.drafters[-1] if method.otherwise else choice.method
                own = Choice(passes, choice.depth)
                least = self.prices.least(own, stream.workload, sequences)
                rates = self._survival.rates(passes, stream.workload)
                budget = budget._replace(least=least, rates=rates)
            self._budgets[key] = budget
        return budget

    def promises(self, item: Scheduled, nodes: DraftNodes) -> bool:
        """Return whether a lookup's draft is worth more than the alternative drafter's."""
        stream, choice, *_ = self._chosen[item.sequence.id]
        lookup, other = self._methods[choice.method].drafters
        enough = self.prices.enough(Choice(other, choice.depth), stream.workload)
        return sum(self.prices.survivals(nodes, lookup, stream.workload)) >= enough

    def cut(self, plan: Plan, draft: Draft) -> Draft:
        self._whole, learner = draft, self.learner
        if not self._peeks or self.controller.tries or not any(nodes.margins for nodes in draft):
            return draft  # a trial measures what all its rows take
        begin = time.perf_counter()
        chances: dict[int, Sequence[float]] = {}
        rows = plan.rows
        for i, (item, nodes) in enumerate(zip(plan.batch, draft, strict=True)):
            known = nodes.survivals
            done = known and not learner.looking  # cut by its drafter
            if done or item.budget.rates is None or len(nodes.margins) != len(nodes.tokens):
                rows += len(nodes.tokens)
            elif nodes.tokens:
                _, choice, *_ = self._chosen[item.sequence.id]
                scored = self._methods[choice.method].scored(item.drafter)
                key = scored or choice.method, item.sequence.workload
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
        learner.cutting = time.perf_counter() - begin
        return draft

    def learn(self, record: StepRecord) -> None:
        if self._chosen:
            whole = self._whole or record.draft
            controller = self.controller
            controller.accepted(len(record.events) > record.plan.decoding)
            tries, cold = controller.tries, controller.cold
            window = self.learner.learn(record, whole, self._chosen, tries, cold)
            self._whole = None
            if window is not None:
                controller.trials.observe(window.last / max(1.0, window.slow), window.gave)
                controller.observe(
                    window.streams, window.emitted, window.took, window.all, window.slow
                )
        super().learn(record)

    def release(self, id: str) -> None:
        self.controller.release(id)
        self.learner.release(id)
