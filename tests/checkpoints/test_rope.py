"""Rotary tables against transformers' own, and dynamic scaling row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.checkpoints.frequencies import _powers, frequencies
from outrider.checkpoints.rope import Rope
from outrider.errors import ModelError
from outrider.models.turns import Turns

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
    rope = Turns(config, length, torch.float32, CPU)
    cos, sin = rope.rows(positions, [length] * length, turned=1, kept=0)
    expected_cos, expected_sin = theirs(config, positions)
    assert cos.shape == sin.shape == (length, 1, 16)
    torch.testing.assert_close(cos[:, 0], expected_cos, atol=1e-6, rtol=0)
    torch.testing.assert_close(sin[:, 0], expected_sin, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_neighbours(kind: str, dtype: torch.dtype) -> None:
    rope = Turns(config_of(kind), 96, dtype, CPU)
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
        Turns(config_of("dynamic"), 96, torch.float32, CPU),
        Turns(config_of("default"), 96, torch.float32, CPU),
    )
    at = torch.tensor([20])

    def cos(length: int, of: Turns = rope) -> torch.Tensor:
        return of.rows(at, [length], turned=1, kept=0)[0]

    torch.testing.assert_close(cos(TRAINED), cos(TRAINED, plain))
    assert torch.equal(cos(21), cos(TRAINED))
    assert not torch.allclose(cos(TRAINED + 1), cos(TRAINED))
    assert not torch.allclose(cos(60), cos(90))


def test_an_unknown_kind_is_refused() -> None:
    config = config_of("default")
    config.rope_parameters["rope_type"] = "spiral"
    with pytest.raises(ModelError, match="'spiral' is not supported natively; supported are"):
        Turns(config, 8, torch.float32, CPU)


def test_heads_that_do_not_turn_stay_as_they_are() -> None:
    cos, sin = Turns(config_of("default"), 96, torch.float32, CPU).rows(
        torch.tensor([7, 90]), [8, 91], turned=2, kept=1
    )
    assert cos.shape == sin.shape == (2, 3, 16)
    assert torch.equal(cos[:, 2], torch.ones(2, 16))
    assert torch.equal(sin[:, 2], torch.zeros(2, 16))
    assert torch.equal(cos[:, 0], cos[:, 1])


FREQUENCIES = {
    **KINDS,
    "llama3 of Llama 3.1": KINDS["llama3"] | {"original_max_position_embeddings": 8192},
    "yarn of Qwen": {
        "factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 24, "beta_slow": 2.0,
        "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.5,
    },
    "yarn with a factor": KINDS["yarn"] | {"attention_factor": 1.25},
    "longrope": {
        "short_factor": [1 + 0.013 * n for n in range(64)],
        "long_factor": [1.5 + 0.113 * n for n in range(64)],
        "original_max_position_embeddings": 4096,
    },
    "longrope with a factor": {
        "short_factor": [1.0] * 64, "long_factor": [2.0] * 64, "attention_factor": 1.0,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip


def both(name: str, base: float, length: int) -> tuple[Any, Any]:
    """Return the frequencies and the factor of transformers and of ours."""
    kind = name.split()[0]
    ropes = {"rope_type": kind, "rope_theta": base, **FREQUENCIES[name]}
    config = LlamaConfig(
        hidden_size=512, num_attention_heads=4, max_position_embeddings=16384, rope_parameters=ropes
    )
    if kind == "default":
        theirs = LlamaRotaryEmbedding(config).inv_freq, 1.0
    else:
        theirs = ROPE_INIT_FUNCTIONS[kind](config, CPU, seq_len=length or None)
    return theirs, frequencies(kind, config.rope_parameters, 128, 16384, length)


@pytest.mark.parametrize("name", FREQUENCIES)
@pytest.mark.parametrize("base", [1e4, 1.5e5, 1e6])
@pytest.mark.parametrize("length", [0, 40000])
def test_frequencies_are_transformers_to_the_bit_but_for_powers(
    name: str, base: float, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torchs(base: float, size: int) -> Any:
        exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
        return (base**exponents).numpy()

    monkeypatch.setattr("outrider.checkpoints.frequencies._powers", torchs)
    (expected, factor), (found, own) = both(name, base, length)
    assert found.dtype == np.float32
    assert np.array_equal(found, expected.numpy())
    assert own == factor


@pytest.mark.parametrize("size", [16, 80, 128, 256])
@pytest.mark.parametrize("base", [1e4, 1.5e5, 5e5, 1e6, 1e9])
def test_powers_are_torchs_to_a_unit_in_the_last_place(size: int, base: float) -> None:
    """Ours are the nearest fp32; torch's differ between processors."""
    theirs = (base ** (torch.arange(0, size, 2).float() / size)).numpy()
    apart = _powers(base, size).view(np.int32) - theirs.view(np.int32)
    assert np.abs(apart).max() <= 1


@pytest.mark.parametrize("factor", [1e-45, 1e-37])
def test_factors_of_far_rows_that_give_no_angles_are_refused(factor: float) -> None:
    parts = {"short_factor": [1.0] * 8, "long_factor": [factor] * 8}
    config = config_of("longrope", original_max_position_embeddings=16, factor=2.0, **parts)
    rope = Rope(config, 512)
    assert np.isfinite(rope.halves()).all()
    with pytest.raises(ModelError, match="no finite numbers"):
        rope.halves(far=True)
