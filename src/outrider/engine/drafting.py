"""Asks drafters for the drafts of a step, times them, and switches off those that fail."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Protocol, TypeVar

from ..base.methods import NONE, OTHERWISE, TOGETHER
from ..base.trees import depths, is_chain
from ..base.types import (
    NO_NODES,
    Draft,
    DraftBudget,
    DraftNodes,
    Plan,
    Scheduled,
    SequenceState,
    StepRecord,
)
from ..drafters.base import Drafter, NoDrafter
from ..drafters.combine import merged, part_of
from ..errors import RequestError
from ..sampling.shared_noise import Noise
from .control.switch import Menu, parts
from .foreign import Shield, is_foreign

T = TypeVar("T")
logger = logging.getLogger("outrider")

MAX_REASON = 300  # characters of the reason why a drafter failed


class Watcher(Protocol):
    """Observes each step without drafting; ``Drafter`` documents both members."""

    target_layers: tuple[int, ...]

    def observe(self, record: StepRecord) -> None:
        """Take in a committed step."""


class Drafting:
    """Drafts for each sequence with the drafter that was chosen for it.

    No draft changes the output under the coupled rule. A drafter that raises, or whose draft is
    malformed, is switched off for good in the menu.
    """

    def __init__(
        self, drafters: dict[str, Drafter], menu: Menu, noise: Noise, vocab_size: int
    ) -> None:
        self.drafters, self.menu = drafters, menu
        self.target_layers: tuple[int, ...] = ()
        """Layers of the target whose hidden states a drafter wants."""
        self._watchers: list[Watcher] = []
        self.promises: Callable[[Scheduled, DraftNodes], bool] = lambda item, nodes: True
        """Returns whether a lookup's draft is worth more than the alternative drafter's."""
        self._shield = Shield()
        self._noise, self._vocab_size = noise, vocab_size
        self.refresh()

    def refresh(self) -> None:
        """Recompute what every step needs from the drafters that are not switched off."""
        off = self.menu.switched_off
        live = {name: each for name, each in self.drafters.items() if name not in off}
        wanted = chain.from_iterable(d.target_layers for d in (*live.values(), *self._watchers))
        self.target_layers = tuple(sorted({*wanted}))
        self._foreign = {name for name, each in live.items() if is_foreign(each)}
        self.preparing, self._observing, self._releasing = (
            [name for name, each in live.items() if overrides(each, method)]
            for method in ("prepare", "observe", "release")
        )
        self.menu.refresh()

    def watch(self, watcher: Watcher) -> None:
        """Let a watcher observe each step too, with hidden states of its ``target_layers``."""
        self._watchers.append(watcher)
        self.refresh()

    def _call(self, otherwise: T, name: str, method: str, *arguments: Any) -> T:
        """Return the result of a drafter's method, ``otherwise`` if it fails."""
        try:
            drafter = self.drafters[name]
            if name in self._foreign:
                result: T = self._shield.call(drafter, method, arguments)
            else:
                result = getattr(drafter, method)(*arguments)
            return result
        except BaseException as error:
            self._switch_off(name, error)
            return otherwise

    def _switch_off(self, name: str, error: BaseException) -> None:
        """Switch a drafter off for good.

        Raises ``error`` itself if it is a KeyboardInterrupt or GeneratorExit, or a RequestError of
        one of our own drafters, by which ``audit`` refuses a step.
        """
        # A panic of a Rust library and a drafter's own sys.exit count as ordinary failures.
        refuses = isinstance(error, RequestError) and name not in self._foreign
        if refuses or isinstance(error, KeyboardInterrupt | GeneratorExit):
            raise error
        self.menu.switched_off[name] = f"{type(error).__name__}: {error}"[:MAX_REASON]
        self.refresh()
        logger.error("drafter %s failed and is switched off", name, exc_info=error)

    def propose(self, plan: Plan) -> Draft:
        """Return the drafts of a step, each from the sequence's drafter; see ``_switch_off``."""
        begin = time.perf_counter()
        names = [item.drafter for item in plan.batch]
        seconds = plan.seconds.drafters
        if self.preparing and self.menu.enabled:
            self._prepare(plan)
        draft = Draft([NO_NODES] * len(names))
        if names.count(names[0]) == len(names):
            if names[0] != NONE or type(self.drafters[NONE]) is not NoDrafter:  # or is watched
                draft = self._made(names[0], plan.batch, seconds)
        else:
            for name in dict.fromkeys(names):
                places = [i for i, each in enumerate(names) if each == name]
                made = self._made(name, [plan.batch[i] for i in places], seconds)
                for i, nodes in zip(places, made, strict=True):
                    draft[i] = nodes
        self._fit(plan, draft)
        plan.seconds.draft = time.perf_counter() - begin
        return draft

    @staticmethod
    def _fit(plan: Plan, draft: Draft) -> None:
        """Cut drafts to what grammars accept; drafts with distributions comply already."""
        for i, item in enumerate(plan.batch):
            pipeline, depth = item.sequence.pipeline, item.budget.depth
            if not depth or not pipeline.has_grammar or draft[i].logits is not None:
                continue
            tokens, parents = draft[i].tokens, draft[i].parents
            try:
                tokens, parents = pipeline.fit(item.sequence.tokens, tokens, parents, depth)
                draft[i] = draft[i]._replace(tokens=tokens, parents=parents)
            except Exception:  # the target meets the same error, and reports it
                draft[i] = NO_NODES

    def _prepare(self, plan: Plan) -> None:
        """Call ``prepare`` of drafters that have it, with the sequences that may be drafted for."""
        ready = [
            item.sequence
            for item in plan.batch
            if item.count == 1
            and item.start == len(item.sequence.tokens) - 1
            and item.sequence.request.speculation.enabled
        ]
        for name in [*self.preparing]:
            begin = time.perf_counter()
            if self._call(False, name, "prepare", ready, self._noise):
                plan.seconds.drafters[name] = time.perf_counter() - begin

    def _made(self, name: str, items: Sequence[Scheduled], seconds: dict[str, float]) -> Draft:
        """Return the drafts of a drafter, or of several merged; empty ones where it failed."""
        budgets = [item.budget for item in items]
        if OTHERWISE in name:
            return self._found_or_drafted(name, items, seconds)
        if TOGETHER not in name:
            return self._drafted(name, items, budgets, seconds)
        names = parts(name)
        shares = part_of(budgets, len(names))
        made = [self._drafted(each, items, shares, seconds) for each in names]
        begin = time.perf_counter()
        whole = merged(names, made, budgets)
        seconds[name] = time.perf_counter() - begin
        return whole

    def _found_or_drafted(
        self, name: str, items: Sequence[Scheduled], seconds: dict[str, float]
    ) -> Draft:
        """Return a lookup's drafts, or another drafter's where the lookup's promise less.

        Sets the ``drafter`` of each item to the one that made its draft.
        """
        lookup, other = name.split(OTHERWISE)
        made = self._drafted(lookup, items, [item.budget for item in items], seconds)
        left: list[int] = []
        for i, (item, nodes) in enumerate(zip(items, made, strict=True)):
            item.drafter = lookup
            if item.budget.depth and not (nodes.tokens and self.promises(item, nodes)):
                left.append(i)
        if left:
            most = self.drafters[other].max_length
            some = [items[i] for i in left]
            budgets = [_shorter(item.budget, most) for item in some]
            for i, nodes in zip(left, self._drafted(other, some, budgets, seconds), strict=True):
                if nodes.tokens:
                    made[i], items[i].drafter = nodes, other
        return made

    def _drafted(
        self,
        name: str,
        items: Sequence[Scheduled],
        budgets: Sequence[DraftBudget],
        seconds: dict[str, float],
    ) -> Draft:
        """Return one drafter's drafts, empty ones where it failed."""
        if name not in self.menu.switched_off:
            begin = time.perf_counter()
            try:
                drafter = self.drafters[name]
                if name in self._foreign:
                    made = self._shield.propose(drafter, items, budgets, self._noise)
                else:
                    made = drafter.propose(items, budgets, self._noise)
                check_draft(made, budgets, self._vocab_size)
                seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begin
                return made
            except BaseException as error:
                self._switch_off(name, error)
        return Draft([NO_NODES] * len(items))

    def observe(self, record: StepRecord) -> None:
        """Tell every drafter what was committed."""
        for watcher in self._watchers:
            watcher.observe(record)
        if not self._observing:
            return
        begin = time.perf_counter()
        for name in [*self._observing]:
            self._call(None, name, "observe", record)
        record.seconds.step += time.perf_counter() - begin

    def peek(self, name: str, sequence: SequenceState, depth: int) -> DraftNodes | None:
        """Return a drafter's cheap draft after a sequence, see ``Drafter.peek``."""
        return self._call(None, name, "peek", sequence, depth)

    def num_unread(self, name: str, sequence: SequenceState) -> int:
        """Return the tokens of a sequence that a drafter must read, see ``Drafter.num_unread``."""
        return self._call(0, name, "num_unread", sequence)

    def release(self, seq_id: str, ended: bool) -> None:
        """Let every drafter forget a sequence, see ``Drafter.release``."""
        for name in [*self._releasing]:
            self._call(None, name, "release", seq_id, ended)
        self._shield.release(seq_id)


