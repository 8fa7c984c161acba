"""Frequencies of ropes, as transformers computes them, in fp32.

Powers are computed in fp64 and rounded once, which gives the same on every machine; torch's are off
by up to a unit in the last place, and differ between processors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..base.fields import Fields

Floats: TypeAlias = NDArray[np.float32]


def frequencies(
    kind: str, parameters: Mapping[str, Any], size: int, context: int, length: int
) -> tuple[Floats, float]:
    """Return the factors of positions, fp32 [size / 2], and the factor of cos and sin.

    Args:
        kind: the rope_type.
        parameters: the other options.
        size: the elements of a head that are rotated.
        context: max_position_embeddings.
        length: that of the sequence, for "dynamic" and "longrope"; 0 for a short one.
    """
    rope = Fields(parameters, "rope_parameters")
    base = rope.number("rope_theta", positive=True)
    match kind:
        case "linear":
            return np.float32(1) / _powers(base, size) / np.float32(rope.number("factor")), 1.0
        case "dynamic":
            factor = rope.number("factor")
            stretched = factor * max(length, context) / context - (factor - 1)
            return np.float32(1) / _powers(base * stretched ** (size / (size - 2)), size), 1.0
        case "llama3":
            return _llama3(rope, np.float32(1) / _powers(base, size)), 1.0
        case "yarn":
            return _yarn(rope, base, size), _yarn_factor(rope)
        case "longrope":
            far = length > rope.whole("original_max_position_embeddings", 1)
            factors = np.array(parameters["long_factor" if far else "short_factor"], np.float32)
            inverse = np.float32(1) / (factors * _powers(base, size))
            return inverse, _longrope_factor(rope, context)
    return np.float32(1) / _powers(base, size), 1.0


def _powers(base: float, size: int) -> Floats:
    """Return the powers of ``base`` by which the periods of ``size`` elements grow."""
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    return (base ** exponents.astype(np.float64)).astype(np.float32)


def _llama3(rope: Fields, inverse: Floats) -> Floats:
    factor, low, high = (
        rope.number(name, positive=True)
        for name in ("factor", "low_freq_factor", "high_freq_factor")
    )
    trained = rope.whole("original_max_position_embeddings", 1)
    waves = np.float32(1) / inverse * np.float32(2 * math.pi)
    divided = np.where(waves > trained / low, inverse / np.float32(factor), inverse)
    turns = np.float32(1) / waves * np.float32(trained)
    smooth = (turns - np.float32(low)) / np.float32(high - low)
    between = (np.float32(1) - smooth) * divided / np.float32(factor) + smooth * divided
    return np.where((waves >= trained / high) & (waves <= trained / low), between, divided)


def _yarn(rope: Fields, base: float, size: int) -> Floats:
    trained = rope.whole("original_max_position_embeddings", 1)

    def place(turns: float) -> float:
        """Return the pair of elements that makes ``turns`` turns within the trained context."""
        return size * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = place(rope.number("beta_fast", 0.0, 0.0) or 32)
    high = place(rope.number("beta_slow", 0.0, 0.0) or 1)
    if rope.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001  # no division by zero
    powers = _powers(base, size)
    ramp = (np.arange(size // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    kept: Floats = np.float32(1) - ramp.clip(0, 1)
    stretched: Floats = np.float32(1) / (np.float32(rope.number("factor", positive=True)) * powers)
    inverse: Floats = stretched * (np.float32(1) - kept) + np.float32(1) / powers * kept
    return inverse


def _yarn_factor(rope: Fields) -> float:
    factor = rope.number("factor", positive=True)
    scales = [rope.number(name, 0.0) for name in ("mscale", "mscale_all_dim")]
    given = rope.number("attention_factor", -1.0)
    if "attention_factor" in rope:
        return given

    def scaled(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    return scaled(scales[0]) / scaled(scales[1]) if all(scales) else scaled(1.0)


def _longrope_factor(rope: Fields, context: int) -> float:
    trained = rope.whole("original_max_position_embeddings", 1)
    factor = rope.number("factor", context / trained, positive=True)
    if "attention_factor" in rope:
        return rope.number("attention_factor")
    return math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
