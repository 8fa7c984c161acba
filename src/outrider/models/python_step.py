"""The step of models that are not native: logits are processed and drafts drawn in Python.

It is the reference of the native step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..base.types import SequenceState
from ..native.interface import MARGINS, DraftBudget
from ..native.rates import DEPTHS, RANKS
from ..sampling.arrays import highest
from ..sampling.pipeline import Logits
from ..sampling.shared_noise import Noise
from .base import Model, Store
from .decide import DraftInput, DraftNodes, Keep, SampleInput, Samples, sample_in_python
from .rows import Segment, plant


class PythonStep(Model):
    """A model that has a forward, ``run``, and needs no more."""

    def decide(
        self,
        segments: Sequence[Segment],
        store: Store,
        inputs: Sequence[SampleInput | None],
        noise: Noise | None,
        hidden: Sequence[int] = (),
    ) -> Samples:
        output = self.run(segments, store, hidden)
        logits = output.logits
        if logits is None:
            logits = np.empty((0, self.shape.vocab_size), np.float32)
        plant(logits, segments)
        raw = Samples([0] * len(logits), [0.0] * len(logits), logits, hidden=output.hidden)
        return sample_in_python(raw, segments, inputs, range(len(inputs)), noise)

    def draft(
        self,
        segments: Sequence[Segment],
        store: Store,
        inputs: Sequence[DraftInput | None],
        noise: Noise,
        needs_logits: bool = False,
    ) -> list[DraftNodes]:
        return draft_in_python(self, store, needs_logits, segments, inputs, noise)


@dataclass
class Node:
    """A token that may be drafted."""

    token: int
    parent: int  # its number, -1 for the sequence's last token
    depth: int
    survival: np.float32  # chance that it and all before it are accepted
    margin: float
    run: int = -1  # place among the rows run after the committed tokens, -1 if it was not run
    logits: Logits | None = None
    path: tuple[int, ...] = ()  # of ranks


@dataclass
class Tree:
    """The draft of one sequence while it grows, level by level."""

    sequence: SequenceState
    limits: DraftBudget
    stateful: bool = False
    """True if layers have states, which drafted tokens must not enter."""
    nodes: list[Node] = field(default_factory=list)
    run: list[int] = field(default_factory=list)
    """Numbers of the nodes whose rows were run, in their order."""
    open: list[int] = field(default_factory=lambda: [-1])
    """Numbers of the nodes whose rows run now."""

    @property
    def draws(self) -> int:
        """The number of highest draws that give the children of a node and their margins."""
        return self.limits.branches + (self.limits.rates is not None or self.limits.branches > 1)

    def rate(self, depth: int, rank: int, margin: float) -> np.float32:
        """Return P(accepted | parent accepted)."""
        if self.limits.rates is None:
            return np.float32(1)
        place = min(depth, DEPTHS) - 1, min(rank, RANKS - 1), bisect_right(MARGINS, margin)
        rate: np.float32 = self.limits.rates.table[place]
        return rate

    def branch(
        self,
        parent: int,
        tokens: Sequence[int],
        scores: Sequence[float],
        logits: Logits | None,
    ) -> None:
        """Take in the highest draws after a node, from its processed logits."""
        depth = 1 if parent < 0 else self.nodes[parent].depth + 1
        before = np.float32(1) if parent < 0 else self.nodes[parent].survival
        above = () if parent < 0 else self.nodes[parent].path
        choices = self.limits.choices
        for rank, token in enumerate(tokens[: self.limits.branches]):
            if not np.isfinite(scores[rank]):
                return  # a token that no target could draw is no node
            path = (*above, rank)
            if choices is not None and path not in choices.numbers:
                continue
            more = scores[rank + 1] if rank + 1 < len(scores) else -np.inf
            margin = float(np.float32(scores[rank]) - np.float32(more))
            survival = before * self.rate(depth, rank, margin)
            self.nodes.append(Node(token, parent, depth, survival, margin, -1, logits, path))

    def ranked(self) -> list[int]:
        """Return the numbers of the likeliest nodes; no child comes before its parent."""
        order = sorted(range(len(self.nodes)), key=lambda n: -self.nodes[n].survival)
        return order[: self.limits.nodes]

    def open_next(self, first: int, vocabulary: int) -> None:
        """Choose the rows of the next forward from the nodes of ``first`` on, the last level's."""
        self.open, (depth, _, width, _, least, *_) = [], self.limits
        for number in self.ranked():
            node = self.nodes[number]
            if (
                number < first
                or len(self.open) == width
                or node.depth >= depth
                or node.token >= vocabulary
                or node.survival < least
                or len(self.run) == self.limits.nodes
            ):
                continue
            node.run = len(self.run)
            self.run.append(number)
            self.open.append(number)

    @property
    def goes_on(self) -> bool:
        """True if a pass runs the last node's row alone, like a committed one: it is a chain.

        Where layers have states all rows are run again as drafted ones, which may be refused.
        """
        return self.limits.branches == 1 and not self.stateful

    def next_segment(self, first: Segment) -> Segment:
        """Return the rows to run after ``first``: the last one if it ``goes_on``, else all."""
        end = first.start + len(first.tokens)
        if self.goes_on:
            token = self.nodes[self.run[-1]].token
            return first._replace(tokens=[token], start=end + len(self.run) - 1, logits=1)
        run = [self.nodes[n] for n in self.run]
        again = () if self.stateful else first.tokens[-1:]  # a state has the last token already
        return first._replace(
            tokens=again,
            start=end - len(again),
            logits=len(again) + len(self.run),
            nodes=[node.token for node in run],
            parents=[-1 if node.parent < 0 else self.nodes[node.parent].run for node in run],
        )

    def lines(self) -> list[int]:
        """Return which lines of the segment's logits follow the open nodes."""
        first = 0 if self.stateful else 1  # before it is the line of the last token
        return [0 if self.goes_on or n < 0 else first + self.nodes[n].run for n in self.open]

    def wish(self, needs_logits: bool) -> SampleInput:
        """Return the sampling that is wanted from the segment's rows."""
        drafted = [self.nodes[n].token for n in self.run] if self.goes_on else ()
        keep = Keep.PROCESSED if needs_logits or self.draws > 1 else Keep.NOTHING
        return SampleInput(self.sequence, True, keep, drafted)

    def result(self) -> DraftNodes:
        """Return the likeliest nodes in depth-first order."""
        worth = self.limits.worth
        kept = sorted(n for n in self.ranked() if self.nodes[n].survival >= worth)
        order: list[int] = []
        stack = [n for n in reversed(kept) if self.nodes[n].parent < 0]
        while stack:
            number = stack.pop()
            order.append(number)
            stack += [n for n in reversed(kept) if self.nodes[n].parent == number]
        places = {number: place for place, number in enumerate(order)}
        nodes = [self.nodes[n] for n in order]
        logits = [node.logits for node in nodes if node.logits is not None]
        return DraftNodes(
            [node.token for node in nodes],
            [places.get(node.parent, -1) for node in nodes],
            [node.run for node in nodes],
            [node.margin for node in nodes],
            [float(node.survival) for node in nodes],
            np.stack(logits) if logits else None,
        )


