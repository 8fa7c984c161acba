"""The float64 reference of processed logits and distributions [vocabulary], slow but simple."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Distribution = NDArray[np.float64]
TRUNCATIONS = {"top_k": 20, "top_p": 0.9, "min_p": 0.05}
"""Options of `distribution` besides temperature, each with a value that audits try."""


def distribution(
    logits: ArrayLike,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Distribution:
    """Return the distribution of logits under a request's options, in vLLM's order.

    Temperature (0: the likeliest id, the lowest among equals), then min_p (keep
    p >= min_p * max p), then top_k (keep ties with the k-th; 0 or less: all), then top_p (keep the
    smallest set of likeliest ids whose mass reaches it, the lowest id first among equals, at least
    one), each on the renormalised result of the one before. ``logits`` [vocabulary] are -inf where
    a token is masked; at least one is finite.
    """
    z = np.asarray(logits, np.float64)
    if temperature == 0:
        return np.asarray(np.arange(len(z)) == z.argmax(), np.float64)
    p = _normalised(np.exp((z - z.max()) / temperature))
    p = _normalised(np.where(p >= min_p * p.max(), p, 0.0))
    if 0 < top_k < len(p):
        p = _normalised(np.where(p >= np.sort(p)[-top_k], p, 0.0))
    if top_p < 1:
        kept, mass = np.zeros_like(p), 0.0
        for i in np.argsort(-p, kind="stable"):
            kept[i] = p[i]
            mass += p[i]
            if mass >= top_p:
                break
        p = _normalised(kept)
    return p


def processed(
    logits: ArrayLike,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    *,
    allowed: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    ends: Sequence[int] = (),
    min_tokens: int = 0,
    logit_bias: Mapping[int, float] | None = None,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
) -> Distribution:
    """Return logits after ``output`` under a request's options, before `distribution`.

    Masks first (allowed ids, if any; the last token of a bad word whose others end the output; the
    ``ends`` before min_tokens), then bias, then the penalties: repetition over prompt and
    output, frequency and presence over the output.
    """
    z = np.array(logits, np.float64)
    if allowed:
        z[np.setdiff1d(np.arange(len(z)), allowed)] = -np.inf
    for word in bad_words:
        before = len(word) - 1
        if before <= len(output) and list(output[len(output) - before :]) == list(word[:-1]):
            z[word[-1]] = -np.inf
    if len(output) < min_tokens:
        z[list(ends)] = -np.inf
    for token, bias in (logit_bias or {}).items():
        z[token] += bias
    for token in {*prompt, *output}:
        z[token] = z[token] / repetition_penalty if z[token] > 0 else z[token] * repetition_penalty
    for token in set(output):
        z[token] -= frequency_penalty * list(output).count(token) + presence_penalty
    return z


def total_variation(p: Distribution, q: Distribution) -> float:
    """Return TV(p, q) = sum (p - q)+, in [0, 1]; the ratio rule accepts with 1 - TV."""
    return float(np.maximum(p - q, 0.0).sum())


def _normalised(weights: Distribution) -> Distribution:
    return np.asarray(weights / weights.sum(), np.float64)
