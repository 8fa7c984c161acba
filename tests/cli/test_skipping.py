"""The benchmark of layerskip: what it plants, and how it measures agreement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import skipping
from benchmarks.peers.pairs import write_tokenizer
from outrider.native import choice as native

LAYERS = 8
SIZES: dict[str, Any] = {
    **skipping.SIZES, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 1,
    "num_key_value_heads": 1, "initializer_range": 0.15,
}  # fmt: skip


def test_a_seed_draws_the_sublayers() -> None:
    drawn = [skipping.useless(seed, 24) for seed in range(9)]
    assert len({*drawn}) == 9
    assert {len(each) for each in drawn} == {19}  # 45 % of 44
    assert {*range(2, 46)} >= {sublayer for each in drawn for sublayer in each}


@pytest.mark.skipif(native.library() is None, reason="the native step is off")
def test_agreement_is_what_the_factor_leaves(tmp_path: Path) -> None:
    texts, little, found = skipping.texts(4, 1, 4096), skipping.useless(1, LAYERS), []
    for factor in (0.001, 0.2):
        folder = tmp_path / str(factor)
        skipping.planted(1, LAYERS, factor, **SIZES).save_pretrained(folder)
        write_tokenizer(folder, SIZES["vocab_size"])
        found.append(skipping.agreement(folder, little, texts, 24, 0.0))
    assert found[0] > 0.97
    assert 0.1 < found[1] < 0.9