def draft_in_python(
    model: Model,
    store: Store,
    needs_logits: bool,
    segments: Sequence[Segment],
    inputs: Sequence[DraftInput | None],
    noise: Noise,
) -> list[DraftNodes]:
    """See ``Model.draft``. A level of a tree runs the rows of all earlier levels again."""
    stateful = model.shape.stateful
    trees = [
        None if each is None else Tree(each.sequence, each.limits, stateful) for each in inputs
    ]
    current, running = list(segments), list(range(len(segments)))
    while running:
        growing = (trees[i] for i in running)
        wishes = [None if tree is None else tree.wish(needs_logits) for tree in growing]
        samples = model.decide([current[i] for i in running], store, wishes, noise)
        end, left = 0, []
        for number, (i, wish) in enumerate(zip(running, wishes, strict=True)):
            tree = trees[i]
            if tree is None or wish is None:
                continue
            begin, end = end, end + current[i].logits
            lines, first = tree.lines(), len(tree.nodes)
            if wish.keep:
                z = samples.kept[number][lines]
                rows = wish.rows(wish.paths(current[i]))
                chosen = [rows[line] for line in lines]
                scores = noise.scores(z, chosen)
                ids = highest(scores, min(tree.draws, scores.shape[1]))
                tokens, values = ids.tolist(), np.take_along_axis(scores, ids, 1).tolist()
            else:
                z = None
                tokens = [[samples.tokens[begin + line]] for line in lines]
                values = [[samples.scores[begin + line]] for line in lines]
            for place, parent in enumerate(tree.open):
                logits = z[place].copy() if needs_logits and z is not None else None
                tree.branch(parent, tokens[place], values[place], logits)
            tree.open_next(first, model.shape.vocab_size)
            if tree.open:
                current[i] = tree.next_segment(segments[i])
                left.append(i)
        running = left
    return [DraftNodes([], []) if tree is None else tree.result() for tree in trees]
