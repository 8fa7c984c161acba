"""Benchmarks of random weights build each of their shapes: here with small sizes."""

from typing import Any

import pytest

from benchmarks import hybrids, mixtures
from outrider.native import choice as native

SMALL = {
    "vocab_size": 160, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "moe_intermediate_size": 128, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.skipif(native.library() is None, reason="needs the native step")
@pytest.mark.parametrize("dtype", ["int4-a8", "bf16"])
@pytest.mark.parametrize("name", mixtures.SHAPES)
def test_mixtures_are_measured(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mixtures.SHAPES, name, mixtures.SHAPES[name] | SMALL)
    monkeypatch.setattr(mixtures, "READ_BYTES", 1 << 18)
    found = mixtures.measure(name, dtype, None, 1, 16)
    assert found["layers"] == 2
    assert 2 <= found["experts_2"] <= found["experts_5"] <= 4  # those that a layer's rows go to
    assert found["batch_32_experts"] <= 4


@pytest.mark.skipif(native.library() is None, reason="needs the native step")
@pytest.mark.parametrize("name", hybrids.SHAPES)
def test_hybrids_are_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = hybrids.SHAPES[name]["num_hidden_layers"]
    sizes: dict[str, Any] = SMALL | {"num_hidden_layers": layers}
    sizes.pop("head_dim")
    sizes |= {"num_local_experts": 0, "shared_intermediate_size": 128}
    monkeypatch.setitem(hybrids.SHAPES, name, hybrids.SHAPES[name] | sizes)
    model = hybrids.build(hybrids.SHAPES[name], "int4-a8")
    assert hybrids.Steps(model).step(2) > 0
