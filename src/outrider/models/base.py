"""The interface of models for the engine and the drafters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cache.store import Store as Store
from ..checkpoints.architecture import Shape
from ..sampling.shared_noise import Noise
from .decide import DraftInput, DraftNodes, SampleInput, Samples
from .rows import Segment, lone_rows


@dataclass(frozen=True)
class Output:
    """``logits`` fp32 [wanted rows, vocabulary]; ``hidden`` by layer, fp32 [rows, hidden_size]."""

    logits: NDArray[np.float32] | None
    hidden: dict[int, NDArray[np.float32]] = field(default_factory=dict)


class RowsModel(ABC):
    """A model, whole or a head, that runs rows of paged sequences and drafts after them."""

    dtype: np.dtype[Any]
    device: str
    """Where it runs; its inputs and outputs are in the host's memory."""
    shape: Shape
    """Sizes and names from the checkpoint."""
    hidden_layers: int = 0
    """Layers whose hidden states ``run`` and ``decide`` return: those below this number."""
    hidden_size: int = 0
    """Width of a hidden state."""

    @abstractmethod
    def page_bytes(self, page_size: int) -> int:
        """Return the bytes of cache that a page takes."""

    def state_bytes(self, drafted: int) -> int:
        """Return the bytes of a sequence's states beside pages, for ``drafted`` drafted tokens."""
        return 0

    @property
    def kept_state_bytes(self) -> int:
        """The bytes of a sequence's states in a snapshot for others."""
        return 0

    def added_bytes(self, beside: RowsModel | None) -> int:
        """Return the bytes of weights that it holds and ``beside`` does not; 0 where unknown."""
        return 0

    @abstractmethod
    def new_store(self, num_pages: int, page_size: int) -> Store:
        """Return an empty cache."""

    @abstractmethod
    def run(self, segments: Sequence[Segment], store: Store, hidden: Sequence[int] = ()) -> Output:
        """Return the logits of the rows that want them, and hidden states; fill the cache.

        A row that is not finite, or attends to one, has NaN logits; other rows are not affected.
        ``hidden`` are layers whose output, the residual stream, is wanted; -1 is the embedding.
        """

    def try_rows(self, count: int, store: Store) -> None:
        """Run ``count`` sequences of one row each, to measure what that takes."""
        self.run(lone_rows(count, self.shape.vocab_size), store)

    @abstractmethod
    def draft(
        self,
        segments: Sequence[Segment],
        store: Store,
        inputs: Sequence[DraftInput | None],
        noise: Noise,
        needs_logits: bool = False,
    ) -> list[DraftNodes]:
        """Run ``segments`` and return the nodes that are drafted after each one with an input.

        Pages reach to the draft's end. A draft ends early if the model draws an id that it has no
        embedding for. ``needs_logits``: nodes carry the processed logits that they were drawn from.
        """


class Model(RowsModel):
    """A causal language model over paged, truncatable sequences."""

    trees: bool
    """True if a segment's nodes may branch."""
    paged: bool
    """True if pages hold all of a sequence, so that others may share its beginning."""
    truncates: bool
    """True if a sequence can go back to an earlier token; if not, nothing can be drafted."""

    @abstractmethod
    def decide(
        self,
        segments: Sequence[Segment],
        store: Store,
        inputs: Sequence[SampleInput | None],
        noise: Noise | None,
        hidden: Sequence[int] = (),
    ) -> Samples:
        """Run ``segments``, process their logits and draw the tokens of their rows.

        A segment that wants no logits has no input. Without ``noise`` nothing is drawn.
        """
