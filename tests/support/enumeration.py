"""The exact output distributions of the acceptance rules in float64, by enumeration.

For small vocabularies: the tests hold the fast code to it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from outrider.audit.oracle import Distribution, total_variation

Model = Callable[
    [tuple[int, ...]], Distribution
]  # the distribution of the token that follows these
Emissions = dict[tuple[int, ...], float]  # the probability of each run of emitted tokens


def coupled_acceptance(p: Distribution, q: Distribution) -> float:
    """P(x == y) of coupled sampling, where argmax(log p + g) and argmax(log q + g) share g.

    sum_i 1 / sum_j max(p_j / p_i, q_j / q_i) over the ids i with p_i, q_i > 0: both pick i when
    its exponential race arrives before every other on both sides. Daliri, Musco, Suresh,
    "Coupling without communication and drafter-invariant speculative decoding" (2024).
    """
    both = [i for i in range(len(p)) if p[i] > 0 and q[i] > 0]
    return float(sum(1.0 / np.maximum(p / p[i], q / q[i]).sum() for i in both))


def coupled_acceptance_bound(p: Distribution, q: Distribution) -> float:
    """The least that `coupled_acceptance` can be: (1 - TV) / (1 + TV)."""
    distance = total_variation(p, q)
    return (1.0 - distance) / (1.0 + distance)


def token_rule_output_law(target: Model, drafter: Model, length: int) -> Emissions:
    """What one verify step of the token rule emits, with drafts of `length` tokens.

    Draft token x is accepted with min(1, p(x) / q(x)); at the first that is not, the token comes
    from (p - q)+; after all of them, the bonus token from p. Leviathan, Kalman, Matias (ICML
    2023); Chen et al. (2023).

    Returns:
        Runs of accepted tokens and the one after them, 1 to length + 1 tokens, with their
        probabilities (above 0, summing to 1).
    """
    emissions: Emissions = {}

    def walk(accepted: tuple[int, ...], reached: float) -> None:
        p = target(accepted)
        if len(accepted) == length:
            _emit(emissions, accepted, reached, p)
            return
        q = drafter(accepted)
        for x in np.flatnonzero(np.minimum(p, q)):
            walk((*accepted, int(x)), reached * min(p[x], q[x]))
        rejected = total_variation(p, q)
        _emit(emissions, accepted, reached * rejected, np.maximum(p - q, 0.0))

    walk((), 1.0)
    return emissions


def block_rule_output_law(target: Model, drafter: Model, length: int) -> Emissions:
    """What one verify step of the block rule emits, with drafts of `length` tokens.

    Sun et al., "Block verification accelerates speculative decoding" (ICLR 2025). For a draft
    x_1 .. x_K with q > 0 along it, and u_i independent and uniform:

        w_0 = 1, w_i = min(1, w_{i-1} p(x_i) / q(x_i))
        R_i = sum_v (w_i p(v | x_1..x_i) - q(v | x_1..x_i))+
        h_i = R_i / (R_i + 1 - w_i) for i < K, and h_K = w_K
        tau = the largest i with u_i <= h_i, 0 if there is none

    tau tokens are accepted. After K of them the bonus token comes from p, else the token comes
    from (w_tau p - q)+.

    Returns:
        As `token_rule_output_law`.
    """
    emissions: Emissions = {}

    def walk(
        draft: tuple[int, ...],
        drafted: float,
        w: float,
        ends: tuple[tuple[float, Distribution], ...],
    ) -> None:
        """`ends` holds h_i and the weights of the token after x_1..x_i, for i < len(draft)."""
        p = target(draft)
        if len(draft) == length:
            for i, (h, weights) in reversed(list(enumerate((*ends, (w, p))))):
                passed = h if i else 1.0
                _emit(emissions, draft[:i], drafted * passed, weights)
                drafted *= 1.0 - passed
            return
        q = drafter(draft)
        residual = np.maximum(w * p - q, 0.0)
        r = float(residual.sum())
        # 0 / 0 only where w = 1 and p = q: every later w is 1 too, until one surely passes.
        h = r / (r + 1.0 - w) if r + 1.0 - w > 0 else 1.0
        for x in np.flatnonzero(q):
            next_w = min(1.0, w * float(p[x] / q[x]))
            walk((*draft, int(x)), drafted * float(q[x]), next_w, (*ends, (h, residual)))

    walk((), 1.0, 1.0, ())
    return emissions


def continued(emissions: Emissions, target: Model, total: int) -> NDArray[np.float64]:
    """The joint distribution of `total` tokens when the target continues what was emitted.

    A rule is exact when this is the same array as for no emission at all, {(): 1.0}. `total` is
    at least the longest run.

    Returns:
        float64 [vocabulary] * total.
    """
    vocabulary = len(target(()))
    joint = np.zeros((vocabulary,) * total)

    def walk(tokens: tuple[int, ...], probability: float) -> None:
        if len(tokens) == total:
            joint[tokens] += probability
            return
        for token, p in enumerate(target(tokens)):
            if p > 0:
                walk((*tokens, token), probability * float(p))

    for tokens, probability in emissions.items():
        walk(tokens, probability)
    return joint


def accepted_per_draft(emissions: Emissions) -> float:
    """The mean number of draft tokens accepted."""
    return sum((len(tokens) - 1) * probability for tokens, probability in emissions.items())


def _emit(
    emissions: Emissions, accepted: tuple[int, ...], mass: float, weights: Distribution
) -> None:
    """Add what follows `accepted`: `mass` in all, shared out as `weights` are."""
    if mass <= 0 or not weights.any():  # the second only where rounding left some mass
        return
    for token, share in enumerate(weights / weights.sum()):
        if share > 0:
            tokens = (*accepted, token)
            emissions[tokens] = emissions.get(tokens, 0.0) + mass * float(share)
