"""Mixtures of experts: transformers' models, and rows whose bits depend on themselves alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from outrider.base.config import Recipe
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.checkpoints.export import export
from outrider.checkpoints.formats.gguf_weights import GGUFTensors
from outrider.errors import ModelError
from outrider.models.native import is_native
from outrider.models.rows import Segment
from outrider.models.transformer import Transformer
from tests.support.chunked import PAGE, ids_of, models, plain, vary
from tests.support.experts import fuse_experts
from tests.support.gguf_mixtures import convert_mixture
from tests.support.loading import native_model, torch_model
from tests.support.native_steps import HERE, step
from tests.support.quantised import CASES, quantised, write

MakeCheckpoint = Callable[..., Path]
LENGTH = 90
MIXED = {"num_experts_per_tok": 3, "hidden_size": 48}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**MIXED, "head_dim": 16, "num_experts": 7, "moe_intermediate_size": 32},
    "qwen3_moe normed": {
        **MIXED, "head_dim": 16, "num_experts": 5, "moe_intermediate_size": 16,
        "norm_topk_prob": True, "mlp_only_layers": [0], "num_hidden_layers": 3,
    },
    "mixtral": {**MIXED, "num_local_experts": 4, "intermediate_size": 64},
    "mixtral with a window": {
        "num_experts_per_tok": 1, "num_local_experts": 9, "sliding_window": 24, "head_dim": 24,
    },
    "olmoe": {**MIXED, "num_experts": 6, "intermediate_size": 32},
    "granitemoe": {
        **MIXED, "num_local_experts": 6, "intermediate_size": 32, "residual_multiplier": 0.4,
        "attention_multiplier": 0.2, "logits_scaling": 2.0, "embedding_multiplier": 3.0,
    },
    "granitemoehybrid": {
        **MIXED, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_hidden_layers": 3, "num_local_experts": 5, "intermediate_size": 32,
        "shared_intermediate_size": 52, "mamba_n_heads": 6, "mamba_d_head": 16,
        "mamba_n_groups": 3, "mamba_d_state": 32, "residual_multiplier": 0.4,
    },
    "gpt_oss": {
        **MIXED, "num_local_experts": 6, "intermediate_size": 32, "head_dim": 16,
        "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_5_moe_text": {
        **MIXED, "layer_types": ["linear_attention", "full_attention"], "head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 32, "num_experts": 6, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 20,
    },
    "qwen3_next": {
        **MIXED, "layer_types": ["linear_attention", "full_attention"], "head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16,
        "linear_value_head_dim": 32, "num_experts": 6, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 20,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
        "num_hidden_layers": None, "hidden_size": 48, "head_dim": 16, "mamba_num_heads": 4,
        "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "n_routed_experts": 6,
        "num_experts_per_tok": 3, "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 20, "routed_scaling_factor": 1.4,
    },
    "lfm2_moe": {
        **MIXED, "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3,
        "num_experts": 6, "moe_intermediate_size": 32, "num_dense_layers": 1,
        "routed_scaling_factor": 1.3,
    },
    "glm4_moe": {
        **MIXED, "head_dim": 16, "num_experts_per_tok": 3, "n_routed_experts": 12,
        "n_group": 4, "topk_group": 2,
        "moe_intermediate_size": 32, "n_shared_experts": 2, "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.7, "use_qk_norm": True, "attention_bias": True,
    },
}  # fmt: skip
ONE_EACH = [name for name in FAMILIES if " " not in name]
IN_FILES = [name for name in ONE_EACH if name != "qwen3_next"]
"""Those whose GGUF files are read."""


def build(
    name: str, make_checkpoint: MakeCheckpoint, into: Path, options: dict[str, Any] | None = None
) -> Path:
    """A checkpoint whose vectors are no constants."""
    family, *_ = name.split()
    return vary(make_checkpoint(into, family, **(options or FAMILIES[name])))


@pytest.fixture(scope="module", params=ONE_EACH)
def folder(
    request: pytest.FixtureRequest,
    make_checkpoint: MakeCheckpoint,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    return build(request.param, make_checkpoint, tmp_path_factory.mktemp("mixtures"))


@pytest.mark.parametrize("name", FAMILIES)
def test_it_is_transformers_model(
    name: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    folder = build(name, make_checkpoint, tmp_path)
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    assert is_native(open_checkpoint(folder))
    for length in (1, 5, LENGTH):
        ids = ids_of(length)
        with torch.no_grad():
            expected = theirs(torch.tensor([ids])).logits[0].numpy()
        atol = max(1e-4, 3e-5 * float(np.abs(expected).max()))
        for model in models(folder, ["float32"]):
            np.testing.assert_allclose(plain(model, ids, [length]), expected, atol=atol, rtol=0)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe_text"])
def test_experts_may_be_one_tensor(
    name: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """As Qwen3.5's are published, and others saved by some versions of transformers."""
    folder, ids = build(name, make_checkpoint, tmp_path), ids_of(20)
    before = [plain(model, ids, [20]) for model in models(folder, ["float32"])]
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(fuse_experts(tensors), file, metadata={"format": "pt"})
    assert len(load_file(file)) < len(tensors)
    for model, expected in zip(models(folder, ["float32"]), before, strict=True):
        assert np.array_equal(plain(model, ids, [20]), expected)


