"""Tokens from the rows of a forward: what is asked for, what comes back, and the way in Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..sampling.draws import Noise
from ..sampling.law import NEVER
from ..types import Row
from ..types import Sequence as SequenceState
from .rows import Segment


class Keep(IntEnum):
    """Which logits of the sampled rows are kept for the caller."""

    NOTHING = 0
    RAW = 1
    PROCESSED = 2


class SampleInput(NamedTuple):
    """What becomes of the rows of logits that one segment wants.

    With ``samples`` a token is drawn behind the segment's last token and behind each of its nodes;
    rows before these are scored only. ``drafted`` are the ids at the segment's end that are drafted
    themselves, so that they are no part of ``sequence.tokens``.
    """

    sequence: SequenceState
    samples: bool = True
    keep: Keep = Keep.NOTHING
    drafted: Sequence[int] = ()

    def count(self, segment: Segment) -> int:
        """Return how many rows of its segment are sampled from."""
        return 1 + len(segment.nodes) if self.samples else 0

    def paths(self, segment: Segment) -> list[list[int]]:
        """Return for each sampled row the drafted ids between the committed tokens and its own."""
        if not self.samples:
            return []
        paths = [[*self.drafted]]
        for token, parent in zip(segment.nodes, segment.parents, strict=True):
            paths.append([*paths[parent + 1], token])
        return paths

    def rows(self, paths: Sequence[Sequence[int]]) -> list[Row]:
        """Return whose tokens the sampled rows decide."""
        sequence, base = self.sequence, len(self.sequence.tokens)
        seed, greedy = sequence.request.seed, sequence.request.params.greedy
        return [
            Row(sequence.id, seed, sequence.sample_index, base + len(path), greedy, base)
            for path in paths
        ]


@dataclass(slots=True)
class Samples:
    """What ``Model.decide`` returns. Its tensors are valid until the next call on the same cache.

    ``tokens`` and ``scores`` have an entry for each row of logits, as of ``Noise.draw``; those of
    rows that are not sampled from mean nothing. ``logits`` are fp32 [rows, vocabulary], processed
    in place where no noise was given. By the number of the input: ``kept`` are the logits that it
    keeps, fp32 [sampled rows, vocabulary], ``scored`` the raw ones of rows that are scored only,
    ``errors`` what its pipeline raised, ``reasons`` why it made rows NaN. ``hidden`` are the hidden
    states by layer, [all rows, hidden_size].
    """

    tokens: Sequence[int]
    scores: Sequence[float]
    logits: torch.Tensor
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    scored: dict[int, torch.Tensor] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)


class DraftInput(NamedTuple):
    """A sequence to draft for, and how many tokens at most."""

    sequence: SequenceState
    length: int


class DraftNodes(NamedTuple):
    """The nodes drafted for one sequence, parents before their children.

    Where they are free: ``logprobs`` are log q of each node, ``margins`` the gap of log q + g to
    the next candidate. ``laws`` are the processed logits that the nodes were drawn from, fp32
    [nodes, vocabulary], where they were asked for.
    """

    tokens: list[int]
    parents: list[int]
    laws: torch.Tensor | None = None
    logprobs: list[float] | None = None
    margins: list[float] | None = None

    @staticmethod
    def chain(tokens: list[int], laws: torch.Tensor | None = None) -> DraftNodes:
        """Return nodes of which each is the child of the one before."""
        return DraftNodes(tokens, list(range(-1, len(tokens) - 1)), laws)


@torch.inference_mode()
def sample_in_python(
    samples: Samples,
    segments: Sequence[Segment],
    inputs: Sequence[SampleInput],
    numbers: Sequence[int],
    noise: Noise | None,
) -> None:
    """Process the logits of some inputs and draw their tokens, which ``samples`` takes in.

    Args:
        samples: with the raw logits of these inputs; ``tokens`` and ``scores`` can be written.
        segments: those that want logits.
        inputs: theirs.
        numbers: which of them to sample.
        noise: what to draw with; None processes logits and draws nothing.
    """
    ends, end = [], 0
    for segment in segments:
        end += segment.logits
        ends.append(end)
    missing = 0 if noise is None else noise.vocab_size - samples.logits.shape[1]
    if missing:  # padded or cut to the target's vocabulary, which its options speak of
        samples.logits = F.pad(samples.logits, (0, missing), value=NEVER)
    lines: list[int] = []
    rows: list[Row] = []
    for i in numbers:
        asked, segment = inputs[i], segments[i]
        first = ends[i] - asked.count(segment)
        if first > ends[i] - segment.logits:
            samples.scored[i] = samples.logits[ends[i] - segment.logits : first]
        if not asked.samples:
            continue
        paths, z = asked.paths(segment), samples.logits[first : ends[i]]
        if asked.keep == Keep.RAW:
            # By NumPy: copies of torch wake its threads, which then spin beside the step's.
            samples.kept[i] = torch.from_numpy(z.numpy().copy()) if z.is_cpu else z.clone()
        sequence = asked.sequence
        try:
            sequence.law.apply(z, sequence.tokens, paths)
        except Exception as error:  # of its options: the others go on
            samples.errors[i] = error
        if sequence.law.error:
            samples.reasons[i] = sequence.law.error
        if asked.keep == Keep.PROCESSED:
            samples.kept[i] = z
        lines += range(first, ends[i])
        rows += asked.rows(paths)
    if noise is None or not lines:
        return
    z = samples.logits if len(lines) == len(samples.logits) else samples.logits[lines]
    tokens, scores = noise.draw(z, rows)
    own_tokens, own_scores = list(samples.tokens), list(samples.scores)
    for line, token, score in zip(lines, tokens, scores, strict=True):
        own_tokens[line], own_scores[line] = token, score
    samples.tokens, samples.scores = own_tokens, own_scores
