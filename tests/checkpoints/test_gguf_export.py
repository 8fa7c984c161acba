"""``outrider quantize`` to GGUF: blocks as ggml reads them, llama.cpp's choice of types, and files
that say all that their source says."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from numpy.linalg import norm
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from outrider.checkpoints import gguf_export
from outrider.checkpoints.blocks import encode
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.checkpoints.formats.gguf import GGUF, open_gguf
from outrider.checkpoints.formats.gguf_config import gguf_config
from outrider.checkpoints.gguf_export import export_gguf, kind_of
from outrider.checkpoints.matrices import plain
from outrider.checkpoints.tokenizers import read_codec
from outrider.errors import ModelError
from tests.support.commands import outrider
from tests.support.ggufs import SIZES, byte_level, convert, pieces, split
from tests.support.tiny import END, MakeCheckpoint, byte_level_tokenizer

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
MOST_ERROR = {
    Kind.Q4_0: 0.09, Kind.Q5_0: 0.045, Kind.Q8_0: 0.006, Kind.Q4_K: 0.075, Kind.Q5_K: 0.037,
    Kind.Q6_K: 0.019, Kind.Q5_1: 0.05, Kind.F16: 0.0005,
}  # fmt: skip
"""Root mean square of what is lost of normal weights, over that of the weights: ggml's or less."""


@pytest.mark.parametrize("kind", MOST_ERROR)
def test_blocks_are_read_by_ggmls_rules(kind: Kind) -> None:
    weights = np.random.default_rng(0).normal(0, 0.02, (64, 512)).astype(np.float32)
    weights[0], weights[1, :256], weights[2], weights[3] = 0, 0.01, -0.01, 0
    weights[3, 300], weights[4] = 3.0, weights[4] * 1e-4
    back = quants.dequantize(encode(weights, kind), kind)
    for rows in (slice(5, None), slice(1, 3), slice(3, 4)):
        lost = norm(back[rows] - weights[rows]) / norm(weights[rows])
        assert lost <= MOST_ERROR[kind]
    assert (back[0] == 0).all()
    if kind in (Kind.Q4_0, Kind.Q5_0):
        theirs = quants.dequantize(quants.quantize(weights, kind), kind)
        assert norm(back - weights) < norm(theirs - weights)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q8_0, Kind.Q4_K, Kind.Q6_K, Kind.F16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_weights_that_no_block_holds(kind: Kind, value: float) -> None:
    weights = np.ones((2, 256), np.float32)
    weights[1, 7] = value
    with pytest.raises(ValueError, match="a weight is not finite, or its size is above 65504"):
        encode(weights, kind)


def test_types_are_llama_cpps_choice(tiny_llama: Path) -> None:
    """Layers with more bits were counted in a file that llama.cpp's quantiser wrote."""
    shape = replace(open_checkpoint(tiny_llama).architecture, num_layers=30, tied=False)

    def kind(key: str, most: Kind = Kind.Q4_K, width: int = 512, **other: Any) -> Kind:
        return kind_of(key, (64, width), most, replace(shape, **other), "llama")

    more = {0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 26, 27, 28, 29}
    for name in ("attn_v", "ffn_down"):
        six = {i for i in range(30) if kind(f"blk.{i}.{name}.weight") == Kind.Q6_K}
        assert six == more
    assert kind("blk.0.attn_q.weight") == kind("token_embd.weight") == Kind.Q4_K
    assert kind("output.weight") == kind("token_embd.weight", tied=True) == Kind.Q6_K
    assert kind("output.weight", Kind.Q4_0) == Kind.Q6_K
    assert kind("output.weight", Kind.Q8_0) == Kind.Q8_0
    assert kind("blk.0.attn_v.weight", Kind.Q4_0) == Kind.Q4_0
    assert kind("blk.0.attn_q.weight", width=96) == Kind.Q5_0
    assert kind("blk.0.attn_v.weight", width=96) == kind("output.weight", width=96) == Kind.Q8_0
    assert kind("blk.0.attn_q.weight", width=40) == Kind.F16
    assert kind("blk.11.attn_v.weight", num_layers=80) == Kind.Q5_K
    assert kind_of("blk.0.attn_q.bias", (64,), Kind.Q4_K, shape, "llama") == Kind.F32


