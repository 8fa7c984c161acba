"""One request, watched while the engine runs it as always, step by step.

The engine needs no hook for this: what a step drafts and commits goes through the drafter, so one
that passes every call on to the engine's own sees it; and the target and a drafter with laws both
apply the sequence's law to their logits, so a law that keeps what it gives has them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..drafters.base import Drafter
from ..errors import NumericalError, RequestError
from ..intake import Prompt
from ..llm import LLM
from ..sampling.draws import Noise
from ..types import (
    Draft,
    DraftBudget,
    HiddenStates,
    Lawgiving,
    SamplingParams,
    Scheduled,
    Verdict,
)  # fmt: skip
from ..types import Sequence as Sample
from .wrapped import WrappedLaw

SEARCHED = 64
"""How many steps are searched for one that shows both an accepted and a rejected token."""

Path = tuple[int, ...]
"""Draft tokens between the committed text and a position."""


@dataclass
class Step:
    """A decode step as it happened.

    Args:
        number: 1 and up; the prompt's own pass is no decode step.
        tokens: the committed ids before it.
        room: how many tokens could be drafted.
        target, drafter: their laws by path: z, fp32 [vocabulary].
        draft: what was drafted, a chain.
        standing: how many of these are the target's own tokens.
        emitted: what was committed.
        finished: the output ended with that.
    """

    number: int
    tokens: list[int]
    room: int
    target: dict[Path, torch.Tensor] = field(default_factory=dict)
    drafter: dict[Path, torch.Tensor] = field(default_factory=dict)
    draft: list[int] = field(default_factory=list)
    standing: int = 0
    emitted: list[int] = field(default_factory=list)
    finished: bool = False

    @property
    def mixed(self) -> bool:
        """One draft token was accepted and one rejected."""
        return 0 < self.standing < min(len(self.draft), len(self.emitted))


class _WatchedLaw(WrappedLaw):
    """A sequence's law that keeps a copy of every law it gives."""

    def __init__(self, law: Lawgiving) -> None:
        super().__init__(law)
        self.keep: dict[Path, torch.Tensor] = {}

    def apply(self, logits: Any, tokens: list[int], paths: list[list[int]]) -> Any:
        z = super().apply(logits, tokens, paths)
        for row, path in zip(z, paths, strict=True):
            self.keep[tuple(path)] = row.clone()
        return z


class Watch(Drafter):
    """The engine's drafter with an eye on the only sequence.

    Args:
        inner: the drafter to watch.
        wanted: the number of the step to find; None for the first that is ``mixed``.
    """

    def __init__(self, inner: Drafter, wanted: int | None) -> None:
        self.name, self.target_layers = inner.name, inner.target_layers
        self.max_length, self.max_nodes = inner.max_length, inner.max_nodes
        self.inner = inner
        self.found: Step | None = None
        self.first: Step | None = None
        self.first_drafted: Step | None = None
        self.sample: Sample | None = None
        self.seen = 0
        self._wanted = wanted
        self._law: _WatchedLaw | None = None
        self._now: Step | None = None

    def propose(
        self, batch: Sequence[Scheduled], budgets: Sequence[DraftBudget], noise: Noise
    ) -> Draft:
        (item,) = batch
        self.sample = item.sequence
        if self._law is None:
            self._law = item.sequence.law = _WatchedLaw(item.sequence.law)
        self._now = None
        if item.samples and item.count == 1:
            self.seen += 1
            self._now = Step(self.seen, list(item.sequence.tokens), item.budget.depth)
            self._law.keep = self._now.drafter
        draft = self.inner.propose(batch, budgets, noise)
        if self._now is not None:
            _refuse_tree(draft, self.name, self.seen)
            self._now.draft = draft.tokens[0]
            self._law.keep = self._now.target
        return draft

    def observe(
        self,
        batch: Sequence[Scheduled],
        draft: Draft,
        verdict: Verdict,
        states: HiddenStates | None,
    ) -> None:
        self.inner.observe(batch, draft, verdict, states)
        step = self._now
        if step is None or self.found is not None:
            return
        step.standing = len(verdict.path[0])
        step.emitted = batch[0].sequence.tokens[len(step.tokens) :]
        step.finished = batch[0].sequence.finish_reason is not None
        self.first = self.first or step
        if step.draft:
            self.first_drafted = self.first_drafted or step
        if step.number == self._wanted or (self._wanted is None and step.mixed):
            self.found = step

    def release(self, seq_id: str, ended: bool) -> None:
        self.inner.release(seq_id, ended)


def _refuse_tree(draft: Draft, name: str, step: int) -> None:
    if draft.parents[0] != list(range(-1, len(draft.tokens[0]) - 1)):
        raise RequestError(
            f"drafter {name!r} drafted a tree of {len(draft.tokens[0])} nodes in step {step}; "
            "explain shows chains only, so give a drafter that drafts one token after the other."
        )


def watch_step(
    llm: LLM, prompt: Prompt, temperature: float, seed: int, step: int | None = None
) -> Watch:
    """Run a request until the step that is wanted has been seen, or the search is over.

    Args:
        llm: idle.
        prompt, temperature, seed: the request.
        step: which decode step, 1 or more; None searches, see ``Watch``.

    Raises:
        RequestError: the prompt cannot be served, or the drafter drafts trees.
        NumericalError: the model's logits are not finite.
    """
    last, engine = step or SEARCHED, llm.engine
    steps = (last + 1) * (llm.config.num_speculative_tokens + 1)
    longest = min(steps, engine.max_model_len)
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=longest)
    with (
        engine.speculator.wrapped(partial(Watch, wanted=step)) as watch,
        closing(llm.stream(prompt, params)) as events,  # type: ignore[type-var]
    ):
        for _, event in events:
            if event.error is not None:
                raise NumericalError(f"the prompt failed: {event.error}")
            if watch.found is not None or watch.seen >= last:
                break
    return watch
