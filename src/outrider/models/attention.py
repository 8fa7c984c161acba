"""Attention of any rows over pages: one kernel shape for prompts, decoding and trees."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from ..cache.store import KVStore
from .rows import TILE, Rows, Tile

Lanes = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]

_HIDDEN, _SEEN = np.float32(-np.inf), np.float32(0)


class Attention:
    """The masks of one forward, made once and used by every layer.

    Every call sees ``TILE`` rows, all query heads of a key head side by side, over lanes in
    position order from 0 on, masked beyond a row's own position. A row's result therefore does
    not depend on which rows came along, nor on whether its path was drafted as a tree.
    """

    def __init__(self, rows: Rows, store: KVStore, num_heads: int, kv_heads: int) -> None:
        self._rows = rows
        self._store = store
        self._groups = num_heads // kv_heads
        self._kv_heads = kv_heads
        self._masks = [self._mask(tile) for tile in rows.tiles]
        self._runs = [self._run(tile) for tile in rows.tiles]

    def _mask(self, tile: Tile) -> torch.Tensor:
        """[count, 1, TILE * groups, length]: 0 where a row sees a lane, -inf elsewhere."""
        far = np.repeat(tile.positions, self._groups)[:, None]
        mask = np.where(np.arange(tile.length) > far, _HIDDEN, _SEEN)
        shaped = torch.from_numpy(mask).view(tile.count, 1, -1, tile.length)
        return shaped.to(self._store.entries.device, self._store.entries.dtype)

    def _run(self, tile: Tile) -> Lanes | None:
        """Keys and values of every layer where a tile's lanes are a run of slots, as views."""
        if not isinstance(tile.lanes, int):
            return None
        run = self._store.entries[:, :, tile.lanes : tile.lanes + tile.length]
        wide = run.unsqueeze(1).expand(-1, tile.count, -1, -1, -1)
        return wide[:, :, : self._kv_heads].unbind(0), wide[:, :, self._kv_heads :].unbind(0)

    def _lanes(self, number: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of tile ``number``, [count, kv_heads, length, head_dim] each."""
        run = self._runs[number]
        if run is not None:
            return run[0][layer], run[1][layer]
        tile = self._rows.tiles[number]
        assert isinstance(tile.lanes, torch.Tensor)
        found = self._store.layers[layer].index_select(1, tile.lanes)
        wide = found.expand(tile.count, -1, -1, -1)
        return wide[:, : self._kv_heads], wide[:, self._kv_heads :]

    def __call__(self, queries: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
        """Attend.

        Args:
            queries: [padded rows, heads, head_dim], rotated.
            layer: whose entries to attend to; the rows' own are among them.
            scale: on the products.

        Returns:
            [padded rows, heads * head_dim]; padding rows hold numbers of no meaning.
        """
        rows, kv, groups = self._rows, self._kv_heads, self._groups
        head_dim = queries.shape[-1]
        if rows.gather is not None:
            alone = rows.count == queries.shape[0] == 1
            queries = (
                queries.expand(TILE, -1, -1) if alone else queries.index_select(0, rows.gather)
            )
        tiled = queries.reshape(-1, TILE, kv, groups, head_dim).transpose(1, 2)
        tiled = tiled.reshape(-1, kv, TILE * groups, head_dim)
        parts, first = [], 0
        for number, (tile, mask) in enumerate(zip(rows.tiles, self._masks, strict=True)):
            keys, values = self._lanes(number, layer)
            asking = tiled if len(rows.tiles) == 1 else tiled[first : first + tile.count]
            parts.append(
                F.scaled_dot_product_attention(asking, keys, values, attn_mask=mask, scale=scale)
            )
            first += tile.count
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        out = out.view(-1, kv, TILE, groups, head_dim).transpose(1, 2)
        out = out.reshape(-1, kv * groups * head_dim)
        return rows.home(out)
