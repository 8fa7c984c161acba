"""One target forward over committed and drafted rows, then the acceptance rule."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..errors import RequestError
from ..models.base import Model, Store
from ..models.native import deciding
from ..models.rows import Segment
from ..sampling.acceptance import AcceptanceRule
from ..sampling.draws import SharedNoise
from ..sampling.grammar import Mask
from ..sampling.law import Laws, row_masks
from ..sampling.logprobs import Measure, logprobs, measure
from ..types import Draft, Logprobs, Row, Scheduled, Verdict
from .scheduler import Plan, unexpected

NO_LAWS = torch.empty(0, 0)
"""The laws of no row."""


class Runner:
    """Holds the target and its cache.

    Args:
        model: the target.
        store: its cache.
        rule: decides which draft tokens stand.
        noise: the shared noise.
        raw_logprobs: log probabilities are of the model's logits; else of the processed laws.
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
        self._raw_logprobs = raw_logprobs
        self._measure = measure

    def verify(self, plan: Plan, draft: Draft) -> Verdict:
        """Run the plan's rows and the draft's, and decide the step.

        Afterwards the entries of accepted nodes stand at their tokens' positions in the cache.
        """
        pairs = zip(plan.batch, draft.tokens, draft.parents, strict=True)
        segments = [_segment(item, nodes, parents) for item, nodes, parents in pairs]
        verdict = self._decide(plan, draft, segments)
        if verdict is None:
            verdict = self._judge(plan, draft, segments)
        self._straighten(plan, verdict)
        return verdict

    def _decide(self, plan: Plan, draft: Draft, segments: list[Segment]) -> Verdict | None:
        """Decide the step in the forward's own call; None, and nothing has run, where it cannot."""
        if self.rule.keeps_laws or any(map(_shows_laws, plan.batch)):
            return None
        drawing = [item.sequence for item in plan.batch if item.samples]
        own = deciding(self.model, self.noise, drawing)
        if own is None:
            return None
        model, laws = own
        masks: list[Mask | None] = []
        if any(law.has_grammar for law in laws):
            paths = [_paths(draft, i) for i, item in enumerate(plan.batch) if item.samples]
            found = row_masks(laws, [sequence.tokens for sequence in drawing], paths)
            if found is None:
                return None
            masks = found
        drawn = model.decide(segments, self.store, laws, masks)
        return self.rule(Laws(NO_LAWS, [], _firsts(segments), drawn), draft, self.noise)

    @torch.inference_mode()
    def _judge(self, plan: Plan, draft: Draft, segments: list[Segment]) -> Verdict:
        """Decide the step from logits, with whatever Python has to say to them."""
        logits = self.model.run(segments, self.store).logits
        if logits is None:
            logits = NO_LAWS
        z = _score_prompts(plan, segments, logits, self._measure)
        step = _Step(z, [], [], self._raw_logprobs)
        for i, item in enumerate(plan.batch):
            step.add(i, item, draft)
        verdict = self.rule(Laws(step.z, step.rows, step.first), draft, self.noise)
        for i, error in step.errors.items():
            verdict.errors[i] = error
        for i, item in enumerate(plan.batch):
            if verdict.errors[i] and item.sequence.law.error:
                verdict.errors[i] = item.sequence.law.error
        verdict.logprobs.extend(step.logprobs(plan, verdict, self._measure))
        return verdict

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
    """An item's rows; it wants logits where tokens are drawn, or log probabilities asked."""
    sequence, start = item.sequence, item.start
    return Segment(
        sequence.tokens[start : start + item.count],
        start,
        sequence.pages,
        _scored(item) or (1 + len(nodes) if item.samples else 0),
        sequence.prompt_length,
        nodes,
        parents,
        sequence.id,
    )


def _scored(item: Scheduled) -> int:
    """How many of an item's rows want logits because the prompt's log probabilities are asked."""
    sequence = item.sequence
    if sequence.request.params.prompt_logprobs is None or sequence.sample_index:
        return 0
    return item.count if max(1, len(sequence.prompt_logprobs)) < sequence.prompt_length else 0


