"""GGUF files: the source checkpoint's model and tokenizer, exact where the format allows."""

from __future__ import annotations

import json
import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from outrider import LLM, SamplingParams
from outrider.audit.reference import transformers_model
from outrider.base.config import Recipe
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.checkpoints.dtypes import BFLOAT16, FLOAT32
from outrider.checkpoints.export import export
from outrider.checkpoints.files import Files
from outrider.checkpoints.formats.gguf import open_gguf
from outrider.checkpoints.formats.gguf_ends import end_token_ids
from outrider.checkpoints.formats.gguf_weights import CODED, GGUFTensors
from outrider.checkpoints.formats.shared import warn_once
from outrider.checkpoints.quantize import Quantized
from outrider.checkpoints.tokenizers import codec_to_read, has_tokenizer, read_codec
from outrider.engine.probe import checkpoint
from outrider.errors import ModelError
from outrider.models.load import load_model
from outrider.models.native import NativeTransformer
from outrider.models.rows import Segment
from outrider.models.tensors import as_array, as_tensor
from outrider.params import StructuredOutputsParams
from outrider.sampling.grammar import Grammars
from tests.support.ggufs import SIZES, add_pieces, byte_level, changed, convert, empty, pieces
from tests.support.loading import native_model, torch_model
from tests.support.native_steps import HERE, step
from tests.support.tiny import SPECIALS, TEMPLATE, byte_level_tokenizer

MakeCheckpoint = Callable[..., Path]
CPU = "cpu"
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
TEXTS = [
    "def greet(name):\n    return f'Hello, {name}!'  # 12345 it's\t\n\n",
    "  two  spaces, Äpfel, 漢字 und 😀 <|user|>hi<|end|> x<|model|>",
    "",
    " ",
    "\n\n\n word",
]


def logits(folder: Path, dtype: str = "float32") -> NDArray[np.float32]:
    # Torch runs dequantised weights, as plain ones are run; the native step has its own kernels.
    model = torch_model(folder, dtype, CPU, 128)
    ids = [(7 * i) % 120 + 3 for i in range(100)]
    out = model.run([Segment(ids, 0, range(1, 8), 100, 100)], model.new_store(8, 16)).logits
    assert out is not None
    return out


