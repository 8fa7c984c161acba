"""Distinguishes rounding from a wrong rule when two outputs differ.

Arithmetic may depend on the number of rows in a forward pass, and a speculative step has more rows
than a plain one. Where outputs differ, the target's logits are recomputed in several ways that
differ only in row counts; their spread is the measured difference. A gap between the two tokens
that is not larger is a tie; anything else is a violation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from ..base.types import Request, Row, SamplingParams
from ..llm import LLM
from ..models.base import Model
from ..models.rows import Segment
from ..native.native_sampling import sequence_pipeline
from ..sampling.pipeline import Logits
from ..sampling.shared_noise import SharedNoise

PAGE_SIZE = 16
NEIGHBOUR_COUNTS = (1, 7, 31)  # numbers of other sequences batched with the last row


@dataclass(frozen=True)
class Difference:
    """The first ``position`` in prompt + output where two outputs differ, and why.

    ``tokens`` are the two tokens there, None for an output that has ended. ``gap`` is between their
    scores z + g, infinite if one can never be drawn; ``measured`` is the spread of z between row
    counts, summed over the two.
    """

    position: int
    tokens: tuple[int | None, int | None]
    gap: float
    measured: float
    is_tie: bool


@dataclass(frozen=True)
class _Way:
    """A context in blocks of rows that end at ``ends``; ``neighbours`` join the last block."""

    ends: tuple[int, ...]
    neighbours: int = 0


def _ways(prompt: int, length: int, chunk: int, draft: int) -> list[_Way]:
    """Return ways to compute ``length`` tokens, plain decoding first; 1 <= prompt <= length."""
    chunks = (*range(chunk, prompt, chunk), prompt)
    ways = [
        _Way((*chunks, *range(prompt + rows, length, rows), length) if length > prompt else chunks)
        for rows in range(1, draft + 2)
    ]
    ways += [_Way((length - rows, length)) for rows in range(1, draft + 2) if rows < length]
    ways += [_Way((length - 1, length), n) for n in NEIGHBOUR_COUNTS if length > 1]
    return list(dict.fromkeys([*ways, _Way((length,))]))


def _logits(model: Model, context: Sequence[int], prompt: int, way: _Way, draft: int) -> Logits:
    """Return the logits after ``context``, computed in a new cache: fp32 [vocabulary]."""
    pages = -(-len(context) // PAGE_SIZE)
    store = model.new_store(1 + pages + way.neighbours, PAGE_SIZE)
    table = list(range(1, pages + 1))
    start = 0
    for end in way.ends[:-1]:
        segment = Segment(context[start:end], start, table, 0, prompt, key="it")
        model.run([segment], store)
        start = end
    rows = min(len(context) - start, draft + 1)
    last = Segment(context[start:], start, table, rows, prompt, key="it")
    others = range(pages + 1, pages + 1 + way.neighbours)
    neighbours = [Segment(context[:1], 0, [page], 1, 1, key=f"{page}") for page in others]
    logits = model.run([last, *neighbours], store).logits
    assert logits is not None  # every segment asks for some
    last_row: Logits = logits[rows - 1].copy()
    return last_row


def classify(
    llm: LLM, request: Request, sample_index: int, output: Sequence[int], tokens: tuple[int, int]
) -> Difference:
    """Return the difference of two next tokens after the same prompt and ``output``."""
    model, config = llm.engine.model, llm.engine.config
    prompt, draft = len(request.prompt_token_ids), config.max_draft_length
    context = [*request.prompt_token_ids, *output]
    ways = _ways(prompt, len(context), config.max_num_batched_tokens, draft)
    z = np.stack([_logits(model, context, prompt, way, draft) for way in ways])
    distribution = sequence_pipeline(llm.engine.pipeline_of(request))
    distribution.apply(z, context, [[]] * len(ways))
    row = Row("", request.seed, sample_index, len(context), request.params.greedy, len(context))
    score = SharedNoise(z.shape[1]).scores(z, [row] * len(ways))
    pair = list(tokens)
    # How far each of the two is below the highest score: [ways, 2], infinite if masked.
    behind = score.max(-1, keepdims=True) - score[:, pair]
    masked = np.isneginf(z[:, pair])
    # If a token is on the edge of top-k, top-p or min-p, its smallest gap counts.
    on_edge = bool((masked.any(0) & ~masked.all(0)).any())
    gap = float((behind.min(0) if on_edge else behind[0]).max())
    highest = z[:, pair].max(0)
    lowest = np.where(masked, math.inf, z[:, pair]).min(0)
    measured = float(np.where(masked.all(0), 0, highest - lowest).sum())
    return Difference(len(context), tokens, gap, measured, gap <= measured)


def compare(
    llm: LLM,
    prompt: Sequence[int],
    params: SamplingParams,
    expected: Sequence[int],
    got: Sequence[int],
    *,
    seed: int,
    sample_index: int = 0,
) -> Difference | None:
    """Return the first difference of two outputs of a request, or None if they are equal."""
    for common, (first, second) in enumerate(zip_longest(expected, got)):
        if first == second:
            continue
        if first is None or second is None:
            return Difference(len(prompt) + common, (first, second), math.inf, 0.0, False)
        eos = llm.engine.model.shape.eos_token_ids
        request = Request("tie", tuple(prompt), params, seed, eos)
        return classify(llm, request, sample_index, expected[:common], (first, second))
    return None
