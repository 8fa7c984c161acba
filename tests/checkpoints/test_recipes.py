"""Quantised weights: grids, layout, and that drafts change no token of a quantised target."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from outrider import LLM, SamplingParams
from outrider.audit.reference import transformers_model
from outrider.base.config import EngineConfig, Recipe
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.checkpoints.dtypes import FLOAT32
from outrider.checkpoints.export import as_tensors, bits_per_weight, export, pack
from outrider.checkpoints.formats.shared import unpack
from outrider.checkpoints.quantize import Floats, Quantized, quantize
from outrider.errors import ConfigError, ModelError
from outrider.models.torch_weights import load_weights
from outrider.native.choice import library
from tests.support.exactness import planted_pair
from tests.support.ggufs import SIZES, byte_level, convert
from tests.support.loading import torch_model
from tests.support.tiny import MakeCheckpoint

RECIPES = ("int8", "int4", "int8-g64", "int4-g32", "int4-zp", "int8-zp", "int4-channel")
COARSE = ("int8-a8", "int4-a8", "int4-g32-zp-a8", "int8-g128-a8")
CPU = "cpu"


def normal(out: int, inputs: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(0, 0.02, (out, inputs)).astype(np.float32)


def error(weight: Floats, found: Floats) -> float:
    return float(((weight - found) ** 2).mean())


def spanned(weight: Floats, bits: int, group: int) -> Floats:
    """``weight`` on grids that just span each group: what the search is to beat."""
    grouped = weight.reshape(len(weight), -1, group)
    scale = np.abs(grouped).max(-1, keepdims=True) / ((1 << (bits - 1)) - 1)
    return (np.rint(grouped / scale) * scale).reshape(weight.shape)


@pytest.mark.parametrize("text", [*RECIPES, *COARSE])
def test_a_recipe_is_its_text(text: str) -> None:
    assert str(Recipe.parse(text)) == text
    assert Recipe.parse("int4-g128") == Recipe.parse("int4") == Recipe(4, 128)
    assert Recipe.parse("int8-channel") == Recipe.parse("int8") == Recipe(8, None)


@pytest.mark.parametrize(
    "text", ["int5", "awq", "", "int4-g48", "int4-zp-g64", "int8-a8-zp", "int8-a4", "INT4", 4]
)
def test_what_is_no_recipe_is_refused(text: Any) -> None:
    with pytest.raises(ConfigError, match=r"quantization is .*; give int4 or int8"):
        EngineConfig(quantization=text)


def test_bits_of_a_weight() -> None:
    bits = {text: Recipe.parse(text).bits_per_weight(512) for text in RECIPES}
    assert bits["int8"] == 8 + 16 / 512
    assert bits["int8-g64"] == 8.25
    assert bits["int4"] == 4.125
    assert bits["int4-g32"] == 4.5
    assert bits["int4-zp"] == 4.125 + 4 / 128
    assert bits["int4-channel"] == 4 + 16 / 512


@pytest.mark.engine
@pytest.mark.parametrize("text", RECIPES)
@pytest.mark.parametrize("inputs", [256, 80])
def test_weights_stay_close_and_inside_their_grid(text: str, inputs: int) -> None:
    recipe, weight = Recipe.parse(text), normal(24, inputs)
    found = quantize(weight, recipe)
    group = min(recipe.group or inputs, inputs)
    assert found.shape == (24, inputs)
    assert found.scales.shape == (24, -(-inputs // group))
    assert int(found.codes.max()) < 1 << recipe.bits
    assert (found.zeros is not None) == recipe.zeros
    assert np.array_equal(found.scales.astype(np.float16).astype(np.float32), found.scales)
    # Rounding to steps of the range over 2^bits, and no more than twice that.
    steps = 2 * np.abs(weight).max(-1) / (1 << recipe.bits)
    assert (np.abs(found.dequantized(FLOAT32) - weight).max(-1) <= steps * 2).all()


@pytest.mark.engine
@pytest.mark.parametrize(("bits", "better"), [(4, 0.85), (8, 0.97)])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_the_search_beats_grids_that_span_their_groups(
    bits: int, better: float, group: int
) -> None:
    weight = normal(64, 256)
    found = quantize(weight, Recipe(bits, group)).dequantized(FLOAT32)
    assert error(weight, found) < better * error(weight, spanned(weight, bits, group))


def test_zero_points_serve_groups_to_one_side() -> None:
    weight = np.abs(normal(32, 128)) + np.float32(0.01)
    plain = quantize(weight, Recipe(4, 32)).dequantized(FLOAT32)
    moved = quantize(weight, Recipe(4, 32, zeros=True)).dequantized(FLOAT32)
    assert error(weight, moved) < error(weight, plain) / 2


@pytest.mark.parametrize("size", [1e-12, 1e-6, 1.0, 1e7])
@pytest.mark.parametrize("zeros", [False, True])
def test_sizes_far_from_1_are_no_worse(size: float, zeros: bool) -> None:
    weight = normal(8, 64)
    one = error(weight, quantize(weight, Recipe(4, 32, zeros)).dequantized(FLOAT32))
    found = quantize(weight * size, Recipe(4, 32, zeros))
    assert error(weight * size, found.dequantized(FLOAT32)) / size**2 == pytest.approx(
        one, rel=0.02
    )
    exponents = np.abs(np.log2(np.abs(found.scales) / np.abs(found.scales).max()))
    assert exponents.max() < 29  # one power of two puts all of them into fp16's range


def test_nothing_stays_nothing() -> None:
    for zeros in (False, True):
        found = quantize(np.zeros((4, 64), np.float32), Recipe(4, 32, zeros))
        assert not found.dequantized(FLOAT32).any()


def test_what_is_no_number_is_refused(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(tmp_path / "a", "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight'.*finite"):
        LLM(folder, drafter=None, quantization="int8")


@pytest.mark.engine
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("count", [64, 37])
def test_codes_lie_from_the_lowest_bits_up(bits: int, count: int) -> None:
    codes = np.random.default_rng(count).integers(0, 1 << bits, (5, count), np.uint8)
    words = pack(codes, bits)
    assert words.dtype == np.int32
    assert words.shape == (5, -(-count * bits // 32))
    each = 32 // bits
    for row, at in itertools.product(range(5), range(count)):
        word = int(words[row, at // each]) & 0xFFFFFFFF
        assert word >> bits * (at % each) & (1 << bits) - 1 == int(codes[row, at])
    assert np.array_equal(unpack(words, bits)[:, :count], codes)


def test_what_others_read() -> None:
    """weight = scale * (code - zero), with codes of the layout counted from -2^(bits - 1)."""
    weight = normal(16, 64)
    stored = as_tensors("a.weight", quantize(weight, Recipe(4, 32, zeros=True)))
    assert {name: (t.dtype, t.shape) for name, t in stored.items()} == {
        "a.weight_packed": (np.int32, (16, 8)),
        "a.weight_scale": (np.float16, (16, 2)),
        "a.weight_shape": (np.int64, (2,)),
        "a.weight_zero_point": (np.int32, (2, 2)),
    }
    codes = unpack(stored["a.weight_packed"], 4).astype(np.int32) - 8
    zeros = unpack(stored["a.weight_zero_point"].T, 4).T.astype(np.int32) - 8
    scales = stored["a.weight_scale"].astype(np.float32)
    found = (codes - zeros.repeat(32, 1)) * scales.repeat(32, 1)
    assert error(weight, found) < 1e-5


def matrices(folder: Path, recipe: Recipe | None) -> list[torch.Tensor]:
    """The matrices of a checkpoint as the torch path runs them, in fp32."""
    checkpoint = open_checkpoint(folder)
    assert checkpoint.architecture is not None
    weights = load_weights(checkpoint.tensors, checkpoint.architecture, FLOAT32, CPU, recipe)
    found = [m for layer in weights.layers for m in layer.products()]
    return [*found, weights.head, weights.embedding]


@pytest.mark.engine
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": False}),
        ("qwen2", {}),
        ("phi3", {"partial_rotary_factor": 0.5}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
        ("gemma3_text", {"head_dim": 8}),
    ],
)
@pytest.mark.parametrize("text", ["int4", "int8-g64-zp", "int4-channel"])
def test_saved_is_what_loading_makes(
    family: str,
    options: dict[str, Any],
    text: str,
    tmp_path: Path,
    make_checkpoint: MakeCheckpoint,
) -> None:
    folder = make_checkpoint(tmp_path / "plain", family, **options)
    recipe = Recipe.parse(text)
    bits = export(folder, tmp_path / "few", recipe)
    for a, b in zip(matrices(folder, recipe), matrices(tmp_path / "few", None), strict=True):
        assert torch.equal(a, b)
    # The shapes of the matrices are stored too: two numbers each, which weigh nothing in earnest.
    assert bits_per_weight(tmp_path / "few", None) == pytest.approx(bits)
    assert bits_per_weight(folder, recipe) == pytest.approx(bits, rel=0.1)


def test_the_recipe_is_told_and_other_files_come_along(tiny_llama: Path, tmp_path: Path) -> None:
    export(tiny_llama, tmp_path / "few", Recipe.parse("int4-g64-zp"))
    with safe_open(tmp_path / "few" / "model.safetensors", framework="pt") as file:
        assert file.metadata()["quantization"] == "int4-g64-zp"
    described = json.loads((tmp_path / "few" / "config.json").read_text())["quantization_config"]
    assert described["quant_method"] == "compressed-tensors"
    assert described["config_groups"]["group_0"]["weights"] == {
        "num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 64,
        "dynamic": False,
    }  # fmt: skip
    assert (tmp_path / "few" / "tokenizer.json").is_file()


def test_large_checkpoints_are_sharded(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.checkpoints.export.MAX_SHARD", 10_000)
    recipe = Recipe.parse("int8")
    export(tiny_llama, tmp_path / "few", recipe)
    files = sorted(file.name for file in (tmp_path / "few").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert len(files) > 2
    for a, b in zip(matrices(tiny_llama, recipe), matrices(tmp_path / "few", None), strict=True):
        assert torch.equal(a, b)


def test_quantising_again_or_over_something_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    few, recipe = tmp_path / "few", Recipe.parse("int8")
    export(tiny_llama, few, recipe)
    with pytest.raises(ConfigError, match="quantised already"):
        LLM(few, drafter=None, quantization="int8")
    with pytest.raises(ConfigError, match="quantised already"):
        export(few, tmp_path / "again", recipe)
    with pytest.raises(ConfigError, match="not empty"):
        export(tiny_llama, few, recipe)


def mixed(name: str) -> Kind:
    """Types as quantisers mix them: some values' and heads' keep their codes, most do not."""
    return Kind.Q8_0 if any(part in name for part in ("v_proj", "down_proj", "embed")) else Kind.F16


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", [Kind.F16, mixed])
def test_a_dequantised_file_is_quantised_from_its_values(
    family: str,
    kind: Any,
    make_checkpoint: MakeCheckpoint,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What keeps its codes stays, unless it is stacked with what does not."""
    source = make_checkpoint(tmp_path / "source", family, tokenizer=True, **SIZES)
    path, plain = convert(source, tmp_path / "a.gguf", kind, byte_level())
    recipe = Recipe.parse("int4-g32")
    loaded, by_recipe = matrices(path, recipe), matrices(plain, recipe)
    assert torch.equal(loaded[0], by_recipe[0])  # queries, keys and values
    same = [torch.equal(a, b) for a, b in zip(loaded, by_recipe, strict=True)]
    if kind is mixed:
        stays = [torch.equal(a, b) for a, b in zip(loaded, matrices(plain, None), strict=True)]
        assert [not s for s in same] == stays == [*2 * [False, False, False, True], False, True]
    else:
        assert all(same)
    for a, b in zip(export_(path, tmp_path / "few", recipe), loaded, strict=True):
        assert torch.equal(a, b)
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=24)
    options: Any = {"drafter": None, "memory": 2**24}
    runs = [LLM(path, quantization="int4-g32", **options), LLM(tmp_path / "few", **options)]
    assert len({llm.generate("def greet", params)[0].outputs[0].text for llm in runs}) == 1
    talk = [{"role": "user", "content": "hello"}]
    assert len({llm.chat(talk, params)[0].outputs[0].text for llm in runs}) == 1
    said = "3 (Q8_0) of 16 matrices keep their codes; the others become int4-g32"
    assert (said in caplog.text) == (kind is mixed)
    assert bits_per_weight(path, recipe) == pytest.approx(
        bits_per_weight(tmp_path / "few", None), 0.1
    )


