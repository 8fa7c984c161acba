"""Rotary tables against transformers' own, and dynamic scaling row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.checkpoints.rope import Rope
from outrider.errors import ModelError

CPU = torch.device("cpu")
TRAINED = 32
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
}


def config_of(kind: str, **more: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_hidden_layers=1,
        max_position_embeddings=TRAINED,
        rope_parameters={"rope_type": kind, "rope_theta": 5000.0, **KINDS.get(kind, {}), **more},
    )


def theirs(config: LlamaConfig, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    half = sin.shape[-1] // 2
    return cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [TRAINED, 3 * TRAINED])
def test_tables_are_transformers(kind: str, length: int) -> None:
    config, positions = config_of(kind), torch.arange(length)
    rope = Rope(config, length, torch.float32, CPU)
    cos, sin = rope.rows(positions, [length] * length, turned=1, kept=0)
    expected_cos, expected_sin = theirs(config, positions)
    assert cos.shape == sin.shape == (length, 1, 16)
    torch.testing.assert_close(cos[:, 0], expected_cos, atol=1e-6, rtol=0)
    torch.testing.assert_close(sin[:, 0], expected_sin, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_neighbours(kind: str, dtype: torch.dtype) -> None:
    rope = Rope(config_of(kind), 96, dtype, CPU)
    positions = torch.tensor([90, 3, 31, 32, 95, 0])
    lengths = [91, 20, 80, 33, 96, 1]
    together = rope.rows(positions, lengths, turned=2, kept=1)
    for i, length in enumerate(lengths):
        alone = rope.rows(positions[i : i + 1], [length], turned=2, kept=1)
        for whole, single in zip(together, alone, strict=True):
            assert whole.dtype == dtype
            assert torch.equal(whole[i : i + 1], single)


def test_dynamic_scaling_follows_the_length() -> None:
    """Within the trained context nothing is scaled; beyond it the base grows with the length."""
    rope, plain = (
        Rope(config_of("dynamic"), 96, torch.float32, CPU),
        Rope(config_of("default"), 96, torch.float32, CPU),
    )
    at = torch.tensor([20])

    def cos(length: int, of: Rope = rope) -> torch.Tensor:
        return of.rows(at, [length], turned=1, kept=0)[0]

    torch.testing.assert_close(cos(TRAINED), cos(TRAINED, plain))
    assert torch.equal(cos(21), cos(TRAINED))
    assert not torch.allclose(cos(TRAINED + 1), cos(TRAINED))
    assert not torch.allclose(cos(60), cos(90))


def test_an_unknown_kind_is_refused() -> None:
    config = config_of("default")
    config.rope_parameters["rope_type"] = "spiral"
    with pytest.raises(ModelError, match="'spiral' is not supported natively; supported are"):
        Rope(config, 8, torch.float32, CPU)


def test_heads_that_do_not_turn_stay_as_they_are() -> None:
    cos, sin = Rope(config_of("default"), 96, torch.float32, CPU).rows(
        torch.tensor([7, 90]), [8, 91], turned=2, kept=1
    )
    assert cos.shape == sin.shape == (2, 3, 16)
    assert torch.equal(cos[:, 2], torch.ones(2, 16))
    assert torch.equal(sin[:, 2], torch.zeros(2, 16))
    assert torch.equal(cos[:, 0], cos[:, 1])
