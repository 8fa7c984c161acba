"""Speculation: who drafts for each sequence and how far, and the drafts of one step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from ..drafters.base import Drafter
from ..drafters.prediction import PredictionSpec
from ..errors import ConfigError, RequestError, shown
from ..sampling.draws import Noise
from ..types import (
    NO_DRAFT,
    Draft,
    DraftBudget,
    HiddenStates,
    Request,
    Scheduled,
    Verdict,
    depths,
)
from ..types import Sequence as SequenceState
from .scheduler import Plan

D = TypeVar("D", bound=Drafter)
T = TypeVar("T")
logger = logging.getLogger("outrider")

LONGEST_REASON = 300
"""Characters."""


@dataclass(frozen=True)
class SpeculationState:
    """The switch: whether anything is drafted, by whom unless a request says, and how far."""

    enabled: bool
    drafter: str
    num_speculative_tokens: int


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
        self.paused = False
        """True in a step that goes without drafts to measure what plain decoding takes."""
        self.target_layers = self._wanted_layers()
        """Layers of the target whose hidden states a drafter wants."""
        self._enabled = True  # a default of none is shown as off, and stops no other drafter
        self._noise = noise
        self._vocab_size = vocab_size

    @property
    def default(self) -> Drafter:
        """The drafter of requests that name none."""
        return self.drafters[self.state.drafter]

    def set(self, state: SpeculationState) -> None:
        """Draft in another way from the next step on.

        Raises:
            ConfigError: there is no such drafter, or the length is out of range.
        """
        self._known(state.drafter)
        if not 1 <= state.num_speculative_tokens <= self.max_length:
            raise ConfigError(
                f"num_speculative_tokens is {state.num_speculative_tokens}; "
                f"give 1 to {self.max_length}."
            )
        self.state = state
        self._enabled = state.enabled

    @contextmanager
    def wrapped(self, wrap: Callable[[Drafter], D]) -> Iterator[D]:
        """Put ``wrap(drafter)`` in the default drafter's place; no step is a probe meanwhile."""
        name, probes = self.state.drafter, self.probes
        inner = self.drafters[name]
        self.drafters[name] = wrapper = wrap(inner)
        self.probes = False
        try:
            yield wrapper
        finally:
            self.drafters[name], self.probes = inner, probes

    def check(self, request: Request) -> None:
        """Refuse a request for a drafter or a length that there is not.

        Raises:
            ConfigError: it asks for one.
        """
        self.name_for(request)
        wanted, most = request.speculation.num_speculative_tokens or 0, self.max_length
        if wanted > most:
            raise ConfigError(
                f"num_speculative_tokens is {wanted}, but this engine drafts {most} tokens at "
                "most; give that or less."
            )

    def name_for(self, request: Request) -> str:
        """Return the name of the drafter of a request.

        Raises:
            ConfigError: there is none of the name that it gives.
        """
        wanted = request.speculation.drafter
        if wanted is not None:
            return self._known(wanted)
        predicts = request.speculation.prediction and PredictionSpec.name in self.drafters
        return PredictionSpec.name if predicts else self.state.drafter

    def _known(self, name: str) -> str:
        if name not in self.drafters:
            known = ", ".join(sorted(self.drafters))
            raise ConfigError(f"there is no drafter {shown(name)} here; give one of {known}.")
        return name

    def budget(self, sequence: SequenceState) -> tuple[str, DraftBudget]:
        """Return who drafts for a sequence in the next step, and how far its draft may go."""
        request, state = sequence.request, self.state
        name = self.name_for(request)
        drafter = self.drafters[name]
        if self.paused or not self._enabled or name in self.switched_off:
            return name, NO_DRAFT
        depth = request.speculation.length(min(state.num_speculative_tokens, drafter.max_length))
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
        budgets = [item.budget for item in items]

        def propose(drafter: Drafter) -> Draft:
            made = drafter.propose(items, budgets, self._noise)
            check_draft(made, budgets, self._vocab_size)
            return made

        return self._call(name, propose) or Draft.chains([[] for _ in items])

    def _call(self, name: str, call: Callable[[Drafter], T]) -> T | None:
        """Return ``call(drafter)``; None where the drafter fails or has failed, which stops it."""
        if name in self.switched_off:
            return None
        try:
            return call(self.drafters[name])
        except RequestError:
            raise
        except Exception as error:
            self.switched_off[name] = f"{type(error).__name__}: {error}"[:LONGEST_REASON]
            self.target_layers = self._wanted_layers()
            logger.exception("drafter %s failed and is switched off", name)
            return None

    def _wanted_layers(self) -> tuple[int, ...]:
        live = (each for name, each in self.drafters.items() if name not in self.switched_off)
        return tuple(sorted({layer for each in live for layer in each.target_layers}))

    def observe(
        self, plan: Plan, draft: Draft, verdict: Verdict, states: HiddenStates | None
    ) -> None:
        """Tell every drafter what was committed."""
        for name, each in self.drafters.items():
            if type(each).observe is not Drafter.observe:
                self._call(
                    name, lambda drafter: drafter.observe(plan.batch, draft, verdict, states)
                )

    def release(self, seq_id: str, ended: bool) -> None:
        """Have every drafter forget a sequence, see ``Drafter.release``."""
        for name in self.drafters:
            self._call(name, lambda drafter: drafter.release(seq_id, ended))


def _merged(names: list[str], parts: Mapping[str, list[int]], made: Mapping[str, Draft]) -> Draft:
    """Return one draft of a step from those of its drafters, whose sequences ``parts`` lists."""
    found = Draft.chains([[] for _ in names])
    columns: dict[str, list[Any]] = {}
    for name, indices in parts.items():
        draft = made[name]
        for i, tokens, parents in zip(indices, draft.tokens, draft.parents, strict=True):
            found.tokens[i], found.parents[i] = tokens, parents
        for field in ("laws", "sources", "margins"):
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
    for tokens, parents, budget in zip(draft.tokens, draft.parents, budgets, strict=True):
        if not tokens and not parents:
            continue
        if len(tokens) != len(parents) or len(tokens) > budget.nodes:
            raise ValueError(
                f"a draft has {len(tokens)} tokens and {len(parents)} parents, but {budget.nodes} "
                "nodes may be drafted."
            )
        if set(map(type, tokens)) != {int} or min(tokens) < 0 or max(tokens) >= vocab_size:
            raise ValueError(f"a draft has ids outside the vocabulary of {vocab_size}.")
        if parents == list(range(-1, len(tokens) - 1)):
            depth = len(tokens)
        elif all(type(p) is int and -1 <= p < i for i, p in enumerate(parents)):
            depth = max(depths(parents))
        else:
            raise ValueError("a draft has a parent that does not come before its child.")
        if depth > budget.depth:
            raise ValueError(f"a draft is {depth} tokens deep, but {budget.depth} may be drafted.")