def octets(file: GGUF) -> dict[str, tuple[Kind, bytes]]:
    return {name: (t.kind, file.read(t).tobytes()) for name, t in file.tensors.items()}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "head_dim": 32}),
    "linear": ("llama", {"rope_parameters": LINEAR}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16, "num_attention_heads": 6}),
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0,
         "attention_multiplier": 0.2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_becomes_what_llama_cpps_converter_makes_of_it(
    case: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Weights that fit Q8_0 give the same bytes, and the config and the tokens are the same."""
    family, options = CASES[case]
    source = make_checkpoint(tmp_path / "source", family, tokenizer=True, **{**SIZES, **options})
    path, plain = convert(source, tmp_path / "a.gguf", Kind.Q8_0, byte_level())
    export_gguf(plain, tmp_path / "b.gguf", "Q8_0")
    theirs, ours = open_gguf(path), open_gguf(tmp_path / "b.gguf")
    assert octets(theirs) == octets(ours)
    assert vars(gguf_config(theirs)) == vars(gguf_config(ours))
    codecs = read_codec(plain), read_codec(tmp_path / "b.gguf")
    for text in ("def greet(name):  # 123 <|user|>it's\n", "  Äpfel, 漢字 😀"):
        assert codecs[0].encode(text) == codecs[1].encode(text)
    for key in ("tokens", "token_type", "merges", "model", "eos_token_id"):
        assert ours.metadata[f"tokenizer.ggml.{key}"] == theirs.metadata[f"tokenizer.ggml.{key}"]
    assert ours.metadata["tokenizer.chat_template"] == theirs.metadata["tokenizer.chat_template"]
    read = gguf.GGUFReader(tmp_path / "b.gguf")
    assert {t.name: t.data.tobytes() for t in read.tensors} == {
        name: data for name, (_, data) in octets(ours).items()
    }


@pytest.mark.parametrize("recipe", ["F16", "BF16"])
def test_a_trained_drafter_becomes_a_file_of_16_bits(
    recipe: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Of weights in bf16, as drafters are trained, BF16 keeps every bit; nothing is lost."""
    source = make_checkpoint(tmp_path / "source", "llama", tokenizer=True, **SIZES)
    weights = {n: t.bfloat16() for n, t in load_file(source / "model.safetensors").items()}
    save_file(weights, source / "model.safetensors")
    file = tmp_path / "drafter.gguf"
    assert export_gguf(source, file, recipe) == pytest.approx(16, abs=0.2)
    kinds = {n: t.kind for n, t in open_gguf(file).tensors.items()}
    assert {k for n, k in kinds.items() if "norm" not in n} == {Kind[recipe]}
    tensors = open_checkpoint(file).tensors
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"):
        found = plain(tensors.matrix(name, tuple(weights[name].shape), None), np.dtype(np.float32))
        given = weights[name] if recipe == "BF16" else weights[name].half()
        assert (found == given.float().numpy()).all()


@pytest.mark.parametrize(("size", "fits"), [(3.38e38, True), (3.4e38, False)])
def test_bf16_holds_larger_weights(size: float, fits: bool) -> None:
    weights = np.full((1, 32), size, np.float32)
    if fits:
        assert np.isfinite(quants.dequantize(encode(weights, Kind.BF16), Kind.BF16)).all()
        return
    with pytest.raises(ValueError, match=r"above 3\.3895"):
        encode(weights, Kind.BF16)


def test_a_file_is_copied_with_all_that_it_says(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From parts, too; what has its type already keeps its bytes."""
    source = make_checkpoint(tmp_path / "source", "llama", tokenizer=True, **SIZES)

    def fill(writer: gguf.GGUFWriter) -> None:
        byte_level()(writer)
        writer.add_uint16("general.something", 7)
        writer.add_array("general.tags", ["a", "b"])
        writer.add_uint32("general.alignment", 32)
        writer.add_string("quantize.imatrix.file", "x")

    path, _ = convert(source, tmp_path / "a.gguf", Kind.Q8_0, fill)
    export_gguf(split(path, 7)[0], tmp_path / "b.gguf", "Q8_0")
    assert not caplog.messages
    first, second = open_gguf(path), open_gguf(tmp_path / "b.gguf")
    assert octets(first) == octets(second)
    for name in ("metadata", "kinds"):
        before, after = getattr(first, name), getattr(second, name)
        gone = {"general.alignment", "quantize.imatrix.file"}
        added = {"general.file_type", "general.quantization_version"}
        assert {k: v for k, v in before.items() if k not in gone} == {
            k: v for k, v in after.items() if k not in added
        }
    export_gguf(path, tmp_path / "c.gguf", "q4_k_m")
    assert "13 of 21 tensors are quantised already" in caplog.text
    third = open_gguf(tmp_path / "c.gguf")
    assert third.metadata["general.file_type"] == 15
    wide = third.tensors["blk.0.attn_q.weight"], first.tensors["blk.0.attn_q.weight"]
    read = [quants.dequantize(f.read(t), t.kind) for f, t in zip((third, first), wide, strict=True)]
    assert np.linalg.norm(read[0] - read[1]) < 0.06 * np.linalg.norm(read[1])


def test_sentencepiece_keeps_its_tokens(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "mistral", tokenizer=True, vocab_size=410)
    shutil.rmtree(source / "drafter", ignore_errors=True)
    tokenizer, tokens = pieces()
    tokenizer.save(str(source / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="windows"):
        export_gguf(source, tmp_path / "a.gguf", "Q8_0")
    options = json.loads((source / "config.json").read_text()) | {"sliding_window": None}
    (source / "config.json").write_text(json.dumps(options))
    export_gguf(source, tmp_path / "a.gguf", "Q8_0")
    file = open_gguf(tmp_path / "a.gguf")
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["tokenizer.ggml.tokens"][: len(tokens)] == tokens
    assert file.metadata["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]
    codecs = read_codec(source), read_codec(tmp_path / "a.gguf")
    for text in ("the quick brown fox", "  lazy dogs, Äpfel 漢字\n", "", "over the hi</s>"):
        assert len({tuple(codec.encode(text)) for codec in codecs}) == 1
    assert codecs[0].end_token_ids == codecs[1].end_token_ids == {2}


def other_tokens(folder: Path) -> None:
    words = Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.save(str(folder / "tokenizer.json"))


def other_cuts(folder: Path) -> None:
    state = json.loads(byte_level_tokenizer().to_str())
    state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"String": "e"}, "behavior": "Isolated", "invert": False},
        state["pre_tokenizer"]]}  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(state))


def without_tokens(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def not_finite(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = torch.nan
    save_file(tensors, folder / "model.safetensors")


def half_a_character(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    file = folder / "tokenizer_config.json"
    options = json.loads(file.read_text()) | {"chat_template": chr(0xD800)}
    file.write_text(json.dumps(options))


def option(name: str, value: Any) -> Any:
    def change(folder: Path) -> None:
        options = json.loads((folder / "config.json").read_text()) | {name: value}
        (folder / "config.json").write_text(json.dumps(options))

    return change


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 16.0}
REFUSED = {
    "tokens": (other_tokens, "tokenizer cannot be written as GGUF: it is WordPiece"),
    "cuts": (other_cuts, "tokenizer cannot be written as GGUF: how it cuts texts"),
    "none": (without_tokens, "has no tokenizer, which a GGUF file holds"),
    "nan": (not_finite, "'blk.1.ffn_down.weight' cannot be quantised: a weight is not finite"),
    "rope": (option("rope_parameters", YARN), "rope of type 'yarn' with beta_fast cannot"),
    "activation": (option("hidden_act", "gelu"), "a model with activation = gelu cannot"),
    "template": (half_a_character, "a text or number of its config or tokenizer cannot be written"),
    "ends": (option("eos_token_id", [0, 5, 6, 7, 8]), r"with end tokens \[5, 6, 7, 8\] cannot"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_file_cannot_hold_is_refused(
    name: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source = make_checkpoint(tmp_path / "source", "llama", tokenizer=True, **SIZES)
    change, sentence = REFUSED[name]
    change(source)
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match=sentence) as error:
        export_gguf(source, tmp_path / "out" / "a.gguf", "Q4_0")
    assert "\n" not in str(error.value)
    assert not [*(tmp_path / "out").iterdir()]


def test_more_end_tokens_have_names(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    ends = [0, 5, 6]
    source = make_checkpoint(tmp_path / "s", "llama", tokenizer=True, eos_token_id=ends, **SIZES)
    export_gguf(source, tmp_path / "a.gguf", "Q8_0")
    assert open_checkpoint(tmp_path / "a.gguf").shape.eos_token_ids == {0, 5, 6}
    assert open_gguf(tmp_path / "a.gguf").metadata["tokenizer.ggml.tokens"][0] == END


def test_families_without_a_form_are_refused(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source = make_checkpoint(tmp_path / "source", "gemma2", tokenizer=True, **SIZES)
    with pytest.raises(ModelError, match="a 'gemma2' model as configured cannot be written"):
        export_gguf(source, tmp_path / "a.gguf", "Q8_0")


def test_the_command_takes_a_recipe_of_what_it_writes(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source = make_checkpoint(tmp_path / "source", "llama", tokenizer=True, **SIZES)
    out = tmp_path / "a.gguf"
    done = outrider("quantize", str(source), str(out), "--quantization", "q8_0", "--json")
    assert json.loads(done.stdout)["quantization"] == "Q8_0"
    assert json.loads(done.stdout)["bits_per_weight"] == pytest.approx(8.6, abs=0.1)
    for folder, recipe, sentence in (
        (out, "Q8_0", "already exists; give a new file"),
        (tmp_path / "b.gguf", "int4", r"quantization is 'int4'; a .gguf file takes one of F16"),
        (tmp_path / "c", "Q4_0", "quantization Q4_0 is for .gguf files"),
    ):
        done = outrider("quantize", str(source), str(folder), "--quantization", recipe)
        assert done.exit_code == 2
        assert sentence in done.stderr
        assert done.stderr.startswith("error: ")
    assert gguf_export.RECIPES.keys() == {"F16", "BF16", "Q8_0", "Q4_0", "Q4_K_M"}


def test_matrices_that_are_quantised_twice_are_counted(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = make_checkpoint(tmp_path / "source", "llama", tokenizer=True, **SIZES)
    outrider("quantize", str(source), str(tmp_path / "few"), "--quantization", "int8")
    export_gguf(tmp_path / "few", tmp_path / "a.gguf", "Q4_0")
    tensors = open_gguf(tmp_path / "a.gguf").tensors.values()
    matrices = [each for each in tensors if len(each.shape) > 1]
    assert f"{len(matrices)} of {len(tensors)} tensors are quantised already" in caplog.text


def test_a_full_disk_is_told_with_the_file(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(tmp_path / "source", "llama", tokenizer=True, **SIZES)

    def full(*_: object) -> None:
        raise OSError("Not enough free space to write 9 bytes")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    with pytest.raises(ModelError, match=r"a\.gguf cannot be written .*free space"):
        export_gguf(source, tmp_path / "a.gguf", "Q8_0")
    assert not [*tmp_path.glob("*gguf*")]
