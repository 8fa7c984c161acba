"""``python -m benchmarks parity``: what it counts, and that it sees other weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from typer.testing import CliRunner

from benchmarks import parity
from benchmarks.__main__ import application
from outrider.audit.reference import transformers_model
from outrider.checkpoints.tokenizers import read_codec
from tests.support.ggufs import SIZES, byte_level, convert
from tests.support.tiny import MakeCheckpoint


@pytest.fixture
def model(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
    sizes = {**SIZES, "max_position_embeddings": 4096}
    source = make_checkpoint(tmp_path / "source", "llama", tokenizer=True, **sizes)
    return convert(source, tmp_path / "a.gguf", Kind.Q8_0, byte_level())[0]


def asked(model: Path, out: Path) -> tuple[int, str, dict[str, Any]]:
    words = ["parity", str(model), "--prompts", "3", "--tokens", "8", "--out", str(out)]
    done = CliRunner().invoke(application("parity"), words)
    return done.exit_code, done.output, json.loads(out.read_text(encoding="utf-8"))


def test_a_file_says_what_transformers_says_of_its_weights(model: Path, tmp_path: Path) -> None:
    code, said, report = asked(model, tmp_path / "out.json")
    assert code == 0, said
    assert sum(report["prompts"].values()) == 3
    fine, coarse = report["runs"]
    assert (fine["activations"], fine["places"], fine["beyond"]) == (16, 24, 0)
    assert 0 < fine["bound"] < coarse["bound"] / 50


def test_what_is_written_is_chosen_again_behind_itself(model: Path) -> None:
    prompts = parity.prompts_of(read_codec(model), 3)
    llm = parity.opened(model, parity.FINE, 2048)
    ids = parity.written(llm, prompts, 8)
    assert parity.chosen(llm, prompts, ids) == ids


def test_other_weights_are_seen(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled(path: Path) -> Any:
        reference = transformers_model(path)
        with torch.no_grad():
            reference.model.layers[0].mlp.up_proj.weight[:, ::8] *= 0.5
        return reference

    monkeypatch.setattr("benchmarks.parity.transformers_model", spoiled)
    code, said, report = asked(model, tmp_path / "out.json")
    beyond = report["runs"][0]["beyond"]
    assert beyond > 0
    assert code == 1
    assert f"{beyond} ids differ by more than rounding of 16 bits explains" in said
    assert f"token {report['runs'][0]['differing'][0]['at']}: engine" in said
