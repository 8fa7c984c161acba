"""One target forward over committed and drafted rows, then the acceptance rule."""

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..base.types import Draft, HiddenStates, Plan, Row, Scheduled, Verdict
from ..checkpoints.architecture import Architecture
from ..errors import RequestError
from ..models.base import Model, Store
from ..models.decide import Keep, SampleInput, Samples
from ..models.rows import Segment
from ..sampling.acceptance import AcceptanceRule
from ..sampling.logprobs import Asked, Measure, logprobs
from ..sampling.pipeline import StepLogits
from ..sampling.shared_noise import SharedNoise
from .experts import ExpertUnions
from .scheduler import unexpected

UNUSED = Row("", 0, 0, 0, True, 0)  # stands for a row that is scored, but decides no token


class Verifier:
    """Holds the target and its cache, the acceptance rule and the shared noise.

    Log probabilities come from the model's logits if ``raw``, else from the processed logits.
    """

    def __init__(
        self,
        model: Model,
        store: Store,
        rule: AcceptanceRule,
        noise: SharedNoise,
        raw: bool,
        measure: Measure,
    ) -> None:
        self.model, self.store, self.rule, self.noise = model, store, rule, noise
        self._shown = Keep.RAW if raw else Keep.PROCESSED
        self._measure = measure
        shape = model.shape
        self.unions: ExpertUnions | None = None
        if isinstance(shape, Architecture) and shape.mixture and store.experts is not None:
            self.unions = ExpertUnions(shape)
        """Counts the experts that steps read; None if there are none or the store counts none."""

    def verify(
        self, plan: Plan, draft: Draft, layers: Sequence[int] = ()
    ) -> tuple[Verdict, HiddenStates | None]:
        """Run the plan's rows and the draft's; return the verdict and ``layers``' hidden states.

        Afterwards the cache entries of accepted nodes are at their tokens' positions.
        """
        begin = time.perf_counter()
        segments: list[Segment] = []
        inputs: list[SampleInput | None] = []
        first: list[int | None] = []
        row = 0
        for item, (nodes, parents, *_) in zip(plan.batch, draft, strict=True):
            sequence, start = item.sequence, item.start
            params, logits = sequence.request.params, 1 + len(nodes) if item.samples else 0
            if params.prompt_logprobs is not None:
                logits = max(logits, _num_scored(item))
            row += logits
            first.append(row - 1 - len(nodes) if item.samples else None)
            keep = Keep.NOTHING if params.logprobs is None else self._shown
            inputs.append(SampleInput(sequence, item.samples, keep) if logits else None)
            tokens, length = sequence.tokens[start : start + item.count], sequence.prompt_length
            segments.append(
                Segment(tokens, start, sequence.pages, logits, length, nodes, parents, sequence.id)
            )
        before = None if self.unions is None else self.store.experts
        if self.rule.needs_logits:
            samples = self.model.decide(segments, self.store, inputs, None, layers)
            target = StepLogits(samples.logits, _rows(segments, inputs), first)
        else:
            samples = self.model.decide(segments, self.store, inputs, self.noise, layers)
            target = StepLogits(samples.logits, [], first, (samples.tokens, samples.scores))
        if self.unions is not None and before is not None:
            rows = sum(len(segment.tokens) + len(segment.nodes) for segment in segments)
            plan.seconds.experts = self.unions.take(rows, (self.store.experts or 0) - before)
        verdict = self.rule(target, draft, self.noise)
        for i, error in samples.errors.items():
            known = isinstance(error, RequestError)
            verdict.errors[i] = str(error) if known else unexpected(error)
        for i, reason in samples.reasons.items():
            if verdict.errors[i]:  # the rule reached a row that this made NaN
                verdict.errors[i] = reason
        if samples.kept or samples.scored:
            self._score(plan, verdict, samples)
        if any(verdict.path):
            self._compact_tree_cache(plan, verdict)
        states = None
        if layers:
            begins, count = list[int](), 0
            for segment in segments:
                begins.append(count)
                count += len(segment.tokens) + len(segment.nodes)
            states = HiddenStates(samples.hidden, begins)
        plan.seconds.verify = time.perf_counter() - begin
        return verdict, states

    def _score(self, plan: Plan, verdict: Verdict, samples: Samples) -> None:
        """Compute the requested log probabilities of prompts and of the step's tokens."""
        prompts = {i: _of_prompt(plan.batch[i], z) for i, z in samples.scored.items()}
        outputs: dict[int, Asked] = {}
        for i, z in samples.kept.items():
            tokens, count = verdict.tokens[i], plan.batch[i].sequence.request.params.logprobs
            if tokens and count is not None:
                rows = [0, *(1 + node for node in verdict.path[i])]
                outputs[i] = Asked(z, rows, tokens, count)
        found = logprobs([*prompts.values(), *outputs.values()], self._measure)
        for i, of_prompt in zip(prompts, found, strict=False):
            plan.batch[i].sequence.prompt_logprobs += of_prompt
        by_item = dict(zip(outputs, found[len(prompts) :], strict=True))
        verdict.logprobs.extend(map(by_item.get, range(len(plan.batch))))

    def _compact_tree_cache(self, plan: Plan, verdict: Verdict) -> None:
        """Move the entries of accepted tree nodes to where a chain would have them."""
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


def _num_scored(item: Scheduled) -> int:
    """Return how many of an item's rows need logits for the prompt's log probabilities."""
    sequence = item.sequence
    done = max(1, len(sequence.prompt_logprobs)) >= sequence.prompt_length
    return 0 if sequence.sample_index or done else item.count


def _rows(segments: list[Segment], inputs: list[SampleInput | None]) -> list[Row]:
    """Return for each row of logits which token it decides."""
    rows: list[Row] = []
    for segment, asked in zip(segments, inputs, strict=True):
        if asked is not None:
            paths = asked.paths(segment)
            rows += [UNUSED] * (segment.logits - len(paths)) + asked.rows(paths)
    return rows


def _of_prompt(item: Scheduled, logits: NDArray[np.float32]) -> Asked:
    """Return the log probabilities to compute of a prompt from ``logits`` of the item's rows."""
    sequence = item.sequence
    if not sequence.prompt_logprobs:
        sequence.prompt_logprobs.append(None)  # nothing precedes the first token
    # The row at position p predicts the token at p + 1; after a preemption some are known.
    start = len(sequence.prompt_logprobs) - 1
    stop = min(item.start + item.count, sequence.prompt_length - 1)
    rows = range(start - item.start, stop - item.start)
    ids = sequence.tokens[start + 1 : stop + 1]
    return Asked(logits, rows, ids, sequence.request.params.prompt_logprobs or 0)
