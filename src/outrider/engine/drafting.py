"""Speculation: who drafts for each sequence and how far, and the drafts of one step."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeVar

from ..base.methods import AUTO, TOGETHER
from ..base.trees import depths, is_chain
from ..base.types import (
    DEFAULT_SPECULATION,
    NO_DRAFT,
    Draft,
    DraftBudget,
    HiddenStates,
    Request,
    Scheduled,
    SequenceState,
    Speculation,
    Verdict,
)
from ..drafters.base import Drafter, NoDrafter, NoSpec
from ..drafters.combine import merged, part_of
from ..drafters.prediction import PredictionSpec
from ..errors import ConfigError, RequestError
from ..sampling.shared_noise import Noise
from .adaptive import Adaptive, Freedom
from .control.outlook import PLAIN, Choice
from .scheduler import Plan
from .shield import Shield, is_fatal, is_foreign
from .switch import SpeculationState, check_choice, check_known

D = TypeVar("D", bound=Drafter)
logger = logging.getLogger("outrider")

MOST_FREEDOMS = 256
LONGEST_REASON = 300
"""Characters."""


class Speculator:
    """Drafts for each sequence with the drafter that its request names, else with the default.

    Nothing that a drafter says changes the output under the coupled rule, so neither does the
    choice among them. A drafter that raises, or whose draft is malformed, is switched off.

    Args:
        drafters: by name; ``none`` among them.
        state: the default choice; may be replaced between steps.
        noise: the noise that drafters draw with.
        vocab_size: the target's.
        longest: the longest draft.
        together: drafters whose drafts may be merged.
        portfolio: drafters that ``auto`` chooses among, beside the prediction of a request.
        probes: whether a step may go without drafts now and then, to measure plain decoding.
        adaptive: chooses where neither the engine's user nor a request did.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        state: SpeculationState,
        noise: Noise,
        vocab_size: int,
        longest: int,
        together: Sequence[tuple[str, ...]] = (),
        portfolio: Sequence[str] = (),
        probes: bool = True,
        adaptive: Adaptive | None = None,
    ) -> None:
        self.probes = probes
        self.drafters = dict(drafters)
        self.state = state
        self.max_length = longest
        self.names = (*drafters, *map(TOGETHER.join, together), *((AUTO,) if adaptive else ()))
        """What a request or the switch may call for."""
        self.adaptive = adaptive
        self.portfolio = (*portfolio, PredictionSpec.name)
        self.spent: dict[str, float] = {}
        """Seconds that each drafter took in the last step."""
        self.switched_off: dict[str, str] = {}
        """Drafters that failed, and why."""
        self.target_layers: tuple[int, ...] = ()
        """Layers of the target whose hidden states a drafter wants."""
        self._shield = Shield()
        if adaptive is not None:
            adaptive.peek, adaptive.num_unread = self._peek, self._num_unread
        self._enabled = True  # a default of none is shown as off, and stops no other drafter
        self._paused = False
        self._in_chains = False
        self._noise = noise
        self._vocab_size = vocab_size
        self._refresh()

    def _refresh(self) -> None:
        """Derive what every step needs from the drafters and the switch."""
        live = {n: each for n, each in self.drafters.items() if n not in self.switched_off}
        self.target_layers = tuple(
            sorted({i for each in live.values() for i in each.target_layers})
        )
        self._foreign = {n for n, each in live.items() if is_foreign(each)}
        self._preparing = [n for n, each in live.items() if overrides(each, "prepare")]
        self._observing = [n for n, each in live.items() if overrides(each, "observe")]
        self._releasing = [n for n, each in live.items() if overrides(each, "release")]
        self._usual = self._choice(DEFAULT_SPECULATION)
        self._freedoms: dict[Speculation, Freedom] = {}
        if self.adaptive is not None:
            self.adaptive.rest()  # what it has chosen may not be allowed any more

    @property
    def default(self) -> Drafter:
        """The drafter of requests that name none; under ``auto`` the first that there is."""
        names = self.portfolio if self.state.drafter == AUTO else _parts(self.state.drafter)
        return self.drafters[names[0]]

    def set(self, state: SpeculationState) -> None:
        """Draft in another way from the next step on.

        Raises:
            ConfigError: there is no such drafter, or the length is out of range.
        """
        check_choice(state, self.names, self.max_length)
        self.state = state
        self._enabled = state.enabled
        self._refresh()

    def pause(self, paused: bool) -> None:
        """Let the next step go without drafts, to measure what plain decoding takes, or not."""
        if paused != self._paused:
            self._paused = paused
            self._refresh()

    @contextmanager
    def wrapped(self, wrap: Callable[[Drafter], D]) -> Iterator[D]:
        """Put ``wrap(drafter)`` in the default drafter's place, which drafts in every step."""
        before = self.state, self.probes, self.adaptive
        name = self.default.name
        inner = self.drafters[name]
        self.drafters[name] = wrapper = wrap(inner)
        length = self.state.num_speculative_tokens or self.max_length
        self.state = SpeculationState(self.state.enabled, name, length)
        self.probes, self.adaptive = False, None
        self._in_chains = before[2] is not None  # else trees were asked for
        self._refresh()
        try:
            yield wrapper
        finally:
            self.drafters[name] = inner
            self.state, self.probes, self.adaptive = before
            self._in_chains = False
            self._refresh()

    def check(self, request: Request) -> None:
        """Refuse a request for a drafter or a length that there is not.

        Raises:
            ConfigError: it asks for one.
        """
        self._name(request.speculation)
        wanted, most = request.speculation.num_speculative_tokens or 0, self.max_length
        if wanted > most:
            raise ConfigError(
                f"num_speculative_tokens is {wanted}, but this engine drafts {most} tokens at "
                "most; give that or less."
            )

    def _name(self, wishes: Speculation) -> str:
        """Return the name of the drafter of a request.

        Raises:
            ConfigError: there is none of the name that it gives.
        """
        if wishes.drafter is not None:
            check_known(wishes.drafter, self.names)
            return wishes.drafter
        default = self.state.drafter
        predicts = wishes.prediction and PredictionSpec.name in self.drafters
        return PredictionSpec.name if predicts and default != AUTO else default

    def plan(self, decoding: list[SequenceState]) -> None:
        """Choose how to draft for the sequences that decode in the next step."""
        if self.adaptive is None:
            return
        if self._paused or not self._enabled:
            self.adaptive.rest()
            return
        self.adaptive.plan(decoding, self._freedom)

    def _freedom(self, wishes: Speculation) -> Freedom:
        """Return what a request leaves to the controller."""
        freedom = self._freedoms.get(wishes)
        if freedom is None:
            if len(self._freedoms) > MOST_FREEDOMS:
                self._freedoms.clear()
            freedom = self._freedoms[wishes] = self._left_free(wishes)
        return freedom

    def _left_free(self, wishes: Speculation) -> Freedom:
        assert self.adaptive is not None
        name, length = self._name(wishes), wishes.num_speculative_tokens
        if length is None and (wishes.drafter is None or name == AUTO):
            length = self.state.num_speculative_tokens
        bound = self.max_length if length is None else min(length, self.max_length)
        methods = self.adaptive.controller.methods
        if not wishes.enabled or not bound:
            return Freedom((), 0, PLAIN)
        if name != AUTO and length is not None:
            fixed = Choice(name, min(bound, methods[name].longest)) if name in methods else PLAIN
            return Freedom((), bound, fixed)
        live = [
            each
            for each, method in methods.items()
            if not set(method.drafters) & self.switched_off.keys()
            and (PredictionSpec.name not in method.drafters or wishes.prediction)
            and (
                {*method.drafters} <= {*self.portfolio}
                if name == AUTO
                else [*method.drafters] == _parts(name)
            )
        ]
        return Freedom(tuple(live), bound)

    def budget(self, sequence: SequenceState) -> tuple[str, DraftBudget]:
        """Return who drafts for a sequence in the next step, and how far its draft may go."""
        chosen = None if self.adaptive is None else self.adaptive.budget(sequence)
        if chosen is not None:
            return chosen
        if sequence.has_wishes:
            return self._choice(sequence.request.speculation)
        return self._usual

    def _choice(self, wishes: Speculation) -> tuple[str, DraftBudget]:
        """Return what an engine that does not adapt drafts with."""
        name = self._name(wishes)
        drafters = [self.drafters[part] for part in _parts(name) if part in self.drafters]
        off = self._paused or not self._enabled or self.switched_off.keys() & {*_parts(name)}
        if off or not drafters:
            return ("none" if name == AUTO else name), NO_DRAFT
        most = self.state.num_speculative_tokens or self.max_length
        depth = wishes.length(min([most, *(each.max_length for each in drafters)]))
        nodes = depth * len(drafters)
        branches = len(drafters) == 1 and drafters[0].max_nodes > drafters[0].max_length
        if depth and branches and not self._in_chains:
            nodes = drafters[0].max_nodes
        return name, DraftBudget(depth, nodes)

    def propose(self, plan: Plan) -> Draft:
        """Return the drafts of a step, each from the sequence's drafter.

        Raises:
            RequestError: a drafter that watches (see ``audit``) refuses what it sees.
        """
        names = [item.drafter for item in plan.batch]
        self.spent = {}
        if self._preparing:
            self._prepare(plan)
        nobody = names.count(NoSpec.name) == len(names)
        if nobody and type(self.drafters[NoSpec.name]) is NoDrafter:  # else one that watches
            return Draft.chains([[] for _ in names])._replace(drafters=names)
        if names.count(names[0]) == len(names):
            return self._made(names[0], plan.batch)._replace(drafters=names)
        parts: dict[str, list[int]] = {}
        for i, name in enumerate(names):
            parts.setdefault(name, []).append(i)
        made = {
            name: self._made(name, [plan.batch[i] for i in indices])
            for name, indices in parts.items()
        }
        return _merged(names, parts, made)

    def _prepare(self, plan: Plan) -> None:
        """Call ``prepare`` of drafters that have it, with the sequences that may be drafted for."""
        if self._paused or not self._enabled:
            return
        ready = [
            item.sequence
            for item in plan.batch
            if item.count == 1
            and item.start == len(item.sequence.tokens) - 1
            and item.sequence.request.speculation.enabled
        ]
        for name in [*self._preparing]:
            begin = time.perf_counter()
            try:
                seen = [self._shield.seen(s) for s in ready] if name in self._foreign else ready
                if self.drafters[name].prepare(seen, self._noise):
                    self.spent[name] = time.perf_counter() - begin
            except BaseException as error:
                self._switch_off(name, error)

    def _made(self, name: str, items: Sequence[Scheduled]) -> Draft:
        """Return the drafts of a drafter, or of several merged; empty ones where it failed."""
        budgets = [item.budget for item in items]
        if TOGETHER in name:
            parts = _parts(name)
            made = [self._drafted(part, items, part_of(budgets, len(parts))) for part in parts]
            begin = time.perf_counter()
            whole = merged(parts, made, budgets)
            self.spent[name] = time.perf_counter() - begin
            return whole
        return self._drafted(name, items, budgets)

    def _drafted(
        self, name: str, items: Sequence[Scheduled], budgets: Sequence[DraftBudget]
    ) -> Draft:
        """Return one drafter's drafts, empty ones where it failed."""
        if name not in self.switched_off:
            begin = time.perf_counter()
            try:
                drafter = self.drafters[name]
                if name in self._foreign:
                    made = self._shield.propose(drafter, items, budgets, self._noise)
                else:
                    made = drafter.propose(items, budgets, self._noise)
                check_draft(made, budgets, self._vocab_size)
                self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - begin
                return made
            except BaseException as error:
                self._switch_off(name, error)
        return Draft.chains([[] for _ in items])

    def cut(self, plan: Plan, draft: Draft) -> Draft:
        """Return ``draft`` without the nodes that are not worth verifying."""
        if self.adaptive is None:
            return draft
        return self.adaptive.cut(plan, draft, sum(self.spent.values()))

    def _switch_off(self, name: str, error: BaseException) -> None:
        """Switch a drafter off for good.

        Raises:
            BaseException: ``error``, if it asks the process to end, or if one of our own drafters
                that watches (see ``audit``) refuses what it sees.
        """
        if is_fatal(error) or (isinstance(error, RequestError) and name not in self._foreign):
            raise error
        self.switched_off[name] = f"{type(error).__name__}: {error}"[:LONGEST_REASON]
        self._refresh()
        logger.error("drafter %s failed and is switched off", name, exc_info=error)

    def observe(
        self, plan: Plan, draft: Draft, verdict: Verdict, states: HiddenStates | None
    ) -> None:
        """Tell every drafter what was committed."""
        for name in self._observing:
            try:
                if name in self._foreign:
                    self._shield.observe(self.drafters[name], plan.batch, draft, verdict, states)
                else:
                    self.drafters[name].observe(plan.batch, draft, verdict, states)
            except BaseException as error:
                self._switch_off(name, error)

    def _peek(self, name: str, sequence: SequenceState, depth: int) -> Draft | None:
        """Return what a drafter would draft behind a sequence, see ``Drafter.peek``."""
        try:
            if name in self._foreign:
                return self._shield.peek(self.drafters[name], sequence, depth)
            return self.drafters[name].peek(sequence, depth)
        except BaseException as error:
            self._switch_off(name, error)
        return None

    def _num_unread(self, name: str, sequence: SequenceState) -> int:
        """Return what a drafter must read of a sequence first, see ``Drafter.num_unread``."""
        try:
            if name in self._foreign:
                sequence = self._shield.seen(sequence)
            return self.drafters[name].num_unread(sequence)
        except BaseException as error:
            self._switch_off(name, error)
        return 0

    def release(self, seq_id: str, ended: bool) -> None:
        """Let every drafter forget a sequence, see ``Drafter.release``."""
        if self.adaptive is not None and ended:
            self.adaptive.release(seq_id)
        for name in self._releasing:
            try:
                self.drafters[name].release(seq_id, ended)
            except BaseException as error:
                self._switch_off(name, error)
        self._shield.release(seq_id)


