"""Speculation: who drafts for each sequence and how far, and the drafts of one step."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from ..drafters.base import Drafter
from ..drafters.prediction import PredictionSpec
from ..errors import ConfigError, RequestError, shown
from ..sampling.shared_noise import Noise
from ..types import (
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
    depths,
)
from .scheduler import Plan

D = TypeVar("D", bound=Drafter)
logger = logging.getLogger("outrider")

CHAINS = [list(range(-1, length - 1)) for length in range(64)]
"""The parents of short chains, by length."""
LONGEST_REASON = 300
"""Characters."""


@dataclass(frozen=True)
class SpeculationState:
    """The switch: on or off, the default drafter, and the draft length."""

    enabled: bool
    drafter: str
    num_speculative_tokens: int


def check_known(name: str, drafters: Collection[str]) -> None:
    """Refuse the name of a drafter that the engine does not have.

    Raises:
        ConfigError: it is none of ``drafters``.
    """
    if name not in drafters:
        known = ", ".join(sorted(drafters))
        raise ConfigError(f"there is no drafter {shown(name)} here; give one of {known}.")


def check_choice(state: SpeculationState, drafters: Collection[str], longest: int) -> None:
    """Refuse a default that the engine cannot draft by.

    Raises:
        ConfigError: there is no such drafter, or the length is not from 1 to ``longest``.
    """
    check_known(state.drafter, drafters)
    if not 1 <= state.num_speculative_tokens <= longest:
        raise ConfigError(
            f"num_speculative_tokens is {state.num_speculative_tokens}; give 1 to {longest}."
        )


class Speculator:
    """Drafts for each sequence with the drafter that its request names, else with the default.

    Nothing that a drafter says changes the output under the coupled rule, so neither does the
    choice among them. A drafter that raises, or whose draft is malformed, is switched off.

    Args:
        drafters: by name; ``none`` among them.
        state: the default choice; may be replaced between steps.
        noise: the noise that drafters draw with.
        vocab_size: the target's.
        probes: whether a step may go without drafts now and then, to measure plain decoding.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        state: SpeculationState,
        noise: Noise,
        vocab_size: int,
        probes: bool = True,
    ) -> None:
        self.probes = probes
        self.drafters = dict(drafters)
        self.state = state
        self.max_length = state.num_speculative_tokens
        self.switched_off: dict[str, str] = {}
        """Drafters that failed, and why."""
        self.target_layers: tuple[int, ...] = ()
        """Layers of the target whose hidden states a drafter wants."""
        self._enabled = True  # a default of none is shown as off, and stops no other drafter
        self._paused = False
        self._noise = noise
        self._vocab_size = vocab_size
        self._refresh()

    def _refresh(self) -> None:
        """Derive what every step needs from the drafters and the switch."""
        live = {n: each for n, each in self.drafters.items() if n not in self.switched_off}
        self.target_layers = tuple(
            sorted({i for each in live.values() for i in each.target_layers})
        )
        self._observing = [n for n, each in live.items() if _overrides(each, "observe")]
        self._releasing = [n for n, each in live.items() if _overrides(each, "release")]
        self._usual = self._choice(DEFAULT_SPECULATION)

    @property
    def default(self) -> Drafter:
        """The drafter of requests that name none."""
        return self.drafters[self.state.drafter]

    def set(self, state: SpeculationState) -> None:
        """Draft in another way from the next step on.

        Raises:
            ConfigError: there is no such drafter, or the length is out of range.
        """
        check_choice(state, self.drafters, self.max_length)
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
        """Put ``wrap(drafter)`` in the default drafter's place; no step is a probe meanwhile."""
        name, probes = self.state.drafter, self.probes
        inner = self.drafters[name]
        self.drafters[name] = wrapper = wrap(inner)
        self.probes = False
        self._refresh()
        try:
            yield wrapper
        finally:
            self.drafters[name], self.probes = inner, probes
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
            check_known(wishes.drafter, self.drafters)
            return wishes.drafter
        predicts = wishes.prediction and PredictionSpec.name in self.drafters
        return PredictionSpec.name if predicts else self.state.drafter

    def budget(self, sequence: SequenceState) -> tuple[str, DraftBudget]:
        """Return who drafts for a sequence in the next step, and how far its draft may go."""
        if sequence.has_wishes:
            return self._choice(sequence.request.speculation)
        return self._usual

    def _choice(self, wishes: Speculation) -> tuple[str, DraftBudget]:
        name = self._name(wishes)
        drafter = self.drafters[name]
        if self._paused or not self._enabled or name in self.switched_off:
            return name, NO_DRAFT
        depth = wishes.length(min(self.state.num_speculative_tokens, drafter.max_length))
        branches = drafter.max_nodes > drafter.max_length
        return name, DraftBudget(depth, drafter.max_nodes if branches and depth else depth)

    def propose(self, plan: Plan) -> Draft:
        """Return the drafts of a step, each from the sequence's drafter.

        Raises:
            RequestError: a drafter that watches (see ``audit``) refuses what it sees.
        """
        names = [item.drafter for item in plan.batch]
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

    def _made(self, name: str, items: Sequence[Scheduled]) -> Draft:
        """Return one drafter's drafts, empty ones where it failed."""
        if name not in self.switched_off:
            budgets = [item.budget for item in items]
            try:
                made = self.drafters[name].propose(items, budgets, self._noise)
                check_draft(made, budgets, self._vocab_size)
                return made
            except RequestError:
                raise
            except Exception as error:
                self._switch_off(name, error)
        return Draft.chains([[] for _ in items])

    def _switch_off(self, name: str, error: Exception) -> None:
        self.switched_off[name] = f"{type(error).__name__}: {error}"[:LONGEST_REASON]
        self._refresh()
        logger.error("drafter %s failed and is switched off", name, exc_info=error)

    def observe(
        self, plan: Plan, draft: Draft, verdict: Verdict, states: HiddenStates | None
    ) -> None:
        """Tell every drafter what was committed."""
        for name in self._observing:
            try:
                self.drafters[name].observe(plan.batch, draft, verdict, states)
            except RequestError:
                raise
            except Exception as error:
                self._switch_off(name, error)

    def release(self, seq_id: str, ended: bool) -> None:
        """Let every drafter forget a sequence, see ``Drafter.release``."""
        for name in self._releasing:
            try:
                self.drafters[name].release(seq_id, ended)
            except Exception as error:
                self._switch_off(name, error)


