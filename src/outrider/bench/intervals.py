"""What is known of a median from a few rounds."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

CONFIDENCE = 0.95
METHOD = "95 % confidence interval of the median over rounds, from order statistics"


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """A 95 % confidence interval of the median: (x_(j), x_(n+1-j)), from 1 as statistics count.

    The number of n independent values below the true median is binomial (n, 1/2), so the interval
    holds it with probability 1 - 2 P(B <= j - 1) whatever the distribution; j is the largest that
    keeps this at 95 % or more. 7 values give (smallest, largest), at 98.4 %. It needs no model and
    no resampling, where a bootstrap of so few values would be too narrow. David and Nagaraja,
    "Order Statistics" (3rd ed. 2003), section 7.1; Le Boudec, "Performance Evaluation of Computer
    and Communication Systems" (2010), theorem 2.1.

    Returns:
        The bounds in the values' unit; None for fewer than 6 values, which reach no 95 %.
    """
    ordered, n = sorted(values), len(values)
    j, outside = 0, 0.0
    while True:
        outside += 2 * comb(n, j) / 2**n
        if outside > 1 - CONFIDENCE:
            break
        j += 1
    return (ordered[j - 1], ordered[n - j]) if j else None