def export_(folder: Path, out: Path, recipe: Recipe) -> list[torch.Tensor]:
    export(folder, out, recipe)
    return matrices(out, None)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0])
def test_a_file_that_keeps_its_codes_is_refused(
    kind: Kind, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source = make_checkpoint(tmp_path / "source", "llama", **SIZES)
    path, _ = convert(source, tmp_path / "a.gguf", kind)
    for call in (
        lambda: LLM(path, drafter=None, quantization="int4"),
        lambda: export(path, tmp_path / "few", Recipe.parse("int4")),
    ):
        with pytest.raises(ConfigError, match="quantised already"):
            call()
    assert not (tmp_path / "few").exists()


def test_a_failed_copy_leaves_nothing(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    out, recipe = tmp_path / "new" / "few", Recipe.parse("int8")
    bad = tmp_path / "bad"
    shutil.copytree(tiny_llama, bad)
    tensors = load_file(bad / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = torch.nan
    save_file(tensors, bad / "model.safetensors")
    with pytest.raises(ModelError, match="cannot be quantised"):
        export(bad, out, recipe)
    monkeypatch.setattr("outrider.checkpoints.files.save", full)
    with pytest.raises(ModelError, match=r"cannot be written .*No space left"):
        export(tiny_llama, out, recipe)
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="cannot be written"):
        export(tiny_llama, empty, recipe)
    assert sorted(tmp_path.iterdir()) == [bad, empty]
    monkeypatch.undo()
    (link := tmp_path / "link").symlink_to(empty)
    export(tiny_llama, link, recipe)
    assert (empty / "config.json").is_file()


def test_models_without_a_native_path_are_refused(
    tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    folder = make_checkpoint(tmp_path / "a", "starcoder2")
    with pytest.raises(ModelError, match="only native models can be quantised"):
        LLM(folder, drafter=None, quantization="int8")
    with pytest.raises(ModelError, match="no native path"):
        export(folder, tmp_path / "b", Recipe.parse("int8"))


def test_damaged_or_unknown_layouts_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    few = tmp_path / "few"
    export(tiny_llama, few, Recipe.parse("int4"))
    tensors = load_file(few / "model.safetensors")
    del tensors["model.layers.0.self_attn.o_proj.weight_scale"]
    save_file(tensors, few / "model.safetensors")
    with pytest.raises(ModelError, match=r"has no tensor .*o_proj\.weight_scale"):
        LLM(few, drafter=None)
    described = json.loads((few / "config.json").read_text())
    del described["quantization_config"]["config_groups"]
    (few / "config.json").write_text(json.dumps(described))
    with pytest.raises(ModelError, match=r"model\.layers"):
        LLM(few, drafter=None)


def test_norms_and_routers_stay(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    options = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    make_checkpoint(tmp_path / "plain", "qwen3_moe", tie_word_embeddings=False, **options)
    export(tmp_path / "plain", tmp_path / "few", Recipe.parse("int4"))
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    found = load_file(tmp_path / "few" / "model.safetensors")
    same = {name for name in plain if name in found and torch.equal(plain[name], found[name])}
    changed = plain.keys() - same
    ends = {"lm_head.weight", "model.embed_tokens.weight"}
    assert all(name.endswith("_proj.weight") or name in ends for name in changed)
    assert ends | {"model.layers.1.mlp.experts.3.down_proj.weight"} <= changed
    assert "model.layers.1.mlp.gate.weight" in same


def test_the_torch_path_runs_the_dequantised_weights(tiny_llama: Path, tmp_path: Path) -> None:
    """An oracle: a plain checkpoint of the same weights gives the same logits."""
    recipe = Recipe.parse("int4")
    same = tmp_path / "same"
    transformers_model(tiny_llama, recipe).save_pretrained(same)
    few = torch_model(tiny_llama, "float32", CPU, 64, recipe)
    plain = torch_model(same, "float32", CPU, 64)
    for a, b in zip(few.weights.layers, plain.weights.layers, strict=True):
        for one, other in zip(a.products(), b.products(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.engine
def test_stacking_and_picking_rows_is_that_of_the_matrix() -> None:
    parts = [quantize(normal(8, 64, seed), Recipe(4, 32, zeros=True)) for seed in range(3)]
    whole = Quantized.stacked(parts)
    plain = np.concatenate([part.dequantized(FLOAT32) for part in parts])
    order = np.random.default_rng(0).permutation(24)
    assert np.array_equal(whole.rows(order).dequantized(FLOAT32), plain[order])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted_pair(tmp_path_factory.mktemp("pair"))


@pytest.mark.engine
@pytest.mark.equality
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("target", "drafter"),
    [("int8-a8", "none"), ("int4", "auto"), ("int4-g64-zp-a8", "int4"), (None, "int8")],
)
def test_drafts_change_no_token(target: str | None, drafter: str, dtype: str, pair: Path) -> None:
    """Of a quantised target, with a drafter quantised or not, and of a plain one, the reverse."""
    options: dict[str, Any] = {"dtype": dtype, "quantization": target, "max_model_len": 128}
    prompts = [[5, 9, 5, 9, 5, 9, 5], [17, 40, 3, 22], list(range(60, 100))]
    params = [
        SamplingParams(temperature=t, seed=s, max_tokens=24, ignore_eos=True)
        for t, s in ((0, 1), (0.8, 2), (0.8, 3))
    ]
    alone = LLM(pair, drafter=None, max_num_seqs=1, **options)
    expected = [
        alone.generate([p], q)[0].outputs[0].token_ids for p, q in zip(prompts, params, strict=True)
    ]
    for name, length in (("ngram", 4), ("model", 1), ("model", 4)):
        llm = LLM(
            pair, drafter=name, num_speculative_tokens=length, drafter_quantization=drafter,
            **options,
        )  # fmt: skip
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, params)] == expected
        assert name == "ngram" or llm.engine.counts.accepted > 0


def test_activations_of_8_bits_are_no_checkpoints(pair: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'int4-a8', but a checkpoint holds weights only"):
        export(pair, tmp_path / "new", Recipe.parse("int4-a8"))
    assert not (tmp_path / "new").exists()


@pytest.mark.engine
def test_a_quantised_target_differs_from_the_plain_one(pair: Path) -> None:
    """Or nothing above would mean much."""
    params = SamplingParams(temperature=0, logprobs=0, max_tokens=8, ignore_eos=True)

    def logprobs(recipe: str | None) -> tuple[float, ...]:
        llm = LLM(pair, drafter=None, dtype="float32", quantization=recipe)
        found = llm.generate([[5, 9]], params)[0].outputs[0].logprobs
        assert found is not None
        return tuple(value.logprob for step in found for value in step.values())

    different = set(map(logprobs, (None, "int4", "int4-g32", "int4-a8")))
    assert len(different) == (3 if library() is None else 4)  # -a8 is the native step's
