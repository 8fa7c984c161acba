"""The rows of one forward of torch: of any sequences, with the slots they write and attend to."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from ..base.trees import depths
from ..checkpoints.weights import TILE as TILE
from .rows import Segment

LANES = 64
"""Lengths of contexts are padded to a multiple of this many lanes."""


@dataclass(frozen=True)
class Tile:
    """Rows of one sequence that share their lanes, ``count`` tiles of ``TILE`` rows.

    ``lanes`` is the first slot of a run of ``length`` slots, or the slots themselves [length];
    lane j holds the token at position j of the rows' path. ``positions`` [count * TILE] says how
    far each row sees.
    """

    count: int
    length: int
    lanes: int | torch.Tensor
    positions: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Everything a forward needs to know about its rows, padded as the model's products want.

    ``tokens``, ``positions``, ``slots`` are int64 [padded rows], ``first_slot`` is given where the
    slots are a run; ``lengths`` are the rows' sequence lengths for dynamic rope. ``gather`` lists
    the rows of all tiles one after the other (None: they are the rows as they stand) and
    ``scatter`` finds each row in them (None: they come first, in order). ``logits`` are the rows
    that want logits, ``num_logits`` of them, padded likewise (None: the first ones).
    """

    count: int
    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    first_slot: int | None
    lengths: list[int]
    tiles: tuple[Tile, ...]
    gather: torch.Tensor | None
    scatter: torch.Tensor | None
    logits: torch.Tensor | None
    num_logits: int

    def seeing(self, marked: torch.Tensor, reach: int | None) -> torch.Tensor:
        """Return which rows [padded rows] depend on a slot of ``marked`` [slots], or are in one.

        Rows depend on their last ``reach`` positions, or on all if it is None.
        """
        parts = []
        for tile in self.tiles:
            first = tile.lanes
            lanes = marked[first : first + tile.length] if isinstance(first, int) else marked[first]
            behind = tile.positions[:, None] - np.arange(tile.length)
            seen = (behind >= 0) & (behind < (reach or tile.length))
            parts.append((torch.from_numpy(seen).to(marked.device) & lanes).any(-1))
        return self.home(torch.cat(parts))

    def home(self, tiled: torch.Tensor) -> torch.Tensor:
        """Return the entries of ``tiled`` [rows of all tiles, ...] of the rows, in their order."""
        if self.scatter is not None:
            return tiled.index_select(0, self.scatter)
        return tiled.narrow(0, 0, len(self.lengths))


def padded(count: int, multiple: int) -> int:
    """Return ``count`` rounded up to a multiple."""
    return -(-count // multiple) * multiple


def _paths(parents: Sequence[int]) -> list[list[int]]:
    """Return the root-to-leaf paths of a tree of draft nodes, as lists of nodes."""
    inner = set(parents)
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else ()), node])
    return [path for path in paths if path[-1] not in inner]


