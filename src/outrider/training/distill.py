"""Distils a target into a small drafter: on the target's answers, or the drafter's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from .heads import rows_at_once
from .loop import Judged, Learned, Task
from .losses import Likeliest, Loss, coupled_acceptance
from .samples import Sample
from .teacher import Lesson, Teacher

OWN_TOKENS = 128
"""Most tokens of an answer that the drafter writes itself."""


class Said(NamedTuple):
    """A drafter's agreement with a lesson, fp32 [rows] each.

    ``same`` is 1 where both have the same likeliest id, else 0. ``accepted`` is the coupled rule's
    probability of acceptance.
    """

    same: Tensor
    accepted: Tensor


class DistillTask(Task):
    """Trains a module of transformers on a teacher's distributions over the ids that both have.

    Both distributions are taken at ``heat``, the temperature. With probability ``own`` the drafter
    writes a sample's answer itself; which ones depends only on the batch and ``seed``. Acceptance
    is judged by drafts of ``depth`` tokens.
    """

    def __init__(
        self, module: nn.Module, teacher: Teacher, ids: int, loss: Loss, heat: float, own: float,
        depth: int, seed: int,
    ) -> None:  # fmt: skip
        self.module, self._teacher, self._ids = module, teacher, ids
        self._model: Any = module
        self._loss, self._heat, self._own = loss, heat, own
        self._depth, self._seed = depth, seed
        self._rows = rows_at_once(ids)

    def learn(self, batch: Sequence[Sample]) -> Learned:
        """See ``Task``; a sample's logits are computed in parts, which takes less memory."""
        batch = self._mixed(batch)
        count = sum(int(sample.said[1 : self._teacher.context].sum()) for sample in batch)
        total = 0.0
        for sample in batch:
            lesson = self._teacher.teach(sample)
            if not len(lesson.rows):
                continue
            read = self._read(lesson)
            leaf = read.detach().requires_grad_()
            for x, p in zip(leaf.split(self._rows), self._taught(lesson, self._heat), strict=True):
                loss = self._loss(p, self._said(x, self._heat)).sum() / count
                loss.backward()
                total += loss.item()
            read.backward(leaf.grad)
        return Learned(total, count)

    def _read(self, lesson: Lesson) -> Tensor:
        """Return the output matrix's inputs at a lesson's rows, [rows, width]."""
        tokens = lesson.tokens[None, : int(lesson.rows[-1]) + 1]
        states: Tensor = self._model.model(tokens, use_cache=False).last_hidden_state
        return states[0, lesson.rows]

    def _said(self, x: Tensor, heat: float) -> Tensor:
        """Return log q of the ids that both have, fp32 [rows, ids]."""
        logits: Tensor = self._model.lm_head(x).float()
        return (logits / heat).log_softmax(-1)[:, : self._ids]

    def _taught(self, lesson: Lesson, heat: float) -> list[Likeliest]:
        """Return the likeliest ids of p in parts of rows; ``heat`` is applied to these ids only."""
        log_p = lesson.log_p.float()
        if heat != 1:
            log_p = (log_p / heat).log_softmax(-1)
        parts = zip(lesson.ids.long().split(self._rows), log_p.split(self._rows), strict=True)
        return [Likeliest(*part) for part in parts]

    def _mixed(self, batch: Sequence[Sample]) -> Sequence[Sample]:
        """Return a batch with some answers replaced by the drafter's own."""
        if not self._own:
            return batch
        said = crc32(b"".join(sample.tokens.tobytes() for sample in batch))
        draw = np.random.default_rng((self._seed, said))
        chances, seeds = draw.random(len(batch)), draw.integers(2**62, size=len(batch))
        return [
            self.written(sample, int(seed)) if chance < self._own and sample.said.any() else sample
            for sample, chance, seed in zip(batch, chances, seeds, strict=True)
        ]

    @torch.no_grad()
    def written(self, sample: Sample, seed: int) -> Sample:
        """Return a sample whose answer the drafter draws, at most as long as the target's."""
        known = sample.tokens[: self._teacher.context]
        first = max(1, int(sample.said.argmax()))
        draw = torch.Generator().manual_seed(seed)
        tokens, cache = known[:first].tolist(), None
        new, ends = tokens, self._teacher.model.shape.eos_token_ids
        for _ in range(min(OWN_TOKENS, len(known) - first)):
            output = self._model.model(torch.tensor([new]), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            chances = self._said(output.last_hidden_state[0, -1:], self._heat).exp()
            new = [int(torch.multinomial(chances.cpu(), 1, generator=draw))]
            tokens += new
            if new[0] in ends:
                break
        said = np.arange(len(tokens)) >= first
        return Sample(np.array(tokens, np.int32), said, sample.prompt)

    @torch.no_grad()
    def says(self, lesson: Lesson) -> Said:
        """Return how far the drafter agrees with a lesson."""
        same, accepted = [torch.empty(0)], [torch.empty(0)]
        if len(lesson.rows):
            states, best = (each.split(self._rows) for each in (self._read(lesson), lesson.best))
            for x, p, likeliest in zip(states, self._taught(lesson, 1.0), best, strict=True):
                log_q = self._said(x, 1.0)
                same.append((log_q.argmax(-1) == likeliest).float())
                accepted.append(coupled_acceptance(p, log_q))
        return Said(torch.cat(same), torch.cat(accepted))

    def judge(self, samples: Sequence[Sample]) -> Judged:
        """Return forecast acceptance lengths: a token counts if all before it are accepted."""
        greedy = coupled = drafts = 0.0
        for sample in samples:
            lesson = self._teacher.teach(sample)
            said = self.says(lesson)
            drafts += len(lesson.rows)
            greedy += chained(lesson.rows, said.same, self._depth)
            coupled += chained(lesson.rows, said.accepted, self._depth)
        return Judged(1 + greedy / max(1.0, drafts), 1 + coupled / max(1.0, drafts))


def chained(rows: Tensor, chances: Tensor, depth: int) -> float:
    """Return the expected number of accepted tokens, summed over drafts after each of ``rows``.

    ``chances`` are the probabilities that the token after each row is accepted. A draft ends where
    the next position is not in ``rows``.
    """
    if not len(rows):
        return 0.0
    at = torch.zeros(int(rows[-1]) + depth + 1)
    at[rows] = chances
    total, standing = 0.0, torch.ones(len(rows))
    for further in range(depth):
        standing = standing * at[rows + further]
        total += float(standing.sum())
    return total
