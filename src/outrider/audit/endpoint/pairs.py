"""Tests whether two servers draw texts from one law, if neither reports probabilities.

Answers are compared in pairs, one of each server. While both follow one law, either order of a pair
is equally likely, whatever the law is. A bet on the order, based on the counts of earlier pairs, is
therefore a martingale with mean 1: it exceeds 1 / alpha with probability alpha at most (Ville
1939), however many pairs there are. Often all texts differ, so their beginnings are compared, too:
each length has a martingale, and the mean of these is a martingale as well.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from .outcome import MISSED_PROBABILITY

Pair = tuple[int, str, str]  # the number of a prompt, the one's answer to it, the other's
LENGTHS = (4, 8, 12, 16, 10_000)  # characters of a text that are compared
UNSEEN = 2.0  # initial count of an unseen text
SIMULATIONS = 20  # simulations of each size of errors, to find the smallest visible one
HALVINGS = 6  # bisections of the range of sizes


def evidence(pairs: Sequence[Pair]) -> float:
    """Return the largest logarithm that the martingale reached."""
    exponents = np.array([_exponents(pairs, length) for length in LENGTHS])
    top = exponents.max(0)
    means = top + np.log(np.exp(exponents - top).mean(0))
    return float(means.max())


def _exponents(pairs: Sequence[Pair], length: int) -> list[float]:
    """Return the logarithm of one martingale before each pair and at the end."""
    ones: defaultdict[int, Counter[str]] = defaultdict(Counter)
    others: defaultdict[int, Counter[str]] = defaultdict(Counter)
    found = [0.0]
    for prompt, whole_x, whole_y in pairs:
        x, y = whole_x[:length], whole_y[:length]
        one, other = ones[prompt], others[prompt]
        as_seen = (one[x] + UNSEEN) * (other[y] + UNSEEN)
        swapped = (one[y] + UNSEEN) * (other[x] + UNSEEN)
        found.append(found[-1] + math.log(2 * as_seen / (as_seen + swapped)))
        one[x] += 1
        other[y] += 1
    return found


def visible(pairs: Sequence[Pair], alpha: float) -> float:
    """Return the total variation that these pairs show if each prompt prefers a text of its own.

    By simulation with a fixed seed: the share of one server's answers that is moved to one text of
    each prompt is found by bisection.
    """
    rng = np.random.default_rng(0)
    texts: defaultdict[int, list[str]] = defaultdict(list)
    for prompt, x, y in pairs:
        texts[prompt] += [x, y]
    favourites = {prompt: str(rng.choice(some)) for prompt, some in texts.items()}
    moved = [texts[p].count(favourites[p]) / len(texts[p]) for p, _, _ in pairs]

    def seen(share: float) -> bool:
        hits = 0
        for _ in range(SIMULATIONS):
            drawn = [
                (
                    p,
                    favourites[p]
                    if rng.random() < share
                    else texts[p][rng.integers(len(texts[p]))],
                    texts[p][rng.integers(len(texts[p]))],
                )
                for p, _, _ in pairs
            ]
            hits += evidence(drawn) > -math.log(alpha)
        return hits >= (1 - MISSED_PROBABILITY) * SIMULATIONS

    low, high = 0.0, 1.0
    if not pairs or not seen(high):
        return 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if seen(middle) else (middle, high)
    return high * (1 - sum(moved) / len(moved))
