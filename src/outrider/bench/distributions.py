"""The distributions of replay targets and of the drafters that are planted for them.

A distribution has one number, its *peak* m, the probability of one token. Of the rest, 1 - m, nine
tenths go to eight other tokens, each with half of the one before, and a tenth is spread over the
vocabulary. Two distributions of the same tokens with peaks m and m' draw the same token under
shared noise with probability 1 - |m - m'|, which is 1 - TV, the most that any rule could reach.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from ..models.rows import Track
from ..sampling.noise import words

Floats = npt.NDArray[np.float64]

# Separate noise streams, which no request with the workload's seed draws from.
LAW_STREAM = 2**32 - 2
AGREEMENT_STREAM = 2**32 - 3

OPEN_SHARE = 0.3  # the share of positions that are open; the others are nearly certain
CERTAIN_PEAK = 0.999
OPEN_PEAKS = (0.4, 0.95)  # range of the recorded token's probability at open positions
OTHER_TOKENS = 8  # tokens with notable mass, each half of the one before
SPREAD_SHARE = 0.1

_HALVES = 0.5 ** np.arange(1, OTHER_TOKENS + 1)
SHARES: Floats = (1 - SPREAD_SHARE) * _HALVES / _HALVES.sum()
EVEN_PEAK = float(SHARES[0] / (1 + SHARES[0]))  # where the first of the others is as likely
PEAK_DISTANCE = 0.02  # least distance of a planted peak from ``EVEN_PEAK``, against rounding
SURE_ERRORS = 0.25  # share of a planted drafter's errors in which it is sure of another token
SMALLEST_PEAK = 1e-9


def uniforms(answer: Sequence[int], seed: int, stream: int, count: int) -> Floats:
    """Return numbers in (0, 1), [len(answer), count], fixed by seed, index and token."""
    n = len(answer)
    return (words([seed] * n, answer, range(n), count, stream) + 0.5) / 2**32


def _law(peak: Floats, vocab_size: int) -> tuple[Floats, Floats]:
    """Return probabilities: [n, 1 + OTHER_TOKENS] of a law's tokens, [n] of every other one."""
    left = 1 - peak
    notable = np.concatenate([peak[:, None], left[:, None] * SHARES], 1)
    return notable, left * SPREAD_SHARE / (vocab_size - 1 - OTHER_TOKENS)


def target_track(answer: Sequence[int], vocab_size: int, seed: int) -> Track:
    """Return a replay target's log probabilities along ``answer`` (token ids)."""
    u = uniforms(answer, seed, LAW_STREAM, 2 + OTHER_TOKENS)
    low, high = OPEN_PEAKS
    peak = np.where(u[:, 0] < OPEN_SHARE, low + (high - low) * u[:, 1], CERTAIN_PEAK)
    # The others are in separate ranges after the recorded id, so that no two are the same.
    gap = (vocab_size - 1) // OTHER_TOKENS
    ahead = 1 + np.arange(OTHER_TOKENS) * gap + (u[:, 2:] * gap).astype(np.int64)
    recorded = np.asarray(answer, np.int64)[:, None]
    ids = np.concatenate([recorded, (recorded + ahead) % vocab_size], 1)
    return _track(ids, *_law(peak, vocab_size))


def planted_track(target: Track, vocab_size: int, seed: int, agreement: float) -> Track:
    """Return the distributions q of a drafter with an ``agreement`` with those of ``target``, p.

    ``agreement`` is two things at once. With greedy sampling it is the share of positions at which
    q and p have the same most likely token. At temperature 1 it is the probability that both draw
    the same token under shared noise, sum_i 1 / sum_j max(p_j / p_i, q_j / q_i), in expectation;
    below about 0.15 only the first holds.

    Where q agrees, it is p, at some positions with a lower peak; where it errs, its peak is so low
    that another token is the likeliest, by a small margin. In a share ``SURE_ERRORS`` of its errors
    its tokens are shifted by one, so that it is as sure of another token.
    """
    peak = np.exp(target.z[:, 0].astype(np.float64))
    u, v = uniforms(target.ids[:, 0].tolist(), seed, AGREEMENT_STREAM, 2).T
    agrees, sure = u < agreement, u >= 1 - SURE_ERRORS * (1 - agreement)
    notable, rest = _law(_peaks(peak, v, agrees | sure, doubt(agreement, vocab_size)), vocab_size)
    recorded = target.ids
    ids = np.where((sure & ~agrees)[:, None], np.roll(recorded, -1, 1), recorded)
    order = np.argsort(-notable, 1, kind="stable")
    rows = np.arange(len(ids))[:, None]
    return _track(ids[rows, order], notable[rows, order], rest)


def _peaks(peak: Floats, v: Floats, sure: npt.NDArray[np.bool_], doubt: float) -> Floats:
    """Return the peaks [n] of a planted drafter from those of its target and from v in (0, 1).

    Where it is ``sure`` they are the target's, or at a share ``doubt`` of positions between that
    and ``EVEN_PEAK``; elsewhere they are below it. A doubt above 1 lowers all.
    """
    low, high = EVEN_PEAK + PEAK_DISTANCE, EVEN_PEAK - PEAK_DISTANCE
    near = low + (peak - low) * np.minimum(1, v / max(doubt, SMALLEST_PEAK))
    return np.where(sure, near, high * v / max(doubt, 1)).clip(SMALLEST_PEAK)


def coupled(p: Floats, q: Floats, count: Floats) -> Floats:
    """Return how often draws from p and q [n, kinds] agree; a kind has ``count`` tokens."""
    ratios = np.maximum(p[:, None] / p[:, :, None], q[:, None] / q[:, :, None])
    same: Floats = (count / (ratios * count).sum(-1)).sum(-1)
    return same


@cache
def doubt(agreement: float, vocab_size: int) -> float:
    """Return the doubt at which a planted drafter is accepted as often as it agrees."""
    middles = (np.arange(64) + 0.5) / 64
    low, high = OPEN_PEAKS
    peaks = np.append(low + (high - low) * middles[1::4], CERTAIN_PEAK)
    weights = np.append(np.full(16, OPEN_SHARE / 16), 1 - OPEN_SHARE).repeat(64) / 64
    peak, v = peaks.repeat(64), np.tile(middles, 17)
    count = np.append(np.ones(1 + OTHER_TOKENS), vocab_size - 1 - OTHER_TOKENS)
    p = np.column_stack(_law(peak, vocab_size))
    shifted = [OTHER_TOKENS, *range(OTHER_TOKENS), 1 + OTHER_TOKENS]

    def accepted(doubt: float) -> float:
        sure, unsure = (
            np.column_stack(_law(_peaks(peak, v, np.full(len(v), is_sure), doubt), vocab_size))
            for is_sure in (True, False)
        )
        alike = [float(weights @ coupled(p, q, count)) for q in (sure, unsure, sure[:, shifted])]
        wrong = (1 - SURE_ERRORS) * alike[1] + SURE_ERRORS * alike[2]
        return agreement * alike[0] + (1 - agreement) * wrong

    least, most = 0.0, 1.0  # of doubt / (1 + doubt)
    for _ in range(40):
        middle = (least + most) / 2
        more = accepted(middle / (1 - middle)) > agreement
        least, most = (middle, most) if more else (least, middle)
    return least / (1 - least)


def _track(ids: npt.NDArray[np.int64], notable: Floats, rest: Floats) -> Track:
    """Return a track of these ids' probabilities, the most likely first."""
    return Track(
        np.ascontiguousarray(ids),
        np.log(notable).astype(np.float32),
        np.log(rest).astype(np.float32),
    )
