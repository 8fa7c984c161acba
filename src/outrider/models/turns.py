"""Rotary tables as torch's forward reads them: in its dtype, on its device."""

from __future__ import annotations

import torch

from ..checkpoints.configs import ModelConfig
from ..checkpoints.rope import Rope


class Turns:
    """The tables of a ``Rope``.

    Attributes:
        by_length: whether the rotation of any row depends on more than its position.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        kind: str | None = None,
    ) -> None:
        self._rope = Rope(config, max_length, kind)
        self.by_length = self._rope.by_length
        self._table = torch.from_numpy(self._rope.table()).to(device, dtype)
        self._unturned = torch.zeros(2, self._rope.head_dim, dtype=dtype, device=device)
        self._unturned[0] = 1

    def rows(
        self, positions: torch.Tensor, lengths: list[int], turned: int, kept: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin to rotate heads by x * cos + (x with its halves swapped) * sin.

        ``lengths`` are max(prompt length, position + 1) of the rows. The first ``turned`` heads are
        rotated; the ``kept`` that follow get ones and zeros, so that all go through one product.
        cos and signed sin are [rows, heads, head_dim].
        """
        table = self._table.index_select(0, positions)
        if self.by_length:
            own = self._rope.lengthened(positions.cpu().numpy(), lengths)
            table = table if own is None else torch.from_numpy(own).to(table)
        still = self._unturned.expand(len(positions), kept, -1, -1)
        heads = torch.cat([table[:, None].expand(-1, turned, -1, -1), still], 1)
        return heads[:, :, 0].contiguous(), heads[:, :, 1].contiguous()
