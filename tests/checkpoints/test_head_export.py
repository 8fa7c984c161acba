"""Heads in other layouts: what is kept, what is added, and what is refused in a sentence."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.checkpoints.extras import KEY
from outrider.checkpoints.head_export import SAFEAILAB, SPECULATORS, export_head
from outrider.checkpoints.head_tensors import HeadTensors, check_tensors, drafted_ids
from outrider.checkpoints.heads import PEAGLE, Head, read_head
from outrider.errors import ConfigError, ModelError
from tests.support.commands import outrider
from tests.support.heads import Eagle, make_head, make_medusa, save_head

NOTHING: tuple[Any, ...] = (None, {}, {"verifier": None})
"""What a config may say of how its head is used without a word on it."""
EXTRAS = {KEY: {"recommended_tokens": {"chat": 3}, "measured": []}}


def made(tiny_llama: Path, folder: Path, about: Eagle, layout: str, embeds: bool = True) -> Head:
    config = AutoConfig.from_pretrained(tiny_llama)
    return read_head(save_head(make_head(about, config), folder, layout, embeds=embeds))


@pytest.mark.parametrize("drafted", [120, 320])
def test_there_and_back_again_it_is_the_same_head(
    drafted: int, tiny_llama: Path, tmp_path: Path
) -> None:
    about = Eagle(drafted=drafted, extra=EXTRAS)
    head = made(tiny_llama, tmp_path / "head", about, SAFEAILAB, embeds=False)
    (head.folder / "tokenizer.json").write_text("{}")
    (head.folder / "tokenizer").mkdir()
    os.mkfifo(head.folder / "README.md")  # nobody writes to it
    target = open_checkpoint(tiny_llama)
    export_head(head, tmp_path / "there", SPECULATORS, target, "some/target")
    there = read_head(tmp_path / "there")
    assert there.verifier == "some/target"
    names = {"config.json", "model.safetensors", "tokenizer.json"}
    assert {each.name for each in (tmp_path / "there").iterdir()} == names
    modes = [(tmp_path / "there" / name).stat().st_mode for name in names]
    assert len({*modes}) == 1  # who may read the config may read the weights
    tensors = load_file(tmp_path / "there" / "model.safetensors")
    table = load_file(tiny_llama / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(tensors["embed_tokens.weight"], table.bfloat16())
    assert ("t2d" in tensors) == (drafted < 320)
    export_head(there, tmp_path / "back", SAFEAILAB, None, None)
    back = read_head(tmp_path / "back")
    for each in (there, back):
        check_tensors(each)
        found = replace(each, files=head.files, longest=None, verifier=None, config=head.config)
        assert vars(found) == vars(head)
        if drafted < 320:
            ids = [drafted_ids(HeadTensors(h.files), h) for h in (head, each)]
            assert np.array_equal(*ids)
    assert "midlayer.self_attn.q_proj.weight" in back.files.tensors


@pytest.mark.parametrize("extra", [{}, *({"speculators_config": x} for x in NOTHING)])
def test_a_head_of_one_pass_is_written_whole(
    extra: dict[str, Any], tiny_llama: Path, tmp_path: Path
) -> None:
    about = Eagle(parallel=True, extra=extra)
    head = made(tiny_llama, tmp_path / "head", about, SPECULATORS, embeds=False)
    export_head(head, tmp_path / "out", SPECULATORS, open_checkpoint(tiny_llama), "some/target")
    again = read_head(tmp_path / "out")
    check_tensors(again)
    assert (again.kind, again.mask_token) == (PEAGLE, head.mask_token)
    assert again.verifier == "some/target"
    own, other = (HeadTensors(each.files).raw("mask_hidden") for each in (head, again))
    assert np.array_equal(own, other)


@pytest.mark.parametrize(
    ("about", "layout", "said"),
    [
        (Eagle(state_normed=True, output_normed=True), SAFEAILAB, "norm_before_residual and norm_"),
        (Eagle(depth=2), SAFEAILAB, "2 layers, which SafeAILab's code does not know"),
        (Eagle(parallel=True), SAFEAILAB, "kind peagle"),
        (Eagle(), SPECULATORS, "has no embedding, which this layout needs"),
        (Eagle(), "other", "layout is 'other'; give speculators or safeailab"),
    ],
)
def test_what_a_layout_cannot_say_is_refused(
    about: Eagle, layout: str, said: str, tiny_llama: Path, tmp_path: Path
) -> None:
    head = made(tiny_llama, tmp_path / "head", about, "speculators", embeds=False)
    with pytest.raises(ConfigError, match=said):
        export_head(head, tmp_path / "out", layout, None, None)
    assert not (tmp_path / "out").exists()


def test_an_embedding_is_that_of_the_heads_own_target(tiny_llama: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(tiny_llama)
    config.vocab_size *= 2
    save_head(make_head(Eagle(), config), tmp_path / "head", embeds=False)
    head, target = read_head(tmp_path / "head"), open_checkpoint(tiny_llama)
    with pytest.raises(ModelError, match="made for a target with a vocabulary of 640"):
        export_head(head, tmp_path / "out", SPECULATORS, target, None)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"d2t": torch.zeros(120, dtype=torch.int64) - torch.arange(120)}, "names ids twice"),
        ({"more": torch.zeros([1] * 40)}, "a tensor has 40 dimensions"),
    ],
)
def test_what_others_would_misread_is_refused(
    changed: dict[str, torch.Tensor], said: str, tiny_llama: Path, tmp_path: Path
) -> None:
    made(tiny_llama, tmp_path / "head", Eagle(), SPECULATORS)
    file = tmp_path / "head" / "model.safetensors"
    save_file({**load_file(file), **changed}, file)
    with pytest.raises(ModelError, match=said):
        export_head(read_head(tmp_path / "head"), tmp_path / "out", SPECULATORS, None, None)


def test_ids_in_another_order_stay_so(tiny_llama: Path, tmp_path: Path) -> None:
    made(tiny_llama, tmp_path / "head", Eagle(drafted=320), SPECULATORS)
    file = tmp_path / "head" / "model.safetensors"
    save_file({**load_file(file), "d2t": 319 - 2 * torch.arange(320)}, file)
    export_head(read_head(tmp_path / "head"), tmp_path / "out", SPECULATORS, None, None)
    again = read_head(tmp_path / "out")
    assert drafted_ids(HeadTensors(again.files), again) == [*reversed(range(320))]


def test_medusa_heads_keep_their_biases_in_vllm(tmp_path: Path) -> None:
    make_medusa(tmp_path / "made", 32, 64, heads=2, blocks=2)
    done = outrider("train", "export", tmp_path / "made", tmp_path / "out", "--name", "some/target")
    assert done.exit_code == 0, done.output
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {
        "medusa_num_heads": 2, "medusa_num_layers": 2, "base_model_name_or_path": "some/target",
        "hidden_size": 32, "vocab_size": 64, "medusa_fc_bias": True, "model_type": "medusa",
        "architectures": ["MedusaModel"],
    }  # fmt: skip
    check_tensors(read_head(tmp_path / "out"))


def test_borrowed_output_matrices_are_written_for_other_engines(
    tiny_llama: Path, tmp_path: Path
) -> None:
    output = load_file(tiny_llama / "model.safetensors")["lm_head.weight"]
    vocabulary, width = output.shape
    make_medusa(tmp_path / "made", width, vocabulary, heads=2, borrows=True)
    with pytest.raises(ConfigError, match="has no output matrix"):
        export_head(read_head(tmp_path / "made"), tmp_path / "out", SPECULATORS, None, None)
    done = outrider("train", "export", tmp_path / "made", tmp_path / "out", "--target", tiny_llama)
    assert done.exit_code == 0, done.output
    head = read_head(tmp_path / "out")
    assert not head.borrows_output
    check_tensors(head)
    written = load_file(tmp_path / "out" / "model.safetensors")
    for place in range(2):
        assert torch.equal(written[f"{place}.1.weight"], output.bfloat16())
