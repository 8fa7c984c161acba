"""Rotary tables of the native families."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..base.fields import Fields, is_number, readable
from ..errors import ModelError
from .configs import whole

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
BY_LENGTH = ("dynamic", "longrope")
"""Types whose frequencies depend on the length of the sequence."""
STILL = "still"
"""The kind of layers without a rope."""
PART = 1 << 14
"""Positions whose tables are computed at a time."""


def rope_parameters(config: PretrainedConfig, kind: str | None = None) -> dict[str, Any]:
    """Return the rope options of layers of ``kind`` ("full_attention", "sliding_attention").

    None stands for the options that all layers share; where kinds differ, for full attention.
    """
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    nested = parameters.get(kind or "full_attention")
    return nested if isinstance(nested, dict) else parameters


def head_dim(config: PretrainedConfig) -> int:
    """Return the elements of a head."""
    explicit = getattr(config, "head_dim", None)
    return int(explicit or config.hidden_size // config.num_attention_heads)


def rotary_dim(config: PretrainedConfig, kind: str | None = None) -> int:
    """Return how many elements of a head are rotated."""
    return int(head_dim(config) * rope_parameters(config, kind).get("partial_rotary_factor", 1.0))


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
    """Return the order of a head's elements in which element i turns with i + size / 2.

    In the head itself the first ``turning`` elements turn, half-split; the others do not.
    """
    half = turning // 2
    still = list(range(turning, size))
    middle = len(still) // 2
    return [*range(half), *still[:middle], *range(half, turning), *still[middle:]]


class Rope:
    """Rotary tables: cos and sin of a row depend on its position and its prompt's length alone.

    transformers' own functions compute the scalings and their attention factor. As in transformers,
    once max(prompt length, position + 1) exceeds the trained context, "dynamic" NTK scaling raises
    the base and "longrope" takes its long factors. Here that depends on the row, not on the forward
    it comes in, so chunks and drafts cannot change it. Tables have ``max_length`` positions; a
    ``kind`` of layers may have tables of its own.

    Attributes:
        type: the rope_type.
        trained: the length beyond which the types ``BY_LENGTH`` turn otherwise.
        by_length: whether any row does.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        kind: str | None = None,
    ) -> None:
        parameters = rope_parameters(config, kind)
        self.type = str(parameters.get("rope_type", "default"))
        if self.type not in ROPE_TYPES:
            raise ModelError(
                f"rope_type {self.type!r} is not supported natively; supported are "
                f"{', '.join(ROPE_TYPES)}."
            )
        self._config = config
        self._kind = kind
        self._device = device
        self._dim = rotary_dim(config, kind)
        self._still = head_dim(config) - self._dim
        trained = config.max_position_embeddings
        if self.type == "longrope":
            trained = parameters["original_max_position_embeddings"]
        self.trained = int(trained)
        self._base = float(parameters["rope_theta"])
        self._max_length = max_length
        self.by_length = self.type in BY_LENGTH and max_length > self.trained
        self._dtype = dtype
        with readable("rope_parameters make no frequencies", "correct the checkpoint's config."):
            inverse, self._factor = self._frequencies(None)
        if not inverse.isfinite().all() or not math.isfinite(self._factor):
            raise ModelError(
                f"rope_parameters of type {self.type!r} make frequencies that are no finite "
                "numbers; correct the checkpoint's config."
            )
        self._short = inverse
        self._unturned = torch.zeros(2, self._dim + self._still, dtype=dtype, device=device)
        self._unturned[0] = 1

    def _frequencies(self, length: int | None) -> tuple[torch.Tensor, float]:
        if self.type == "default":
            exponent = torch.arange(0, self._dim, 2, device=self._device).float() / self._dim
            return 1.0 / self._base**exponent, 1.0
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        more = {} if self._kind is None else {"layer_type": self._kind}
        compute = ROPE_INIT_FUNCTIONS[self.type]
        inverse, factor = compute(whole(self._config), self._device, seq_len=length, **more)
        return inverse.float(), float(factor)

    def _parts(self, inverse: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the tables of ``PART`` positions at a time, to keep intermediate results small."""
        for begin in range(0, self._max_length, PART):
            part = slice(begin, min(begin + PART, self._max_length))
            positions = torch.arange(part.start, part.stop, device=self._device).float()
            yield part, self._tables(positions[:, None] * inverse[None, :])

    @cached_property
    def _table(self) -> torch.Tensor:
        """The tables of all positions, [max_length, 2, head_dim]."""
        size = (self._max_length, 2, self._dim + self._still)
        whole = torch.empty(size, dtype=self._dtype, device=self._device)
        for part, table in self._parts(self._short):
            whole[part] = table.to(self._dtype)
        return whole

    def _tables(self, angles: torch.Tensor) -> torch.Tensor:
        """Return cos and signed sin: [rows, 2, head_dim]."""
        # By NumPy in fp64: torch's fp32 cosine was seen to differ between processes in a last bit.
        exact = angles.double().cpu().numpy()
        cos, sin = (
            torch.from_numpy(turn(exact)).float().to(angles.device) * self._factor
            for turn in (np.cos, np.sin)
        )
        if self._still:  # see ``half_split``
            more = (*angles.shape[:-1], self._still // 2)
            cos = torch.cat([cos, cos.new_ones(more)], -1)
            sin = torch.cat([sin, sin.new_zeros(more)], -1)
        return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], -2)

    def fill(self) -> None:
        """Compute the tables of ``rows`` now instead of at its first call."""
        _ = self._table

    def halves(self, far: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of every position, [max_length, head_dim / 2] each.

        They are those of rows beyond ``trained`` if ``far``, which longrope alone has for all.
        """
        inverse = self._frequencies(self.trained + 1)[0] if far else self._short
        half = (self._dim + self._still) // 2
        size = (self._max_length, half)
        cos, sin = (torch.empty(size, dtype=self._dtype, device=self._device) for _ in range(2))
        for part, table in self._parts(inverse):
            cos[part], sin[part] = table[:, 0, half:], table[:, 1, half:]
        return cos, sin

    def rows(
        self, positions: torch.Tensor, lengths: list[int], turned: int, kept: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what rotates heads: x * cos + (x with its halves swapped) * sin.

        ``lengths`` are max(prompt length, position + 1) of the rows, for the types in
        ``BY_LENGTH``. The first ``turned`` heads are rotated; the ``kept`` that follow get ones and
        zeros, so that all go through one product. cos and signed sin are [rows, heads, head_dim].
        """
        table = self._table.index_select(0, positions)
        if self.type in BY_LENGTH and max(lengths) > self.trained:
            by_length = {
                n: self._frequencies(n)[0] if n > self.trained else self._short
                for n in set(lengths)
            }
            inverse = torch.stack([by_length[n] for n in lengths])
            table = self._tables(positions.float()[:, None] * inverse).to(table.dtype)
        still = self._unturned.expand(len(positions), kept, -1, -1)
        heads = torch.cat([table[:, None].expand(-1, turned, -1, -1), still], 1)
        return heads[:, :, 0].contiguous(), heads[:, :, 1].contiguous()
