"""The reference itself: against closed forms, hand-made cases and what the papers prove."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.audit import oracle
from outrider.audit.oracle import Distribution
from outrider.sampling.noise import gumbel
from tests.support import enumeration
from tests.support.enumeration import Emissions, Model

Rule = Callable[[Model, Model, int], Emissions]
RULES: list[Rule] = [enumeration.token_rule_output_law, enumeration.block_rule_output_law]


def random_law(rng: np.random.Generator, size: int, sharpness: float = 1.0) -> Distribution:
    z = np.exp(sharpness * rng.standard_normal(size))
    return np.asarray(z / z.sum(), np.float64)


def random_model(seed: int, size: int, holes: bool = False) -> Model:
    rng = np.random.default_rng(seed)

    @cache
    def model(_: tuple[int, ...]) -> Distribution:
        p = random_law(rng, size)
        if holes:
            p[rng.integers(size)] = 0.0
            p /= p.sum()
        return p

    return model


def logits(*probabilities: float) -> NDArray[np.float64]:
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(np.array(probabilities)), np.float64)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.4, 0.1, 0.2, 0.2, 0.1]),
        ({"temperature": 0}, [1, 0, 0, 0, 0]),
        ({"temperature": 0.5}, [16 / 26, 1 / 26, 4 / 26, 4 / 26, 1 / 26]),
        ({"top_k": 2}, [0.5, 0, 0.25, 0.25, 0]),  # both that tie for the second place
        ({"top_k": 5}, [0.4, 0.1, 0.2, 0.2, 0.1]),
        ({"top_k": -1}, [0.4, 0.1, 0.2, 0.2, 0.1]),
        ({"top_p": 0.3}, [1, 0, 0, 0, 0]),
        ({"top_p": 0.5}, [2 / 3, 0, 1 / 3, 0, 0]),  # of equals the lowest id
        ({"top_p": 0.85}, [4 / 9, 1 / 9, 2 / 9, 2 / 9, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0, 0]),
        ({"min_p": 0.4}, [0.5, 0, 0.25, 0.25, 0]),
        ({"min_p": 1.0}, [1, 0, 0, 0, 0]),
        # top_p counts on what top_k left: 0.5 reaches 0.45, 0.4 would not.
        ({"top_k": 2, "top_p": 0.45}, [1, 0, 0, 0, 0]),
        # min_p looks at the distribution after the temperature: 4/26 < 0.4 * 16/26.
        ({"temperature": 0.5, "min_p": 0.4}, [1, 0, 0, 0, 0]),
    ],
)
def test_law(options: dict[str, float], expected: list[float]) -> None:
    got = oracle.distribution(logits(0.4, 0.1, 0.2, 0.2, 0.1), **options)  # type: ignore[arg-type]
    np.testing.assert_allclose(got, expected, atol=1e-12)


def test_masked_tokens_stay_out_and_greedy_ties_go_to_the_lowest_id() -> None:
    assert oracle.distribution(logits(0, 0.5, 0.5), temperature=0).tolist() == [0, 1, 0]
    assert oracle.distribution(logits(0, 0.5, 0.5), top_k=3).tolist() == [0, 0.5, 0.5]


def test_coupled_acceptance_lies_between_its_bounds() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        p, q = random_law(rng, 7, 2.0), random_law(rng, 7)
        acceptance = enumeration.coupled_acceptance(p, q)
        assert enumeration.coupled_acceptance_bound(p, q) - 1e-12 <= acceptance
        assert acceptance <= 1 - oracle.total_variation(p, q) + 1e-12
        assert enumeration.coupled_acceptance(p, p) == pytest.approx(1)
    apart = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    assert (
        enumeration.coupled_acceptance(*apart) == enumeration.coupled_acceptance_bound(*apart) == 0
    )


def test_coupled_acceptance_is_what_the_noise_does() -> None:
    rng = np.random.default_rng(2)
    p, q = random_law(rng, 9), random_law(rng, 9)
    n = 40_000
    g = gumbel([3] * n, [0] * n, range(n), 9)
    rate = float(np.mean((np.log(p) + g).argmax(1) == (np.log(q) + g).argmax(1)))
    expected = enumeration.coupled_acceptance(p, q)
    # 4.9 standard deviations: a false alarm once in 10^6 seeds, and the seed is fixed.
    assert abs(rate - expected) < 4.9 * np.sqrt(expected * (1 - expected) / n)


@pytest.mark.parametrize("length", [0, 1, 2, 3])
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_the_rules_are_exact(rule: Rule, holes: bool, length: int) -> None:
    for seed in range(3):
        target, drafter = random_model(seed, 3, holes), random_model(seed + 100, 3, holes)
        emissions = rule(target, drafter, length)
        assert sum(emissions.values()) == pytest.approx(1, abs=1e-12)
        assert {len(tokens) for tokens in emissions} <= set(range(1, length + 2))
        got = enumeration.continued(emissions, target, length + 1)
        expected = enumeration.continued({(): 1.0}, target, length + 1)
        np.testing.assert_allclose(got, expected, atol=1e-14)


@pytest.mark.parametrize("rule", RULES)
def test_the_rules_at_the_ends(rule: Rule) -> None:
    target = random_model(5, 3)
    assert enumeration.accepted_per_draft(rule(target, target, 3)) == pytest.approx(3)

    def apart(tokens: tuple[int, ...], first: bool) -> Distribution:
        return np.array([1.0, 0.0]) if first else np.array([0.25, 0.75])

    # A drafter that proposes one token for sure: accepted with p of it, else p without it.
    emissions = rule(lambda t: apart(t, False), lambda t: apart(t, True), 1)
    assert emissions == pytest.approx({(1,): 0.75, (0, 0): 0.0625, (0, 1): 0.1875})


def test_the_token_rule_accepts_the_first_token_with_one_minus_tv() -> None:
    target, drafter = random_model(7, 4), random_model(8, 4)
    emissions = enumeration.token_rule_output_law(target, drafter, 1)
    expected = 1 - oracle.total_variation(target(()), drafter(()))
    assert enumeration.accepted_per_draft(emissions) == pytest.approx(expected)


def test_the_block_rule_never_accepts_less() -> None:
    gains = []
    for seed in range(10):
        target, drafter = random_model(seed, 3), random_model(seed + 50, 3)
        token, block = (enumeration.accepted_per_draft(rule(target, drafter, 3)) for rule in RULES)
        assert block >= token - 1e-12
        gains.append(block - token)
    assert max(gains) > 0.01  # so that it is not the token rule under another name


def test_a_wrong_rule_is_seen() -> None:
    target, drafter = random_model(9, 3), random_model(10, 3)
    emissions = enumeration.token_rule_output_law(target, lambda t: drafter(()), 2)
    unconditioned = enumeration.token_rule_output_law(lambda t: target(()), drafter, 2)
    expected = enumeration.continued({(): 1.0}, target, 3)
    np.testing.assert_allclose(enumeration.continued(emissions, target, 3), expected, atol=1e-14)
    assert np.abs(enumeration.continued(unconditioned, target, 3) - expected).max() > 0.01
