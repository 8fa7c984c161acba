"""The tensors of the KV cache: keys and values of one model that torch runs."""

import math
import mmap

import torch

from ..cache.store import Store
from .states import SequenceStates


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on a CPU, the system allocates a page when it is first written."""
    count = math.prod(shape)
    if device.type != "cpu" or not count:
        return torch.zeros(shape, dtype=dtype, device=device)
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    room = mmap.mmap(-1, count * dtype.itemsize, flags=kind)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # one token would make a huge page resident in every layer
        room.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(room, dtype=dtype).view(shape)


class KVStore(Store):
    """Keys and values of every layer, addressed by slot = page * page_size + offset.

    ``entries`` is [layers, 2 * kv_heads, slots, head_dim], key heads first, then value heads;
    ``layers`` are its layers. Slots come after heads, so that a run of pages is a view.
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
        shape = (num_layers, 2 * kv_heads, self.num_slots, head_dim)
        # Zeros, because masked lanes are read too, and 0 times NaN is not 0.
        self.entries = lazy_zeros(shape, dtype, device)
        self.layers = self.entries.unbind(0)
        # Slots whose rows are NaN or infinite; for the same reason no NaN outlives its forward.
        self.harmed = torch.zeros(self.num_slots, dtype=torch.bool, device=device)
        self.any_harmed = False
        self.states: dict[str, SequenceStates] = {}

    def write(
        self, layer: int, entries: torch.Tensor, slots: torch.Tensor, first: int | None, count: int
    ) -> None:
        """Write the entries [padded rows, 2 * kv_heads, head_dim] of one forward to a layer.

        They go to ``slots`` int64 [padded rows], a run of ``count`` where ``first`` is not None.
        """
        if first is not None:
            run = self.layers[layer].narrow(1, first, count)
            run.copy_(entries.narrow(0, 0, count).transpose(0, 1))
        else:
            self.layers[layer].index_copy_(1, slots, entries.transpose(0, 1))

    def mark(self, slots: torch.Tensor, harmed: torch.Tensor) -> None:
        """Record which of ``slots``, just written, hold rows that are not finite: bool [slots]."""
        self.harmed[slots] = harmed
        self.any_harmed = bool(self.harmed.any())

    def move(self, sources: list[int], targets: list[int]) -> None:
        device = self.entries.device
        source = torch.tensor(sources, device=device)
        target = torch.tensor(targets, device=device)
        self.entries[:, :, target] = self.entries[:, :, source]
        self.harmed[target] = self.harmed[source]

    def release(self, key: str) -> None:
        self.states.pop(key, None)
