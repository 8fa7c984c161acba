"""The same in bfloat16, int8 and int4: quantised target, drafter or both, work cut up at random."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, pocket
from outrider.audit.adversary import Answers
from outrider.audit.faults import Fault
from outrider.audit.sweep import MIXES, asks, decode, open_mix
from outrider.base.types import Request, SamplingParams
from outrider.checkpoints.tokenizers import read_codec
from outrider.native.choice import library
from tests.support.exactness import (
    END,
    SAMPLING,
    VOCABULARY,
    adversary,
    alone,
    make_engine,
    make_fickle,
    planted_pair,
    run,
)

pytestmark = [
    pytest.mark.equality,
    pytest.mark.skipif(library() is None, reason="torch's products in bf16 may part at a tie"),
]

RECIPES = (None, "int8", "int8-zp", "int4", "int4-g32", "int4-zp", "int8-a8", "int4-g64-a8")
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "phi3")
DRAFTERS = (
    "none", "ngram", "suffix", "model", "wrong", "right", "ragged", "model+suffix", "auto",
)  # fmt: skip
# Groups of 128 and a shorter one behind them, rows that fill no unit.
SIZES = {"hidden_size": 160, "intermediate_size": 296, "head_dim": 40}
TOKENS = 20
LONGEST_PROMPT = 40
LONGEST_DRAFT = 8


@dataclass(frozen=True)
class Weights:
    """What target and drafter are made to; None and "none" leave them in ``dtype``."""

    target: str | None
    drafter: str = "none"
    dtype: str = "bfloat16"

    def options(self) -> dict[str, Any]:
        """As ``EngineConfig`` has it."""
        return {
            "dtype": self.dtype,
            "quantization": self.target,
            "drafter_quantization": self.drafter,
        }


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: planted_pair(tmp_path_factory.mktemp(family), family, **SIZES)
        for family in FAMILIES
    }


def _mixed(rng: random.Random, count: int, temperate: bool = False) -> list[Request]:
    """Requests that share nothing: prompt, length, options and seed are each one's own."""
    found: list[Request] = []
    for i in range(count):
        start = (4 + i,)  # tells prompts apart, as an adversary wants it
        body = [rng.randrange(4, VOCABULARY) for _ in range(rng.randint(0, 12))]
        prompt = start + tuple(body * rng.randint(1, 3))[:LONGEST_PROMPT]
        option = {"temperature": 0.8} if temperate else rng.choice(list(SAMPLING.values()))
        params = SamplingParams(max_tokens=rng.randint(12, TOKENS), **option)
        found.append(Request(f"r{i}", prompt, params, rng.randrange(2**53), frozenset([END])))
    return found


def _drafted(
    folder: Path,
    weights: Weights,
    drafter: str,
    queued: list[Request],
    expected: dict[str, list[Any]],
    rng: random.Random,
) -> dict[str, list[Any]]:
    """The same in random company: chunks, draft length, cache, order and time of arrival."""
    length = rng.randint(1, LONGEST_DRAFT)
    least = -(-(LONGEST_PROMPT + 1 + TOKENS + LONGEST_DRAFT) // 4) + 2
    engine = make_engine(
        folder,
        adversary(drafter, queued, expected, length),
        pages=rng.choice((None, rng.randint(least, 2 * least))),
        max_num_batched_tokens=rng.choice((1, 2, 3, 5, 16, 33, 512)),
        max_num_seqs=rng.choice((1, 2, 3, 5, 9, 32)),
        num_speculative_tokens=length,
        **weights.options(),
    )
    if drafter == "auto":
        make_fickle(engine, rng)
    order = rng.sample(queued, len(queued))
    found = run(engine, order, arrival=rng)
    if drafter in ("model", "wrong", "right", "model+suffix", "auto"):
        assert engine.counts.drafted > 0
    return found


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(r, marks=pytest.mark.engine) if i % 2 else r for i, r in enumerate(RECIPES)],
)
def test_a_low_bit_target_says_the_same_whatever_drafts(
    pair: dict[str, Path], recipe: str | None
) -> None:
    rng, weights = random.Random(str(recipe)), Weights(recipe)
    folder = pair[FAMILIES[RECIPES.index(recipe) % len(FAMILIES)]]
    queued = _mixed(rng, 5)
    expected = alone(folder, queued, **weights.options())
    for drafter in DRAFTERS:
        assert _drafted(folder, weights, drafter, queued, expected, rng) == expected, drafter


@pytest.mark.parametrize("drafter", RECIPES[1:])
@pytest.mark.parametrize("target", [None, pytest.param("int4-g32", marks=pytest.mark.engine)])
def test_a_low_bit_drafter_changes_nothing(
    pair: dict[str, Path], target: str | None, drafter: str
) -> None:
    rng = random.Random(f"{target} {drafter}")
    queued = _mixed(rng, 4, temperate=True)
    expected = alone(pair["qwen3"], queued, **Weights(target).options())
    weights = Weights(target, drafter)
    for name in ("model", "auto"):
        assert _drafted(pair["qwen3"], weights, name, queued, expected, rng) == expected, name


@pytest.mark.slow
@pytest.mark.parametrize("number", range(100))
def test_random_work_of_any_bits_says_the_same(pair: dict[str, Path], number: int) -> None:
    rng = random.Random(number)
    recipes = (*RECIPES, "int8-g32", "int8-g64-zp", "int4-g64", "int4-channel", "int4-g32-zp")
    weights = Weights(
        recipes[number % len(recipes)],
        rng.choice(("none", *recipes[1:])),
        "float32" if rng.random() < 0.2 else "bfloat16",
    )
    folder = pair[rng.choice(FAMILIES)]
    queued = _mixed(rng, 12)
    expected = alone(folder, queued, **weights.options())
    for drafter in (*DRAFTERS, "model", "ragged"):
        found = _drafted(folder, weights, drafter, queued, expected, rng)
        assert found == expected, (weights, drafter)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["none", "int8-a8", "int4"])
@pytest.mark.parametrize("target", [None, "int8", "int8-a8", "int4", "int4-g32-a8", "int4-zp"])
def test_the_pocket_pair_says_the_same_in_any_bits(target: str | None, drafter: str) -> None:
    """The audit's mixes and options, in bf16 and bit for bit: no tie is granted."""
    rng = random.Random(f"{target} {drafter}")
    options = {"model": pocket.PATH, "max_model_len": 128, **Weights(target, drafter).options()}
    plain = LLM(**options, drafter=None, max_num_seqs=1)
    codec = read_codec(pocket.PATH)
    prompts = [codec.encode(text)[: rng.randint(8, 64)] for text in pocket.prompts()[:4]]
    longest = max(map(len, prompts)) + TOKENS
    shape = plain.engine.model.shape
    queued = asks(prompts, TOKENS, 1, shape.vocab_size, True, rng)
    answers: Answers = {
        (ask.params.seed or 0, index): ids
        for ask in queued
        for _, samples in decode(plain, [ask], 1)
        for index, ids in enumerate(samples)
    }
    budget = LLM(**options).engine.budget
    page = (budget.target_bytes + budget.drafter_bytes) // budget.pages
    for mix in MIXES:
        llm = open_mix(mix, options, page, answers, longest, rng, Fault("none"))
        for ask, samples in decode(llm, queued, mix.batch):
            for index, ids in enumerate(samples):
                assert ids == answers[ask.params.seed or 0, index], (str(mix), ask)
