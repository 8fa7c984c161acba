"""Sampling defaults that come with a checkpoint reach every door."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import pytest

from outrider import LLM
from outrider.errors import ConfigError
from outrider.frontend.presets import sampling_defaults
from tests.support.commands import outrider


def test_a_folder(tiny_llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    (folder / "generation_config.json").write_text('{"temperature": 0, "max_new_tokens": 5}')
    llm = LLM(folder, drafter=None)
    assert llm.get_default_sampling_params().temperature == 0
    one, other = (llm.generate("for word")[0].outputs[0].token_ids for _ in range(2))
    assert one == other
    assert len(one) == 5
    said = json.loads(outrider("generate", folder, "--prompt", "for word", "--json").stdout)
    assert said["outputs"][0]["token_ids"] == one
    more = json.loads(
        outrider("generate", folder, "--prompt", "for word", "--json", "--max-tokens", 7).stdout
    )
    assert more["outputs"][0]["token_ids"][:5] == one
    assert len(more["outputs"][0]["token_ids"]) == 7


def test_a_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"

    def write(**keys: float) -> None:
        writer = gguf.GGUFWriter(file, "llama")
        for key, value in keys.items():
            name = f"general.sampling.{key}"
            writer.add_int32(name, value) if key == "top_k" else writer.add_float32(name, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    write(temp=0.5, top_k=20, penalty_repeat=1.25)
    found = {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.25}
    assert sampling_defaults(file) == found
    write()
    assert sampling_defaults(file) == {}
    (tmp_path / "generation_config.json").write_text('{"top_p": 0.5}')
    assert sampling_defaults(file) == {"top_p": 0.5}
    write(temp=-1.0)
    with pytest.raises(ConfigError, match="temperature is -1"):
        sampling_defaults(file)
