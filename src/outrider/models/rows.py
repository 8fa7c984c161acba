"""The rows of sequences that go through a model, and logits that are planted for them."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base.trees import depths
from ..native.interface import Planted


@dataclass(frozen=True)
class Track:
    """The planted logits after one prompt: one entry per output token, the last for all later ones.

    ``ids`` int64 [n, m] have the logits ``z`` fp32 [n, m], every other id has ``rest`` fp32 [n].
    The first of the ids is the most likely, and the second comes next.
    """

    ids: NDArray[np.int64]
    z: NDArray[np.float32]
    rest: NDArray[np.float32]

    def plant(self, logits: NDArray[np.float32], indices: Sequence[int]) -> None:
        """Overwrite logits [rows, vocabulary] by those of output tokens ``indices`` [rows].

        A row with a negative index stands within the prompt and is left as it is.
        """
        rows = [i for i, index in enumerate(indices) if index >= 0]
        if not rows:
            return
        chosen = [min(indices[i], len(self.ids) - 1) for i in rows]
        distribution = np.repeat(self.rest[chosen, None], logits.shape[1], 1)
        np.put_along_axis(distribution, self.ids[chosen], self.z[chosen], 1)
        logits[rows] = distribution


class Segment(NamedTuple):
    """One sequence's rows: committed tokens from position ``start`` on, then draft nodes.

    There may be no tokens if there are nodes; layers with states then take nothing in, and the
    native step refuses such rows after drafted ones that were accepted.
    ``parents[j]`` is the draft node above node j, -1 for the last committed token; nodes come
    after their parents. ``pages`` cover every row. The last ``logits`` rows want logits.
    ``prompt_length`` matters to dynamic rope and planted logits alone, ``key`` (the sequence's id)
    to models that keep their caches by sequence. ``planted`` replaces the model's logits in
    ``decide`` and ``draft``. Rows of heads attend from ``first`` on, and take ``states`` fp32
    [rows, hidden_size].
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    logits: int
    prompt_length: int
    nodes: Sequence[int] = ()
    parents: Sequence[int] = ()
    key: str = ""
    planted: Track | None = None
    first: int = 0
    states: NDArray[np.float32] | None = None


STRIDE = 7919
"""Distance of the tokens of successive rows that should differ: a prime."""


def lone_rows(count: int, vocabulary: int = 2) -> list[Segment]:
    """Return ``count`` sequences of one row each, every one with a page of its own.

    Their tokens differ as far as ``vocabulary`` has any: unrelated rows go to different experts of
    a mixture.
    """
    tokens = [1 + i * STRIDE % max(1, vocabulary - 1) for i in range(count)]
    return [
        Segment([token], 0, array("i", (page,)), 1, 1, key=str(page))
        for page, token in enumerate(tokens)
    ]


def plant(logits: NDArray[np.float32], segments: Sequence[Segment]) -> None:
    """Overwrite the rows of logits, fp32 [wanted rows, vocabulary], that have planted ones."""
    end = 0
    for segment in segments:
        start, end = end, end + segment.logits
        if segment.planted is not None:
            last = segment.start + len(segment.tokens) - 1
            rows = [*range(segment.start, last + 1), *(last + d for d in depths(segment.parents))]
            wanted = rows[len(rows) - segment.logits :]
            outputs = [row + 1 - segment.prompt_length for row in wanted]
            segment.planted.plant(logits[start:end], outputs)


def planted_of(segment: Segment) -> Planted | None:
    """Return the planted logits of a segment as the library takes them, None for none."""
    track = segment.planted
    if track is None:
        return None
    return Planted(track.ids, track.z, track.rest, segment.prompt_length)