def test_a_rows_bits_do_not_depend_on_how_it_came(folder: Path) -> None:
    ids = ids_of(50)
    for model in models(folder, ["float32", "bfloat16"]):
        expected = plain(model, ids, [50])
        for sizes in ([1], [7, 16, 1, 1, 20], [49]):
            assert np.array_equal(plain(model, ids, sizes), expected)


def file_sizes(name: str) -> dict[str, Any]:
    """Sizes that blocks of 32 codes fill, and options that files can say."""
    sizes = {"intermediate_size": 64} | FAMILIES[name] | {"hidden_size": 64, "head_dim": 16}
    sizes = {k: 32 if k.endswith("_intermediate_size") else v for k, v in sizes.items()}
    if name == "qwen3_moe":
        sizes["norm_topk_prob"] = True
    return sizes | ({"mamba_n_heads": 8, "mamba_n_groups": 2} if "hybrid" in name else {})


@pytest.mark.parametrize(
    ("name", "kind", "joined"),
    [
        *[(name, kind, False) for name in IN_FILES for kind in (Kind.Q8_0, Kind.F32)],
        ("qwen3_5_moe_text", Kind.Q8_0, True),  # gates and what they gate as one tensor
    ],
)
def test_a_gguf_file_says_what_its_checkpoint_says(
    name: str, kind: Kind, joined: bool, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source = build(name, make_checkpoint, tmp_path / "source", file_sizes(name))
    path, plain_folder = convert_mixture(source, tmp_path / "a.gguf", kind, joined)
    ids = ids_of(40)
    expected = plain(torch_model(plain_folder, "float32", "cpu", 256), ids, [40])
    spread = max(1.0, float(np.abs(expected).max()))
    for model in models(path, ["float32"]):
        near = 1e-4 if kind == Kind.F32 or isinstance(model, Transformer) else 2e-3
        np.testing.assert_allclose(plain(model, ids, [40]), expected, atol=near * spread, rtol=0)


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_step_reads_each_expert_once(
    rows: int, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """As many as transformers' routers choose for all rows of a layer together."""
    folder = build("qwen3_moe", make_checkpoint, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids, top = ids_of(rows), FAMILIES["qwen3_moe"]["num_experts_per_tok"]
    with torch.no_grad():
        scores = theirs(torch.tensor([ids]), output_router_logits=True).router_logits
    expected = sum(len(layer.topk(top, -1)[1].unique()) for layer in scores)
    for isa in HERE:
        model = native_model(step(isa), folder, "float32", 256)
        store = model.new_store(12, PAGE)
        model.run([Segment(ids, 0, range(1, 10), 1, rows)], store)
        assert store.experts == expected
        more = Segment([7], rows, range(1, 10), 1, rows)
        model.run([more], store)
        assert store.experts == expected + top * len(scores)


@pytest.mark.parametrize("recipe", ["int8", "int4-g32", "int4-g32-a8"])
def test_codes_are_what_they_stand_for(folder: Path, recipe: str) -> None:
    """In quantised experts, too, bits depend on the row alone, and torch dequantises the same."""
    ids = ids_of(50)
    first, *rest = models(folder, ["float32"], recipe=Recipe.parse(recipe))
    expected = plain(first, ids, [50])
    for model in rest:
        whole = plain(model, ids, [50])
        for sizes in ([1], [7, 16, 1, 1, 20]):
            assert np.array_equal(plain(model, ids, sizes), whole)
        spread = float(np.abs(expected).max())
        near = 0.06 if recipe.endswith("a8") else 2e-3
        assert np.abs(whole - expected).max() < near * max(1.0, spread)


def test_experts_of_mxfp4_are_read(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """As gpt-oss is published: blocks of codes, and an exponent each."""
    folder = build("gpt_oss", make_checkpoint, tmp_path / "a", file_sizes("gpt_oss"))
    tensors, random = load_file(folder / "model.safetensors"), np.random.default_rng(0)
    plain_folder = tmp_path / "plain"
    shutil.copytree(folder, plain_folder)
    said = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, inputs, outputs = tensors.pop(name).shape
        blocks = random.integers(0, 256, (count, outputs, inputs // 32, 16), np.uint8)
        scales = random.integers(121, 125, (count, outputs, inputs // 32), np.uint8)
        tensors[f"{name}_blocks"] = torch.from_numpy(blocks)
        tensors[f"{name}_scales"] = torch.from_numpy(scales)
        dequantised = convert_moe_packed_tensors(
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"], dtype=torch.float32
        )
        said[name] = dequantised.reshape(count, inputs, outputs).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(said, plain_folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (folder / "config.json").write_text(json.dumps(config))
    ids = ids_of(40)
    expected = plain(torch_model(plain_folder, "float32", "cpu", 256), ids, [40])
    spread = max(1.0, float(np.abs(expected).max()))
    for model in models(folder, ["float32"]):
        whole = plain(model, ids, [40])
        np.testing.assert_allclose(whole, expected, atol=2e-3 * spread, rtol=0)
        assert np.array_equal(plain(model, ids, [7, 1, 1]), whole)


def test_experts_of_fp8_get_codes_of_their_size(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Other matrices in FP8 are dequantised."""
    folder = build("qwen3_moe", make_checkpoint, tmp_path)
    before = native_model(step(HERE[-1]), folder, "bfloat16", 256)
    tensors, stored = load_file(folder / "model.safetensors"), dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        stored[name] = tensor
        if name.endswith("proj.weight"):
            scale = tensor.abs().max() / 448
            stored[name] = (tensor / scale).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale.reshape(1, 1)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    ids = ids_of(40)
    expected = plain(torch_model(folder, "float32", "cpu", 256), ids, [40])
    spread = max(1.0, float(np.abs(expected).max()))
    for isa in HERE:
        model = native_model(step(isa), folder, "float32", 256)
        assert np.abs(plain(model, ids, [40]) - expected).max() < 0.05 * spread
        assert np.array_equal(plain(model, ids, [3, 1]), plain(model, ids, [40]))
    after = native_model(step(HERE[-1]), folder, "bfloat16", 256)
    assert after.added_bytes(None) < 0.9 * before.added_bytes(None)


@pytest.mark.parametrize("case", ["gptq-4-zeros", "awq", "packed-4-zeros"])
def test_experts_in_published_formats_keep_their_codes(
    case: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    options, writer, bits, group, zeros = CASES[case]
    folder, dequantised, matrices = write(
        build("glm4_moe", make_checkpoint, tmp_path / "a"),
        tmp_path,
        options,
        writer,
        lambda out, width, seed: quantised(out, width, bits, group, zeros, seed),
    )
    assert sum(".experts." in name for name in matrices) > 24
    ids = ids_of(40)
    expected = plain(torch_model(dequantised, "float32", "cpu", 256), ids, [40])
    for isa in HERE:
        model = native_model(step(isa), folder, "float32", 256)
        found = plain(model, ids, [40])
        assert np.abs(found - expected).max() < 3e-3 * expected.std()  # digits of 16 bits
        assert np.array_equal(plain(model, ids, [3, 1]), found)


@pytest.mark.parametrize("name", ["mixtral", "lfm2_moe", "qwen3_next", "qwen3_5_moe_text"])
def test_a_quantised_copy_is_what_quantising_at_load_gives(
    name: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    folder, recipe, ids = (
        build(name, make_checkpoint, tmp_path),
        Recipe.parse("int8-g32"),
        ids_of(9),
    )
    bits = export(folder, tmp_path / "copy", recipe)
    assert bits < 14  # routers, embeddings and scales among them
    for isa in HERE[-1:]:
        first = native_model(step(isa), folder, "float32", 256, recipe=recipe)
        second = native_model(step(isa), tmp_path / "copy", "float32", 256)
        assert np.array_equal(plain(first, ids, [9]), plain(second, ids, [9]))


def test_copies_that_cannot_be_written_are_refused(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    fused = build("gpt_oss", make_checkpoint, tmp_path / "a")
    file, _ = convert_mixture(
        build("qwen3_moe", make_checkpoint, tmp_path / "b", file_sizes("qwen3_moe")),
        tmp_path / "b.gguf", Kind.F32,
    )  # fmt: skip
    for folder, why in ((fused, "one tensor"), (file, "a GGUF file of a mixture")):
        with pytest.raises(ModelError, match=f"{why}.*--quantization"):
            export(folder, tmp_path / "copy", Recipe.parse("int8"))
        assert not (tmp_path / "copy").exists()


def test_joined_experts_keep_their_codes(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = build(
        "qwen3_5_moe_text", make_checkpoint, tmp_path / "a", file_sizes("qwen3_5_moe_text")
    )
    path, _ = convert_mixture(source, tmp_path / "a.gguf", Kind.Q8_0, joined=True)
    tensors = open_checkpoint(path).tensors
    assert tensors.kept("model.layers.0.mlp.experts.gate_proj.weight") == "Q8_0"
    assert "model.layers.0.mlp.experts.gate_up_proj.weight" in tensors.shapes()


def test_experts_of_another_number_are_refused(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Also where they have as many numbers in all."""
    sizes = file_sizes("qwen3_moe") | {"num_experts": 6}
    source = build("qwen3_moe", make_checkpoint, tmp_path / "a", sizes)
    path, _ = convert_mixture(source, tmp_path / "a.gguf", Kind.F32)
    tensors = open_checkpoint(path).tensors
    assert isinstance(tensors, GGUFTensors)
    key = "blk.0.ffn_up_exps.weight"
    stored = tensors._file.tensors[key]
    tensors._file.tensors[key] = replace(stored, shape=(3, 64, 64))
    with pytest.raises(ModelError, match=r"\[3, 64, 64\], but its metadata says \[192, 64\]"):
        tensors.matrix("model.layers.0.mlp.experts.up_proj.weight", (192, 64), None)


def test_one_expert_is_a_mixture(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    sizes = file_sizes("mixtral") | {"num_local_experts": 1, "num_experts_per_tok": 1}
    source = build("mixtral", make_checkpoint, tmp_path / "a", sizes)
    path, plain_folder = convert_mixture(source, tmp_path / "a.gguf", Kind.F32)
    ids = ids_of(20)
    expected = plain(torch_model(plain_folder, "float32", "cpu", 256), ids, [20])
    for model in models(path, ["float32"]):
        np.testing.assert_allclose(plain(model, ids, [20]), expected, atol=1e-3, rtol=0)
