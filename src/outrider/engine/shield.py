"""Calls drafters of other packages with copies of the engine's data.

Tokens and page tables, prompts and options, the batch, drafts and verdicts are copied, so that
nothing that a drafter writes changes the output. Pipelines and noise, which are called, and hidden
states, which only drafters read, are not copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import TypeVar

from ..base.types import (
    Draft,
    DraftBudget,
    HiddenStates,
    Scheduled,
    SequenceState,
    Verdict,
)  # fmt: skip
from ..drafters.base import Drafter
from ..sampling.shared_noise import Noise

T = TypeVar("T")
PACKAGE = __name__.partition(".")[0]


def is_foreign(drafter: Drafter) -> bool:
    """Return whether a drafter's class comes from another package."""
    return type(drafter).__module__.partition(".")[0] != PACKAGE


def is_fatal(error: BaseException) -> bool:
    """Return whether an error asks the process to end, and is not a drafter's failure.

    A panic of a Rust library and a drafter's own ``sys.exit`` count as failures.
    """
    return isinstance(error, KeyboardInterrupt | GeneratorExit)


class Shield:
    """The copies for drafters of other packages, one for each sequence as long as it lives."""

    def __init__(self) -> None:
        self._copies: dict[str, SequenceState] = {}

    def propose(
        self,
        drafter: Drafter,
        items: Sequence[Scheduled],
        budgets: Sequence[DraftBudget],
        noise: Noise,
    ) -> Draft:
        """Return a copy of the drafter's draft, so that the drafter cannot change it later.

        Raises:
            ValueError: it is not a ``Draft``, or its columns do not match its nodes.
        """
        made = drafter.propose(self._batch(items), [*budgets], noise)
        if not isinstance(made, Draft):
            raise ValueError(f"a drafter proposed {type(made).__name__}; a Draft is needed.")
        return _checked(_copied(made))

    def observe(
        self,
        drafter: Drafter,
        items: Sequence[Scheduled],
        draft: Draft,
        verdict: Verdict,
        states: HiddenStates | None,
    ) -> None:
        """Tell a drafter what was committed."""
        told = Verdict(
            [[*tokens] for tokens in verdict.tokens],
            [[*path] for path in verdict.path],
            [*verdict.errors],
            [rows and [{**row} for row in rows] for rows in verdict.logprobs],
        )
        states = states and HiddenStates(dict(states.layers), [*states.first])
        drafter.observe(self._batch(items), _copied(draft), told, states)

    def peek(self, drafter: Drafter, sequence: SequenceState, depth: int) -> Draft | None:
        """Return the chain that a drafter makes beside the one that is verified."""
        made = drafter.peek(self.seen(sequence), depth)
        return None if made is None else _checked(_copied(made))

    def seen(self, sequence: SequenceState) -> SequenceState:
        """Return the copy of a sequence, brought up to date; it has no text."""
        known = self._copies.get(sequence.id)
        if known is None:
            known = self._copies[sequence.id] = copy(sequence)
        own, request = dict(vars(sequence)), sequence.request
        own["request"] = known.request
        if known.request is request:
            params = copy(request.params)
            vars(params).update(logit_bias=copy(params.logit_bias))
            own["request"] = replace(request, params=params)
        own |= {"tokens": [*sequence.tokens], "pages": sequence.pages[:], "text": None}
        own |= {"keys": [*sequence.keys], "prompt_logprobs": [*sequence.prompt_logprobs]}
        own["counts"] = replace(sequence.counts, outcomes=dict(sequence.counts.outcomes))
        vars(known).update(own)
        return known

    def _batch(self, items: Sequence[Scheduled]) -> list[Scheduled]:
        return [
            Scheduled(self.seen(i.sequence), i.start, i.count, i.samples, i.drafter, i.budget)
            for i in items
        ]

    def release(self, id: str) -> None:
        """Forget the copy of a sequence."""
        self._copies.pop(id, None)


def _copied(draft: Draft) -> Draft:
    """Return a copy of a draft."""

    def whole(column: list[list[T]] | None) -> list[list[T]] | None:
        return None if column is None else [[*each] for each in column]

    return Draft(
        [[*tokens] for tokens in draft.tokens],
        [[*parents] for parents in draft.parents],
        None if draft.logits is None else [*draft.logits],
        None if draft.drafters is None else [*draft.drafters],
        whole(draft.sources),
        whole(draft.margins),
        whole(draft.survivals),
    )


def _checked(draft: Draft) -> Draft:
    """Return ``draft`` if each of its columns has one entry for every node, or none at all.

    Raises:
        ValueError: one does not.
    """
    sizes = [len(tokens) for tokens in draft.tokens]
    if draft.logits is not None:
        counts = [len(z) if z is not None else n for z, n in zip(draft.logits, sizes, strict=True)]
        if counts != sizes:
            raise ValueError("a draft has not as many rows of logits as nodes.")
    for name in ("sources", "margins", "survivals"):
        column = getattr(draft, name)
        if column is not None and any(
            len(values) not in (0, size) for values, size in zip(column, sizes, strict=True)
        ):
            raise ValueError(f"a draft has not as many {name} as nodes.")
    return draft