class _Builder:
    """Gathers segments into the lists that ``Rows`` are made of."""

    def __init__(self, page_size: int, num_slots: int, device: torch.device, unit: int) -> None:
        self.page_size, self.num_slots, self.device, self.unit = page_size, num_slots, device, unit
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.slots: list[int] = []
        self.lengths: list[int] = []
        self.tiles: list[Tile] = []
        self.gather: list[int] = []
        self.home: dict[int, int] = {}
        self.logits: list[int] = []

    def add(self, segment: Segment) -> None:
        first, committed = len(self.tokens), len(segment.tokens)
        last = segment.start + committed - 1
        positions = [*range(segment.start, last + 1), *(last + d for d in depths(segment.parents))]
        total = segment.start + committed + len(segment.nodes)
        size = self.page_size
        pages = segment.pages[: -(-total // size)]
        run = list(pages) == list(range(pages[0], pages[0] + len(pages)))
        base = pages[0] * size if run else None
        table = np.asarray(pages, dtype=np.int64)
        slots = (table[:, None] * size + np.arange(size)).ravel()
        self.tokens += [*segment.tokens, *segment.nodes]
        self.positions += positions
        self.slots += slots[segment.start : total].tolist()
        self.lengths += [max(segment.prompt_length, p + 1) for p in positions]
        rows = range(first, first + committed + len(segment.nodes))
        self.logits += rows[len(rows) - segment.logits :]
        if list(segment.parents) == list(range(-1, len(segment.nodes) - 1)):
            self._tile(rows, positions, slots, base)
            return
        # A tree: one tile per root-to-leaf path, whose lanes are the prefix and then the path's own
        # nodes, so that every row is reduced over the same lanes as in a chain.
        self._tile(rows[:committed], positions[:committed], slots, None)
        done: set[int] = set()
        known = segment.start + committed
        for path in _paths(segment.parents):
            lanes = np.concatenate([slots[:known], slots[[known + node for node in path]]])
            fresh = [committed + node for node in path if node not in done]
            done.update(path)
            self._tile([rows[i] for i in fresh], [positions[i] for i in fresh], lanes, None)

    def _tile(
        self,
        rows: Sequence[int],
        positions: list[int],
        slots: npt.NDArray[np.int64],
        run: int | None,
    ) -> None:
        """Add the tiles of ``rows``; ``slots`` are their lanes, a run from ``run`` on if not None.

        A row's number of lanes depends only on its own position: over more than a few hundred lanes
        the order in which kernels sum depends on that number, even for masked lanes.
        """
        for _, group in groupby(zip(rows, positions, strict=True), lambda pair: pair[1] // LANES):
            own, seen = zip(*group, strict=True)
            last = seen[-1]
            spare = padded(len(own), TILE) - len(own)
            for i, row in enumerate(own):
                self.home[row] = len(self.gather) + i
            self.gather += [*own, *[own[-1]] * spare]
            length = padded(last + 1, LANES)
            lanes: int | torch.Tensor
            if run is not None and run + length <= self.num_slots:
                lanes = run
            else:
                table = np.zeros(length, dtype=np.int64)
                table[: len(slots)] = slots[:length]
                lanes = torch.from_numpy(table).to(self.device)
            far = np.array([*seen, *[last] * spare])
            self.tiles.append(Tile((len(own) + spare) // TILE, length, lanes, far))

    def rows(self) -> Rows:
        count = len(self.tokens)
        spare = padded(count, self.unit) - count
        run = list(range(self.slots[0], self.slots[0] + count))
        pad = [0] * spare  # padding rows write to the null page
        in_order = self.home == {i: i for i in range(count)}
        as_they_stand = in_order and len(self.gather) == count + spare
        scatter = [self.home[i] for i in range(count)] + pad
        wanted = len(self.logits)
        first = wanted > 0 and self.logits[-1] == wanted - 1 and count <= TILE
        more = padded(wanted, self.unit) - wanted
        logits = [*self.logits, *[self.logits[-1]] * more] if wanted else []

        def tensor(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, device=self.device, dtype=torch.int64)

        return Rows(
            count=count,
            tokens=tensor(self.tokens + pad),
            positions=tensor(self.positions + pad),
            slots=tensor(self.slots + pad),
            first_slot=self.slots[0] if self.slots == run else None,
            lengths=self.lengths + [1] * spare,
            tiles=tuple(self.tiles),
            gather=None if as_they_stand else tensor(self.gather),
            scatter=None if in_order else tensor(scatter),
            logits=None if first else tensor(logits),
            num_logits=wanted,
        )


def build_rows(
    segments: Sequence[Segment],
    page_size: int,
    num_slots: int,
    device: torch.device,
    unit: int = TILE,
) -> Rows:
    """Return the rows of ``segments``, at least one each, one after the other.

    They are padded to a multiple of ``unit``, at most ``TILE``.
    """
    builder = _Builder(page_size, num_slots, device, unit)
    for segment in segments:
        builder.add(segment)
    return builder.rows()
