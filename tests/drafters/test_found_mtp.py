"""`auto` goes on without MTP layers that it found by itself and that do not load."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from outrider import LLM, SamplingParams
from outrider.checkpoints.files import Files
from outrider.drafters.check import check_mtp
from outrider.drafters.mtp import MtpSpec
from outrider.engine.probe import checkpoint
from outrider.errors import OutriderError
from outrider.native import choice as native
from tests.support.ggufs import byte_level, convert
from tests.support.mtp import with_layer

MakeCheckpoint = Callable[..., Path]
FAMILY, WIDTH = "qwen3_5_text", 48
SIZES = {
    "layer_types": ["linear_attention", "full_attention"], "head_dim": 16, "hidden_size": WIDTH,
    "intermediate_size": 64, "num_attention_heads": 3, "num_key_value_heads": 1,
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
pytestmark = pytest.mark.skipif(native.library() is None, reason="the native step is off")
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


BROKEN = {"fc": torch.ones(WIDTH, WIDTH), "up_proj": None, "q_norm": torch.ones(3)}


@pytest.mark.parametrize("part", BROKEN)
def test_layers_that_do_not_fit_are_left_out_and_named(
    part: str, make_checkpoint: MakeCheckpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = make_checkpoint(tmp_path / "model", FAMILY, tokenizer=True, **SIZES)
    folder = with_layer(made, FAMILY, **{part: BROKEN[part]})
    plain = LLM(folder, drafter="none", max_model_len=64).generate("abc", PARAMS)
    with caplog.at_level(logging.WARNING, "outrider"):
        (found,) = LLM(folder, max_model_len=64).generate("abc", PARAMS)
    assert found.outputs[0].token_ids == plain[0].outputs[0].token_ids
    assert "auto goes on without the MTP layers in" in caplog.text
    with pytest.raises(OutriderError, match=part):
        LLM(folder, drafter="mtp", max_model_len=64)
    wrong = [fact for fact in check_mtp(folder)[1] if not fact.fits]
    assert [part in fact.what for fact in wrong] == [True]
    assert part in str(checkpoint(str(folder))["no_mtp"])


def test_a_target_that_torch_runs_goes_without(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    made = make_checkpoint(tmp_path / "model", FAMILY, tokenizer=True, **SIZES)
    llm = LLM(with_layer(made, FAMILY), dtype="float16", max_model_len=64)
    assert len(llm.generate("abc", PARAMS)[0].outputs[0].token_ids) == 6


def test_stray_and_foreign_layers_are_not_counted(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    made = make_checkpoint(tmp_path / "q", FAMILY, tokenizer=True, **SIZES)
    folder = with_layer(made, FAMILY)
    tensors = load_file(folder / "model.safetensors")
    tensors["mtp.layers.9999.x.weight"] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert checkpoint(str(folder))["mtp"] == 1
    assert all(fact.fits for fact in check_mtp(folder)[1])
    other = make_checkpoint(tmp_path / "l", "llama", tokenizer=True, hidden_size=WIDTH)
    assert MtpSpec.inside(Files(with_layer(other, FAMILY))) is None


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no file"])
def test_a_broken_file_beside_a_target_stops_nothing(
    content: bytes, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    made = make_checkpoint(tmp_path / "model", FAMILY, tokenizer=True, **SIZES)
    path, _ = convert(made, tmp_path / "model.gguf", Kind.F32, byte_level())
    (tmp_path / "mtp-model.gguf").write_bytes(content)
    assert len(LLM(path, max_model_len=64).generate("abc", PARAMS)[0].outputs[0].token_ids) == 6
