"""The prompts of an audit, and the choice of those on which an error would show."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .answers import Token
from .distributions import AnswerContext, Biased, Laws, Prompt
from .sampling import Sampling, expected, plain

TEXTS = (
    "red, green, blue, red, blue, green, red,",
    "heads tails tails heads tails heads heads tails",
    "1 2 2 1 1 2 1 2 2 2 1 1 2",
    "The quick brown fox jumps over the",
    "Once upon a time there was a",
    "A B B A A B A B B B A A",
    "yes no no yes yes no yes no no yes",
    "def add(a, b):\n    return",
    "import os\nimport sys\nimport",
    "The weather today is",
    "She said that she would",
    "My favourite colour is",
    "x = 1\ny = 2\nz =",
    "one two three one two four one two",
    '{"name": "Alice", "age":',
    "Dear Sir or Madam, I am writing to",
)
LEAST_EFFECT = 0.05
"""Least effect, as total variation, that makes a prompt worth its draws."""


def effect(
    laws: Laws, prompt: Prompt, before: tuple[Token, ...], sampling: Sampling, biased: Biased
) -> float:
    """Return how far options move a law, or how far it is spread; 0 where it is not known."""
    law = laws.get(AnswerContext(prompt, before))
    if law is None:
        return 0.0
    cells = expected(law, sampling, before, biased.get(prompt))
    if cells is None:
        return 0.0
    if not sampling.truncates and not sampling.reweighs:
        return float(plain(law)[:-1].sum() * (1 - max(law.p)))
    named = np.array([*plain(law)[:-1], 0.0 if sampling.reweighs else plain(law)[-1]])
    share = named.sum() if sampling.reweighs else 1.0
    return float(share * np.abs(cells - named / named.sum()).sum() / 2)


def chosen(
    laws: Laws, prompts: Sequence[Prompt], sampling: Sampling, biased: Biased, most: int
) -> list[Prompt]:
    """Return the prompts on which an error would show best."""
    scores = {}
    for prompt in prompts:
        law = laws.get(AnswerContext(prompt, ()))
        after = () if law is None else (law.tokens[0],)
        first = effect(laws, prompt, (), sampling, biased)
        second = effect(laws, prompt, after, sampling, biased)
        # Draws behind the likeliest token are as many as the token is likely.
        scores[prompt] = first + 2 * second * (0 if law is None else law.p[0])
    ranked = sorted(prompts, key=lambda prompt: -scores[prompt])
    return [prompt for prompt in ranked[:most] if scores[prompt] > LEAST_EFFECT] or ranked[:1]
