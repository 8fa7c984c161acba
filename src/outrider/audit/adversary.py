"""A drafter that knows the next tokens and proposes them, wrong ones, or trees that hide them."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..base.types import NO_NODES, Draft, DraftBudget, DraftNodes, Scheduled
from ..drafters.base import Drafter, DrafterContext, DrafterSpec, Needs
from ..sampling.shared_noise import Noise

Answers = Mapping[tuple[int, int], Sequence[int]]
"""The output of plain decoding, keyed by (seed of the request, sample index)."""


class Adversary(Drafter):
    """Drafts up to ``length`` tokens from the answers of plain decoding.

    "right" proposes the next tokens, "wrong" another one at every position, "ragged" trees of
    random shape, of up to three times as many nodes, that hold the next tokens down to a random
    depth.
    """

    def __init__(
        self, kind: str, answers: Answers, length: int, vocabulary: int, rng: random.Random
    ) -> None:
        self.name = kind
        self.max_length = length
        self.max_nodes = 3 * length if kind == "ragged" else length
        self._answers = answers
        self._vocabulary = vocabulary
        self._rng = rng

    def propose(
        self, batch: Sequence[Scheduled], budgets: Sequence[DraftBudget], noise: Noise
    ) -> Draft:
        drafts = Draft()
        for item, budget in zip(batch, budgets, strict=True):
            sequence, length = item.sequence, budget.depth
            answer = self._answers[sequence.request.seed, sequence.sample_index]
            coming = answer[sequence.num_output : sequence.num_output + length]
            if self.name == "ragged":
                drafts.append(self._tree(coming, length) if length else NO_NODES)
            else:
                shift = 0 if self.name == "right" else 1
                tokens = [(token + shift) % self._vocabulary for token in coming]
                drafts.append(DraftNodes.chain(tokens))
        return drafts

    def _tree(self, coming: Sequence[int], length: int) -> DraftNodes:
        """Return a random tree."""
        tokens: list[int] = []
        parents: list[int] = []
        depths: dict[int, int] = {-1: 0}
        path = [-1]  # the nodes of the right branch so far
        for _ in range(self._rng.randint(1, self.max_nodes)):
            right = len(path) <= len(coming) and self._rng.random() < 0.6
            parent = path[-1] if right else self._rng.choice(list(depths))
            token = coming[len(path) - 1] if right else self._rng.randrange(self._vocabulary)
            if depths[parent] == length or (parent, token) in zip(parents, tokens, strict=True):
                continue
            if right:
                path.append(len(tokens))
            depths[len(tokens)] = depths[parent] + 1
            tokens.append(token)
            parents.append(parent)
        return DraftNodes(tokens, parents)


@dataclass(frozen=True)
class AdversarySpec(DrafterSpec):
    """Makes an ``Adversary`` that drafts as far as the engine's config allows."""

    style: str
    answers: Answers = field(default_factory=dict)
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.style

    def needs(self, context: DrafterContext) -> Needs:
        return Needs(max_nodes=3 * context.config.max_draft_length)

    def make(self, context: DrafterContext) -> Adversary:
        length, shape = context.config.max_draft_length, context.model.shape
        return Adversary(self.style, self.answers, length, shape.vocab_size, self.rng)
