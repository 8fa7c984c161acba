"""Noise for rows of processed logits, and the draw with it, for rules and drafters."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ..base.types import Row
from .noise import check_vocab_size, gumbel
from .philox import check

BLOCK = 2**17  # numbers of noise in a block, unless one position has more

_Key = tuple[str, int, int]  # sequence id, seed, sample index
_Place = tuple[_Key, int]  # and which of its blocks


class Noise(ABC):
    """Gumbel noise for rows; its bits do not depend on the order of calls."""

    vocab_size: int

    @abstractmethod
    def of(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Return the noise of every row: fp32 [rows, vocab_size], not to be written into."""

    def release(self, seq_id: str) -> None:
        """Forget what is kept for a sequence."""
        return

    def scores(self, z: NDArray[np.float32], rows: Sequence[Row]) -> NDArray[np.float32]:
        """Return z + g where a row is sampled, z where it is greedy; z may be narrower than g."""
        drawn = [i for i, row in enumerate(rows) if not row.greedy]
        if not drawn:
            return z
        g = self.of([rows[i] for i in drawn])[:, : z.shape[1]]
        if len(drawn) == len(rows):
            return z + g
        out = z.copy()
        out[drawn] += g
        return out

    def draw(self, z: NDArray[np.float32], rows: Sequence[Row]) -> tuple[list[int], list[float]]:
        """Return the token of each row, the lowest id on a tie, and its score."""
        scores = self.scores(z, rows)
        ids = scores.argmax(-1)
        return ids.tolist(), scores[np.arange(len(ids)), ids].tolist()


class SharedNoise(Noise):
    """Rows of shared noise, drawn once for all users: the drafter, the target, a tree's nodes.

    Noise is drawn in blocks of `block_size` consecutive positions and the two blocks used last are
    kept per sequence, about 1 MiB together. The order of calls decides only when noise is drawn,
    never its bits.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = check_vocab_size(vocab_size)
        self.block_size = max(1, min(16, BLOCK // vocab_size))  # positions
        self._kept: dict[
            str, dict[tuple[_Key, int], NDArray[np.float32]]
        ] = {}  # last used comes last

    def of(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Return the noise of every row; consecutive rows of one block are a view of it."""
        size = self.block_size
        places = [
            (
                (r.sequence_id, r.seed, r.sample_index),
                *divmod(check("position", r.position, 32), size),
            )
            for r in rows
        ]
        blocks = self._blocks(list(dict.fromkeys((key, index) for key, index, _ in places)))
        pieces = []
        row = 0
        while row < len(places):
            key, index, first = places[row]
            length = 1
            while places[row + length : row + length + 1] == [(key, index, first + length)]:
                length += 1
            pieces.append(blocks[key, index][first : first + length])
            row += length
        if not pieces:
            return np.empty((0, self.vocab_size), np.float32)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def release(self, seq_id: str) -> None:
        """Forget the blocks of a sequence; one that is not known is no error."""
        self._kept.pop(seq_id, None)

    def _blocks(self, wanted: list[_Place]) -> dict[tuple[_Key, int], NDArray[np.float32]]:
        """Return the blocks `wanted` (without repetition), [<= block_size, vocab_size] each."""
        names = {name for (name, _, _), _ in wanted}
        known = {b: g for name in names for b, g in self._kept.get(name, {}).items()}
        blocks = {block: known[block] for block in wanted if block in known}
        missing = [block for block in wanted if block not in blocks]
        if missing:
            blocks.update(zip(missing, self._draw(missing), strict=True))
        for block in wanted:
            kept = self._kept.setdefault(block[0][0], {})
            kept.pop(block, None)
            kept[block] = blocks[block]
            if len(kept) > 2:
                del kept[next(iter(kept))]
        return blocks

    def _draw(self, wanted: list[_Place]) -> list[NDArray[np.float32]]:
        """Return blocks drawn in one call, each in memory of its own."""
        size = self.block_size  # the last block may be cut short
        spans = [range(index * size, min((index + 1) * size, 2**32)) for _, index in wanted]
        rows = [
            (seed, sample, position)
            for ((_, seed, sample), _), span in zip(wanted, spans, strict=True)
            for position in span
        ]
        seeds, samples, positions = map(list, zip(*rows, strict=True))
        noise = gumbel(seeds, samples, positions, self.vocab_size)
        blocks = np.split(noise, [*accumulate(map(len, spans))][:-1])
        # A view would keep the noise of all sequences alive for as long as one of them is.
        return blocks if len(blocks) == 1 else [block.copy() for block in blocks]