def overrides(drafter: Drafter, method: str) -> bool:
    """Return True where a drafter has a method of its own."""
    return getattr(type(drafter), method) is not getattr(Drafter, method)


def _parts(name: str) -> list[str]:
    return name.split(TOGETHER)


def _merged(names: list[str], parts: Mapping[str, list[int]], made: Mapping[str, Draft]) -> Draft:
    """Return one draft of a step from those of its drafters, whose sequences ``parts`` lists."""
    found = Draft.chains([[] for _ in names])
    columns: dict[str, list[Any]] = {}
    for name, indices in parts.items():
        draft = made[name]
        for i, tokens, parents in zip(indices, draft.tokens, draft.parents, strict=True):
            found.tokens[i], found.parents[i] = tokens, parents
        for field in ("logits", "sources", "margins", "survivals"):
            values = getattr(draft, field)
            if values is not None:
                unknown: Any = None if field == "logits" else []
                column = columns.setdefault(field, [unknown] * len(names))
                for i, value in zip(indices, values, strict=True):
                    column[i] = value
    return found._replace(drafters=names, **columns)


def check_draft(draft: Draft, budgets: Sequence[DraftBudget], vocab_size: int) -> None:
    """Refuse a malformed draft before C++ sees it.

    Raises:
        ValueError: a draft is missing, too large or too deep, or has an id outside the vocabulary
            or a parent that does not come before its child.
    """
    if not len(draft.tokens) == len(draft.parents) == len(budgets):
        raise ValueError(
            f"a draft is for {len(draft.tokens)} sequences, its parents are for "
            f"{len(draft.parents)}; {len(budgets)} were asked for."
        )
    if not any(draft.tokens) and not any(draft.parents):
        return
    ids = [*chain.from_iterable(draft.tokens)]
    if set(map(type, ids)) - {int} or min(ids, default=0) < 0 or max(ids, default=0) >= vocab_size:
        raise ValueError(f"a draft has ids outside the vocabulary of {vocab_size}.")
    for tokens, parents, budget in zip(draft.tokens, draft.parents, budgets, strict=True):
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
