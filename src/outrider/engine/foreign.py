"""Calls drafters of other packages with copies of the engine's data.

Tokens and page tables, prompts and options, the batch, drafts and verdicts are copied, so that
nothing that a drafter writes changes the output. Pipelines and noise, which are called, and hidden
states, which only drafters read, are not copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np

from ..base.types import (
    Draft,
    DraftBudget,
    DraftNodes,
    HiddenStates,
    Plan,
    Scheduled,
    SequenceState,
    StepRecord,
    Verdict,
)
from ..drafters.base import Drafter
from ..sampling.shared_noise import Noise

PACKAGE = __name__.partition(".")[0]


def is_foreign(drafter: Drafter) -> bool:
    """Return True if a drafter's class comes from another package."""
    return type(drafter).__module__.partition(".")[0] != PACKAGE


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
        """Return a ``checked_copy`` of the drafter's draft, which it cannot change later."""
        made = drafter.propose(self._batch(items), [*budgets], noise)
        if not isinstance(made, Draft):
            raise ValueError(f"a drafter proposed {type(made).__name__}; a Draft is needed.")
        return Draft(map(checked_copy, made))

    def call(self, drafter: Drafter, method: str, arguments: Iterable[object]) -> Any:
        """Return the result of a drafter's method, called with copies; a draft is copied too."""
        result = getattr(drafter, method)(*map(self._copy_of, arguments))
        return result if method != "peek" or result is None else checked_copy(result)

    def _copy_of(self, argument: object) -> object:
        """Return the copy of a sequence, a list of them or a step; other arguments unchanged."""
        if isinstance(argument, SequenceState):
            return self._seen(argument)
        if isinstance(argument, StepRecord):
            return self._record(argument)
        return [*map(self._seen, argument)] if isinstance(argument, list) else argument

    def _record(self, record: StepRecord) -> StepRecord:
        """Return the copy of a step that a drafter may see."""
        plan, verdict, states = record.plan, record.verdict, record.states
        seconds = copy(plan.seconds)
        seconds.drafters = {**seconds.drafters}
        return record._replace(
            plan=Plan(self._batch(plan.batch), [], plan.rows, plan.decoding, seconds),
            draft=Draft(map(checked_copy, record.draft)),
            verdict=Verdict(
                [[*tokens] for tokens in verdict.tokens],
                [[*path] for path in verdict.path],
                [*verdict.errors],
                [rows and [{**row} for row in rows] for rows in verdict.logprobs],
            ),
            states=states and HiddenStates(dict(states.layers), [*states.first]),
            events=[],
            ended=[],
            drafters={*record.drafters},
        )

    def _seen(self, sequence: SequenceState) -> SequenceState:
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
            Scheduled(self._seen(i.sequence), i.start, i.count, i.samples, i.drafter, i.budget)
            for i in items
        ]

    def release(self, id: str) -> None:
        """Forget the copy of a sequence."""
        self._copies.pop(id, None)


def checked_copy(nodes: DraftNodes) -> DraftNodes:
    """Return a copy of a draft; ValueError unless a column is empty or has one entry per node."""
    if not isinstance(nodes, DraftNodes):
        raise ValueError(f"a draft has {type(nodes).__name__}; DraftNodes are needed.")
    rows = None if nodes.logits is None else np.asarray(nodes.logits)
    if rows is not None and not (rows.ndim == 2 and rows.shape[1] and len(rows) == len(nodes[0])):
        raise ValueError("a draft has not as many rows of logits as nodes.")
    if rows is not None and rows.dtype.kind != "f":
        raise ValueError(f"a draft has logits of type {rows.dtype}; floats of NumPy are needed.")
    for name in ("runs", "margins", "survivals", "sources"):
        if len(getattr(nodes, name)) not in (0, len(nodes.tokens)):
            raise ValueError(f"a draft has not as many {name} as nodes.")
    tokens, parents, runs, margins, survivals, _, sources = nodes
    columns = [*runs], [*margins], [*survivals]
    return DraftNodes([*tokens], [*parents], *columns, rows, [*sources])
