"""The coupled rule and the processed distributions, against the float64 oracle."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from outrider.audit import oracle
from outrider.base.types import Draft, DraftNodes, Request, Row, SamplingParams, Verdict
from outrider.sampling.acceptance import NOT_FINITE, NOTHING_LEFT, Coupled, trouble
from outrider.sampling.arrays import softmax
from outrider.sampling.pipeline import Logits, RequestPipeline, SequencePipeline, StepLogits
from outrider.sampling.shared_noise import SharedNoise
from tests.support import enumeration

VOCABULARY = 50


def _row(position: int, greedy: bool = False, sample: int = 0) -> Row:
    return Row("s", 17, sample, position, greedy, 0)


def _verdict(z: Logits, draft: Draft, depths: list[int], greedy: bool) -> Verdict:
    rows = [_row(100 + depth, greedy) for depth in depths]
    return Coupled()(StepLogits(z, rows, [0]), draft, SharedNoise(VOCABULARY))


@pytest.mark.parametrize("greedy", [True, False])
def test_the_output_under_any_tree_is_the_output_under_none(greedy: bool) -> None:
    """Logits depend on the path: whatever is drafted, the tokens are those of plain decoding."""
    rng = random.Random(1)

    def distribution(path: tuple[int, ...]) -> Logits:
        rng = np.random.default_rng(hash(path) % 2**31)
        return rng.standard_normal(VOCABULARY, np.float32) * 2

    plain: list[int] = []
    for position in range(100, 108):
        z = distribution(tuple(plain))[None]
        plain += SharedNoise(VOCABULARY).draw(z, [_row(position, greedy)])[0]
    for _ in range(200):
        nodes: list[int] = []
        parents: list[int] = []
        paths: list[tuple[int, ...]] = [()]
        for _ in range(rng.randint(0, 9)):
            parent = rng.randint(-1, len(nodes) - 1)
            above = paths[parent + 1]
            right = above == tuple(plain[: len(above)]) and len(above) < 7
            token = plain[len(above)] if right and rng.random() < 0.7 else rng.randrange(VOCABULARY)
            if (*above, token) in paths:
                continue
            nodes.append(token)
            parents.append(parent)
            paths.append((*above, token))
        z = np.stack([distribution(path) for path in paths])
        verdict = _verdict(z, Draft([DraftNodes(nodes, parents)]), [len(p) for p in paths], greedy)
        tokens, path = verdict.tokens[0], verdict.path[0]
        assert tokens == plain[: len(tokens)]
        assert [nodes[i] for i in path] == tokens[:-1]
        assert tuple(tokens) not in paths, "the walk ends only where the draft does"


def test_acceptance_meets_its_closed_form() -> None:
    """Draft and target draw with one noise; a false alarm of each comparison: 1e-6 (5 sigma)."""
    rng = np.random.default_rng(4)
    draws = 20_000
    for spread in (0.3, 1.0, 2.0):
        zp = rng.standard_normal(VOCABULARY, np.float32) * 2
        zq = zp + rng.standard_normal(VOCABULARY, np.float32) * spread
        noise = SharedNoise(VOCABULARY)
        rows = [_row(i) for i in range(draws)]
        y, _ = noise.draw(np.broadcast_to(zp, (draws, VOCABULARY)), rows)
        x, _ = noise.draw(np.broadcast_to(zq, (draws, VOCABULARY)), rows)
        p, q = (softmax(z.astype(np.float64)) for z in (zp, zq))
        expected = enumeration.coupled_acceptance(p, q)
        rate = np.mean(np.array(x) == np.array(y))
        assert abs(rate - expected) < 5 * math.sqrt(expected * (1 - expected) / draws)
        assert expected >= enumeration.coupled_acceptance_bound(p, q)


def test_a_draw_is_the_lowest_id_among_equals() -> None:
    z = np.zeros((1, VOCABULARY), np.float32)
    assert SharedNoise(VOCABULARY).draw(z, [_row(0, greedy=True)])[0] == [0]


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    z = np.random.default_rng(0).standard_normal((3, VOCABULARY), np.float32)
    noise = SharedNoise(VOCABULARY)
    mixed, _ = noise.draw(z, [_row(5), _row(6, greedy=True), _row(7)])
    alone = [noise.draw(z[i : i + 1], [_row(5 + i, greedy=i == 1)])[0][0] for i in range(3)]
    assert mixed == alone
    assert mixed[1] == int(z[1].argmax())


def test_laws_that_are_not_numbers_are_reported() -> None:
    z = np.zeros((3, VOCABULARY), np.float32)
    z[1, 7] = math.nan
    z[2] = -math.inf
    rows = [_row(i) for i in range(3)]
    best = SharedNoise(VOCABULARY).draw(z, rows)[1]
    assert [trouble(b) for b in best] == [None, NOT_FINITE, NOTHING_LEFT]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 1.0, "top_p": 0.05},
        {"temperature": 1.5, "min_p": 0.2},
        {"temperature": 0.9, "min_p": 0.01, "top_k": 12, "top_p": 0.9},
        {"temperature": 1.0, "top_k": -1, "top_p": 1.0},
        {"temperature": 1.0, "top_k": 500},
    ],
)
def test_laws_are_the_oracles(options: dict[str, float]) -> None:
    logits = np.random.default_rng(8).standard_normal((20, VOCABULARY), np.float32) * 3
    logits[:, 10:20] = logits[:, :10]  # ties, also at the edges
    params = SamplingParams(**options)  # type: ignore[arg-type]
    distribution = SequencePipeline(RequestPipeline(Request("r", (1,), params, 0), VOCABULARY))
    z = distribution.apply(logits.copy(), [1], [[]] * 20)
    for row, raw in zip(softmax(z.astype(np.float64)), logits, strict=True):
        expected = oracle.distribution(
            raw, params.temperature, max(params.top_k, 0), params.top_p, params.min_p
        )
        assert ((row > 0) == (expected > 0)).all()
        np.testing.assert_allclose(row, expected, atol=1e-6)


def test_min_tokens_mask_the_ends_until_they_are_reached() -> None:
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[7])
    request = Request("r", (1,), params, 0, frozenset([3, VOCABULARY + 5]))
    distribution = SequencePipeline(RequestPipeline(request, VOCABULARY))
    z = distribution.apply(np.zeros((4, VOCABULARY), np.float32), [1], [[], [5], [5, 5], [5, 5, 5]])
    masked = np.argwhere(np.isinf(z)).tolist()
    assert masked == [[0, 3], [0, 7], [1, 3], [1, 7]]
