"""Wrong rules that ``verify`` must catch: each was, or could be, somebody's speculative decoding.

An audit that cannot fail proves nothing. Six stand in for the ratio rules; the seventh spoils the
engines that draft, to which the equalities are put.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..engine.engine import Engine
from ..sampling.draws import Noise, SharedNoise
from ..sampling.fresh import DRAFTING, FreshNoise
from ..sampling.ratio import Chains, Ratio, Rejection
from ..types import Request, Row
from .wrapped import WrappedLaw

THRESHOLD = 0.1

Odds = tuple[torch.Tensor, torch.Tensor]


class AcceptAlways(Rejection):
    """Every draft token stands: the drafter's law comes out."""

    name = "accept-always"

    def odds(self, chains: Chains) -> Odds:
        w, h = super().odds(chains)
        return w, torch.ones_like(h)


class AcceptLikely(Rejection):
    """A draft token stands where the target gives it more than a threshold, with no coin thrown."""

    name = "threshold"

    def odds(self, chains: Chains) -> Odds:
        w, h = super().odds(chains)
        p = chains.p[:, : h.shape[1]].gather(-1, chains.x[..., None])[..., 0]
        return w, (p > THRESHOLD).double()


class OwnSample(Rejection):
    """The ratio's denominator is the target's probability of a token it drew itself."""

    name = "own-sample"

    def odds(self, chains: Chains) -> Odds:
        w, h = super().odds(chains)
        p, q = (law[:, : h.shape[1]] for law in (chains.p, chains.q))
        gumbel = -torch.empty_like(p).exponential_().log()
        own = p.gather(-1, (p.log() + gumbel).argmax(-1, keepdim=True))
        return w, (q.gather(-1, chains.x[..., None]) / own).clamp(max=1)[..., 0]


class _NoNoise(FreshNoise):
    """Makes the drafter take its likeliest token."""

    def of(self, rows: Sequence[Row]) -> torch.Tensor:
        return torch.zeros(len(rows), self.vocab_size, device=self.device)


class GreedyDrafts(Rejection):
    """Greedy drafts, verified as if they had been drawn from the drafter's softmax."""

    name = "greedy-drafts"

    def drafting(self, noise: SharedNoise) -> Noise:
        return _NoNoise(noise.vocab_size, noise.device, DRAFTING)


class NoSubtraction(Rejection):
    """After a rejection the token comes from p, where (p - q)+ is due."""

    name = "no-subtraction"

    def after(self, chains: Chains, w: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
        return chains.p[torch.arange(len(accepted), device=accepted.device), accepted]


class SharedDraws(Rejection):
    """The shared noise draws the draft and the token after it, and the ratio test decides."""

    name = "shared-noise"

    def drafting(self, noise: SharedNoise) -> Noise:
        return noise

    def ending(self, rows: list[Row], noise: SharedNoise) -> torch.Tensor:
        return noise.of(rows)


@dataclass(frozen=True)
class Fault:
    """What is wrong: ``rule`` in place of the ratio rules, or ``spoil`` on drafting engines."""

    name: str
    rule: Ratio | None = None
    spoil: Callable[[Engine], None] | None = None


class _StaleLaw(WrappedLaw):
    """Makes the law of every row of a block from what stood before the block."""

    def apply(self, logits: Any, tokens: list[int], paths: list[list[int]]) -> Any:
        return super().apply(logits, tokens, [[] for _ in paths])


def stale_penalties(engine: Engine) -> None:
    """Penalties are computed from the state before the block: drafted tokens do not count."""
    add = engine.add

    def spoilt(request: Request) -> None:
        add(request)
        for sequence in engine.scheduler.sequences():
            if sequence.request is request and request.params.penalises:
                sequence.law = _StaleLaw(sequence.law)

    engine.add = spoilt  # type: ignore[method-assign]


FAULTS = {
    rule.name: Fault(rule.name, rule())
    for rule in (
        AcceptAlways,
        AcceptLikely,
        OwnSample,
        GreedyDrafts,
        NoSubtraction,
        SharedDraws,
    )
} | {"stale-penalties": Fault("stale-penalties", spoil=stale_penalties)}
