"""Drafts from another vocabulary change nothing, are accepted as theory says, and leak no page."""

from __future__ import annotations

import itertools
import random
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import VOCABULARY, make_engine, make_fickle, planted_pair, requests, run
from pages import check_engine, check_pool
from retokenizing import other_tokenizer, save_other

from outrider.drafters.retokenize import RetokenizeDrafter, RetokenizeSpec
from outrider.engine.engine import Engine
from outrider.models.rows import Segment
from outrider.native import choice as native
from outrider.types import Request, SamplingParams

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(native.library() is None, reason="the native step is off"),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "0.8": {"temperature": 0.8},
    "n": {"temperature": 0.8, "n": 3},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.3},
    "logprobs": {"temperature": 0.8, "logprobs": 3, "prompt_logprobs": 2, "min_p": 0.02},
    "regex": {"structured_outputs": {"regex": "[a-d]+(-[a-d]+){2,}"}, "min_tokens": 5},
}
DRAFTERS = ("{}", "{} tree", "{}+ngram", "auto+{}")
LENGTHS, CHUNKS, POOLS = (1, 4, 7), (3, 16, 512), ("ample", "tight")
NUMBERS: dict[str, dict[str, Any]] = {
    "float32": {}, "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8", "drafter_quantization": "int8"},
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = planted_pair(tmp_path_factory.mktemp("retokenize") / "target")
    save_other(folder, folder / "other", other_tokenizer())
    return folder


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    found = [[rng.randrange(1, VOCABULARY) for _ in range(n)] for n in (1, 2, 19, 40)]
    return [*found, [*found[-1][:32], 9, 8], [110, 12, 113, 14, 150] * 6]


def engine_of(target: Path, drafter: str, length: int = 4, **options: Any) -> Engine:
    name, _, tree = drafter.partition(" ")
    nodes = 3 * length if tree else None
    name = name.format(f"retokenize:{target / 'other'}")
    engine = make_engine(
        target, name, num_speculative_tokens=length, max_draft_nodes=nodes, **options
    )
    if name.startswith("auto"):
        make_fickle(engine, random.Random(length))
    return engine


def drafter_of(engine: Engine) -> RetokenizeDrafter:
    drafter = engine.speculator.drafters["retokenize"]
    assert isinstance(drafter, RetokenizeDrafter)
    return drafter


def check_drafter(engine: Engine) -> None:
    drafter = drafter_of(engine)
    check_pool(drafter._pool, [state.table for state in drafter._states.values()])
    for state in drafter._states.values():
        assert state.num_computed <= drafter._pool.page_size * len(state.table)


PLAIN: dict[tuple[str, str], dict[str, list[Any]]] = {}


def plain(target: Path, option: str, numbers: str) -> dict[str, list[Any]]:
    if (option, numbers) not in PLAIN:
        engine = make_engine(target, "none", **NUMBERS[numbers])
        params = SamplingParams(max_tokens=24, **OPTIONS[option])
        found: dict[str, list[Any]] = {}
        for request in requests(prompts(), params):
            found |= run(engine, [request])
        PLAIN[option, numbers] = found
    return PLAIN[option, numbers]


def holds(
    target: Path, drafter: str, option: str, batch: int, length: int, chunk: int, pool: str,
    numbers: str,
) -> None:  # fmt: skip
    options = {"pages": 26 if pool == "tight" else None, "max_num_batched_tokens": chunk}
    engine = engine_of(target, drafter, length, **options, **NUMBERS[numbers])
    expected = plain(target, option, numbers)
    queued = requests(prompts(), SamplingParams(max_tokens=24, **OPTIONS[option]))
    found: dict[str, list[Any]] = {}
    for first in range(0, len(queued), batch):
        found |= run(engine, queued[first : first + batch])
        check_drafter(engine)
    assert found == expected
    assert not engine.speculator.switched_off
    check_engine(engine)
    assert not drafter_of(engine)._states
    if option in ("greedy", "0.8", "n") and length > 1 and pool == "ample":
        assert 0 < engine.counts.accepted < engine.counts.nodes


CASES = [
    # Every drafter under every option, the other dimensions dealt out over them.
    (*each, (1, 4)[i % 2], LENGTHS[i % 3], CHUNKS[i // 2 % 3], POOLS[i // 3 % 2], [*NUMBERS][i % 3])
    for i, each in enumerate(itertools.product(DRAFTERS, OPTIONS))
]


@pytest.mark.equality
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_another_vocabulary_changes_nothing(target: Path, case: Any) -> None:
    holds(target, *case)


@pytest.mark.slow
@pytest.mark.equality
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("option", OPTIONS)
def test_another_vocabulary_changes_nothing_in_the_full_product(
    target: Path, drafter: str, option: str
) -> None:
    for rest in itertools.product((1, 4), LENGTHS, CHUNKS, POOLS, NUMBERS):
        holds(target, drafter, option, *rest)