def _shows_laws(item: Scheduled) -> bool:
    """Whether log probabilities are asked of what an item runs."""
    return item.sequence.request.params.logprobs is not None or _scored(item) > 0


def _paths(draft: Draft, index: int) -> list[list[int]]:
    """What is drafted before each row of a sequence: of its last committed token, of its nodes."""
    paths: list[list[int]] = [[]]
    for token, parent in zip(draft.tokens[index], draft.parents[index], strict=True):
        paths.append([*paths[parent + 1], token])
    return paths


def _firsts(segments: list[Segment]) -> list[int | None]:
    """Each segment's first row among those that want logits, None where none does."""
    first, row = [], 0
    for segment in segments:
        first.append(row if segment.logits else None)
        row += segment.logits
    return first


def _score_prompts(
    plan: Plan, segments: list[Segment], logits: torch.Tensor, measure: Measure
) -> torch.Tensor:
    """Note the prompts' log probabilities where asked; return the rows that are left to decide."""
    if not any(map(_scored, plan.batch)):
        return logits
    kept: list[int] = []
    first = 0
    for item, segment in zip(plan.batch, segments, strict=True):
        sequence, last = item.sequence, first + segment.logits
        if _scored(item):
            if not sequence.prompt_logprobs:
                sequence.prompt_logprobs.append(None)  # nothing precedes the first token
            # The row at position p speaks of the token at p + 1; after a preemption some are known.
            start = len(sequence.prompt_logprobs) - 1
            stop = min(item.start + item.count, sequence.prompt_length - 1)
            rows = range(first + start - item.start, first + stop - item.start)
            count = sequence.request.params.prompt_logprobs or 0
            ids = sequence.tokens[start + 1 : stop + 1]
            sequence.prompt_logprobs += logprobs(logits, rows, ids, count, measure)
        kept += range(last - (1 + len(segment.nodes) if item.samples else 0), last)
        first = last
    return logits[kept]


@dataclass
class _Step:
    """The laws of one step, gathered sequence by sequence."""

    z: torch.Tensor
    rows: list[Row]
    first: list[int | None]
    raw_logprobs: bool
    errors: dict[int, str] = field(default_factory=dict)
    kept: dict[int, torch.Tensor] = field(default_factory=dict)

    def add(self, index: int, item: Scheduled, draft: Draft) -> None:
        """Process the logits of one sequence's rows and note whose they are."""
        if not item.samples:
            self.first.append(None)
            return
        sequence, params = item.sequence, item.sequence.request.params
        paths = _paths(draft, index)
        first = len(self.rows)
        self.first.append(first)
        z = self.z[first : first + len(paths)]
        if params.logprobs is not None and self.raw_logprobs:
            # By NumPy: copies of torch wake its threads, which then spin beside the step's.
            self.kept[index] = torch.from_numpy(z.numpy().copy()) if z.is_cpu else z.clone()
        try:
            sequence.law.apply(z, sequence.tokens, paths)
        except RequestError as error:
            self.errors[index] = str(error)
        except Exception as error:  # of its options: the others go on
            self.errors[index] = unexpected(error)
        if params.logprobs is not None and not self.raw_logprobs:
            self.kept[index] = z
        base, seed = len(sequence.tokens), sequence.request.seed
        self.rows.extend(
            Row(sequence.id, seed, sequence.sample_index, base + len(path), params.greedy, base)
            for path in paths
        )

    def logprobs(
        self, plan: Plan, verdict: Verdict, measure: Measure
    ) -> list[list[Logprobs] | None]:
        """Those of every sequence's tokens, where asked."""
        found: list[list[Logprobs] | None] = []
        for i, item in enumerate(plan.batch):
            tokens, count = verdict.tokens[i], item.sequence.request.params.logprobs
            if count is None or not tokens:
                found.append(None)
                continue
            rows = [0, *(1 + node for node in verdict.path[i])]
            found.append(logprobs(self.kept[i], rows, tokens, count, measure))
        return found
