"""Tokens from the rows of a forward: inputs, results, and the implementation in Python."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base.types import DraftBudget, Row, SequenceState
from ..base.types import DraftNodes as DraftNodes
from ..errors import RequestError
from ..native.masks import AllowedAfter
from ..sampling.arrays import widened
from ..sampling.grammar import Mask
from ..sampling.pipeline import Logits
from ..sampling.shared_noise import Noise
from .rows import Segment


class Keep(IntEnum):
    """Logits of the sampled rows that are kept for the caller."""

    NOTHING = 0
    RAW = 1
    PROCESSED = 2


class SampleInput(NamedTuple):
    """The sampling from the rows of logits that a segment wants.

    With ``samples`` a token is drawn after the segment's last token, if it has any, and after each
    of its nodes; rows before these are scored only. ``drafted`` are ids at the segment's end that
    are not in ``sequence.tokens``.
    """

    sequence: SequenceState
    samples: bool = True
    keep: Keep = Keep.NOTHING
    drafted: Sequence[int] = ()

    def paths(self, segment: Segment) -> list[list[int]]:
        """Return for each sampled row the drafted ids between the committed tokens and its own."""
        if not self.samples:
            return []
        paths = [[*self.drafted]]
        for token, parent in zip(segment.nodes, segment.parents, strict=True):
            paths.append([*paths[parent + 1], token])
        return paths if segment.tokens else paths[1:]

    def rows(self, paths: Sequence[Sequence[int]]) -> list[Row]:
        """Return for each sampled row which token it decides."""
        sequence, base = self.sequence, len(self.sequence.tokens)
        seed, greedy = sequence.request.seed, sequence.request.params.greedy
        return [
            Row(sequence.id, seed, sequence.sample_index, base + len(path), greedy, base)
            for path in paths
        ]


EMPTY: Any = MappingProxyType({})


class Samples(NamedTuple):
    """The result of ``Model.decide``. Its arrays are valid until the next call on the same cache.

    ``tokens`` and ``scores`` have an entry for each row of logits, as of ``Noise.draw``, without
    meaning where none is sampled. ``logits``, fp32 [rows and more, vocabulary], are processed in
    place where no noise was given. The other fields, except ``hidden``, are by number of segment.
    """

    tokens: Sequence[int]
    scores: Sequence[float]
    logits: Logits
    kept: Mapping[int, Logits] = EMPTY  # for its input, fp32 [sampled rows, vocabulary]
    scored: Mapping[int, Logits] = EMPTY  # raw, of rows that are scored only
    errors: Mapping[int, Exception] = EMPTY  # that its pipeline raised
    reasons: Mapping[int, str] = EMPTY  # why that made rows NaN
    hidden: Mapping[int, NDArray[np.float32]] = EMPTY  # by layer, [all rows, hidden_size]


class DraftInput(NamedTuple):
    """A sequence to draft for: nodes have the highest log q + g, ranked by the limits' rates.

    ``position`` is that of the first drafted token; None where it follows ``sequence.tokens``.
    """

    sequence: SequenceState
    limits: DraftBudget
    position: int | None = None


def sample_in_python(
    samples: Samples,
    segments: Sequence[Segment],
    inputs: Sequence[SampleInput | None],
    numbers: Collection[int],
    noise: Noise | None,
) -> Samples:
    """Return ``samples``, of raw logits, with tokens of the segments ``numbers`` by the pipeline.

    Without ``noise`` logits are processed and nothing is drawn.
    """
    logits = samples.logits
    if noise is not None:  # it has the target's vocabulary, to which options refer
        logits = widened(logits, noise.vocab_size)
    kept, scored = dict(samples.kept), dict(samples.scored)
    errors: dict[int, Exception] = {}
    reasons: dict[int, str] = {}
    lines: list[int] = []
    rows: list[Row] = []
    end = 0
    for i, (segment, asked) in enumerate(zip(segments, inputs, strict=True)):
        begin, end = end, end + segment.logits
        if asked is None or i not in numbers:
            continue
        paths = asked.paths(segment)
        first = end - len(paths)
        if first > begin:
            scored[i] = logits[begin:first]
        if not paths:
            continue
        z, sequence = logits[first:end], asked.sequence
        if asked.keep == Keep.RAW:
            kept[i] = z.copy()
        try:
            sequence.pipeline.apply(z, sequence.tokens, paths)
        except RequestError as error:  # of its options; other sequences continue
            errors[i] = error.with_traceback(None)  # whose frames would hold grammars
        except Exception as error:
            errors[i] = error
        if sequence.pipeline.error:
            reasons[i] = sequence.pipeline.error
        if asked.keep == Keep.PROCESSED:
            kept[i] = z
        lines += range(first, end)
        rows += asked.rows(paths)
    tokens, scores = list(samples.tokens), list(samples.scores)
    if noise is not None and lines:
        z = logits if len(lines) == len(logits) else logits[lines]
        for line, token, score in zip(lines, *noise.draw(z, rows), strict=True):
            tokens[line], scores[line] = token, score
    return Samples(tokens, scores, logits, kept, scored, errors, reasons, samples.hidden)


def grammar_masks(
    segments: Sequence[Segment],
    inputs: Sequence[SampleInput | None],
    grammars: Sequence[int],
    slow: list[int],
    pipelines: list[int],
) -> list[Mask | None]:
    """Return for each row of logits the tokens allowed by its grammar; None without a grammar.

    ``grammars`` are segments' numbers. One whose parser fails moves to ``slow``: Python says why.
    """
    masks: list[Mask | None] = []
    number = -1
    for i, (segment, asked) in enumerate(zip(segments, inputs, strict=True)):
        number += asked is not None
        allowed: list[Mask | str | None] = [None] * segment.logits
        if asked is not None and i in grammars:
            try:
                allowed = asked.sequence.pipeline.masks(asked.sequence.tokens, asked.paths(segment))
            except Exception as error:
                allowed = [str(error)] * segment.logits
            if any(isinstance(mask, str) for mask in allowed):
                pipelines[number] = 0
                slow.append(i)
        masks += [None if isinstance(mask, str) else mask for mask in allowed]
    return masks


def mask_bytes(vocab_size: int) -> int:
    """Return the least bytes of a mask."""
    return -(-vocab_size // 8)


def allowed_after(sequence: SequenceState, vocab_size: int) -> AllowedAfter:
    """Return a function that returns the tokens that a grammar allows after drafted ones.

    It allows none if the parser gives up: the target meets the same error, and says why.
    """
    nothing = np.zeros(mask_bytes(vocab_size), np.uint8)

    def allowed(path: list[int]) -> Mask | None:
        try:
            (mask,) = sequence.pipeline.masks(sequence.tokens, [path])
        except Exception:
            return nothing
        return nothing if isinstance(mask, str) else mask

    return allowed


def with_kept(
    samples: Samples,
    segments: Sequence[Segment],
    inputs: Sequence[SampleInput | None],
    slow: Sequence[int],
) -> Samples:
    """Return ``samples`` with the logits that inputs keep; raw ones follow all rows."""
    kept = {}
    line, raw = 0, len(samples.tokens)
    for i, (segment, asked) in enumerate(zip(segments, inputs, strict=True)):
        count = segment.logits
        if asked is not None and asked.keep and i not in slow:
            first = raw if asked.keep == Keep.RAW else line
            kept[i] = samples.logits[first : first + count]
            raw += count if asked.keep == Keep.RAW else 0
        line += count
    return samples._replace(kept=kept)
