"""Layers with states: transformers' models, and exact rollback of what was refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from outrider.errors import ModelError
from outrider.models.base import Model
from outrider.models.rows import Segment
from outrider.native import choice as native
from tests.support.chunked import PAGE, ids_of, logits_of, models, plain, vary
from tests.support.loading import native_model
from tests.support.native_steps import HERE, step

MakeCheckpoint = Callable[..., Path]
LENGTH = 130

FAMILIES: dict[str, dict[str, Any]] = {
    "lfm2": {
        "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3,
        "hidden_size": 48, "block_multiple_of": 8,
    },
    "lfm2 of four taps": {
        "layer_types": ["full_attention", "conv"], "hidden_size": 32, "conv_bias": True,
        "conv_L_cache": 4, "block_auto_adjust_ff_dim": False,
    },
    "qwen3_5_text": {
        "num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
    },
    "qwen3_5_text of one key head": {
        "layer_types": ["linear_attention", "full_attention"], "head_dim": 64,
        "linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_key_head_dim": 128,
        "linear_value_head_dim": 16, "linear_conv_kernel_dim": 3,
    },
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_hidden_layers": 3, "hidden_size": 48, "num_local_experts": 0, "mamba_n_heads": 6,
        "mamba_d_head": 16, "mamba_n_groups": 3, "mamba_d_state": 32, "mamba_proj_bias": True,
        "shared_intermediate_size": 52, "residual_multiplier": 0.4, "logits_scaling": 2.0,
    },
    "granitemoehybrid of one group": {
        "layer_types": ["full_attention", "linear_attention"], "num_local_experts": 0,
        "mamba_n_heads": 2, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_conv_bias": False,
        "hidden_size": 64, "mamba_d_conv": 3,
    },
    "falcon_h1": {
        "num_hidden_layers": 2, "mamba_d_ssm": 96, "mamba_n_heads": 3, "mamba_d_head": 32,
        "mamba_d_state": 16, "embedding_multiplier": 1.5, "lm_head_multiplier": 0.4,
        "mlp_multipliers": [0.8, 1.3], "ssm_multipliers": [0.7, 1.2, 0.9, 1.4, 0.6],
        "key_multiplier": 0.5, "attention_in_multiplier": 1.1, "attention_out_multiplier": 0.9,
        "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.7, "mamba_conv_bias": False,
        "tie_word_embeddings": False,
    },
    "falcon_h1 with norms": {
        "num_hidden_layers": 2, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16,
        "mamba_d_state": 32, "mamba_n_groups": 2, "mamba_rms_norm": True,
        "mamba_norm_before_gate": True,
    },
    "falcon_h1 with norms behind gates": {
        "num_hidden_layers": 2, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16,
        "mamba_d_state": 32, "mamba_n_groups": 2, "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "num_hidden_layers": None, "head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 32,
        "n_groups": 2, "ssm_state_size": 16, "chunk_size": 8, "intermediate_size": 44,
    },
}  # fmt: skip


ONE_EACH = [name for name in FAMILIES if " " not in name]
"""Of each family one: the others differ in what states are made of, not in how they are kept."""


def build(name: str, make_checkpoint: MakeCheckpoint, into: Path) -> Path:
    family, *_ = name.split()
    return vary(make_checkpoint(into, family, **FAMILIES[name]))


@pytest.fixture(scope="module", params=ONE_EACH)
def folder(
    request: pytest.FixtureRequest,
    make_checkpoint: MakeCheckpoint,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    return build(request.param, make_checkpoint, tmp_path_factory.mktemp("states"))


@pytest.mark.parametrize("name", FAMILIES)
def test_it_is_transformers_model(
    name: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Of prompts as long as windows and chunks are, and a token more."""
    folder = build(name, make_checkpoint, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    for length in (1, 3, 4, 5, 63, 64, 65, LENGTH):
        ids = ids_of(length)
        with torch.no_grad():
            expected = theirs(torch.tensor([ids])).logits[0].numpy()
        atol = max(1e-4, 3e-5 * float(np.abs(expected).max()))
        for model in models(folder):
            np.testing.assert_allclose(plain(model, ids, [length]), expected, atol=atol, rtol=0)


def test_a_rows_bits_do_not_depend_on_how_it_came(folder: Path) -> None:
    ids = ids_of(50)
    for model in models(folder, ["float32", "bfloat16"]):
        expected = plain(model, ids, [50])
        for sizes in ([1], [7, 16, 1, 1, 20], [49]):
            assert np.array_equal(plain(model, ids, sizes), expected)


def drafted(model: Model, ids: list[int], seed: int, wrong: int | None = None) -> None:
    """Three sequences with drafts of which some tokens are accepted say what plain ones say.

    Refused tokens are random, or ``wrong``.
    """
    rng, store = random.Random(seed), model.new_store(40, PAGE)
    expected = plain(model, ids, [20])
    pages = {key: range(1 + 10 * n, 11 + 10 * n) for n, key in enumerate("abc")}
    start = dict.fromkeys(pages, 20)
    for key in pages:
        logits_of(model, store, [Segment(ids[:20], 0, pages[key], 1, 20, key=key)])
    while max(start.values()) < len(ids) - 6:
        segments, accepted = [], []
        for key in rng.sample("abc", rng.randint(1, 3)):
            here, length = start[key], rng.randint(0, 5)
            accepted.append(rng.randint(0, length))
            nodes = ids[here + 1 : here + 1 + accepted[-1]]
            while len(nodes) < length:
                nodes.append(rng.randrange(127) if wrong is None else wrong)
            segments.append(
                Segment(
                    ids[here : here + 1], here, pages[key], 1 + length, 20, nodes,
                    range(-1, length - 1), key,
                )
            )  # fmt: skip
        logits, row = logits_of(model, store, segments), 0
        for segment, count in zip(segments, accepted, strict=True):
            here = segment.start
            sure = logits[row : row + 1 + count]
            assert np.array_equal(sure, expected[here : here + 1 + count])
            row += segment.logits
            start[segment.key] += 1 + count


def test_refused_drafts_leave_nothing(folder: Path) -> None:
    for model in models(folder, ["float32", "bfloat16"]):
        for seed in range(2):
            drafted(model, ids_of(80), seed)


def test_refused_drafts_that_are_no_numbers_leave_nothing(folder: Path, tmp_path: Path) -> None:
    poisoned = tmp_path / "model"
    poisoned.mkdir()
    for file in folder.iterdir():
        (poisoned / file.name).write_bytes(file.read_bytes())
    tensors = load_file(poisoned / "model.safetensors")
    table = next(tensor for name, tensor in tensors.items() if ".embed" in name)
    tensors["lm_head.weight"] = table.clone()
    table[127] = torch.nan
    save_file(tensors, poisoned / "model.safetensors", metadata={"format": "pt"})
    config = (poisoned / "config.json").read_text()
    untied = config.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    (poisoned / "config.json").write_text(untied)
    ids = [id % 127 for id in ids_of(60)]
    for model in models(poisoned):
        drafted(model, ids, 0, wrong=127)


def test_a_sequence_goes_on_behind_its_states_only(folder: Path) -> None:
    ids = ids_of(40)
    for model in models(folder):
        store = model.new_store(12, PAGE)
        first = Segment(ids[:10], 0, range(1, 10), 1, 10, [5, 6], [-1, 0], "a")
        logits_of(model, store, [first])
        for start in (9, 13):
            with pytest.raises(ModelError, match="goes on"):
                model.run([Segment(ids[:1], start, range(1, 10), 1, 10, key="a")], store)
        with pytest.raises(ModelError, match="goes on"):
            model.run([Segment(ids[:1], 10, range(1, 10), 1, 10, key="b")], store)
        expected = plain(model, ids[:12], [10])
        row = Segment(ids[10:11], 10, range(1, 10), 1, 10, key="a")
        assert np.array_equal(logits_of(model, store, [row])[0], expected[10])
        store.release("a")
        with pytest.raises(ModelError, match="goes on"):
            model.run([row._replace(start=11)], store)


def test_a_slot_begins_anew(folder: Path) -> None:
    """A sequence that takes another's place, or is read again, finds nothing of it."""
    ids = ids_of(30)
    for model in models(folder):
        store, expected = model.new_store(12, PAGE), plain(model, ids, [30])
        prompt = Segment(ids, 0, range(1, 10), 30, 30, key="a")
        for key, released in (("a", False), ("a", True), ("b", True)):
            found = logits_of(model, store, [prompt._replace(key=key)])
            assert np.array_equal(found, expected)
            if released:
                store.release(key)


@pytest.mark.skipif(native.library() is None, reason="the native step is off")
def test_hostile_segments_are_refused(folder: Path) -> None:
    model = native_model(step(HERE[-1]), folder, "float32", 256)
    store, pages = model.new_store(12, PAGE), range(1, 10)
    branches = Segment([1], 0, pages, 1, 1, [2, 3], [-1, -1], "a")
    with pytest.raises(ModelError, match="branches"):
        model.run([branches], store)
    twice = Segment([1], 0, pages, 1, 1, key="a")
    with pytest.raises(ModelError, match="one slot"):
        model.run([twice, twice], store)
    model.run([Segment([1, 2], 0, pages, 1, 2, [3, 4], [-1, 0], "c")], store)
    behind = Segment((), 2, pages, 1, 2, [3], [-1], "c")
    with pytest.raises(ModelError, match="before a committed one"):
        model.run([behind._replace(start=3)], store)
    model.run([behind], store)
