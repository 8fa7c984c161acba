"""What the engine and the drafters need of a model, whoever runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .families import Shape
from .rows import Segment


@dataclass(frozen=True)
class Output:
    """``logits`` fp32 [wanted rows, vocabulary]; ``hidden`` by layer, [rows, hidden_size]."""

    logits: torch.Tensor | None
    hidden: dict[int, torch.Tensor]


class Store(Protocol):
    """The cache of one model."""

    page_size: int

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy the entries at slots ``sources`` to slots ``targets``, in every layer."""
        ...

    def release(self, key: str) -> None:
        """Forget what is kept by ``Segment.key``; pages are given back by their owner."""
        ...


class Model(Protocol):
    """A causal language model over paged, truncatable sequences."""

    dtype: torch.dtype
    device: torch.device
    trees: bool
    """Whether a segment's nodes may branch."""
    paged: bool
    """Whether pages hold all that a sequence has, so that others may share its beginning."""
    truncates: bool
    """Whether a sequence can go back to an earlier token; if not, nothing can be drafted."""

    @property
    def shape(self) -> Shape:
        """What the checkpoint says of itself."""
        ...

    def page_bytes(self, page_size: int) -> int:
        """Bytes of cache that a page takes."""
        ...

    def new_store(self, num_pages: int, page_size: int) -> Store:
        """An empty cache."""
        ...

    def run(self, segments: Sequence[Segment], store: Store) -> Output:
        """Logits of the rows that want them, segment after segment; keys and values are cached.

        Entries from a segment's ``start`` on are written anew, whatever stood there. A row that is
        not finite, or attends to one, has NaN logits; no other row is touched by it.
        """
        ...
