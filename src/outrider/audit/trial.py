"""Tests whether a rule emits the target's distribution: counts against the oracle, by a bound.

Counts of n draws over m possible outcomes of known probabilities p are compared with p by the set
A of outcomes that deviates most:

    S = max over A of n KL(seen(A) || p(A)),  KL of two Bernoulli distributions

For one set P(S_A >= s) <= 2 exp(-s) (Chernoff; Hoeffding 1956 where the draws have different
distributions with mean p, as the sum over contexts has). There are 2^m sets, and A and its
complement count as one. So S above m log 2 + log(1 / alpha) is a false alarm with probability alpha
at most. The search tries the sets of outcomes with the largest seen / p. On one of them the two
distributions differ by their total variation, and since KL >= 2 TV^2 (Pinsker), an error of total
variation 2 sqrt(threshold / (2 n)) or more is seen with probability 1 - alpha at least.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..base.types import Draft, Row
from ..sampling.acceptance import AcceptanceRule
from ..sampling.pipeline import Logits, StepLogits
from ..sampling.shared_noise import SharedNoise
from .contexts import LOCAL_IDS, Recorded
from .oracle import Distribution

DRAWS_AT_ONCE = 2**13  # draws that go through a rule at once
COMMITTED_TOKENS = 100  # tokens committed before each step of a trial
SEEDS = 2**53

Counts = NDArray[np.float64]


@dataclass(frozen=True)
class CountsFinding:
    """Counts against a distribution; a total variation of ``visible`` is seen with 1 - alpha."""

    what: str
    draws: int
    statistic: float
    threshold: float
    visible: float
    variation: float

    @property
    def wrong(self) -> bool:
        return self.statistic > self.threshold


def hold(what: str, counts: Counts, distribution: Distribution, alpha: float) -> CountsFinding:
    """Return the comparison of counts with their distribution; ``alpha`` bounds false alarms."""
    seen, p = counts.ravel(), distribution.ravel()
    n = int(seen.sum())
    threshold = int((p > 0).sum()) * math.log(2) + math.log(1 / alpha)
    with np.errstate(divide="ignore", invalid="ignore"):
        order = np.argsort(-np.where(seen > 0, seen / p, 0.0))[: int((p > 0).sum())]
        # Sums from both ends, since rounding could make a difference of sums 0.
        a, b = seen[order].cumsum()[:-1], p[order].cumsum()[:-1]
        rest_a, rest_b = n - a, p[order][::-1].cumsum()[::-1][1:]
        terms = _term(a / n, b) + _term(rest_a / n, rest_b)
    statistic = n * float(terms.max(initial=0.0))
    if bool((seen[p == 0] > 0).any()):
        statistic = math.inf  # an outcome that the distribution excludes
    variation = float(np.abs(seen / n - p).sum() / 2)
    return CountsFinding(what, n, statistic, threshold, 2 * math.sqrt(threshold / 2 / n), variation)


def _term(x: Counts, y: Counts) -> Counts:
    """Return x log(x / y), 0 where x is 0."""
    return np.asarray(np.where(x > 0, x * np.log(x / y), 0.0), np.float64)


def emitted(
    rule: AcceptanceRule, context: Recorded, certain: bool, seeds: list[int]
) -> NDArray[np.int64]:
    """Return the tokens of one step of ``rule`` with drafts of two tokens: int64 [seeds, 3].

    ``certain`` drafts the context's own two tokens instead of the drafter's draws. Tokens after
    those that the step emits are -1.
    """
    n = len(seeds)
    shared = SharedNoise(LOCAL_IDS)
    noise = rule.drafting(shared)
    rows = [
        [Row("", seed, 0, COMMITTED_TOKENS + i, False, COMMITTED_TOKENS) for seed in seeds]
        for i in range(3)
    ]
    if certain or context.drafter is None:
        first, second = (np.full(n, token) for token in context.certain)
        distributions: list[Logits] | list[None] = [None] * n
    else:
        z = np.broadcast_to(context.drafter[0], (n, LOCAL_IDS))
        first = np.array(noise.draw(z, rows[0])[0])
        z_q = np.stack((z, context.drafter[1][first]), 1)
        second = np.array(noise.draw(z_q[:, 1], rows[1])[0])
        distributions = list(z_q)
    chains = Draft.chains(np.stack((first, second), 1).tolist())
    pairs = zip(chains, distributions, strict=True)
    draft = Draft(nodes._replace(logits=z) for nodes, z in pairs)
    root, one, two = context.target
    after = np.broadcast_to(root, (n, LOCAL_IDS)), one[first], two[first, second]
    z_p = np.stack(after, 1).reshape(3 * n, -1)
    ordered = [row for triple in zip(*rows, strict=True) for row in triple]
    verdict = rule(StepLogits(z_p, ordered, list(range(0, 3 * n, 3))), draft, shared)
    lengths = np.array([len(emitted) for emitted in verdict.tokens])
    tokens = np.full((n, 3), -1)
    tokens[np.arange(3) < lengths[:, None]] = [t for emitted in verdict.tokens for t in emitted]
    return tokens


def continued(tokens: NDArray[np.int64], joint: Distribution, rng: np.random.Generator) -> Counts:
    """Return counts of the next three tokens; missing ones are drawn from the oracle."""
    for i in (1, 2):
        distribution = joint.sum(tuple(range(i + 1, 3)))  # of the first i + 1 tokens
        missing = tokens[:, i] < 0
        rows = distribution[tuple(tokens[missing, :i].T)].cumsum(-1)
        u = rng.random(len(rows))[:, None] * rows[:, -1:]
        tokens[missing, i] = (rows <= u).sum(-1) % LOCAL_IDS
    return np.bincount(np.ravel_multi_index(tuple(tokens.T), joint.shape), minlength=joint.size
                       ).reshape(joint.shape).astype(np.float64)  # fmt: skip


def kinds(contexts: list[Recorded]) -> dict[str, bool]:
    """Return the kinds of drafts a rule is tried with, and whether they are certain."""
    drawn = {"drafted by the model": False} if contexts[0].drafter is not None else {}
    return drawn | {"certain drafts": True}


def comparisons(contexts: list[Recorded], rules: int) -> int:
    """Return how many comparisons ``try_rule`` makes for ``rules`` rules."""
    return rules * len(kinds(contexts)) * 3 * (len(contexts) + 1)


def try_rule(
    rule: AcceptanceRule, contexts: list[Recorded], draws: int, alpha: float,
    rng: np.random.Generator,
) -> Iterator[CountsFinding]:  # fmt: skip
    """Compare what ``rule`` emits in each context, and in all together, with the oracle.

    It compares the first token, the first two, and all three, with ``draws`` draws for each
    context. Sums over contexts add outcomes of the same rank in the target's distribution, so that
    errors of one kind add up. ``alpha`` is the probability of a false alarm of one comparison.
    """
    for kind, certain in kinds(contexts).items():
        total: Counts = np.zeros((LOCAL_IDS,) * 3)
        distribution: Distribution = np.zeros((LOCAL_IDS,) * 3)
        for number, context in enumerate(contexts):
            counts: Counts = np.zeros((LOCAL_IDS,) * 3)
            for start in range(0, draws, DRAWS_AT_ONCE):
                seeds = rng.integers(0, SEEDS, min(DRAWS_AT_ONCE, draws - start)).tolist()
                tokens = emitted(rule, context, certain, seeds)
                counts += continued(tokens, context.joint, rng)
            total += counts
            distribution += context.joint / len(contexts)
            yield from _levels(
                f"{rule.name}, {kind}, context {number}", counts, context.joint, alpha
            )
        yield from _levels(f"{rule.name}, {kind}, all contexts", total, distribution, alpha)


def _levels(
    name: str, counts: Counts, distribution: Distribution, alpha: float
) -> Iterator[CountsFinding]:
    for level in (1, 2, 3):
        rest = tuple(range(level, 3))
        level_name = f"{name}, first {level} {'token' if level == 1 else 'tokens'}"
        yield hold(level_name, counts.sum(rest), distribution.sum(rest), alpha)
