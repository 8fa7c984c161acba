"""Attention of any rows over pages: one kernel shape for prompts, decoding and trees."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .rows import TILE, Rows


class Attention:
    """The masks of one forward, made once and used by every layer.

    Every call sees ``TILE`` rows, all query heads of a key head side by side, over lanes in
    position order from 0 on, masked beyond a row's own position. A row's result therefore does
    not depend on which rows came along, nor on whether its path was drafted as a tree.
    """

    def __init__(self, rows: Rows, num_heads: int, kv_heads: int, dtype: torch.dtype) -> None:
        self._rows = rows
        self._groups = num_heads // kv_heads
        self._kv_heads = kv_heads
        self._masks = [self._mask(t.positions, t.length, t.count, dtype) for t in rows.tiles]

    def _mask(
        self, positions: torch.Tensor, length: int, count: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """[count, 1, TILE * groups, length]: 0 where a row sees a lane, -inf elsewhere."""
        hidden = torch.arange(length, device=positions.device) > positions[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
        mask.masked_fill_(hidden, float("-inf"))
        spread = mask[:, None].expand(-1, self._groups, -1)
        return spread.reshape(count, 1, TILE * self._groups, length)

    def __call__(self, queries: torch.Tensor, cache: torch.Tensor, scale: float) -> torch.Tensor:
        """Attend.

        Args:
            queries: [padded rows, heads, head_dim], rotated.
            cache: [2 * kv_heads, slots, head_dim] of this layer, with the rows' own entries.
            scale: on the products.

        Returns:
            [padded rows, heads * head_dim]; padding rows hold numbers of no meaning.
        """
        rows, kv, groups = self._rows, self._kv_heads, self._groups
        head_dim = queries.shape[-1]
        if rows.gather is not None:
            queries = queries.index_select(0, rows.gather)
        tiled = queries.view(-1, TILE, kv, groups, head_dim).transpose(1, 2)
        tiled = tiled.reshape(-1, kv, TILE * groups, head_dim)
        parts, first = [], 0
        for tile, mask in zip(rows.tiles, self._masks, strict=True):
            if isinstance(tile.lanes, int):
                lanes = cache[:, tile.lanes : tile.lanes + tile.length]
            else:
                lanes = cache.index_select(1, tile.lanes)
            shared = lanes.expand(tile.count, -1, -1, -1)
            parts.append(
                F.scaled_dot_product_attention(
                    tiled[first : first + tile.count],
                    shared[:, :kv],
                    shared[:, kv:],
                    attn_mask=mask,
                    scale=scale,
                )
            )
            first += tile.count
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        out = out.view(-1, kv, TILE, groups, head_dim).transpose(1, 2)
        out = out.reshape(-1, kv * groups * head_dim)
        return out if rows.scatter is None else out.index_select(0, rows.scatter)
