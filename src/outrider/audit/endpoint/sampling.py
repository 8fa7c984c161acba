"""The law of the next token under the options of a request."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .answers import NAMED_TOKENS, Law, Token

Cells = NDArray[np.float64]
CELLS = NAMED_TOKENS + 1  # the ranks of the named tokens, and all other tokens together
CLOSE_SHARE = 0.2  # relative distance to a threshold within which rounding may decide
CLOSE_PROBABILITY = 0.05  # the same for a sum of probabilities
RARE_PROBABILITY = 1e-6  # least probability of unnamed tokens, which rounding may hide


@dataclass(frozen=True)
class Sampling:
    """Options of a request; each set tests only one, so that their order does not matter."""

    name: str
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: float = 0.0

    def fields(self, biased: Token | None) -> dict[str, Any]:
        """Return the temperature, which has no common default, and options not at their default."""
        default, own = Sampling(""), ("name", "bias")
        fields = {k: v for k, v in vars(self).items() if k not in own and v != getattr(default, k)}
        if self.bias and biased is not None:
            fields["logit_bias"] = {str(biased.id): self.bias}
        return {"temperature": self.temperature, **fields}

    @property
    def truncates(self) -> bool:
        """True if tokens are excluded."""
        return bool(self.top_k or self.min_p or self.top_p < 1)

    @property
    def reweighs(self) -> bool:
        """True if only the proportions of named tokens are known."""
        penalties = self.presence_penalty or self.frequency_penalty
        return bool(self.temperature != 1 or penalties or self.bias)


SAMPLINGS = (
    Sampling("temperature 1"),
    Sampling("temperature 0.5", temperature=0.5),
    Sampling("top_k 2", top_k=2),
    Sampling("top_p 0.7", top_p=0.7),
    Sampling("min_p 0.2", min_p=0.2),
    Sampling("penalties", presence_penalty=1.5, frequency_penalty=0.5),
    Sampling("logit_bias -2", bias=-2.0),
)


def plain(law: Law) -> Cells:
    """Return the probabilities of the cells: [CELLS]."""
    cells = np.zeros(CELLS)
    for i, (token, p) in enumerate(zip(law.tokens, law.p, strict=True)):
        cells[i if token.clear else -1] += p
    cells[-1] += max(RARE_PROBABILITY, 1 - sum(law.p))
    return cells


def expected(
    law: Law, sampling: Sampling, before: Sequence[Token], biased: Token | None = None
) -> Cells | None:
    """Return the cells' probabilities under the options, [CELLS]; None if they are not known.

    They are unknown if a token is so near a threshold that rounding decides, or if unnamed tokens
    may matter. If an option only reweighs, the law is conditional on the named tokens.
    """
    p = np.array(law.p)
    clear = np.array([token.clear for token in law.tokens])
    if sampling.truncates:
        kept = _kept(p, sampling) if clear.all() else None
        if kept is None:
            return None
        return _padded(p * kept)
    if sampling.reweighs:
        counts = np.array([sum(token.same(one) for one in before) for token in law.tokens])
        hit = np.array([biased is not None and token.same(biased) for token in law.tokens])
        lower = sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
        with np.errstate(divide="ignore"):
            z = (np.log(p) - lower + sampling.bias * hit) / sampling.temperature
        return _padded(np.exp(z - z.max()) * clear) if clear.any() else None
    return plain(law)


def unaffected(law: Law, sampling: Sampling) -> Cells:
    """Return the cells' probabilities if the options were ignored: [CELLS]."""
    if not sampling.reweighs:
        return plain(law)
    return _padded(np.array(law.p) * [token.clear for token in law.tokens])


def _padded(weights: Cells) -> Cells:
    total = float(weights.sum())
    cells = np.zeros(CELLS)
    cells[: len(weights)] = weights / total if total > 0 else 0
    return cells


def _kept(p: Cells, sampling: Sampling) -> NDArray[np.bool_] | None:
    """Return which named tokens a truncation keeps; None if that is not certain."""
    if sampling.top_k:
        k = sampling.top_k
        if len(p) <= k or p[k] > (1 - CLOSE_SHARE) * p[k - 1]:
            return None
        return np.arange(len(p)) < k
    if sampling.min_p:
        least = sampling.min_p * p[0]
        near = np.abs(p / least - 1) < CLOSE_SHARE
        return None if near.any() or p[-1] >= least else p >= least
    before = np.concatenate(([0.0], p.cumsum()[:-1]))
    near = np.abs(p.cumsum() - sampling.top_p) < CLOSE_PROBABILITY
    # Tokens of similar probability may swap places at the threshold.
    last = int((before < sampling.top_p).sum()) - 1
    swaps = last + 1 < len(p) and p[last + 1] > (1 - CLOSE_SHARE) * p[last]
    if near.any() or swaps or math.fsum(p) < sampling.top_p:
        return None
    return before < sampling.top_p
