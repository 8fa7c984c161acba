"""Trains heads on a target's hidden states: each depth of a draft on the target's distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .eagle3 import Rows, Unrolling, rows_of
from .loop import Judged, Learned, Task
from .losses import Likeliest, Loss, coupled_acceptance
from .samples import Sample
from .teacher import Lesson, Teacher

MOST_LOGITS = 1 << 25
"""Most logits that are held at a time."""
LEAST_ROWS = 64
"""Fewest rows whose logits are held at a time, however many ids there are."""
ANYWAY = 8
"""One in this many drafts goes on to its end, right or wrong."""
REHEARSED = 3
"""The same for a step that is timed beforehand: about as many go on in mid-training."""


def rows_at_once(ids: int) -> int:
    """Return how many rows of logits, of ``ids`` ids each, are held at a time."""
    return max(LEAST_ROWS, MOST_LOGITS // ids)


class DraftingHead(Protocol):
    """A head that is trained: its layers, and its output matrices."""

    def unroll(self, rows: Rows, depth: int) -> Unrolling:
        """Yield the output matrix's inputs at each depth, [drafts, width]."""

    def logits(self, depth: int, x: Tensor) -> Tensor:
        """Return the logits of the ids that are drafted, [rows, ids]."""


class Depth(NamedTuple):
    """One depth of all drafts: those that reach it, and the row of each one's label."""

    drafts: Tensor
    labels: Tensor


class Labels:
    """The target's distributions at each depth after the rows where drafts begin."""

    def __init__(self, lessons: Sequence[Lesson], rows: Rows) -> None:
        own = [lesson.rows >= 1 for lesson in lessons]
        pairs = [*zip(lessons, own, strict=True)]
        self._ids = torch.cat([each.ids[keep] for each, keep in pairs])
        self._log_p = torch.cat([each.log_p[keep].float() for each, keep in pairs])
        self.best = torch.cat([each.best[keep] for each, keep in pairs])
        self._rows = rows
        self._label = torch.full((len(rows.tokens),), -1)
        self._label[rows.drafts] = torch.arange(len(rows.drafts))

    def likeliest(self, labels: Tensor) -> Likeliest:
        """Return the likeliest ids of the distributions of ``labels``."""
        return Likeliest(self._ids[labels].long(), self._log_p[labels])

    def at(self, depth: int, drafts: Tensor) -> Depth:
        """Return the drafts whose token at a depth the target said."""
        positions = self._rows.positions
        rows = drafts + depth
        inside = rows < len(positions)
        rows = rows.clamp(max=len(positions) - 1)
        inside &= positions[rows] == positions[drafts] + depth  # not of the next sample
        inside &= self._label[rows] >= 0
        which = inside.nonzero()[:, 0]
        return Depth(which, self._label[rows[which]])


class HeadTask(Task):
    """Trains a head on a teacher's distributions; ``ids`` int64 are those that it drafts.

    The loss of depth i has the weight ``fading`` ** i.
    """

    def __init__(
        self, head: DraftingHead, teacher: Teacher, ids: NDArray[np.int64], depth: int,
        loss: Loss, fading: float,
    ) -> None:  # fmt: skip
        assert isinstance(head, nn.Module)
        self.module: nn.Module = head
        self._head, self._teacher, self._depth = head, teacher, depth
        self._ids = torch.from_numpy(ids)
        self._loss, self._weights = loss, [fading**i for i in range(depth)]
        self._rows = rows_at_once(len(ids))

    def learn(self, batch: Sequence[Sample]) -> Learned:
        """See ``Task``.

        A draft goes on while the head's likeliest ids are the sample's: a served draft is useless
        after a wrong id. One in ``ANYWAY`` goes on in any case, so that all depths learn.
        """
        return self._learn(batch, ANYWAY)

    def rehearse(self, batch: Sequence[Sample]) -> None:
        """See ``Task``."""
        self._learn(batch, REHEARSED)

    def _learn(self, batch: Sequence[Sample], anyway: int) -> Learned:
        """Learn from drafts; one in ``anyway`` goes on in any case.

        Each depth's loss is backpropagated to its states at once, so that logits need not be kept;
        gradients flow through the head after the last depth.
        """
        lessons = [self._teacher.teach(sample) for sample in batch]
        rows = rows_of(lessons)
        drafts, count = rows.drafts, len(rows.drafts)
        if not count:
            return Learned(0.0, 0)
        labels, total, ids = Labels(lessons, rows), 0.0, self._ids.to(drafts.device)
        read: list[Tensor] = []
        slopes: list[Tensor] = []
        unrolling = self._head.unroll(rows, self._depth)
        x = next(unrolling)
        for depth, weight in enumerate(self._weights):
            leaf = x.detach().requires_grad_()
            at = labels.at(depth, drafts)
            going = [at.drafts[:0]]
            for which, of in zip(*(each.split(self._rows) for each in at), strict=True):
                log_q = self._head.logits(depth, leaf[which]).float().log_softmax(-1)
                loss = self._loss(labels.likeliest(of), log_q).sum() * (weight / count)
                loss.backward()
                total += loss.item()
                said = rows.tokens[drafts[which] + depth + 1]
                right = ids[log_q.argmax(-1)] == said
                going.append(which[right | (drafts[which] % anyway == 0)])
            read.append(x)
            slopes.append(torch.zeros_like(x) if leaf.grad is None else leaf.grad)
            which = torch.cat(going)
            if not len(which):
                break
            drafts = drafts[which]
            try:
                x = unrolling.send(which)
            except StopIteration:
                break
        torch.autograd.backward(read, slopes)
        return Learned(total, count)

    def judge(self, samples: Sequence[Sample]) -> Judged:
        """Return forecast acceptance lengths: a token counts if all before it are accepted."""
        greedy = coupled = drafts = 0.0
        for sample in samples:
            lessons = [self._teacher.teach(sample)]
            rows = rows_of(lessons)
            if not len(rows.drafts):
                continue
            labels, ids = Labels(lessons, rows), self._ids.to(rows.drafts.device)
            standing = torch.ones(len(rows.drafts), dtype=torch.bool)
            chance = torch.ones(len(rows.drafts))
            drafts += len(rows.drafts)
            for depth, x in enumerate(self._head.unroll(rows, self._depth)):
                at = labels.at(depth, rows.drafts)
                log_q = self._head.logits(depth, x[at.drafts]).float().log_softmax(-1)
                same = ids[log_q.argmax(-1)] == labels.best[at.labels]
                accepted = coupled_acceptance(labels.likeliest(at.labels), log_q)
                reached = torch.zeros_like(standing)
                reached[at.drafts] = same
                standing &= reached
                chances = torch.zeros_like(chance)
                chances[at.drafts] = accepted
                chance *= chances
                greedy += float(standing.sum())
                coupled += float(chance.sum())
        return Judged(1 + greedy / max(1.0, drafts), 1 + coupled / max(1.0, drafts))
