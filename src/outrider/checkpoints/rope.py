"""Rotary tables of the native families."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.fields import Fields, is_number, readable
from ..errors import ModelError
from .configs import ModelConfig
from .frequencies import Floats, frequencies

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
BY_LENGTH = ("dynamic", "longrope")
"""Types whose frequencies depend on the length of the sequence."""
STILL = "still"
"""The kind of layers without a rope."""
PART = 1 << 14
"""Positions whose tables are computed at a time."""


def rope_parameters(config: ModelConfig, kind: str | None = None) -> dict[str, Any]:
    """Return the rope options of layers of ``kind`` ("full_attention", "sliding_attention").

    None stands for the options that all layers share; where kinds differ, for full attention.
    """
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    nested = parameters.get(kind or "full_attention")
    return nested if isinstance(nested, dict) else parameters


def head_dim(config: ModelConfig) -> int:
    """Return the elements of a head."""
    explicit = getattr(config, "head_dim", None)
    return int(explicit or config.hidden_size // config.num_attention_heads)


def rotary_dim(config: ModelConfig, kind: str | None = None) -> int:
    """Return how many elements of a head are rotated."""
    share = rope_parameters(config, kind).get("partial_rotary_factor")
    return int(head_dim(config) * (1.0 if share is None else share))


def check_rope(parameters: Mapping[str, Any], size: int, where: str) -> None:
    """Refuse rope options that give no rotary table for heads of ``size`` elements."""
    rope = Fields(parameters, where)
    kind = rope.text("rope_type", "default")
    rope.number("rope_theta", positive=True)
    share = rope.number("partial_rotary_factor", 1.0, positive=True)
    if share > 1:
        raise rope.refuse("partial_rotary_factor", "a share of at most 1")
    if kind in ("linear", "dynamic", "llama3", "yarn"):
        rope.number("factor", positive=True)
    if kind == "longrope" or "original_max_position_embeddings" in rope:
        rope.whole("original_max_position_embeddings", 1)
    for name, value in parameters.items():
        if isinstance(value, float) and not is_number(value):
            raise rope.refuse(name, "a finite number")
    for name in ("short_factor", "long_factor") if kind == "longrope" else ():
        factors, count = parameters.get(name), int(size * share) // 2
        listed = isinstance(factors, list) and len(factors) == count
        if not listed or not all(is_number(n) and n > 0 for n in factors or ()):
            raise rope.refuse(name, f"a list of {count} numbers above 0")


def half_split(size: int, turning: int) -> list[int]:
    """Return the order of a head's elements in which element i is rotated with i + size / 2.

    In the head itself the first ``turning`` elements are rotated, half-split; the others are not.
    """
    half = turning // 2
    still = list(range(turning, size))
    middle = len(still) // 2
    return [*range(half), *still[:middle], *range(half, turning), *still[middle:]]


class Rope:
    """Rotary tables: cos and sin of a row depend only on its position and its prompt's length.

    As in transformers, once max(prompt length, position + 1) exceeds the trained context, "dynamic"
    NTK scaling raises the base and "longrope" takes its long factors. Here that depends on the row,
    not on the forward pass that it is in, so chunks and drafts cannot change it. Tables have
    ``max_length`` positions; a ``kind`` of layers may have its own tables.

    Attributes:
        type: the rope_type.
        trained: the length beyond which the types ``BY_LENGTH`` have other frequencies.
        by_length: whether that applies to any row.
        head_dim: the elements of a head.
    """

    def __init__(self, config: ModelConfig, max_length: int, kind: str | None = None) -> None:
        self._parameters = rope_parameters(config, kind)
        self.type = str(self._parameters.get("rope_type", "default"))
        if self.type not in ROPE_TYPES:
            raise ModelError(
                f"rope_type {self.type!r} is not supported natively; supported are "
                f"{', '.join(ROPE_TYPES)}."
            )
        self.head_dim = head_dim(config)
        self._dim = rotary_dim(config, kind)
        self._context = int(config.max_position_embeddings)
        self.trained = self._context
        if self.type == "longrope":
            self.trained = int(self._parameters["original_max_position_embeddings"])
        self._max_length = max_length
        self.by_length = self.type in BY_LENGTH and max_length > self.trained
        with readable("rope_parameters make no frequencies", "correct the checkpoint's config."):
            self._short, self._factor = self._frequencies(0)

    def _frequencies(self, length: int) -> tuple[Floats, float]:
        with np.errstate(all="ignore"):  # non-finite results are refused
            made = frequencies(self.type, self._parameters, self._dim, self._context, length)
            furthest = made[0] * np.float32(self._max_length)
        if not np.isfinite(furthest).all() or not math.isfinite(made[1]):
            raise ModelError(
                f"rope_parameters of type {self.type!r} make frequencies that are no finite "
                "numbers; correct the checkpoint's config."
            )
        return made

    def _parts(self, inverse: Floats) -> Iterator[tuple[slice, Floats]]:
        """Yield the tables of ``PART`` positions at a time, to keep intermediate results small."""
        for begin in range(0, self._max_length, PART):
            part = slice(begin, min(begin + PART, self._max_length))
            positions = np.arange(part.start, part.stop, dtype=np.float32)
            yield part, self._tables(positions[:, None] * inverse[None, :])

    def table(self) -> Floats:
        """Return cos and signed sin of all positions: [max_length, 2, head_dim]."""
        whole = np.empty((self._max_length, 2, self.head_dim), np.float32)
        for part, table in self._parts(self._short):
            whole[part] = table
        return whole

    def _tables(self, angles: Floats) -> Floats:
        """Return cos and signed sin: [rows, 2, head_dim]."""
        exact = angles.astype(np.float64)
        cos, sin = (turn(exact).astype(np.float32) * self._factor for turn in (np.cos, np.sin))
        if still := self.head_dim - self._dim:  # see ``half_split``
            more = (*angles.shape[:-1], still // 2)
            cos = np.concatenate([cos, np.ones(more, np.float32)], -1)
            sin = np.concatenate([sin, np.zeros(more, np.float32)], -1)
        return np.stack([np.concatenate([cos, cos], -1), np.concatenate([-sin, sin], -1)], axis=-2)

    def halves(self, far: bool = False) -> tuple[Floats, Floats]:
        """Return cos and sin of every position, [max_length, head_dim / 2] each.

        If ``far``, they are those of rows beyond ``trained``, which only longrope has in common.
        """
        inverse = self._frequencies(self.trained + 1)[0] if far else self._short
        half = self.head_dim // 2
        cos, sin = (np.empty((self._max_length, half), np.float32) for _ in range(2))
        for part, table in self._parts(inverse):
            cos[part], sin[part] = table[:, 0, half:], table[:, 1, half:]
        return cos, sin

    def lengthened(self, positions: NDArray[np.int64], lengths: list[int]) -> Floats | None:
        """Return cos and signed sin of rows [rows, 2, head_dim]; None if ``table`` has them.

        ``lengths`` are max(prompt length, position + 1) of the rows.
        """
        if self.type not in BY_LENGTH or max(lengths) <= self.trained:
            return None
        by_length = {
            n: self._frequencies(n)[0] if n > self.trained else self._short for n in set(lengths)
        }
        inverse = np.stack([by_length[n] for n in lengths])
        return self._tables(positions.astype(np.float32)[:, None] * inverse)
