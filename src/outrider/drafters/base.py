"""The protocol behind which every drafter stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..sampling.draws import Noise
from ..types import Draft, Scheduled, Verdict


class Drafter(Protocol):
    """Proposes tokens for the target to verify.

    A drafter keeps its own state per sequence id and catches up by itself: it may see a sequence
    first in the middle, and again after its pages were taken and given anew.
    """

    max_length: int
    """The longest draft it can make."""
    max_nodes: int
    """The most nodes a draft can have: ``max_length`` for chains, more for trees."""
    target_layers: tuple[int, ...]
    """Hidden states it wants from the target, often none."""

    @property
    def name(self) -> str:
        """What it is called where drafters are chosen."""
        ...

    def propose(self, batch: Sequence[Scheduled], lengths: Sequence[int], noise: Noise) -> Draft:
        """Draft at most ``lengths[s]`` tokens deep after the last token of each sequence.

        Every sequence of the step is in ``batch``, those in the middle of their prompt with a
        length of 0. The noise is the target's own.
        """
        ...

    def observe(self, batch: Sequence[Scheduled], verdict: Verdict) -> None:
        """See what was committed: ``sequence.tokens`` hold it already."""
        ...

    def release(self, seq_id: str) -> None:
        """Forget a sequence: it ended, or its pages were taken."""
        ...


class NoDrafter:
    """Drafts nothing: plain decoding on the same path."""

    name = "none"
    max_length = 0
    max_nodes = 0
    target_layers: tuple[int, ...] = ()

    def propose(self, batch: Sequence[Scheduled], lengths: Sequence[int], noise: Noise) -> Draft:
        return Draft.chains([[] for _ in batch])

    def observe(self, batch: Sequence[Scheduled], verdict: Verdict) -> None:
        return

    def release(self, seq_id: str) -> None:
        return