def _shorter(budget: DraftBudget, most: int) -> DraftBudget:
    """Return the budget cut to a chain of at most ``most`` tokens."""
    depth = min(budget.depth, most)
    return budget._replace(depth=depth, nodes=min(budget.nodes, depth))


def overrides(drafter: Drafter, method: str) -> bool:
    """Return True if a drafter overrides a method of ``Drafter``."""
    return getattr(type(drafter), method) is not getattr(Drafter, method)


def check_draft(draft: Sequence[DraftNodes], budgets: Sequence[DraftBudget], vocab: int) -> None:
    """Raise ValueError for a malformed draft, before C++ sees it."""
    if len(draft) != len(budgets):
        raise ValueError(f"a draft is for {len(draft)} sequences; {len(budgets)} were asked for.")
    ids = [*chain.from_iterable([nodes.tokens for nodes in draft])]
    if set(map(type, ids)) - {int} or min(ids, default=0) < 0 or max(ids, default=0) >= vocab:
        raise ValueError(f"a draft has ids outside the vocabulary of {vocab}.")
    for (tokens, parents, *_), budget in zip(draft, budgets, strict=True):
        depth, deepest, most = len(tokens), budget.depth, budget.nodes
        if depth != len(parents) or depth > most:
            raise ValueError(
                f"a draft has {depth} tokens and {len(parents)} parents, but {most} nodes may be "
                "drafted."
            )
        if not is_chain(parents):
            if not all(type(p) is int and -1 <= p < i for i, p in enumerate(parents)):
                raise ValueError("a draft has a parent that does not come before its child.")
            depth = max(depths(parents), default=0)
        if depth > deepest:
            raise ValueError(f"a draft is {depth} tokens deep, but {deepest} may be drafted.")