def _overrides(drafter: Drafter, method: str) -> bool:
    """Return True where a drafter has a method of its own."""
    return getattr(type(drafter), method) is not getattr(Drafter, method)


def _merged(names: list[str], parts: Mapping[str, list[int]], made: Mapping[str, Draft]) -> Draft:
    """Return one draft of a step from those of its drafters, whose sequences ``parts`` lists."""
    found = Draft.chains([[] for _ in names])
    columns: dict[str, list[Any]] = {}
    for name, indices in parts.items():
        draft = made[name]
        for i, tokens, parents in zip(indices, draft.tokens, draft.parents, strict=True):
            found.tokens[i], found.parents[i] = tokens, parents
        for field in ("logits", "sources", "margins"):
            values = getattr(draft, field)
            if values is not None:
                column = columns.setdefault(field, [None] * len(names))
                for i, value in zip(indices, values, strict=True):
                    column[i] = value
    return found._replace(drafters=names, **columns)


def check_draft(draft: Draft, budgets: Sequence[DraftBudget], vocab_size: int) -> None:
    """Refuse a malformed draft before C++ sees it.

    Raises:
        ValueError: a draft is missing, too large or too deep, or has an id outside the vocabulary
            or a parent that does not come before its child.
    """
    if not any(draft.tokens) and not any(draft.parents):
        return
    ids = [*chain.from_iterable(draft.tokens)]
    if set(map(type, ids)) - {int} or min(ids, default=0) < 0 or max(ids, default=0) >= vocab_size:
        raise ValueError(f"a draft has ids outside the vocabulary of {vocab_size}.")
    for tokens, parents, (deepest, most) in zip(draft.tokens, draft.parents, budgets, strict=True):
        depth = len(tokens)
        if depth != len(parents) or depth > most:
            raise ValueError(
                f"a draft has {depth} tokens and {len(parents)} parents, but {most} nodes may be "
                "drafted."
            )
        if depth >= len(CHAINS) or parents != CHAINS[depth]:
            if not all(type(p) is int and -1 <= p < i for i, p in enumerate(parents)):
                raise ValueError("a draft has a parent that does not come before its child.")
            depth = max(depths(parents), default=0)
        if depth > deepest:
            raise ValueError(f"a draft is {depth} tokens deep, but {deepest} may be drafted.")
