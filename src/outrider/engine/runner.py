"""One target forward over committed and drafted rows, then the acceptance rule."""

from __future__ import annotations

from ..models.base import Model, Store
from ..models.rows import Segment
from ..sampling.acceptance import AcceptanceRule
from ..sampling.law import Laws, process
from ..sampling.noise import SharedNoise
from ..types import Draft, Row, Scheduled, Verdict, depths
from .scheduler import Plan


class Runner:
    """Holds the target and its cache.

    Args:
        model: the target.
        store: its cache.
        rule: decides which draft tokens stand.
        noise: the shared noise.
    """

    def __init__(
        self, model: Model, store: Store, rule: AcceptanceRule, noise: SharedNoise
    ) -> None:
        self.model = model
        self.store = store
        self.noise = noise
        self.rule = rule

    def verify(self, plan: Plan, draft: Draft) -> Verdict:
        """Run the plan's rows and the draft's, and decide the step.

        Afterwards the entries of accepted nodes stand at their tokens' positions in the cache.
        """
        segments = [
            Segment(
                tokens=item.sequence.tokens[item.start : item.start + item.count],
                start=item.start,
                pages=item.sequence.pages,
                logits=1 + len(nodes) if item.samples else 0,
                prompt_length=item.sequence.prompt_length,
                nodes=nodes,
                parents=parents,
                key=item.sequence.id,
            )
            for item, nodes, parents in zip(plan.batch, draft.tokens, draft.parents, strict=True)
        ]
        output = self.model.run(segments, self.store)
        if output.logits is None:
            return Verdict(
                [[] for _ in plan.batch], [[] for _ in plan.batch], [None] * len(plan.batch)
            )
        laws = Laws(output.logits, [], [])
        for item, parents in zip(plan.batch, draft.parents, strict=True):
            self._add_laws(laws, item, parents)
        verdict = self.rule(laws, draft, self.noise)
        self._straighten(plan, verdict)
        return verdict

    @staticmethod
    def _add_laws(laws: Laws, item: Scheduled, parents: list[int]) -> None:
        """Process the logits of one sequence's rows and note whose they are."""
        if not item.samples:
            laws.first.append(None)
            return
        sequence, request = item.sequence, item.sequence.request
        first = len(laws.rows)
        laws.first.append(first)
        ahead = [0, *depths(parents)]
        outputs = [sequence.num_output + depth for depth in ahead]
        process(laws.z[first : first + len(ahead)], request, outputs)
        base, greedy = len(sequence.tokens), request.params.greedy
        laws.rows.extend(
            Row(sequence.id, request.seed, sequence.sample_index, base + depth, greedy, base)
            for depth in ahead
        )

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
