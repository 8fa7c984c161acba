"""Records the decode steps of one request while the engine runs it as usual.

A wrapper around the engine's drafter sees what each step drafts and commits; one around the
sequence's pipeline sees the processed logits of target and drafter.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..base.types import (
    Draft,
    DraftBudget,
    LogitsPipeline,
    SamplingParams,
    Scheduled,
    SequenceState,
    StepRecord,
)
from ..drafters.base import Drafter
from ..errors import NumericalError, RequestError
from ..frontend.inputs import Prompt
from ..llm import LLM
from ..sampling.pipeline import Logits
from ..sampling.shared_noise import Noise
from .wrapped import WrappedDrafter, WrappedPipeline

SEARCHED_STEPS = 64  # steps that are searched for one with both an accepted and a rejected token

Path = tuple[int, ...]  # draft tokens between the committed text and a position


@dataclass
class WatchedStep:
    """One decode step, whose ``number`` is 1 or more: the prompt's pass is no decode step.

    ``tokens`` are the committed ids before it, ``room`` the most tokens that could be drafted;
    ``target`` and ``drafter`` their processed logits by path: z, fp32 [vocabulary]. ``draft`` is a
    chain, of which ``standing`` tokens are accepted; ``finished`` is True if the output ended with
    ``emitted``.
    """

    number: int
    tokens: list[int]
    room: int
    target: dict[Path, Logits] = field(default_factory=dict)
    drafter: dict[Path, Logits] = field(default_factory=dict)
    draft: list[int] = field(default_factory=list)
    standing: int = 0
    emitted: list[int] = field(default_factory=list)
    finished: bool = False

    @property
    def mixed(self) -> bool:
        return 0 < self.standing < min(len(self.draft), len(self.emitted))


class _WatchedPipeline(WrappedPipeline):
    """A logits pipeline that keeps a copy of every row it returns, by path."""

    def __init__(self, inner: LogitsPipeline) -> None:
        super().__init__(inner)
        self.rows: dict[Path, Logits] = {}

    def apply(self, logits: Any, tokens: list[int], paths: list[list[int]]) -> Any:
        z = super().apply(logits, tokens, paths)
        for row, path in zip(z, paths, strict=True):
            self.rows[tuple(path)] = row.copy()
        return z


class StepWatch(WrappedDrafter):
    """A wrapper of the engine's drafter that finds step ``number``, or the first ``mixed`` one."""

    def __init__(self, inner: Drafter, number: int | None) -> None:
        super().__init__(inner)
        self.chosen: WatchedStep | None = None
        self.first: WatchedStep | None = None
        self.first_drafted: WatchedStep | None = None
        self.sample: SequenceState | None = None
        self.seen = 0
        self._number = number
        self._distribution: _WatchedPipeline | None = None
        self._now: WatchedStep | None = None

    def passes_of(self, step: WatchedStep) -> int:
        """Return how many passes of a drafter with logits made a step's draft."""
        return min(1, len(step.drafter)) if self.inner.rows_at_once else len(step.drafter)

    def propose(
        self, batch: Sequence[Scheduled], budgets: Sequence[DraftBudget], noise: Noise
    ) -> Draft:
        (item,) = batch
        self.sample = item.sequence
        if self._distribution is None:
            self._distribution = item.sequence.pipeline = _WatchedPipeline(item.sequence.pipeline)
        self._now = None
        if item.samples and item.count == 1:
            self.seen += 1
            self._now = WatchedStep(self.seen, list(item.sequence.tokens), item.budget.depth)
            self._distribution.rows = self._now.drafter
        draft = super().propose(batch, budgets, noise)
        if self._now is not None:
            self._now.draft = nodes = draft[0].tokens
            if draft[0].parents != list(range(-1, len(nodes) - 1)):
                raise RequestError(
                    f"drafter {self.name!r} drafted a tree of {len(nodes)} nodes in step "
                    f"{self.seen}; explain shows chains only, so give a drafter that drafts one "
                    "token after the other."
                )
            self._distribution.rows = self._now.target
        return draft

    def observe(self, record: StepRecord) -> None:
        super().observe(record)
        step = self._now
        if step is None or self.chosen is not None:
            return
        sequence = record.plan.batch[0].sequence
        step.standing = len(record.verdict.path[0])
        step.emitted = sequence.tokens[len(step.tokens) :]
        step.finished = sequence.finish_reason is not None
        self.first = self.first or step
        if step.draft:
            self.first_drafted = self.first_drafted or step
        if step.number == self._number or (self._number is None and step.mixed):
            self.chosen = step


def watch_step(
    llm: LLM, prompt: Prompt, temperature: float, seed: int, step: int | None = None
) -> StepWatch:
    """Run a request until the step is found or the search ends; return what was recorded.

    Raises RequestError: the prompt cannot be served, or the drafter drafts trees; NumericalError.
    """
    last, engine = step or SEARCHED_STEPS, llm.engine
    steps = (last + 1) * (llm.config.max_draft_length + 1)
    longest = min(steps, engine.max_model_len)
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=longest)
    with (
        engine.watched(partial(StepWatch, number=step)) as watch,
        closing(llm.stream(prompt, params)) as events,  # type: ignore[type-var]
    ):
        for event in events:
            engine.settle()  # so that the watch has seen the event's step
            if event.error is not None:
                raise NumericalError(f"the prompt failed: {event.error}")
            if watch.chosen is not None or watch.seen >= last:
                break
    return watch
