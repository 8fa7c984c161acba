"""Keys and values in codes of 8 bits: how near they are, their size, and that output stays exact.

``test_rows.py`` has what a cache of any kind owes its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from outrider import pocket
from outrider.base.types import SamplingParams
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.errors import ConfigError
from outrider.llm import LLM
from outrider.models.base import Model
from outrider.models.load import load_model
from outrider.models.rows import Segment
from outrider.native import choice as native
from tests.support.loading import native_model
from tests.support.native_steps import HERE, step

MakeCheckpoint = Callable[..., Path]
PAGE = 16
LENGTH = 70
IDS = [(7 * i * i + 3) % 128 for i in range(LENGTH)]

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native step is off")

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 1},
    "mistral": {"sliding_window": 20, "head_dim": 24, "hidden_size": 40, "intermediate_size": 52},
    "gemma2": {"head_dim": 256, "sliding_window": 20, "attn_logit_softcapping": 1.5},
}


def logits_of(model: Model) -> NDArray[np.float32]:
    pages = range(1, 1 + -(-LENGTH // PAGE))
    store = model.new_store(1 + len(pages), PAGE)
    logits = model.run([Segment(IDS, 0, pages, LENGTH, LENGTH)], store).logits
    assert logits is not None
    return np.asarray(logits)


def error_of(isa: str, folder: Path) -> float:
    """The codes' error of logits, as a share of their spread."""
    coded, plain = (
        logits_of(native_model(step(isa), folder, "float32", 256, coded_cache=each))
        for each in (True, False)
    )
    return float((coded - plain).std() / plain.std())


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_near_those_of_whole_numbers(
    family: str, isa: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    error = error_of(isa, make_checkpoint(tmp_path, family, **FAMILIES[family]))
    assert 0 < error < 0.02


@pytest.mark.parametrize("isa", HERE)
def test_large_biases_of_keys_cost_nothing(
    isa: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """As Qwen2.5's: of elements that hardly turn, and a hundred times what others have."""
    folder = make_checkpoint(
        tmp_path, "qwen2", head_dim=64, hidden_size=128, num_attention_heads=2,
        num_key_value_heads=1, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    tensors = load_file(folder / "model.safetensors")
    for name, bias in tensors.items():
        if name.endswith("k_proj.bias"):
            bias[[28, 29, 30, 31, 60, 61, 62, 63]] = 150.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert error_of(isa, folder) < 0.02


def test_they_take_8_bits_and_a_half(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", head_dim=64)
    coded, plain = (
        native_model(step(HERE[-1]), folder, "float32", 256, coded_cache=each).page_bytes(PAGE)
        for each in (True, False)
    )
    assert coded / plain == 8.5 / 32


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafter", ["model", "suffix", "model+suffix"])
def test_what_drafts_changes_no_output(drafter: str, temperature: float) -> None:
    prompts = pocket.prompts()[:3]
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40)
    options: dict[str, Any] = {"kv_cache_dtype": "int8", "max_num_seqs": 4}
    plain, drafted = (
        [output.outputs[0].token_ids for output in LLM(pocket.PATH, of, **options).generate(
            prompts, params)]
        for of in (None, drafter)
    )  # fmt: skip
    assert drafted == plain


def test_it_needs_the_native_step(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uncovered = open_checkpoint(make_checkpoint(tmp_path / "gelu", "llama", hidden_act="gelu"))
    covered = open_checkpoint(make_checkpoint(tmp_path / "silu", "llama"))
    with pytest.raises(ConfigError, match="kv_cache_dtype is int8, which needs the native step"):
        load_model(uncovered, "float32", "cpu", 256, coded_cache=True)
    monkeypatch.setenv(native.VARIABLE, "off")
    with pytest.raises(ConfigError, match="kv_cache_dtype is int8, which needs the native step"):
        load_model(covered, "float32", "cpu", 256, coded_cache=True)
