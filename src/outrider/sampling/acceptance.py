"""The acceptance rule: which draft tokens stand, and what comes after them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from ..types import Draft, Row, Verdict
from .law import Laws
from .noise import Noise, SharedNoise

NOT_FINITE = "the model's logits are NaN or infinite; check the checkpoint, or try dtype='float32'."
NOTHING_LEFT = (
    "the request's options leave no token to sample here; "
    "two of them contradict each other (min_tokens, allowed_token_ids, a grammar, a processor)."
)


class AcceptanceRule(Protocol):
    """Decides a step from the target's laws, the draft and the noise."""

    name: str
    trees: bool
    """Whether drafts may branch."""
    keeps_laws: bool
    """Whether drafts must carry the laws that they were drawn from."""

    def drafting(self, noise: SharedNoise) -> Noise:
        """The noise that drafters draw with, given the engine's shared noise."""
        ...

    def __call__(self, laws: Laws, draft: Draft, noise: SharedNoise) -> Verdict: ...


def scores(z: torch.Tensor, rows: Sequence[Row], noise: Noise) -> torch.Tensor:
    """z + g where a row is sampled, z itself where it is greedy: fp32 [rows, vocabulary].

    The argmax of a row is its token (Gumbel-max). ``z`` may be narrower than the noise.
    """
    drawn = [i for i, row in enumerate(rows) if not row.greedy]
    if not drawn:
        return z
    g = noise.of([rows[i] for i in drawn])[:, : z.shape[1]]
    if len(drawn) == len(rows):
        return z + g
    out = z.clone()
    out[torch.tensor(drawn, device=z.device)] += g
    return out


def trouble(best: float) -> str | None:
    """What is wrong with a row whose highest score is ``best``: a sentence, None if nothing is."""
    if math.isfinite(best):
        return None
    return NOTHING_LEFT if best == -math.inf else NOT_FINITE


def draw(z: torch.Tensor, rows: Sequence[Row], noise: Noise) -> tuple[list[int], list[float]]:
    """The token of each row, the lowest id on a tie, and its score: finite if the law was."""
    best, ids = scores(z, rows, noise).max(-1)
    return ids.tolist(), best.tolist()


class Coupled:
    """Coupled sampling: the output is always the target's token y; a draft stands where it is y.

    y = argmax(z + g) with noise that depends on (seed, position, sample, id) alone, so the output
    is the same whatever was drafted. Daliri, Musco, Suresh, "Coupling without communication and
    drafter-invariant speculative decoding" (2024), in its Gumbel-max form.
    """

    name = "coupled"
    trees = True
    keeps_laws = False

    def drafting(self, noise: SharedNoise) -> Noise:
        return noise

    def __call__(self, laws: Laws, draft: Draft, noise: SharedNoise) -> Verdict:
        ids, best = draw(laws.z, laws.rows, noise) if laws.rows else ([], [])
        verdict = Verdict([], [], [])
        for first, nodes, parents in zip(laws.first, draft.tokens, draft.parents, strict=True):
            tokens: list[int] = []
            path: list[int] = []
            error = None
            if first is not None:
                children = {
                    (p, token): i for i, (p, token) in enumerate(zip(parents, nodes, strict=True))
                }
                node: int | None = -1
                while node is not None:
                    row = first + 1 + node
                    error = error or trouble(best[row])
                    tokens.append(ids[row])
                    node = children.get((node, ids[row]))
                    if node is not None:
                        path.append(node)
            verdict.tokens.append(tokens)
            verdict.path.append(path)
            verdict.errors.append(error)
        return verdict
