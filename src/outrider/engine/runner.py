"""One target forward over committed and drafted rows, then the acceptance rule."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import RequestError
from ..models.base import Model, Store
from ..models.decide import Keep, SampleInput, Samples
from ..models.rows import Segment
from ..sampling.acceptance import AcceptanceRule
from ..sampling.draws import SharedNoise
from ..sampling.law import Laws
from ..sampling.logprobs import Measure, logprobs, measure
from ..types import Draft, HiddenStates, Logprobs, Row, Scheduled, Verdict
from .scheduler import Plan, unexpected

UNUSED = Row("", 0, 0, 0, True, 0)
"""Stands for a row that is scored, but decides no token."""


class Runner:
    """Holds the target and its cache.

    Args:
        model: the target.
        store: its cache.
        rule: decides which draft tokens stand.
        noise: the shared noise.
        raw_logprobs: log probabilities are of the model's logits; else of the processed ones.
        measure: measures them.
    """

    def __init__(
        self,
        model: Model,
        store: Store,
        rule: AcceptanceRule,
        noise: SharedNoise,
        raw_logprobs: bool = True,
        measure: Measure = measure,
    ) -> None:
        self.model = model
        self.store = store
        self.noise = noise
        self.rule = rule
        self._shown = Keep.RAW if raw_logprobs else Keep.PROCESSED
        self._measure = measure

    def verify(
        self, plan: Plan, draft: Draft, layers: Sequence[int] = ()
    ) -> tuple[Verdict, HiddenStates | None]:
        """Run the plan's rows and the draft's, and decide the step.

        Afterwards the entries of accepted nodes stand at their tokens' positions in the cache.

        Args:
            plan: the step.
            draft: its drafts.
            layers: those whose hidden states are wanted.
        """
        pairs = zip(plan.batch, draft.tokens, draft.parents, strict=True)
        segments = [_segment(item, nodes, parents) for item, nodes, parents in pairs]
        scored = [i for i, segment in enumerate(segments) if segment.logits]
        inputs = [self._input(plan.batch[i]) for i in scored]
        rule = self.rule
        noise = None if rule.keeps_laws else self.noise
        samples = self.model.decide(segments, self.store, inputs, noise, layers)
        rows = _rows(segments, inputs) if rule.keeps_laws else []
        drawn = None if noise is None else (samples.tokens, samples.scores)
        laws = Laws(samples.logits, rows, _firsts(plan, segments), drawn)
        verdict = rule(laws, draft, self.noise)
        self._take_errors(verdict, samples, scored)
        self._score(plan, verdict, samples, scored)
        self._straighten(plan, verdict)
        return verdict, _states(segments, samples) if layers else None

    def _input(self, item: Scheduled) -> SampleInput:
        """Return what becomes of an item's rows of logits."""
        shows = item.sequence.request.params.logprobs is not None
        return SampleInput(item.sequence, item.samples, self._shown if shows else Keep.NOTHING)

    @staticmethod
    def _take_errors(verdict: Verdict, samples: Samples, scored: list[int]) -> None:
        """Say in ``verdict`` what went wrong with options, where it is known better than by rows.

        A reason counts only where the rule met the row that is NaN by it.
        """
        for number, error in samples.errors.items():
            known = isinstance(error, RequestError)
            verdict.errors[scored[number]] = str(error) if known else unexpected(error)
        for number, reason in samples.reasons.items():
            if verdict.errors[scored[number]]:
                verdict.errors[scored[number]] = reason

    @torch.inference_mode()
    def _score(self, plan: Plan, verdict: Verdict, samples: Samples, scored: list[int]) -> None:
        """Measure the log probabilities that are asked of prompts and of the step's tokens."""
        for number, logits in samples.scored.items():
            _score_prompt(plan.batch[scored[number]], logits, self._measure)
        if not samples.kept:
            return
        found: list[list[Logprobs] | None] = [None] * len(plan.batch)
        for number, logits in samples.kept.items():
            i = scored[number]
            tokens, count = verdict.tokens[i], plan.batch[i].sequence.request.params.logprobs
            if tokens and count is not None:
                rows = [0, *(1 + node for node in verdict.path[i])]
                found[i] = logprobs(logits, rows, tokens, count, self._measure)
        verdict.logprobs.extend(found)

    def _straighten(self, plan: Plan, verdict: Verdict) -> None:
        """Gather the entries of accepted tree nodes to where a chain would have them."""
        sources: list[int] = []
        targets: list[int] = []
        size = self.store.page_size
        for item, path in zip(plan.batch, verdict.path, strict=True):
            base, pages = item.start + item.count, item.sequence.pages
            for depth, node in enumerate(path):
                if node != depth:
                    for slots, place in ((sources, base + node), (targets, base + depth)):
                        slots.append(pages[place // size] * size + place % size)
        if sources:
            self.store.move(sources, targets)


def _segment(item: Scheduled, nodes: list[int], parents: list[int]) -> Segment:
    """Return an item's rows; it wants logits where tokens are drawn, or log probabilities asked."""
    sequence, start = item.sequence, item.start
    return Segment(
        sequence.tokens[start : start + item.count],
        start,
        sequence.pages,
        _num_scored(item) or (1 + len(nodes) if item.samples else 0),
        sequence.prompt_length,
        nodes,
        parents,
        sequence.id,
    )


def _num_scored(item: Scheduled) -> int:
    """Return how many of an item's rows want logits for the prompt's log probabilities."""
    sequence = item.sequence
    if sequence.request.params.prompt_logprobs is None or sequence.sample_index:
        return 0
    return item.count if max(1, len(sequence.prompt_logprobs)) < sequence.prompt_length else 0


def _firsts(plan: Plan, segments: list[Segment]) -> list[int | None]:
    """Return each segment's first sampled row among those of logits, None where none is."""
    first: list[int | None] = []
    row = 0
    for item, segment in zip(plan.batch, segments, strict=True):
        row += segment.logits
        first.append(row - 1 - len(segment.nodes) if item.samples else None)
    return first


def _rows(segments: list[Segment], inputs: list[SampleInput]) -> list[Row]:
    """Return whose token each row of logits decides."""
    rows: list[Row] = []
    scored = (segment for segment in segments if segment.logits)
    for segment, asked in zip(scored, inputs, strict=True):
        rows += [UNUSED] * (segment.logits - asked.count(segment))
        rows += asked.rows(asked.paths(segment))
    return rows


def _score_prompt(item: Scheduled, logits: torch.Tensor, measure: Measure) -> None:
    """Note the log probabilities of a prompt's tokens; ``logits`` are of the item's first rows."""
    sequence = item.sequence
    if not sequence.prompt_logprobs:
        sequence.prompt_logprobs.append(None)  # nothing precedes the first token
    # The row at position p speaks of the token at p + 1; after a preemption some are known.
    start = len(sequence.prompt_logprobs) - 1
    stop = min(item.start + item.count, sequence.prompt_length - 1)
    rows = range(start - item.start, stop - item.start)
    ids = sequence.tokens[start + 1 : stop + 1]
    count = sequence.request.params.prompt_logprobs or 0
    sequence.prompt_logprobs += logprobs(logits, rows, ids, count, measure)


def _states(segments: list[Segment], samples: Samples) -> HiddenStates:
    """Return the hidden states of a step, and where each sequence's rows begin."""
    first, row = [], 0
    for segment in segments:
        first.append(row)
        row += len(segment.tokens) + len(segment.nodes)
    return HiddenStates(samples.hidden, first)
