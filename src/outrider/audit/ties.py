"""Was it a tie? Two outputs part at a token: rounding, or a wrong rule.

Arithmetic may depend on how many rows go through together, and a speculative step has other rows
than a plain one. Where outputs part, the target's logits are computed again in several ways that
differ in row counts only; what that moves is the measured difference, and a gap between the two
tokens that is not larger is a tie. Anything else is a violation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..llm import LLM
from ..models.base import Model
from ..models.rows import Segment
from ..native.laws import sequence_law
from ..sampling.draws import SharedNoise
from ..types import Request, Row, SamplingParams

PAGE_SIZE = 16
NEIGHBOURS = (1, 7, 31)
"""How many other sequences come along in the ways that batch the last row."""


@dataclass(frozen=True)
class Difference:
    """Where two outputs part, and why.

    Args:
        position: index in prompt + output.
        tokens: the two tokens there; None where an output has ended.
        gap: how far the scores z + g of the two lie apart, 0 or above; infinite where one of them
            can never be drawn.
        measured: by how much the z of the two moves between row counts, added up.
        is_tie: gap <= measured.
    """

    position: int
    tokens: tuple[int | None, int | None]
    gap: float
    measured: float
    is_tie: bool


@dataclass(frozen=True)
class _Way:
    """A context in blocks of rows that end at ``ends``; ``neighbours`` come with the last one."""

    ends: tuple[int, ...]
    neighbours: int = 0


def _ways(prompt: int, length: int, chunk: int, draft: int) -> list[_Way]:
    """Ways to compute ``length`` tokens, ``prompt`` of them the prompt; plain decoding first.

    Args:
        prompt, length: in tokens, 1 <= prompt <= length.
        chunk: rows of a prefill step.
        draft: the longest draft.
    """
    chunks = (*range(chunk, prompt, chunk), prompt)
    ways = [
        _Way((*chunks, *range(prompt + rows, length, rows), length) if length > prompt else chunks)
        for rows in range(1, draft + 2)
    ]
    ways += [_Way((length - rows, length)) for rows in range(1, draft + 2) if rows < length]
    ways += [_Way((length - 1, length), n) for n in NEIGHBOURS if length > 1]
    return list(dict.fromkeys([*ways, _Way((length,))]))


def _logits(
    model: Model, context: Sequence[int], prompt: int, way: _Way, draft: int
) -> torch.Tensor:
    """The logits after ``context``, computed in a cache of its own: fp32 [vocabulary]."""
    pages = -(-len(context) // PAGE_SIZE)
    store = model.new_store(1 + pages + way.neighbours, PAGE_SIZE)
    table = list(range(1, pages + 1))
    start, found = 0, None
    for end in way.ends:
        wanted = min(end - start, draft + 1) if end == len(context) else 0
        segments = [Segment(context[start:end], start, table, wanted, prompt, key="it")]
        if end == len(context):
            others = range(pages + 1, pages + 1 + way.neighbours)
            segments += [Segment(context[:1], 0, [page], 1, 1, key=f"{page}") for page in others]
        output = model.run(segments, store)
        if output.logits is not None:
            found = output.logits[wanted - 1].clone()
        start = end
    assert found is not None  # the last way out of every list of ends is the context's end
    return found


def classify(
    llm: LLM, request: Request, sample_index: int, output: Sequence[int], tokens: tuple[int, int]
) -> Difference:
    """Tell a tie from a violation, for two tokens after the same prompt and output.

    Args:
        llm: with the target; its engine and cache are left alone. Its K is the longest draft.
        request: prompt, parameters and seed.
        sample_index: which of its samples, from 0.
        output: the tokens that both outputs have in common after the prompt.
        tokens: the next token of each.
    """
    model, config = llm.engine.model, llm.engine.config
    prompt, draft = len(request.prompt_token_ids), config.num_speculative_tokens
    context = [*request.prompt_token_ids, *output]
    ways = _ways(prompt, len(context), config.max_num_batched_tokens, draft)
    z = torch.stack([_logits(model, context, prompt, way, draft) for way in ways])
    law = sequence_law(llm.engine.law_of(request))
    law.apply(z, context, [[]] * len(ways))
    row = Row("", request.seed, sample_index, len(context), request.params.greedy, len(context))
    score = SharedNoise(z.shape[1], z.device).scores(z, [row] * len(ways))
    pair = torch.tensor(tokens, device=z.device)
    # How far each of the two is from being drawn: [ways, 2], infinite where it is masked.
    behind = score.amax(-1, keepdim=True) - score[:, pair]
    masked = z[:, pair].isneginf()
    if bool((masked.any(0) & ~masked.all(0)).any()):
        # A token on the edge of top-k, top-p or min-p: there the best way counts for each.
        gap = float(behind.amin(0).max())
    else:
        gap = float(behind[0].max())
    highest = z[:, pair].masked_fill(masked, -math.inf).amax(0)
    lowest = z[:, pair].masked_fill(masked, math.inf).amin(0)
    measured = float((highest - lowest).masked_fill(masked.all(0), 0).sum())
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
    """The first difference of two outputs of one request, classified; None when they are equal.

    Args:
        llm: with the target, see ``classify``.
        prompt, params, seed, sample_index: the request's.
        expected, got: token ids of the two outputs.
    """
    common = 0
    while common < min(len(expected), len(got)) and expected[common] == got[common]:
        common += 1
    if common == len(expected) == len(got):
        return None
    if common in (len(expected), len(got)):
        first = expected[common] if common < len(expected) else None
        second = got[common] if common < len(got) else None
        return Difference(len(prompt) + common, (first, second), math.inf, 0.0, False)
    eos = llm.engine.model.shape.eos_token_ids
    request = Request("tie", tuple(prompt), params, seed, eos)
    pair = (expected[common], got[common])
    return classify(llm, request, sample_index, expected[:common], pair)
