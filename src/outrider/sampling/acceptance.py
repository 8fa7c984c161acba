"""The acceptance rule: which draft tokens stand, and what comes after them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from ..types import Draft, Verdict
from .law import Laws, Row
from .noise import SharedNoise


class AcceptanceRule(Protocol):
    """Decides a step from the target's laws, the draft and the noise."""

    def __call__(self, laws: Laws, draft: Draft, noise: SharedNoise) -> Verdict: ...


def scores(z: torch.Tensor, rows: Sequence[Row], noise: SharedNoise) -> torch.Tensor:
    """z + g where a row is sampled, z itself where it is greedy: fp32 [rows, vocabulary].

    The argmax of a row is its token (Gumbel-max). ``z`` may be narrower than the noise.
    """
    drawn = [i for i, row in enumerate(rows) if not row.greedy]
    if not drawn:
        return z
    g = noise.rows(
        [(rows[i].sequence_id, rows[i].seed, rows[i].sample_index) for i in drawn],
        [rows[i].position for i in drawn],
    )[:, : z.shape[1]]
    if len(drawn) == len(rows):
        return z + g
    out = z.clone()
    out[torch.tensor(drawn, device=z.device)] += g
    return out


def draw(z: torch.Tensor, rows: Sequence[Row], noise: SharedNoise) -> tuple[list[int], list[bool]]:
    """The token of each row, the lowest id on a tie, and whether its law was finite."""
    best, ids = scores(z, rows, noise).max(-1)
    return ids.tolist(), [math.isfinite(b) for b in best.tolist()]


class Coupled:
    """Coupled sampling: the output is always the target's token y; a draft stands where it is y.

    y = argmax(z + g) with noise that depends on (seed, position, sample, id) alone, so the output
    is the same whatever was drafted. Daliri, Musco, Suresh, "Coupling without communication and
    drafter-invariant speculative decoding" (2024), in its Gumbel-max form.
    """

    def __call__(self, laws: Laws, draft: Draft, noise: SharedNoise) -> Verdict:
        ids, finite = draw(laws.z, laws.rows, noise) if laws.rows else ([], [])
        verdict = Verdict([], [], [])
        for first, nodes, parents in zip(laws.first, draft.tokens, draft.parents, strict=True):
            tokens: list[int] = []
            path: list[int] = []
            good = True
            if first is not None:
                children = {
                    (p, token): i for i, (p, token) in enumerate(zip(parents, nodes, strict=True))
                }
                node: int | None = -1
                while node is not None:
                    row = first + 1 + node
                    good = good and finite[row]
                    tokens.append(ids[row])
                    node = children.get((node, ids[row]))
                    if node is not None:
                        path.append(node)
            verdict.tokens.append(tokens)
            verdict.path.append(path)
            verdict.finite.append(good)
        return verdict
