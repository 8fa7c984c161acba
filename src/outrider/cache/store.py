"""The tensors behind the pages: keys and values of one model, one tensor a layer."""

from __future__ import annotations

import torch


class KVStore:
    """Keys and values of every layer, addressed by slot = page * page_size + offset.

    ``layers[i]`` is [2 * kv_heads, slots, head_dim]: the key heads, then the value heads. Slots
    are the middle dimension so that a run of pages is a view and not a gather.
    """

    def __init__(
        self,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self.num_slots = num_pages * page_size
        shape = (2 * kv_heads, self.num_slots, head_dim)
        # Zeros, because masked lanes are read too, and 0 times a NaN would not be 0.
        self.layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        # For the same reason NaN is never written: these slots would hold it.
        self.harmed = torch.zeros(self.num_slots, dtype=torch.bool, device=device)
        self.any_harmed = False

    def mark(self, slots: torch.Tensor, harmed: torch.Tensor) -> None:
        """Note which of ``slots``, just written, stand for rows that are no numbers [slots]."""
        if self.any_harmed or bool(harmed.any()):
            self.harmed[slots] = harmed
            self.any_harmed = bool(self.harmed.any())

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy the entries at ``sources`` to ``targets`` (slots), in every layer."""
        device = self.layers[0].device
        source = torch.tensor(sources, device=device)
        target = torch.tensor(targets, device=device)
        for layer in self.layers:
            layer[:, target] = layer[:, source]
        self.harmed[target] = self.harmed[source]


def page_bytes(num_layers: int, kv_heads: int, head_dim: int, page_size: int, itemsize: int) -> int:
    """Bytes that one page takes in a store of this shape."""
    return 2 * num_layers * kv_heads * head_dim * page_size * itemsize
