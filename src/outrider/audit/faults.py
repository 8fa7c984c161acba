"""Wrong rules that ``verify`` must catch: each was, or could be, somebody's speculative decoding.

An audit that cannot fail proves nothing. The first six stand in for the ratio rules; a fault may
also spoil an engine, to which the equalities are then put.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..engine.engine import Engine
from ..sampling.fresh import DRAFTING, FreshNoise
from ..sampling.noise import Noise, SharedNoise
from ..sampling.ratio import Chains, Ratio, Rejection
from ..types import Row

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
}
# TODO(penalties): the seventh, penalties computed from the state before the block, is a Fault with
# ``spoil`` and waits for penalties. It replaces the law processing of the engine's runner by one
# that sees no drafted token; a penalty belongs into ``sweep.OPTIONS`` with it.
