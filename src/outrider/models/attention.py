"""Attention over pages: one kernel shape for the rows of prompts, decoding and trees."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from .kv_store import KVStore
from .tiles import LANES, TILE, Rows, Tile

Lanes = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]

_HIDDEN_LANE = np.float32(-np.inf)
_SEEN_LANE = np.float32(0)


def first_lane(tile: Tile, window: int | None) -> int:
    """Return the first lane of ``tile`` under ``window``: the same for all rows of its length."""
    if window is None:
        return 0
    return max(0, tile.length - LANES - window + 1) // LANES * LANES


def written_out(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return attention with a cap or sinks, which torch's kernel lacks, tile by tile.

    Products are bounded to cap * tanh(product / cap) (Gemma 2), and ``sinks`` [kv_heads, TILE *
    groups, 1] are scores of a key without a value (gpt-oss). ``queries`` and the result are [count,
    kv_heads, TILE * groups, head_dim], ``keys`` and ``values`` [count, kv_heads, lanes, head_dim],
    ``mask`` [count, 1, TILE * groups, lanes].
    """
    out = []
    for query, key, value, hidden in zip(queries, keys, values, mask, strict=True):
        # One tile at a time: the order of a batched product's sums may depend on the batch.
        products = torch.bmm(query, key.transpose(1, 2)) * scale
        if cap is not None:
            products = (products / cap).tanh() * cap
        scores = (products + hidden).float()
        if sinks is not None:
            scores = torch.cat((scores, sinks), -1)
        weights = scores.softmax(-1)[..., : products.shape[-1]]
        out.append(torch.bmm(weights.to(value.dtype), value))
    return torch.stack(out)


class Attention:
    """Attention of one forward; masks are computed once and used by every layer.

    Every kernel call gets ``TILE`` rows, all query heads of a key head side by side, over lanes in
    position order, masked beyond a row's own position and outside its window. So a row's result
    does not depend on the other rows, nor on whether its path was drafted as a tree. ``windows``
    say by layer how many positions a row sees, itself included, None for all.
    """

    def __init__(
        self,
        rows: Rows,
        store: KVStore,
        num_heads: int,
        kv_heads: int,
        windows: Sequence[int | None],
        cap: float | None = None,
    ) -> None:
        self._rows, self._store, self._windows, self._cap = rows, store, windows, cap
        self._groups, self._kv_heads = num_heads // kv_heads, kv_heads
        distinct = set(windows)
        self._masks = {w: [self._mask(tile, w) for tile in rows.tiles] for w in distinct}
        self._runs = {w: [self._run(tile, w) for tile in rows.tiles] for w in distinct}

    def _mask(self, tile: Tile, window: int | None) -> torch.Tensor:
        """Return [count, 1, TILE * groups, lanes]: 0 where a row sees a lane, -inf elsewhere."""
        own = np.repeat(tile.positions, self._groups)[:, None]
        lanes = np.arange(first_lane(tile, window), tile.length)
        hidden = lanes > own
        if window is not None:
            hidden |= lanes <= own - window
        mask = np.where(hidden, _HIDDEN_LANE, _SEEN_LANE)
        shaped = torch.from_numpy(mask).view(tile.count, 1, -1, len(lanes))
        return shaped.to(self._store.entries.device, self._store.entries.dtype)

    def _run(self, tile: Tile, window: int | None) -> Lanes | None:
        """Return views of every layer's keys and values, if a tile's lanes are a run of slots."""
        if not isinstance(tile.lanes, int):
            return None
        first = first_lane(tile, window)
        run = self._store.entries[:, :, tile.lanes + first : tile.lanes + tile.length]
        wide = run.unsqueeze(1).expand(-1, tile.count, -1, -1, -1)
        return wide[:, :, : self._kv_heads].unbind(0), wide[:, :, self._kv_heads :].unbind(0)

    def _lanes(self, number: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of tile ``number``, [count, kv_heads, lanes, head_dim] each."""
        window = self._windows[layer]
        run = self._runs[window][number]
        if run is not None:
            return run[0][layer], run[1][layer]
        tile = self._rows.tiles[number]
        assert isinstance(tile.lanes, torch.Tensor)
        lanes = tile.lanes[first_lane(tile, window) :]
        wide = self._store.layers[layer].index_select(1, lanes).expand(tile.count, -1, -1, -1)
        return wide[:, : self._kv_heads], wide[:, self._kv_heads :]

    def __call__(
        self, queries: torch.Tensor, layer: int, scale: float, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the attention of ``queries`` over a layer's cache, times ``scale``.

        Queries are [padded rows, heads, head_dim], rotated; the result is [padded rows, heads *
        head_dim], arbitrary in padding rows. ``sinks`` [heads] are scores of a key without a value.
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
        if sinks is not None:
            sinks = sinks.float().view(kv, 1, groups).expand(-1, TILE, -1).reshape(kv, -1, 1)
        masks, parts, first = self._masks[self._windows[layer]], [], 0
        for number, (tile, mask) in enumerate(zip(rows.tiles, masks, strict=True)):
            keys, values = self._lanes(number, layer)
            query = tiled if len(rows.tiles) == 1 else tiled[first : first + tile.count]
            if self._cap is None and sinks is None:
                parts.append(
                    F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
                )
            else:
                parts.append(written_out(query, keys, values, mask, scale, self._cap, sinks))
            first += tile.count
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        out = out.view(-1, kv, TILE, groups, head_dim).transpose(1, 2)
        out = out.reshape(-1, kv * groups * head_dim)
        return rows.home(out)
