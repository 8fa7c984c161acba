"""Tests whether tokens follow the laws of their contexts, by exact bounds.

The law of a context is fixed by the tokens before it, which were drawn themselves. So draws are not
independent, and their laws are not known beforehand. Each test is an exponent whose exponential is
a martingale with mean 1 while the draws follow their laws; it exceeds 1 / alpha with probability
alpha at most (Ville 1939). Nothing is approximated by a normal or a chi-square distribution.

*Alike*: errors of one kind add up over contexts. For a set A of outcomes in each context and a
number l, with x_t = 1 if draw t falls into A and p_t its probability,

    sum over t of  l x_t - log(1 + p_t (e^l - 1)).

Sets are all sets of ranks, the tokens above a few probabilities, and those that an option makes
rarer; the largest exponent over sets and a grid of l counts, by the union bound. Where p_t is only
known up to ``ROUNDING``, the value that makes the exponent smallest is taken.

*Apart*: errors differ from context to context. In each one, counts c of draws are judged by the
Bayes factor of a Dirichlet prior around the law p against p itself,

    log Gamma(a) / Gamma(a + n)  +  sum over i of  log Gamma(a p_i + c_i) / Gamma(a p_i)
                                 -  sum over i of  c_i log p_i,

added up over contexts and averaged over a few weights a. ``SLACK_NATS`` a draw is taken off for
rounding.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .outcome import MISSED_PROBABILITY
from .sampling import CELLS, Cells

Counts = NDArray[np.int64]
RANKS = np.array([[n >> i & 1 for n in range(1, 2 ** (CELLS - 1))] for i in range(CELLS)], bool)
"""Membership of cells in sets of ranks, [CELLS, sets]: all sets but complements."""
ABOVE_PROBABILITIES = (0.05, 0.1, 0.2, 0.4)
SETS = RANKS.shape[1] + len(ABOVE_PROBABILITIES) + 1
_POWERS = 2.0 ** (np.arange(-10, 9) / 2)
GRID = np.concatenate((_POWERS, -_POWERS))
GRID_SHARE = 0.96  # of the best l's exponent, reached by the nearest: 1 - (2^(1/4) - 1)^2
WEIGHTS = np.array([2.0, 8.0, 32.0, 128.0])
ROUNDING = 0.01  # error of a probability if arithmetic depends on the batch
SLACK_NATS = 0.005  # error of such a server, in nats per draw
SIMULATIONS = 40  # simulations of each size of errors, to find the smallest visible one
HALVINGS = 7  # bisections of the range of sizes


@dataclass(frozen=True)
class Comparison:
    """Draws against their laws; ``alike`` or ``apart`` above 0 is an error.

    Both are exponents over their thresholds. ``ranks`` is the set of ranks that deviates most,
    ``seen`` and ``due`` its shares; ``worst`` the context that deviates most, and the cell that is
    too frequent there. A draw that is ``excluded`` had probability 0, which is always an error. The
    visible total variations would have been seen with 90 % probability.
    """

    draws: int
    alike: float
    apart: float
    ranks: tuple[int, ...]
    seen: float
    due: float
    worst: tuple[int, int]
    excluded: int
    visible_alike: float
    visible_apart: float

    @property
    def wrong(self) -> bool:
        return self.excluded > 0 or self.alike > 0 or self.apart > 0


def compare(laws: Cells, ignored: Cells, counts: Counts, alpha: float) -> Comparison:
    """Return the comparison of draws with their laws.

    ``laws``, the laws ``ignored`` if the options had no effect, and ``counts``, one draw at least,
    are [contexts, CELLS]; ``alpha`` bounds the probability of a false alarm.
    """
    n = counts.sum(1)
    ranks = np.broadcast_to(RANKS, (len(laws), *RANKS.shape))
    above = np.stack([laws > least for least in ABOVE_PROBABILITIES], 2)
    rarer = (laws < ignored)[:, :, None]
    members = np.concatenate((ranks, above, rarer), 2).astype(np.float64)  # [contexts, CELLS, SETS]
    inside = np.clip(np.einsum("cks,ck->cs", members, laws), 0.0, 1.0)
    hits = np.einsum("cks,ck->s", members, counts)
    by_set = np.full(SETS, -math.inf)
    for rate in GRID:
        near = np.clip(inside + math.copysign(ROUNDING, rate), 0.0, 1.0)
        by_set = np.maximum(by_set, rate * hits - n @ np.log1p(near * np.expm1(rate)))
    at = int(by_set[: RANKS.shape[1]].argmax())
    each = _Factors(laws)(counts)
    over = counts - n[:, None] * laws
    context = int(each.max(0).argmax())
    total = int(n.sum())
    return Comparison(
        draws=total,
        alike=float(by_set.max()) - _threshold(alpha),
        apart=_mean(each.sum(1)) - SLACK_NATS * total - math.log(2 / alpha),
        ranks=tuple(int(i) + 1 for i in np.flatnonzero(RANKS[:, at])),
        seen=float(hits[at]) / total,
        due=float(n @ inside[:, at]) / total,
        worst=(context, int(over[context].argmax())),
        excluded=int(counts[laws <= 0].sum()),
        visible_alike=visible_alike(total, alpha),
        visible_apart=visible_apart(laws, n, alpha),
    )


def visible_alike(draws: int, alpha: float) -> float:
    """Return the total variation that shows if it is alike in all contexts (Hoeffding)."""
    share = math.sqrt(_threshold(alpha) / (2 * GRID_SHARE * draws))
    return min(1.0, ROUNDING + share + math.sqrt(math.log(1 / MISSED_PROBABILITY) / (2 * draws)))


def visible_apart(laws: Cells, draws: Counts, alpha: float) -> float:
    """Return the mean total variation that shows if each context prefers a token of its own.

    By simulation with a fixed seed: the share of draws moved to that token is found by bisection.
    """
    rng = np.random.default_rng(0)
    scaled = laws / laws.sum(1, keepdims=True)
    chosen = np.array([rng.choice(CELLS, p=p) for p in scaled])
    moved = np.eye(CELLS)[chosen]
    weights = draws / draws.sum()
    factors = _Factors(laws)

    def variation(share: float) -> float:
        return float(weights @ (share * np.abs(moved - scaled).sum(1) / 2))

    def seen(share: float) -> bool:
        p = (1 - share) * scaled + share * moved
        hits = 0
        for _ in range(SIMULATIONS):
            counts = rng.multinomial(draws, p)
            total = _mean(factors(counts).sum(1)) - SLACK_NATS * int(draws.sum())
            hits += total > math.log(2 / alpha)
        return hits >= (1 - MISSED_PROBABILITY) * SIMULATIONS

    low, high = 0.0, 1.0
    if not seen(high):
        return 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if seen(middle) else (middle, high)
    return variation(high)


def _threshold(alpha: float) -> float:
    return math.log(2 * SETS * len(GRID) / alpha)


class _Factors:
    """Bayes factors of draws from the laws of contexts; excluded cells are not counted."""

    def __init__(self, laws: Cells) -> None:
        self._allowed = laws > 0
        p = np.where(self._allowed, laws, 1.0)
        self._log_p = np.log(p)
        self._prior = WEIGHTS[:, None, None] * p
        self._total = WEIGHTS[:, None] * p.sum(1, where=self._allowed)
        self._before = _log_gamma(self._total) - _log_gamma(self._prior).sum(2)

    def __call__(self, counts: Counts) -> NDArray[np.float64]:
        """Return their logarithms, [WEIGHTS, contexts]."""
        c = np.where(self._allowed, counts, 0)
        cells = (_log_gamma(self._prior + c) - c * self._log_p).sum(2)
        factors: NDArray[np.float64] = cells - _log_gamma(self._total + c.sum(1)) + self._before
        return factors


def _mean(exponents: NDArray[np.float64]) -> float:
    """Return the logarithm of the mean of exponentials."""
    top = float(exponents.max())
    return top + math.log(float(np.exp(exponents - top).mean()))


def _log_gamma(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return log Gamma(x) for x > 0, by Stirling's series at x + 8."""
    y, inverse = x + 8, 1 / (x + 8)
    square = inverse * inverse
    shift = np.log(x * (x + 1) * (x + 2) * (x + 3) * (x + 4) * (x + 5) * (x + 6) * (x + 7))
    series = inverse * (1 / 12 - square * (1 / 360 - square / 1260))
    value: NDArray[np.float64] = (
        (y - 0.5) * np.log(y) - y + 0.5 * math.log(2 * math.pi) + series - shift
    )
    return value
