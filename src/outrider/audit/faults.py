"""Errors that ``verify`` must catch: each has been, or could be, in a real implementation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.types import Draft, DraftBudget, LogitsPipeline, Row, Scheduled, SequenceState
from ..drafters.base import Drafter, DrafterContext, DrafterSpec, Needs
from ..sampling.ratio import Chains, Floats, Ints, Ratio, Rejection, of_drafted
from ..sampling.ratio_noise import DRAFTING, FreshNoise
from ..sampling.shared_noise import Noise, SharedNoise
from .wrapped import WrappedDrafter, WrappedPipeline

THRESHOLD = 0.1

Odds = tuple[Floats, Floats]


class AcceptAlways(Rejection):
    """Every draft token is accepted, so that the drafter's distribution is emitted."""

    name = "accept-always"

    def odds(self, chains: Chains) -> Odds:
        w, h = super().odds(chains)
        return w, np.ones_like(h)


class AcceptLikely(Rejection):
    """A draft token is accepted if its target probability exceeds a threshold, without chance."""

    name = "threshold"

    def odds(self, chains: Chains) -> Odds:
        w, _ = super().odds(chains)
        return w, (of_drafted(chains.p, chains.x) > THRESHOLD).astype(np.float64)


class OwnSample(Rejection):
    """The ratio's denominator is the target's probability of a token it drew itself."""

    name = "own-sample"

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def odds(self, chains: Chains) -> Odds:
        w, _ = super().odds(chains)
        p = chains.p[:, : chains.x.shape[1]]
        gumbel = self._rng.gumbel(size=p.shape)
        own = of_drafted(p, (np.log(p) + gumbel).argmax(-1))
        return w, np.minimum(of_drafted(chains.q, chains.x) / own, 1)


class _NoNoise(FreshNoise):
    """Makes the drafter take its likeliest token."""

    def of(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        return np.zeros((len(rows), self.vocab_size), np.float32)


class GreedyDrafts(Rejection):
    """Greedy drafts, verified as if they had been drawn from the drafter's softmax."""

    name = "greedy-drafts"

    def drafting(self, noise: SharedNoise) -> Noise:
        return _NoNoise(noise.vocab_size, DRAFTING)


class NoSubtraction(Rejection):
    """After a rejection the token is drawn from p, where (p - q)+ would be right."""

    name = "no-subtraction"

    def after(self, chains: Chains, w: Floats, accepted: Ints) -> Floats:
        return chains.p[np.arange(len(accepted)), accepted]


class SharedDraws(Rejection):
    """The shared noise draws the draft and the token after it, but the ratio test decides."""

    name = "shared-noise"

    def drafting(self, noise: SharedNoise) -> Noise:
        return noise

    def ending(self, rows: list[Row], noise: SharedNoise) -> NDArray[np.float32]:
        return noise.of(rows)


@dataclass(frozen=True)
class Fault:
    """A deliberate error: a rule in place of the ratio rules, or wrong logits pipelines."""

    name: str
    rule: Ratio | None = None
    pipeline: Callable[[SequenceState], LogitsPipeline] | None = None


class _StalePenalties(WrappedPipeline):
    """Penalises every row of a block by the text before the block, ignoring drafted tokens."""

    def apply(self, logits: Any, tokens: list[int], paths: list[list[int]]) -> Any:
        return super().apply(logits, tokens, [[] for _ in paths])


def _stale_penalties(sequence: SequenceState) -> LogitsPipeline:
    penalises = sequence.request.params.penalises
    return _StalePenalties(sequence.pipeline) if penalises else sequence.pipeline


class _FaultyDrafter(WrappedDrafter):
    """A drafter whose sequences get a wrong logits pipeline with their first step."""

    def __init__(
        self, inner: Drafter, distribution: Callable[[SequenceState], LogitsPipeline]
    ) -> None:
        super().__init__(inner)
        self._distribution = distribution

    def propose(
        self, batch: Sequence[Scheduled], budgets: Sequence[DraftBudget], noise: Noise
    ) -> Draft:
        for item in batch:
            if not isinstance(item.sequence.pipeline, WrappedPipeline):
                item.sequence.pipeline = self._distribution(item.sequence)
        return super().propose(batch, budgets, noise)


@dataclass(frozen=True)
class FaultySpec(DrafterSpec):
    """Makes the drafter of ``inner``, its sequences' pipelines replaced as a ``Fault`` says."""

    inner: DrafterSpec
    pipeline: Callable[[SequenceState], LogitsPipeline]

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.inner.name

    def needs(self, context: DrafterContext) -> Needs:
        return self.inner.needs(context)

    def make(self, context: DrafterContext) -> Drafter:
        return _FaultyDrafter(self.inner.make(context), self.pipeline)


FAULTS = {
    rule.name: Fault(rule.name, rule())
    for rule in (AcceptAlways, AcceptLikely, OwnSample, GreedyDrafts, NoSubtraction, SharedDraws)
} | {"stale-penalties": Fault("stale-penalties", pipeline=_stale_penalties)}
