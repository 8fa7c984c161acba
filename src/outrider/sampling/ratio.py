"""The ratio rules accept a draft token x ~ q with a probability that depends on p(x) / q(x).

Unlike coupled sampling they preserve the distribution only: the tokens of a seed change with the
drafter and with K. Both follow one scheme over a chain x_1 .. x_K, with weights w and odds h:

    rejection   w_i = 1                                 h_i = min(1, p(x_i) / q(x_i))
                accepted: the first ones with u_i < h_i
    block       w_0 = 1, w_i = min(1, w_{i-1} p(x_i) / q(x_i))
                R_i = sum_v (w_i p(v | x_1..x_i) - q(v | x_1..x_i))+
                h_i = R_i / (R_i + 1 - w_i) for i < K, h_K = w_K
                accepted: up to the largest i with u_i < h_i

After t accepted tokens one is drawn from (w_t p - q)+, or from p if t = K. Rejection: Leviathan,
Kalman, Matias, "Fast inference from transformers via speculative decoding" (ICML 2023), algorithm
1, and Chen et al., "Accelerating large language model decoding with speculative sampling" (2023).
Block: Sun et al., "Block verification accelerates speculative decoding" (ICLR 2025), algorithm 2.

Distributions are computed in fp64: (w p - q)+ and 1 - w are differences of numbers that may nearly
agree, and with a good drafter their rounding in fp32 would decide.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.types import Draft, Row, Verdict
from .acceptance import NOT_FINITE, NOTHING_LEFT, AcceptanceRule, Coupled
from .arrays import softmax, widened
from .pipeline import NEVER, Logits, StepLogits
from .ratio_noise import DRAFTING, ENDING, FreshNoise, uniforms
from .shared_noise import Noise, SharedNoise

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Chains:
    """Distributions of B drafts of one length K, and the drafts ``x`` int64 [B, K].

    ``p`` is fp64 [B, K+1, V], ``q`` too; the last row of ``q`` is 0.
    """

    p: Floats
    q: Floats
    x: Ints

    @property
    def ratio(self) -> Floats:
        """p(x_i) / q(x_i): fp64 [B, K]."""
        ratio: Floats = of_drafted(self.p, self.x) / of_drafted(self.q, self.x)
        return ratio


def of_drafted(rows: NDArray[Any], x: Ints) -> NDArray[Any]:
    """Return the entries of ``rows`` [B, K or K+1, V] at the drafted ids: [B, K]."""
    return np.take_along_axis(rows[:, : x.shape[1]], x[..., None], -1)[..., 0]


_PROBABILITIES = 2**22  # worked on at once: 32 MiB of them


class Ratio(ABC):
    """The common part of the ratio rules: their noise, and the token after the accepted ones."""

    name: str
    trees = False
    needs_logits = True

    def drafting(self, noise: SharedNoise) -> Noise:
        return FreshNoise(noise.vocab_size, DRAFTING)

    def ending(self, rows: list[Row], noise: SharedNoise) -> Logits:
        """Return the noise of the token after the accepted ones, by first rows: [B, V]."""
        return FreshNoise(noise.vocab_size, ENDING).of(rows)

    @abstractmethod
    def odds(self, chains: Chains) -> tuple[Floats, Floats]:
        """Return the weights w fp64 [B, K+1] and the odds h fp64 [B, K]."""

    @abstractmethod
    def count(self, passed: Bools) -> Ints:
        """Return how many tokens are accepted if ``passed`` bool [B, K] is u < h: int64 [B]."""

    def after(self, chains: Chains, w: Floats, accepted: Ints) -> Floats:
        """Return weights of the token after ``accepted`` [B] ones: (w p - q)+, fp64 [B, V]."""
        at = np.arange(len(accepted)), accepted
        p = chains.p[at]
        left = np.maximum(w[at][:, None] * p - chains.q[at], 0)
        # Nothing is left only where p and q differ by less than rounding can tell.
        return np.where(left.sum(-1, keepdims=True) > 0, left, p)

    @np.errstate(divide="ignore", invalid="ignore")
    def decide(
        self, z_p: Logits, z_q: Logits | None, x: Ints, u: Floats, g: Logits
    ) -> tuple[Ints, Ints]:
        """Return for B drafts of length K how many tokens are accepted, and the next, int64 [B].

        Args:
            z_p: the target's log-weights [B, K+1, V], each row with a finite entry.
            z_q: those that the draft was drawn from [B, K, V]; None if it was deterministic.
            x: the draft, int64 [B, K].
            u: uniforms in (0, 1), fp64 [B, K].
            g: Gumbel noise [B, V].
        """
        chains = _chains(z_p, z_q, x)
        w, h = self.odds(chains)
        accepted = self.count(u < h)
        return accepted, (np.log(self.after(chains, w, accepted)) + g).argmax(-1)

    def __call__(self, target: StepLogits, draft: Draft, noise: SharedNoise) -> Verdict:
        number = len(target.first)
        verdict = Verdict([[] for _ in range(number)], [[] for _ in range(number)], [None] * number)
        groups: dict[tuple[int, bool], list[int]] = {}
        for s, first in enumerate(target.first):
            if first is not None:
                certain = target.rows[first].greedy or draft[s].logits is None
                groups.setdefault((len(draft[s].tokens), certain), []).append(s)
        for (length, certain), members in groups.items():
            size = max(1, _PROBABILITIES // ((length + 1) * target.logits.shape[1]))
            for start in range(0, len(members), size):
                self._settle(target, draft, noise, members[start : start + size], certain, verdict)
        return verdict

    def _settle(
        self,
        target: StepLogits,
        draft: Draft,
        noise: SharedNoise,
        members: list[int],
        certain: bool,
        verdict: Verdict,
    ) -> None:
        """Decide the sequences ``members``, which have drafts of one length, into ``verdict``."""
        vocabulary = target.logits.shape[1]
        starts = [first for s in members if (first := target.first[s]) is not None]
        x = np.array([draft[s].tokens for s in members], np.int64)
        length = x.shape[1]
        z_p = target.logits[np.array(starts)[:, None] + np.arange(length + 1)]
        best = z_p.max(-1)
        finite, masked = np.isfinite(best), best == NEVER
        z_p[~finite] = 0
        greedy = np.array([target.rows[first].greedy for first in starts])
        z_p[greedy] = _only(z_p[greedy].argmax(-1), vocabulary)
        z_q = None
        if not certain:  # drafters may have vocabularies of their own
            z_q = np.stack([widened(draft[s].logits, vocabulary) for s in members])
        # Greedy rows have one outcome and need no noise.
        u = np.full((len(members), length), 0.5)
        g = np.zeros((len(members), vocabulary), np.float32)
        drawn = [first for first in starts if not target.rows[first].greedy]
        if drawn:
            rows = [target.rows[first + i] for first in drawn for i in range(length)]
            u[~greedy] = uniforms(rows).reshape(len(drawn), length)
            g[~greedy] = self.ending([target.rows[first] for first in drawn], noise)[:, :vocabulary]
        accepted, tokens = self.decide(z_p, z_q, x, u, g)
        # Rows after a token that the target cannot draw are ignored.
        likely = of_drafted(z_p, x) > NEVER
        reached = np.insert(np.logical_and.accumulate(likely, -1), 0, True, -1)
        nothing = (masked & reached).any(-1).tolist()
        broken = (~finite & ~masked & reached).any(-1).tolist()
        decided = zip(members, accepted.tolist(), tokens.tolist(), broken, nothing, strict=True)
        for s, count, token, wrong, empty in decided:
            verdict.tokens[s].extend([*draft[s].tokens[:count], token])
            verdict.path[s].extend(range(count))
            verdict.errors[s] = NOT_FINITE if wrong else NOTHING_LEFT if empty else None


class Rejection(Ratio):
    """Verifies token by token: Leviathan et al. (2023), Chen et al. (2023)."""

    name = "rejection"

    def odds(self, chains: Chains) -> tuple[Floats, Floats]:
        return np.ones_like(chains.p[..., 0]), np.minimum(chains.ratio, 1)

    def count(self, passed: Bools) -> Ints:
        count: Ints = np.logical_and.accumulate(passed, -1).sum(-1)
        return count


class Block(Ratio):
    """Verifies the draft as a whole, and accepts no fewer on average: Sun et al. (2025)."""

    name = "block"

    def odds(self, chains: Chains) -> tuple[Floats, Floats]:
        w = np.ones_like(chains.p[..., 0])
        for i, ratio in enumerate(chains.ratio.T, 1):
            w[:, i] = np.minimum(w[:, i - 1] * ratio, 1)
        left = np.maximum(w[..., None] * chains.p - chains.q, 0).sum(-1)
        # 0 / 0 only where w = 1 and p = q: every later w is 1 too, until one surely passes.
        h = np.where(left + 1 - w > 0, left / (left + 1 - w), 1)
        return w, np.concatenate((h[:, 1:-1], w[:, 1:][:, -1:]), -1)

    def count(self, passed: Bools) -> Ints:
        places = np.arange(1, passed.shape[1] + 1)
        count: Ints = (passed * places).max(-1, initial=0)
        return count


RULES: dict[str, Callable[[], AcceptanceRule]] = {
    "coupled": Coupled, "rejection": Rejection, "block": Block,
}  # fmt: skip


def _only(ids: Ints, vocabulary: int) -> Logits:
    """Return log-weights with one outcome each: fp32 [..., vocabulary] from ids [...]."""
    z = np.full((*ids.shape, vocabulary), NEVER, np.float32)
    np.put_along_axis(z, ids[..., None], 0.0, -1)
    return z


def _chains(z_p: Logits, z_q: Logits | None, x: Ints) -> Chains:
    """Normalise processed logits; shapes as in ``Ratio.decide``.

    A draft distribution that is not finite counts as certain: an argmax over it has one outcome.
    """
    p = softmax(z_p.astype(np.float64))
    q, length = np.zeros_like(p), x.shape[1]
    np.put_along_axis(q[:, :length], x[..., None], 1.0, -1)
    if z_q is not None:
        finite = np.isfinite(z_q.max(-1))
        own = softmax(z_q[finite].astype(np.float64))
        q[:, :length][finite] = own
    return Chains(p, q, x)
