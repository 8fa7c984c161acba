"""Drafts change nothing in any family: windows, caps, experts, and what transformers runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.audit.adversary import AdversarySpec
from outrider.base.types import SamplingParams
from outrider.errors import ConfigError
from outrider.models.fallback import Fallback, SequenceStore
from tests.support.exactness import (
    VOCABULARY,
    adversary,
    alone,
    in_batches,
    make_engine,
    planted_pair,
    requests,
)

NATIVE = ("mistral", "gemma2", "qwen3_moe")
OTHERWISE = ("olmo2", "phi3", "smollm3")
"""Norms behind, ropes by length, layers without a rope."""
FALLBACK = ("starcoder2", "mixtral")
LOOKUPS = ("ngram", "suffix")
PROMPTS = [
    [(7 * i) % 190 + 5 for i in range(19)],  # longer than a window
    [11, 12, 13, 14, 15] * 5,
    [40, 50],
]


def _params(temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return functools.cache(lambda family: planted_pair(tmp_path_factory.mktemp(family), family))


@pytest.fixture(scope="module")
def plain(pair: Callable[[str], Path]) -> Callable[[str, float], dict[str, list[Any]]]:
    """Plain decoding, by family and temperature."""
    return functools.cache(
        lambda family, temperature: alone(pair(family), requests(PROMPTS, _params(temperature)))
    )


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("family", "drafter"),
    [
        *[(family, drafter) for family in NATIVE for drafter in (*LOOKUPS, "model", "ragged")],
        *[(family, drafter) for family in OTHERWISE for drafter in ("ngram", "ragged")],
        # One of the lookups: to a model both are chains, and the native families have the other.
        *[(family, drafter) for family in FALLBACK for drafter in ("none", "ngram", "model")],
        ("starcoder2", "wrong"),
        ("starcoder2", "right"),
    ],
)
def test_drafts_change_nothing(
    family: str,
    drafter: str,
    temperature: float,
    batch: int,
    pair: Callable[[str], Path],
    plain: Callable[[str, float], dict[str, list[Any]]],
) -> None:
    expected = plain(family, temperature)
    queued = requests(PROMPTS, _params(temperature))
    engine = make_engine(
        pair(family),
        adversary(drafter, queued, expected, 4),
        pages=18 if batch == 3 else None,  # tight: some are preempted and computed anew
        max_num_batched_tokens=7 if batch == 3 else 512,
        num_speculative_tokens=4,
    )
    assert isinstance(engine.model, Fallback) == (family in FALLBACK)
    assert in_batches(engine, queued, batch) == expected
    counts = engine.counts
    if drafter == "wrong":
        assert counts.accepted == 0 < counts.drafted
    elif drafter == "right":
        assert counts.accepted == counts.drafted > 0
    elif drafter in ("model", "ragged"):
        assert 0 < counts.accepted < counts.nodes
    if isinstance(engine.verifier.store, SequenceStore):
        assert engine.verifier.store.kept == {}  # nothing outlives its sequence


def test_trees_are_refused_without_a_native_path(pair: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"'starcoder2' model .* cannot verify the trees of"):
        make_engine(pair("starcoder2"), AdversarySpec("ragged"))
    make_engine(pair("mistral"), AdversarySpec("ragged"))


def test_a_plain_draw_uses_much_of_the_vocabulary(
    plain: Callable[[str, float], dict[str, list[Any]]],
) -> None:
    """Else equal outputs would say little."""
    for family in (*NATIVE, *FALLBACK):
        outputs = [ids for name, ids in plain(family, 0.8).items() if name.endswith("/0")]
        assert len({t for ids in outputs for t in ids}) > 15, family
        assert all(0 <= t < VOCABULARY for ids in outputs for t in ids)
