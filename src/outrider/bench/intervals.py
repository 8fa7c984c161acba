"""Confidence intervals of a median from a few rounds."""

from collections.abc import Sequence
from math import comb
from statistics import NormalDist

CONFIDENCE = 0.95
METHOD = (
    "of the median over rounds, by order statistics: with at least 95 % confidence, if rounds are "
    "independent of each other"
)


def ranks(n: int) -> tuple[int, float]:
    """Return the rank j of n values that bounds their median from both ends, and the confidence.

    The number of n independent values below the true median is binomial (n, 1/2), so the j-th from
    below and the j-th from above enclose it with probability 1 - 2 P(B <= j - 1), whatever the
    distribution; a bootstrap of so few values would be too narrow. j is the largest, from 1, with
    95 % or more: (1, 0.984) for 7 values, (0, 0) for fewer than 6. David and Nagaraja, "Order
    Statistics" (3rd ed. 2003), section 7.1; Le Boudec, "Performance Evaluation of Computer and
    Communication Systems" (2010), theorem 2.1.
    """
    j, confidence, outside = 0, 0.0, 2 / 2**n
    while outside <= 1 - CONFIDENCE:
        j, confidence = j + 1, 1 - outside
        outside += 2 * comb(n, j) / 2**n
    return j, confidence


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return a confidence interval of the values' median, in their unit; None for too few."""
    ordered, (j, _) = sorted(values), ranks(len(values))
    return (ordered[j - 1], ordered[-j]) if j else None


def shown(bounds: Sequence[float] | None, form: str) -> str:
    """Return an interval as text, empty if there is none."""
    return "" if bounds is None else f"[{bounds[0]:{form}} {bounds[1]:{form}}]"


def student(freedom: int, claims: int = 1) -> float:
    """Return the bound on |t| of Student's t that ``claims`` draws all keep with 95 % probability.

    By Bonferroni, so draws need not be independent, and by the expansion of Abramowitz and Stegun,
    "Handbook of Mathematical Functions", 26.7.5: for one claim and 2 or more degrees of freedom
    within 2 % of the true value, but too low for many claims and few degrees.
    """
    x = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / 2 / claims)
    terms = (
        x,
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return sum(term / float(freedom) ** i for i, term in enumerate(terms))
