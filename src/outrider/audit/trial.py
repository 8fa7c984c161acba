"""Does a rule emit the target's law? Counts against the oracle, with a bound and no approximation.

The counts of n draws over m possible outcomes, whose probabilities p are known, are held against p
by the set A of outcomes that stands out most:

    S = max over A of n KL(seen(A) || p(A)),  KL of two Bernoulli laws

For one set P(S_A >= s) <= 2 exp(-s) (Chernoff; Hoeffding 1956 where the draws have different laws
with mean p, as counts of several contexts added up have); there are 2^m sets, A and its complement
being one. So S above m log 2 + log(1 / alpha) is a false alarm with probability alpha at most. The
set is looked for among those of the outcomes with the largest seen / p: one of them is where the
two laws differ by their total variation, and since KL >= 2 TV^2 (Pinsker), an error of total
variation 2 sqrt(threshold / (2 n)) or more is seen with probability 1 - alpha at least.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ..sampling.acceptance import AcceptanceRule
from ..sampling.draws import SharedNoise
from ..sampling.law import Laws
from ..sampling.oracle import Law
from ..types import Draft, Row
from .record import WIDTH, Recorded

CHUNK = 2**13  # draws that go through a rule at once
BASE = 100  # tokens committed when each step of a trial begins
SEEDS = 2**53

Counts = NDArray[np.float64]


@dataclass(frozen=True)
class Finding:
    """One comparison of counts with a law: ``statistic`` above ``threshold`` is an error.

    ``visible`` is the total variation that would have been seen for sure, but for ``alpha``.
    """

    what: str
    draws: int
    statistic: float
    threshold: float
    visible: float
    variation: float

    @property
    def wrong(self) -> bool:
        return self.statistic > self.threshold


def hold(what: str, counts: Counts, law: Law, alpha: float) -> Finding:
    """Compare counts with the law they should come from, at false alarm ``alpha``.

    Args:
        counts, law: of one shape; the law sums to 1.
    """
    seen, p = counts.ravel(), law.ravel()
    n = int(seen.sum())
    threshold = int((p > 0).sum()) * math.log(2) + math.log(1 / alpha)
    with np.errstate(divide="ignore", invalid="ignore"):
        order = np.argsort(-np.where(seen > 0, seen / p, 0.0))[: int((p > 0).sum())]
        # Sums from both ends, so that no share is a difference that rounding makes 0.
        a, b = seen[order].cumsum()[:-1], p[order].cumsum()[:-1]
        rest_a, rest_b = n - a, p[order][::-1].cumsum()[::-1][1:]
        terms = _term(a / n, b) + _term(rest_a / n, rest_b)
    statistic = n * float(terms.max(initial=0.0))
    if bool((seen[p == 0] > 0).any()):
        statistic = math.inf  # an outcome that the law excludes
    share = seen / n
    variation = float(np.abs(share - p).sum() / 2)
    return Finding(what, n, statistic, threshold, 2 * math.sqrt(threshold / 2 / n), variation)


def _term(x: Counts, y: Counts) -> Counts:
    """x log(x / y), 0 where x is."""
    return np.asarray(np.where(x > 0, x * np.log(x / y), 0.0), np.float64)


def emitted(
    rule: AcceptanceRule, context: Recorded, certain: bool, seeds: list[int]
) -> NDArray[np.int64]:
    """What one step of ``rule`` emits with drafts of two tokens: int64 [seeds, 3], -1 behind it.

    Args:
        certain: draft the context's own two tokens, not the drafter's draws.
        seeds: one for each draw.
    """
    n, device = len(seeds), torch.device("cpu")
    shared = SharedNoise(WIDTH, device)
    noise = rule.drafting(shared)
    rows = [[Row("", seed, 0, BASE + i, False, BASE) for seed in seeds] for i in range(3)]
    if certain or context.drafter is None:
        first, second = (torch.full((n,), token) for token in context.certain)
        laws = None
    else:
        z = context.drafter[0].expand(n, -1)
        first = torch.tensor(noise.draw(z, rows[0])[0])
        z_q = torch.stack((z, context.drafter[1][first]), 1)
        second = torch.tensor(noise.draw(z_q[:, 1], rows[1])[0])
        laws = list(z_q.unbind())
    chains = Draft.chains(torch.stack((first, second), 1).tolist())
    draft = Draft(chains.tokens, chains.parents, laws)
    root, one, two = context.target
    z_p = torch.stack((root.expand(n, -1), one[first], two[first, second]), 1).reshape(3 * n, -1)
    ordered = [row for triple in zip(*rows, strict=True) for row in triple]
    verdict = rule(Laws(z_p, ordered, list(range(0, 3 * n, 3))), draft, shared)
    lengths = np.array([len(tokens) for tokens in verdict.tokens])
    found = np.full((n, 3), -1)
    found[np.arange(3) < lengths[:, None]] = [t for tokens in verdict.tokens for t in tokens]
    return found


def continued(tokens: NDArray[np.int64], joint: Law, rng: np.random.Generator) -> Counts:
    """Counts of the next three tokens, what is missing drawn from the oracle: as ``joint``.

    What follows a token that the target never says is counted as token 0.
    """
    for i in (1, 2):
        law = joint.sum(tuple(range(i + 1, 3)))  # of the first i + 1 tokens
        missing = tokens[:, i] < 0
        rows = law[tuple(tokens[missing, :i].T)].cumsum(-1)
        u = rng.random(len(rows))[:, None] * rows[:, -1:]
        tokens[missing, i] = (rows <= u).sum(-1) % WIDTH
    return np.bincount(np.ravel_multi_index(tuple(tokens.T), joint.shape), minlength=joint.size
                       ).reshape(joint.shape).astype(np.float64)  # fmt: skip


def kinds(contexts: list[Recorded]) -> dict[str, bool]:
    """Which drafts a rule is tried with: their name, and whether they are certain."""
    drawn = {"drafted by the model": False} if contexts[0].drafter is not None else {}
    return drawn | {"certain drafts": True}


def comparisons(contexts: list[Recorded], rules: int) -> int:
    """How many comparisons ``try_rule`` makes for so many rules: the false alarm is shared out."""
    return rules * len(kinds(contexts)) * 3 * (len(contexts) + 1)


def try_rule(
    rule: AcceptanceRule,
    contexts: list[Recorded],
    draws: int,
    alpha: float,
    rng: np.random.Generator,
) -> Iterator[Finding]:
    """Hold what ``rule`` emits in each context, and in all of them together, against the oracle.

    The laws of the first token, of the first two and of all three; together, outcomes are added up
    by rank in the target's law, where errors of one kind fall together.

    Args:
        draws: of each context.
        alpha: the false alarm of one comparison.
    """
    for kind, certain in kinds(contexts).items():
        total: Counts = np.zeros((WIDTH,) * 3)
        law: Law = np.zeros((WIDTH,) * 3)
        for number, context in enumerate(contexts):
            counts: Counts = np.zeros((WIDTH,) * 3)
            for start in range(0, draws, CHUNK):
                seeds = rng.integers(0, SEEDS, min(CHUNK, draws - start)).tolist()
                tokens = emitted(rule, context, certain, seeds)
                counts += continued(tokens, context.joint, rng)
            total += counts
            law += context.joint / len(contexts)
            yield from _levels(
                f"{rule.name}, {kind}, context {number}", counts, context.joint, alpha
            )
        yield from _levels(f"{rule.name}, {kind}, all contexts", total, law, alpha)


def _levels(what: str, counts: Counts, law: Law, alpha: float) -> Iterator[Finding]:
    for level in (1, 2, 3):
        rest = tuple(range(level, 3))
        named = f"{what}, first {level} {'token' if level == 1 else 'tokens'}"
        yield hold(named, counts.sum(rest), law.sum(rest), alpha)