CASES: dict[str, tuple[str, dict[str, Any], Kind]] = {
    "llama-q8": ("llama", {}, Kind.Q8_0),
    "llama-q4": ("llama", {}, Kind.Q4_0),
    "llama-f32": ("llama", {"head_dim": 24}, Kind.F32),
    "llama-f16": ("llama", {}, Kind.F16),
    "llama-bf16": ("llama", {}, Kind.BF16),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}, Kind.Q8_0),
    "llama-q5": ("llama", {"tie_word_embeddings": True}, Kind.Q5_0),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "head_dim": 32}, Kind.Q8_0),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
        Kind.Q8_0,
    ),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}, Kind.Q8_0),
    "qwen3": ("qwen3", {"head_dim": 16, "num_attention_heads": 6}, Kind.Q4_0),
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0,
         "attention_multiplier": 0.2},
        Kind.Q8_0,
    ),
    "gemma3": (
        "gemma3_text",
        {"num_hidden_layers": 6, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 20,
         "rope_parameters": {
             "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
             "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}},
        Kind.Q8_0,
    ),
    "gemma2": (
        "gemma2",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 20,
         "attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0},
        Kind.Q4_0,
    ),
    "olmo2": ("olmo2", {"rms_norm_eps": 1e-3}, Kind.Q5_1),
    "olmo3": (
        "olmo3",
        {"sliding_window": 20, "layer_types": ["full_attention", "sliding_attention"],
         "rope_parameters": {
             "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0,
                                "original_max_position_embeddings": 32},
             "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}},
        Kind.Q8_0,
    ),
    "exaone4": (
        "exaone4",
        {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
        Kind.Q8_0,
    ),
    "exaone4-all": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2, "head_dim": 32,
         "rope_parameters": LLAMA3},
        Kind.Q8_0,
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "tie_word_embeddings": True}, Kind.Q8_0),
    "phi3-longrope": (
        "phi3",
        {"rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.5, 1.0, 2.0, 1.0, 1.0],
            "long_factor": [2.0, 5.0, 2.0, 3.0, 4.0, 2.0], "original_max_position_embeddings": 64},
         "original_max_position_embeddings": 64, "tie_word_embeddings": True},
        Kind.Q4_1,
    ),
    "phi3-window": ("phi3", {"sliding_window": 20}, Kind.Q8_0),
    "lfm2": (
        "lfm2",
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        Kind.Q8_0,
    ),
    "qwen3_5": (
        "qwen3_5_text",
        {"layer_types": ["linear_attention", "full_attention"], "full_attention_interval": 2,
         "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 16, "linear_value_head_dim": 16},
        Kind.Q8_0,
    ),
    "granite4": (
        "granitemoehybrid",
        {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 0,
         "mamba_n_heads": 8, "mamba_d_head": "auto", "mamba_n_groups": 2, "mamba_d_state": 16,
         "shared_intermediate_size": 256, "residual_multiplier": 0.5},
        Kind.Q8_0,
    ),
    "falcon_h1": (
        "falcon_h1",
        {"mamba_d_ssm": 256, "mamba_n_heads": 4, "mamba_d_head": 64, "mamba_n_groups": 2,
         "mamba_d_state": 16, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
        Kind.Q8_0,
    ),
    "nemotron_h": (
        "nemotron_h",
        {"layers_block_type": ["linear_attention", "mlp", "full_attention"], "head_dim": 32,
         "num_hidden_layers": None, "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2,
         "ssm_state_size": 16, "chunk_size": 16},
        Kind.Q8_0,
    ),
    "ministral3": (
        "ministral3",
        {"head_dim": 16, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 16,
            "beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.3}},
        Kind.Q8_0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_file_is_its_dequantised_checkpoint(
    case: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    family, options, kind = CASES[case]
    source = make_checkpoint(tmp_path / "source", family, **{**SIZES, **options})
    path, plain = convert(
        source, tmp_path / "model.gguf", kind, skip="lm_head" if "tie" in str(options) else "none"
    )
    expected = logits(plain)
    atol = max(2e-5, 3e-6 * float(np.abs(expected).max()))
    np.testing.assert_allclose(logits(path), expected, atol=atol, rtol=0)
    # Else heads have another order, or decays are kept as their exponentials.
    if not any(part in str(options) for part in ("rope_parameters", "linear", "mamba")):
        assert np.array_equal(logits(path), logits(plain))
    if kind in (Kind.F32, Kind.F16, Kind.BF16):
        names = {Kind.F32: "float32", Kind.F16: "float16", Kind.BF16: "bfloat16"}
        assert open_checkpoint(path).shape.dtype == names[kind]


@pytest.mark.parametrize(
    "case",
    [
        "qwen3",
        "granite",
        "gemma2",
        "gemma3",
        "olmo2",
        "olmo3",
        "exaone4",
        "smollm3",
        "phi3-longrope",
        "ministral3",
        "lfm2",
        "qwen3_5",
        "granite4",
        "nemotron_h",
        "falcon_h1",
    ],
)
def test_codes_of_every_family_run_natively(
    case: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """As transformers' own model of the weights that the ``gguf`` package dequantises."""
    family, options, _ = CASES[case]
    heads = 256 // options.get("head_dim", 16)
    wide = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": heads}
    if "linear" in str(options):
        wide |= {"linear_value_head_dim": 64, "mamba_head_dim": 64}
    source = make_checkpoint(tmp_path / "source", family, **{**options, **wide})

    def kind(name: str) -> Kind:
        return Kind.Q6_K if "v_proj" in name or "down_proj" in name else Kind.Q4_K

    skip = "lm_head" if "tie" in str(options) else "none"
    path, _ = convert(source, tmp_path / "model.gguf", kind, skip=skip)
    ids = [(7 * i) % 120 + 3 for i in range(100)]
    with torch.inference_mode():
        expected = as_array(transformers_model(path)(torch.tensor([ids])).logits[0])
    for isa in HERE:
        model = native_model(step(isa), path, "float32", 128)
        out = model.run([Segment(ids, 0, range(1, 8), 100, 100)], model.new_store(8, 16)).logits
        assert out is not None
        assert np.abs(out - expected).max() < 3e-3 * expected.std()  # digits of 16 bits


@pytest.mark.parametrize(
    ("case", "bias"),
    [
        ("granite4", "attention_bias"), ("granite4", "mamba_proj_bias"), ("nemotron_h", "mlp_bias"),
        ("nemotron_h", "use_bias"),
    ],
)  # fmt: skip
def test_biases_of_hybrids_are_read(
    case: str, bias: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Also those of layers behind the first, which is of another kind."""
    family, options, _ = CASES[case]
    source = make_checkpoint(tmp_path / "source", family, **{**SIZES, **options, bias: True})
    path, plain = convert(source, tmp_path / "model.gguf", Kind.F32)
    np.testing.assert_allclose(logits(path), logits(plain), atol=3e-5, rtol=0)


@pytest.mark.parametrize("case", ["lfm2", "granite4", "falcon_h1", "nemotron_h"])
def test_a_copy_of_a_hybrids_file_is_its_checkpoints(
    case: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    family, options, _ = CASES[case]
    source = make_checkpoint(tmp_path / "source", family, **{**SIZES, **options})
    path, plain = convert(source, tmp_path / "model.gguf", Kind.F32)
    for of, copy in ((path, "one"), (plain, "other")):
        export(of, tmp_path / copy, Recipe.parse("int4-g32"))
    # Files hold decays as their exponentials.
    expected = logits(tmp_path / "other")
    np.testing.assert_allclose(logits(tmp_path / "one"), expected, atol=3e-3, rtol=0)


def test_only_vectors_of_mamba_have_other_shapes(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "nemotron_h")
    writer.add_ssm_group_count(2)
    for name, shape in {
        "ssm_out.weight": (32, 16), "ssm_conv1d.weight": (4, 64), "ssm_norm.weight": (16, 2),
        "ssm_a": (4, 1),
    }.items():  # fmt: skip
        writer.add_tensor(f"blk.0.{name}", -np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = GGUFTensors(open_gguf(tmp_path / "x.gguf"), 8)
    begins = "model.layers.0.mamba."
    assert tensors.get(f"{begins}A_log", (4,)).tolist() == [0.0] * 4
    for name, *size in (
        ("out_proj.weight", 16, 32), ("conv1d.weight", 64, 1, 4), ("norm.weight", 32),
    ):  # fmt: skip
        with pytest.raises(ModelError, match="but its metadata says"):
            tensors.get(f"{begins}{name}", tuple(size))


@pytest.mark.parametrize(
    ("heads", "extra", "said"),
    [
        ([0, 0, 2], ["blk.0.attn_q.weight"], "block 0 has ssm_in and attn_q; one of attention"),
        ([0, 0, 2], ["blk.2.ffn_up.weight"], "block 2 has attn_q and ffn_up; one of attention"),
        ([0, 2], [], "head_count_kv is .*; for each layer 0, or its key heads"),
        ([2, 2, 2, 2], [], "head_count_kv is .*; for each layer 0, or its key heads"),
    ],
)
def test_layers_of_hybrids_have_one_kind(
    heads: list[int], extra: list[str], said: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    family, options, _ = CASES["nemotron_h"]
    source = make_checkpoint(tmp_path / "source", family, **{**SIZES, **options})

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_head_count_kv(heads)
        for name in extra:
            writer.add_tensor(name, np.ones((64, 64), np.float32))

    path, _ = convert(source, tmp_path / "model.gguf", Kind.F32, fill)
    with pytest.raises(ModelError, match=said):
        open_checkpoint(path)


def test_the_other_epsilon_does_alone(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, options, _ = CASES["nemotron_h"]
    more = {**SIZES, **options, "layer_norm_epsilon": 0.25}
    source = make_checkpoint(tmp_path / "source", family, **more)
    monkeypatch.setattr(gguf.GGUFWriter, "add_layer_norm_rms_eps", lambda writer, value: None)
    path, _ = convert(source, tmp_path / "model.gguf", Kind.F32)
    shape = open_checkpoint(path).architecture
    assert shape is not None
    assert shape.norm_eps == 0.25


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0, Kind.F16])
def test_what_a_file_takes_in_memory_is_told_before_it_is_loaded(
    kind: Kind, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Codes stay as many bytes as they are in the file."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
    source = make_checkpoint(tmp_path / "source", "llama", **sizes)
    path, _ = convert(source, tmp_path / "model.gguf", kind)
    model = load_model(open_checkpoint(path), "auto", CPU, 128)
    told = checkpoint(str(path))
    if isinstance(model, NativeTransformer):
        assert told["weights"] == pytest.approx(model.added_bytes(None), rel=0.05)
    assert told["page"] == model.page_bytes(16)
    if kind in CODED:
        assert told["weights"] < 1.06 * told["bytes"]


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0])
def test_codes_and_scales_are_the_files(kind: Kind, tmp_path: Path) -> None:
    """Against the blocks as ggml defines them, taken apart one by one."""
    values = np.random.default_rng(0).normal(size=(6, 96)).astype(np.float32)
    packed = quantize(values, kind)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "qwen2")
    writer.add_tensor("blk.0.ffn_up.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = GGUFTensors(open_gguf(tmp_path / "x.gguf"), 8).grid(
        "model.layers.0.mlp.up_proj.weight", (6, 96)
    )
    assert isinstance(found, Quantized)
    assert (found.bits, found.group, found.zeros) == (8 if kind == Kind.Q8_0 else 4, 32, None)
    size = 34 if kind == Kind.Q8_0 else 18
    for row in range(6):
        for block in range(3):
            octets = packed[row, block * size : (block + 1) * size]
            scale = float(octets[:2].view(np.float16)[0])
            if kind == Kind.Q8_0:
                codes = [int(q) + 128 for q in octets[2:].view(np.int8)]
            else:
                codes = [int(q) & 15 for q in octets[2:]] + [int(q) >> 4 for q in octets[2:]]
            assert found.codes[row, block * 32 : block * 32 + 32].tolist() == codes
            assert float(found.scales[row, block]) == scale
    assert np.array_equal(found.dequantized(FLOAT32), dequantize(packed, kind))


def test_other_types_are_dequantised_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    random = np.random.default_rng(0)
    packed = random.integers(0, 256, (3, 2 * 66), dtype=np.uint8)  # TQ2_0: 256 values in 66 bytes
    for at in (64, 130):
        packed[:, at : at + 2] = np.float16(0.01).reshape(1).view(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "qwen2")
    writer.add_tensor("output.weight", packed, raw_dtype=Kind.TQ2_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with caplog.at_level(logging.WARNING, "outrider"):
        tensors = GGUFTensors(open_gguf(tmp_path / "x.gguf"), 8)
        warn_once(tensors.note)
        warn_once(tensors.note)
    assert [r.message.partition(": ")[2] for r in caplog.records] == [
        "weights of type TQ2_0 are dequantised at load."
    ]
    found = tensors.matrix("lm_head.weight", (3, 512), BFLOAT16)
    assert isinstance(found, np.ndarray)
    expected = torch.from_numpy(dequantize(packed, Kind.TQ2_0)).bfloat16()
    assert torch.equal(as_tensor(found), expected)


def test_a_file_speaks_as_its_checkpoint(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Text in, text out, by generate and chat, drafted for by another file."""
    source = make_checkpoint(tmp_path / "source", "llama", tokenizer=True, **SIZES)
    path, plain = convert(source, tmp_path / "a.gguf", Kind.Q8_0, byte_level())
    small, _ = convert(source, tmp_path / "b.gguf", Kind.F32, byte_level())
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=24)
    runs = [
        LLM(model, drafter=drafter, dtype="float32", activations="16")
        for model, drafter in ((plain, None), (path, None), (str(path), small), (path, "auto"))
    ]
    said = [llm.generate(["def greet"], params)[0] for llm in runs]
    assert len({str(s.prompt_token_ids) for s in said}) == 1
    assert len({s.outputs[0].text for s in said}) == 1
    assert said[2].metrics.accepted > 0
    talk = [{"role": "user", "content": "hello"}]
    assert len({llm.chat(talk, params)[0].outputs[0].text for llm in runs}) == 1
    assert runs[1].engine.model.shape.eos_token_ids == {0}


def test_the_audit_reads_a_file(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "llama", **SIZES)
    path, plain = convert(source, tmp_path / "a.gguf", Kind.Q4_0)
    ids = torch.tensor([[(7 * i) % 120 + 3 for i in range(100)]])
    with torch.inference_mode():
        mine, theirs = (transformers_model(p)(ids).logits for p in (path, plain))
    assert torch.equal(mine, theirs)


def encodings(path: Path) -> list[list[int]]:
    codec = read_codec(path)
    assert has_tokenizer(path)
    return [codec.encode(text) for text in TEXTS]


def test_byte_level_tokens_are_the_sources(tiny_llama: Path, tmp_path: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(tiny_llama)
    path = empty(tmp_path / "a.gguf", byte_level())
    assert encodings(path) == [theirs(text)["input_ids"] for text in TEXTS]
    mine = read_codec(path).backend
    for ids in encodings(path):
        for special in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=special)
            assert mine.decode(ids, skip_special_tokens=special) == expected


CUTS = {
    "llama-bpe": "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|"
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
    "qwen2": "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}|"
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
    "qwen35": "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}|"
    " ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
    "smollm": None,
    "gpt-4o": "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*"
    "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+"
    "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\\p{N}{1,3}|"
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
}


@pytest.mark.parametrize("cut", CUTS)
def test_known_cuts_are_the_models_own(cut: str, tmp_path: Path) -> None:
    source = byte_level_tokenizer()
    source.add_special_tokens(SPECIALS)
    expression, whole = CUTS[cut], pre_tokenizers.ByteLevel(add_prefix_space=False)
    if expression is None:
        first: Any = pre_tokenizers.Digits(individual_digits=True)
    else:
        first = pre_tokenizers.Split(Regex(expression), "isolated")
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    source.pre_tokenizer = pre_tokenizers.Sequence([first, whole])
    source.model.ignore_merges = cut == "llama-bpe"
    codec = read_codec(empty(tmp_path / "a.gguf", byte_level(cut, add_bos_token=False)))
    for text in (*TEXTS, "हिन्दी में ลิ้น"):  # marks among letters
        assert codec.encode(text) == source.encode(text).ids


def test_bos_comes_where_llama_cpp_puts_it(tmp_path: Path) -> None:
    plain = encodings(empty(tmp_path / "a.gguf", byte_level(bos_token_id=1)))
    for number, (cut, more) in enumerate(
        [("gpt-2", {"add_bos_token": True}), ("llama-bpe", {}), ("gpt-2", {"add_eos_token": True})]
    ):
        path = empty(tmp_path / f"{number}.gguf", byte_level(cut, bos_token_id=1, **more))
        for mine, ids in zip(encodings(path), plain, strict=True):
            assert (mine[0] == 1) == ("add_eos_token" not in more)
            assert (mine[-1:] == [0]) == ("add_eos_token" in more) or mine[-1:] == ids[-1:]


def test_sentencepiece_tokens_are_the_sources(tmp_path: Path) -> None:
    source, tokens = pieces()

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        add_pieces(writer, tokens)

    path = empty(tmp_path / "a.gguf", fill)
    texts = [*TEXTS, "the quick brown fox, the  lazy dogs", "hi</s>the fox", "▁x"]
    codec = read_codec(path)
    for text in texts:
        ids = source.encode(text).ids
        assert codec.encode(text) == [1, *ids]
        assert codec.backend.decode(ids) == source.decode(ids)


def test_gemmas_tokens_are_the_sources(tmp_path: Path) -> None:
    """No space goes before a text; runs of spaces and lines are tokens of their own."""
    source, tokens = pieces()
    source.normalizer = normalizers.Replace(" ", "▁")
    source.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    runs = ["\n\n", "  ", "   "]
    source.add_tokens([AddedToken(run, normalized=False) for run in runs])

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_add_space_prefix(False)
        add_pieces(writer, tokens, runs)

    codec = read_codec(empty(tmp_path / "a.gguf", fill))
    for text in [*TEXTS, "the quick brown fox,   the  lazy dogs", "hi</s>the\n\n\n fox", "▁x"]:
        ids = source.encode(text).ids
        assert codec.encode(text) == [1, *ids]
        assert codec.backend.decode(ids) == source.decode(ids)


def test_sentencepiece_tokens_are_forged_by_no_text(tmp_path: Path) -> None:
    source, tokens = pieces()

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        add_pieces(writer, tokens)

    codec = read_codec(empty(tmp_path / "a.gguf", fill), specials=False)
    assert codec.encode("the quick fox") == [1, *source.encode("the quick fox").ids]
    for text in ("hi</s>the fox", "</s></s>", "<s>a </s> b"):
        ids = codec.encode(text)
        assert ids[0] == 1
        assert not {1, 2} & set(ids[1:])
        assert codec.backend.decode(ids[1:], skip_special_tokens=False) == text


ENDS = {
    "base": (["<|endoftext|>", "<|im_end|>", "<|im_start|>"], {"eos": 0}, {0, 1}),
    "infill": (["<|endoftext|>", "<|fim_pad|>", "<|fim_prefix|>", "<|file_sep|>"], {}, {0, 1, 3}),
    "named": (["a", "b", "c", "d", "e", "f"], {"eos": 0, "eot": 1, "eom": 2, "fim_sep": 4},
              {0, 1, 2, 4}),
    "harmony": (["<|end|>", "<|call|>", "<|return|>", "<|start|>"], {"eos": 2}, {1, 2}),
    "phi": (["<|end|>", "<|user|>", "<｜end▁of▁sentence｜>", "_<EOT>"], {}, {0, 2, 3}),
    "none": (["<|user|>", "<|tool|>"], {}, set()),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_a_turn_ends_where_llama_cpp_ends_it(name: str, tmp_path: Path) -> None:
    tokens, named, ends = ENDS[name]

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        words = ["<", "/", "s", ">", "/s", "</s", "</s>"]  # a word here, no token of control
        writer.add_token_list([*tokens, *words])
        writer.add_token_types([1 if name == "phi" else 3] * len(tokens) + [1] * len(words))
        writer.add_token_merges(["/ s", "< /s", "</s >"])
        for key, id in named.items():
            writer.add_uint32(f"tokenizer.ggml.{key}_token_id", id)

    path = empty(tmp_path / "a.gguf", fill)
    assert end_token_ids(open_gguf(path)) == ends
    specials = read_codec(path).backend.get_added_tokens_decoder()
    assert all(specials[id].special for id in ends)  # so that texts do not show them
    assert len(tokens) + 6 not in specials


def test_the_ends_of_a_file_end_its_outputs(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source = make_checkpoint(tmp_path / "source", "llama", tokenizer=True, **SIZES)
    path, _ = convert(source, tmp_path / "a.gguf", Kind.F32, byte_level(eos_token_id=1))
    llm = LLM(path, None, dtype="float32", memory="16MiB")
    for end in (0, 1):  # <|end|> is known by its text
        params = SamplingParams(max_tokens=9, logit_bias={end: 100.0})
        (output,) = llm.generate("def greet", params)[0].outputs
        assert (output.token_ids, output.finish_reason, output.text) == ([end], "stop", "")


def test_named_templates_of_a_file_are_used(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    talk = [{"role": "user", "content": "hi"}]
    named = {"default": TEMPLATE, "tool_use": "{{ tools | tojson }}" + TEMPLATE, "rag": "x"}
    listed = [{"name": name, "template": template} for name, template in named.items()]
    for templates in (listed, listed[1:]):
        path = empty(tmp_path / "a.gguf", byte_level(chat_template=templates))
        codec = read_codec(path)
        assert codec.render(talk, tools=tools) == json.dumps(tools) + "add;<|user|>hi<|model|>"
        plain = codec.render(talk)
        assert plain == ("<|user|>hi<|model|>" if templates is listed else f"null{plain[4:]}")


def test_an_unknown_tokenizer_is_taken_from_beside(tiny_llama: Path, tmp_path: Path) -> None:
    path = empty(tmp_path / "a.gguf", byte_level("cuts-of-tomorrow"))
    with pytest.raises(
        ModelError, match=r"'gpt2' with cuts 'cuts-of-tomorrow', is not known; put the.*beside"
    ):
        read_codec(path)
    (tmp_path / "tokenizer.json").write_bytes((tiny_llama / "tokenizer.json").read_bytes())
    theirs = AutoTokenizer.from_pretrained(tiny_llama)
    assert encodings(path) == [theirs(text)["input_ids"] for text in TEXTS]
    assert read_codec(path).chat([{"role": "user", "content": "hi"}])
    none = empty(tmp_path / "b.gguf", lambda writer: writer.add_tokenizer_model("none"))
    assert encodings(none) == encodings(path)
    alone = tmp_path / "alone"
    alone.mkdir()
    assert not has_tokenizer(none.rename(alone / "b.gguf"))


@pytest.mark.parametrize(
    ("fill", "sentence"),
    [
        (changed(expert_count=8), "llama.expert_used_count is missing"),
        (changed(expert_count=8, expert_used_count=2), "mixtures of experts in some layers only"),
        (changed(head_count_kv=[2, 4]), "layers that differ in 'llama.attention.head_count_kv'"),
        (changed(head_count=0), "head_count is 0; a whole number from 1 to"),
        (changed(rope_dimension_count=8), "8 of 16 elements turn"),
        (changed(vocab_size=100), r"'token_embd.weight' is \[128, 64\], but.*says \[100, 64\]"),
        (changed(block_count=3), r"has no tensor 'blk.2.attn_q.weight'; its metadata requires"),
        (changed(block_count=1), r"has a tensor 'blk\.1\..*, but llama.block_count is 1; fetch"),
        (changed(rope_scaling_type=gguf.RopeScalingType.LONGROPE), "'longrope' is not read"),
    ],
)
def test_what_metadata_say_is_checked(
    fill: Callable[[gguf.GGUFWriter], object],
    sentence: str,
    make_checkpoint: MakeCheckpoint,
    tmp_path: Path,
) -> None:
    source = make_checkpoint(tmp_path / "source", "llama", **SIZES)

    def override(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0] = dict(writer.kv_data[0])
        fresh = gguf.GGUFWriter(None, "llama")
        fill(fresh)
        writer.kv_data[0].update(
            {k: v for k, v in fresh.kv_data[0].items() if k != "general.architecture"}
        )

    path, _ = convert(source, tmp_path / "a.gguf", Kind.F32, override)
    with pytest.raises(ModelError, match=sentence) as error:
        logits(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_layers_that_predict_further_tokens_are_ignored(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source = make_checkpoint(tmp_path / "source", "llama", **SIZES)

    def further(writer: gguf.GGUFWriter) -> None:
        for name in ("attn_norm", "nextn.eh_proj"):
            writer.add_tensor(f"blk.2.{name}.weight", np.ones(8, np.float32))

    path, _ = convert(source, tmp_path / "a.gguf", Kind.F32, further)
    alone, _ = convert(source, tmp_path / "b.gguf", Kind.F32)
    assert np.array_equal(logits(path), logits(alone))


def test_files_that_are_none(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    with pytest.raises(ModelError, match=r"is no file; give a \.gguf file that exists"):
        LLM(path)
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="too short for a GGUF file"):
        open_checkpoint(path)
    path.write_bytes(b"nope" + bytes(40))
    with pytest.raises(ModelError, match="is no GGUF file"):
        open_checkpoint(path)
    source = make_checkpoint(tmp_path / "source", "llama", **SIZES)
    whole, _ = convert(source, tmp_path / "b.gguf", Kind.Q8_0, byte_level())
    data = whole.read_bytes()
    for length in (25, 100, 1000, 4000):
        path.write_bytes(data[:length])
        with pytest.raises(ModelError, match="header is damaged; fetch the file again"):
            open_gguf(path)
    path.write_bytes(data[:-100])
    with pytest.raises(ModelError, match=r"tensor .* is damaged or cut off"):
        open_gguf(path)
    path.write_bytes(data[:4] + b"\x01" + data[5:])
    with pytest.raises(ModelError, match="GGUF of version 1"):
        open_gguf(path)
    other = gguf.GGUFWriter(tmp_path / "c.gguf", "rwkv7")
    other.write_header_to_file()
    other.write_kv_data_to_file()
    other.write_tensors_to_file()
    other.close()
    with pytest.raises(ModelError, match="architecture 'rwkv7' are not read, only of llama, qwen2"):
        open_checkpoint(tmp_path / "c.gguf")


def test_a_scale_that_is_no_number_is_told_with_its_place(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source = make_checkpoint(tmp_path / "source", "llama", **SIZES)
    path, _ = convert(source, tmp_path / "a.gguf", Kind.Q8_0)
    stored = open_gguf(path).tensors["blk.1.ffn_down.weight"]
    with path.open("r+b") as file:
        file.seek(stored.begin + 34)
        file.write(b"\x00\x7c")
    with pytest.raises(ModelError, match=r"a\.gguf: matrix 'down' of layer 1 .* not finite\); "):
        native_model(step(HERE[-1]), path, "float32", 64)


def test_a_tokenizer_is_not_read_from_another_file_in_its_place(tmp_path: Path) -> None:
    path = empty(tmp_path / "a.gguf", byte_level())
    codec = pickle.loads(pickle.dumps(codec_to_read(Files(path), True)))
    os.utime(path, ns=(1, 1))
    grammars = Grammars(lambda: codec.read().backend, 400, frozenset({0}))
    form = StructuredOutputsParams(regex="a")
    for use in (codec.read, lambda: grammars.compile(SamplingParams(structured_outputs=form))):
        with pytest.raises(ModelError, match=r"a\.gguf has changed since its model was loaded"):
            use()
