"""Parity with transformers at tiny random sizes, for every family and every option of a config."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from outrider import LLM, SamplingParams
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.checkpoints.dtypes import BFLOAT16, choose_dtype
from outrider.checkpoints.folders import find_folder
from outrider.errors import ModelError
from outrider.models.base import Output
from outrider.models.load import load_model
from outrider.models.native import is_native
from outrider.models.rows import Segment
from outrider.models.tensors import as_tensor, torch_dtype
from outrider.models.transformer import Transformer, rms_norm
from tests.support.loading import torch_model

CPU = "cpu"
PAGE = 16
MakeCheckpoint = Callable[..., Path]
Change = Callable[[Path], object]


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


LINEAR = rope("linear", factor=3.0)
DYNAMIC = {**rope("dynamic", factor=4.0), "max_position_embeddings": 48}
LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64)
LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 1.5], "long_factor": [2.0, 5.0],
        "original_max_position_embeddings": 128,
    },
    "original_max_position_embeddings": 128,
}  # fmt: skip
LOCAL = {"sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}
WINDOW = {"use_sliding_window": True, "sliding_window": 24}
LAYERS = {"layer_types": ["full_attention", "sliding_attention"]}
GEMMA = {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 20}
MOE = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GRANITE = {
    "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6,
    "logits_scaling": 0.7,
}  # fmt: skip
DENSE = {
    **GRANITE, "shared_intermediate_size": 48, "num_local_experts": 0, "mamba_n_heads": 4,
    "layer_types": ["full_attention"] * 2, "position_embedding_type": None,
}  # fmt: skip
"""Granite 4 without mixtures and state-space layers."""
FAMILIES = ("llama", "qwen2", "qwen3")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "llama-attention-bias": ("llama", {"attention_bias": True}),
    "llama-mlp-bias": ("llama", {"mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-eps": ("llama", {"rms_norm_eps": 0.1}),
    "llama-theta": ("llama", rope("default", rope_theta=500.0)),
    "llama-narrow": ("llama", {"hidden_size": 24, "num_attention_heads": 3, "vocab_size": 61,
                               "num_key_value_heads": 3, "intermediate_size": 20}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-mha": ("qwen2", {"num_key_value_heads": 4}),
    "qwen3-bias": ("qwen3", {"attention_bias": True, "head_dim": 16}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, "head_dim": 8}),
    "llama3-head-dim": ("llama", {**LLAMA3, "head_dim": 24}),
    "yarn-mscale": ("llama", rope("yarn", factor=4.0, original_max_position_embeddings=64,
                                  mscale=0.8, mscale_all_dim=0.5)),
    "yarn-factor": ("qwen2", rope("yarn", factor=4.0, original_max_position_embeddings=64,
                                  attention_factor=1.2, beta_fast=16.0, beta_slow=2.0)),
    "llama-gelu": ("llama", {"hidden_act": "gelu"}),
    "mistral": ("mistral", {"sliding_window": 24}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "mistral-window-2": ("mistral", {"sliding_window": 2, "head_dim": 24}),
    "qwen2-window": ("qwen2", {**WINDOW, "max_window_layers": 1}),
    "qwen2-window-all": ("qwen2", {**WINDOW, "max_window_layers": 0}),
    "qwen2-layer-types": ("qwen2", {**WINDOW, **LAYERS}),
    "qwen3-layer-types": ("qwen3", {**WINDOW, **LAYERS, "head_dim": 16}),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0}),
    "gemma2-no-caps": ("gemma2", {**GEMMA, "attn_logit_softcapping": None,
                                  "final_logit_softcapping": None, "tie_word_embeddings": False}),
    "gemma2-bias": ("gemma2", {**GEMMA, "attention_bias": True, "hidden_activation": "gelu"}),
    "gemma3": ("gemma3_text", {**GEMMA, **LAYERS}),
    "gemma3-caps": ("gemma3_text", {**GEMMA, **LAYERS, "final_logit_softcapping": 4.0,
                                    "attn_logit_softcapping": 1.5, "attention_bias": True}),
    "gemma3-ropes": ("gemma3_text", {**GEMMA, **LAYERS, "rope_parameters": {
        **LOCAL, "full_attention": LINEAR["rope_parameters"]}}),
    "gemma3-dynamic": ("gemma3_text", {**GEMMA, **LAYERS, "max_position_embeddings": 48,
                                       "rope_parameters": {
        **LOCAL, "full_attention": DYNAMIC["rope_parameters"]}}),
    "phi3": ("phi3", {}),
    "phi3-partial": ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                  "partial_rotary_factor": 0.5}}),
    "phi3-window": ("phi3", {"sliding_window": 24, "tie_word_embeddings": True}),
    "phi3-longrope": ("phi3", LONGROPE),
    "granite": ("granite", GRANITE),
    "granite-bias": ("granite", {**GRANITE, "attention_bias": True, "mlp_bias": True,
                                 "tie_word_embeddings": True}),
    "granite-llama3": ("granite", {**GRANITE, **LLAMA3}),
    "granitemoehybrid": ("granitemoehybrid", DENSE),
    "granitemoehybrid-rope": ("granitemoehybrid", {
        **DENSE, "position_embedding_type": "rope", "tie_word_embeddings": True}),
    "ministral": ("ministral", {**LAYERS, "sliding_window": 24, "head_dim": 16}),
    "ministral3": ("ministral3", {"head_dim": 16, "rope_parameters": {
        **rope("yarn", factor=4.0, original_max_position_embeddings=32, mscale=1.0,
               mscale_all_dim=1.0, beta_fast=32.0, beta_slow=1.0)["rope_parameters"],
        "llama_4_scaling_beta": 0.3}}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0], "tie_word_embeddings": False}),
    "smollm3-window": ("smollm3", {**LAYERS, **WINDOW, "no_rope_layers": [0, 1]}),
    "olmo2": ("olmo2", {}),
    "olmo2-one-kv-head": ("olmo2", {"num_key_value_heads": 1, "attention_bias": True}),
    "olmo3": ("olmo3", {**LAYERS, "sliding_window": 24}),
    "exaone4-window": ("exaone4", {**LAYERS, "sliding_window": 24, "head_dim": 16}),
    "exaone4-all": ("exaone4", {
        **LLAMA3, "sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "phi3-longrope-tied": ("phi3", {**LONGROPE, "tie_word_embeddings": True}),
    "mistral-yarn": ("mistral", {**YARN, "sliding_window": 24}),
    "gemma2-all-windows": ("gemma2", {**GEMMA, "layer_types": ["sliding_attention"] * 2}),
    "qwen3_moe-linear": ("qwen3_moe", {**MOE, **LINEAR, "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", MOE),
    "qwen3_moe-dense-layer": ("qwen3_moe", {**MOE, "mlp_only_layers": [0],
                                            "norm_topk_prob": True}),
    "qwen3_moe-window": ("qwen3_moe", {**MOE, **WINDOW, "decoder_sparse_step": 2}),
    "qwen3_moe-bias": ("qwen3_moe", {**MOE, "attention_bias": True, "num_experts_per_tok": 4}),
    **{family: (family, {}) for family in FAMILIES},
    **{f"{f}-linear": (f, LINEAR) for f in FAMILIES},
    **{f"{f}-dynamic": (f, DYNAMIC) for f in FAMILIES},
    **{f"{f}-llama3": (f, LLAMA3) for f in FAMILIES},
    **{f"{f}-yarn": (f, YARN) for f in FAMILIES},
}  # fmt: skip


def prompt_of(length: int, seed: int = 0, vocabulary: int = 61) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (length,), generator=generator).tolist()


def load(folder: Path, dtype: str = "float32", max_length: int = 512) -> Transformer:
    return torch_model(folder, dtype, CPU, max_length)


def run(model: Transformer, ids: Sequence[int], **options: Any) -> Output:
    """One forward of the whole prompt, logits everywhere."""
    pages = list(range(1, -(-len(ids) // PAGE) + 1))
    store = model.new_store(len(pages) + 1, PAGE)
    segment = Segment(ids, 0, pages, len(ids), len(ids))
    return model.run([segment], store, **options)


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model, a copy of the loaded one: with dynamic rope it keeps state from call to call."""
    return deepcopy(loaded(folder, dtype))


@lru_cache(maxsize=1)
def loaded(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.inference_mode()
def reference_logits(folder: Path, ids: Sequence[int]) -> torch.Tensor:
    logits: torch.Tensor = reference(folder)(torch.tensor([ids])).logits[0]
    return logits


def assert_parity(folder: Path, ids: Sequence[int]) -> None:
    ours, theirs = run(load(folder, max_length=2048), ids).logits, reference_logits(folder, ids)
    assert ours is not None
    assert ours.dtype == np.float32
    assert theirs.std() > 0.5  # spread, or closeness would mean nothing
    np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def checkpoints(
    make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            family, config = CASES[name]
            made[name] = make_checkpoint(tmp_path_factory.mktemp(name), family, **config)
        return made[name]

    return get


@pytest.mark.parametrize("name", CASES)
def test_logits_are_transformers(name: str, checkpoints: Callable[[str], Path]) -> None:
    # 40 tokens lie within every trained context; 150 beyond what dynamic, llama3 and yarn were
    # trained on.
    for length in (1, 40, 150):
        assert_parity(checkpoints(name), prompt_of(length, seed=length))


@pytest.mark.parametrize(
    "name",
    # Ropes are tables of Python.
    [
        name if "rope_parameters" in config else pytest.param(name, marks=pytest.mark.engine)
        for name, (_, config) in CASES.items()
    ],
)
def test_greedy_ids_are_transformers(name: str, checkpoints: Callable[[str], Path]) -> None:
    folder = checkpoints(name)
    prompts = [prompt_of(5), prompt_of(70, seed=2)]
    # A length, so that nobody measures what steps cost.
    options: dict[str, Any] = {"num_speculative_tokens": 1, "max_num_batched_tokens": 48}
    llm = LLM(folder, drafter=None, dtype="float32", **options)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8))
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt])
        theirs = reference(folder).generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8
        )
        assert output.outputs[0].token_ids == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("name", "wrapper", "begins"),
    [
        ("gemma3", "gemma3", "language_model.model."),
        ("gemma3", "gemma3", "model.language_model."),
        ("ministral3", "mistral3", "language_model.model."),
        ("mistral", "mistral3", "model.language_model."),
        ("exaone4-window", "exaone4_5", "model.language_model."),
    ],
)
def test_the_text_part_of_a_wrapper_is_read(
    name: str, wrapper: str, begins: str, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    """Whichever version of transformers wrote it; pictures' weights are left alone."""
    alone = checkpoints(name)
    tensors = load_file(alone / "model.safetensors")
    head = "lm_head." if begins.startswith("model.") else "language_model.lm_head."
    wrapped = {
        head + key.removeprefix("lm_head.")
        if key.startswith("lm_head.")
        else begins + key.removeprefix("model."): tensor
        for key, tensor in tensors.items()
    }
    wrapped["vision_tower.weight"] = torch.zeros(3)
    save_file(wrapped, tmp_path / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((alone / "config.json").read_text())
    text.pop("architectures")
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": wrapper, "text_config": text, "vision_config": {}})
    )
    ids = prompt_of(60)
    assert np.array_equal(run(load(tmp_path), ids).logits, run(load(alone), ids).logits)
    assert is_native(open_checkpoint(tmp_path))
    shape = open_checkpoint(tmp_path).shape
    assert (shape.context, shape.vocab_size) == (256, 128)


@pytest.mark.parametrize("family", FAMILIES)
def test_long_context(family: str, tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(tmp_path, family, max_position_embeddings=2048)
    assert_parity(folder, prompt_of(1500))


def test_sharded(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(tmp_path, "llama", max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert_parity(folder, prompt_of(20))


def edit(folder: Path, **changes: Any) -> None:
    """Change config.json by hand; None takes an entry out."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_old_rope_spelling(
    scaling: dict[str, Any] | None, tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    before = run(load(folder), prompt_of(100)).logits
    edit(folder, rope_parameters=None, rope_theta=2000.0, rope_scaling=scaling)
    after = run(load(folder), prompt_of(100)).logits
    assert before is not None
    assert after is not None
    assert not np.array_equal(before, after)
    assert_parity(folder, prompt_of(100))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_is_roughly_the_same(
    family: str, dtype: str, checkpoints: Callable[[str], Path]
) -> None:
    ids = prompt_of(60)
    ours = run(load(checkpoints(family), dtype), ids).logits
    theirs = reference_logits(checkpoints(family), ids)
    assert ours is not None
    assert ours.dtype == np.float32
    error = (as_tensor(ours) - theirs).norm() / theirs.norm()
    assert error < (0.05 if dtype == "bfloat16" else 0.01)


def test_the_checkpoints_dtype_is_taken(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    assert load(folder, "bfloat16").weights.embedding.dtype == torch.bfloat16
    assert load(folder, "float32").weights.embedding.dtype == torch.float32
    assert open_checkpoint(folder).shape.dtype == BFLOAT16
    model = load(folder, "auto")
    assert model.dtype == choose_dtype("auto", BFLOAT16)
    assert model.new_store(2, PAGE).layers[0].dtype == torch_dtype(model.dtype)
    llm = LLM(folder, drafter=None)
    (output,) = llm.generate([prompt_of(9)], SamplingParams(temperature=0, max_tokens=5))
    assert len(output.outputs[0].token_ids) == 5


@torch.inference_mode()
def test_hidden_states(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(tmp_path / "whole", "qwen3", num_hidden_layers=4)
    ids = prompt_of(21)
    model = load(folder)
    output = run(model, ids, hidden=(-1, 0, 2, 3))
    theirs = reference(folder)(torch.tensor([ids]), output_hidden_states=True)
    assert set(output.hidden) == {-1, 0, 2, 3}
    for layer in (-1, 0, 2):
        np.testing.assert_allclose(
            output.hidden[layer], theirs.hidden_states[layer + 1][0], atol=1e-4, rtol=0
        )
    # Theirs after the last layer has gone through the last norm already.
    last = rms_norm(as_tensor(output.hidden[3]), model.weights.norm, model.shape.norm_eps)
    np.testing.assert_allclose(last, theirs.hidden_states[4][0], atol=1e-4, rtol=0)


@torch.inference_mode()
def test_the_tied_head_is_one_tensor(checkpoints: Callable[[str], Path]) -> None:
    tied, free = load(checkpoints("llama-tied")).weights, load(checkpoints("llama")).weights
    assert tied.head is tied.embedding
    assert free.head is not free.embedding


# What cannot be used is refused in a sentence.


@pytest.fixture
def copy(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint(tmp_path / "model", "llama")


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def retensor(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def misshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(3, 5)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (cut, r"model.safetensors is damaged .*; fetch it again"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 64), "safetensors is damaged"),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "safetensors is damaged"),
        (lambda f: (f / "model.safetensors").unlink(), "has no .safetensors file; fetch it again"),
        (
            retensor(lambda t: t.pop("model.layers.0.self_attn.k_proj.weight")),
            "no tensor 'model.layers.0.self_attn.k_proj.weight'; its config.json promises one",
        ),
        (retensor(lambda t: t.pop("lm_head.weight")), "no tensor 'lm_head.weight'"),
        (
            retensor(misshape),
            r"'model.layers.1.mlp.down_proj.weight' is \[3, 5\], but its config.json says "
            r"\[32, 48\]",
        ),
    ],
)
def test_damaged_weights_are_refused(change: Change, sentence: str, copy: Path) -> None:
    change(copy)
    with pytest.raises(ModelError, match=sentence) as caught:
        load(copy)
    assert str(copy) in str(caught.value)


def test_damaged_shards_are_refused(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(tmp_path, "llama", max_shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    shard = sorted(folder.glob("*.safetensors"))[1]
    kept = shard.read_bytes()
    shard.unlink()
    with pytest.raises(ModelError, match=f"{shard.name} is missing; fetch the checkpoint again"):
        load(folder)
    shard.write_bytes(kept)
    for damage in ("{", "[]", "{}", '{"weight_map": 3}'):
        index.write_text(damage)
        with pytest.raises(ModelError, match=r"index.json is damaged; fetch the checkpoint again"):
            load(folder)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path, copy: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for wrong in (file, tmp_path / "nowhere"):
        with pytest.raises(ModelError, match=r"is not a folder; give one with a config.json"):
            open_checkpoint(find_folder(wrong))
    with pytest.raises(ModelError, match=r"no config.json; give a Hugging Face checkpoint"):
        open_checkpoint(tmp_path)
    for damage in ("{", "", "[]", "3", '{"model_type": 3}', '{"hidden_size": 8}'):
        (copy / "config.json").write_text(damage)
        with pytest.raises(ModelError, match=r"config.json(: model_type is| is damaged)"):
            open_checkpoint(copy)


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        (
            "llama",
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            "quantised by 'bitsandbytes'.*not read, only by gptq.*checkpoint in float32, bfloat16",
        ),
        ("vit", {}, "model_type 'vit' is not supported: transformers has no causal language"),
        ("t5", {}, "model_type 't5' is not supported: transformers has no causal language"),
        ("bert", {}, "model_type 'bert' has an encoder, which reads both ways"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "reads both ways"),
        (
            "klingon",
            {"auto_map": {"AutoConfig": "x.C"}},
            "needs Python code of its own",
        ),
        ("klingon", {}, "config.json cannot be used.*klingon"),
        ("llama", {"hidden_size": "wide"}, "config.json: hidden_size is 'wide'; a whole number"),
        ("llama", {"num_attention_heads": 5}, "num_key_value_heads is 2; a divisor of num"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads"),
    ],
)
def test_what_cannot_be_run_is_refused(
    family: str, changes: dict[str, Any], sentence: str, copy: Path
) -> None:
    edit(copy, model_type=family, **changes)
    with pytest.raises(ModelError, match=sentence):
        load_model(open_checkpoint(copy), "float32", CPU, 256)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("cohere", {}),
        ("llama", {"hidden_act": "relu2"}),
        ("llama", {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    ],
)
def test_what_has_no_native_path_is_told_apart(
    family: str, changes: dict[str, Any], copy: Path
) -> None:
    edit(copy, model_type=family, **changes)
    assert open_checkpoint(copy).architecture is None


def test_end_tokens_and_context(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    def shape(**config: Any) -> Any:
        folder = make_checkpoint(tmp_path / str(len(list(tmp_path.iterdir()))), "llama", **config)
        return open_checkpoint(folder).shape

    assert shape().eos_token_ids == frozenset()
    assert shape(eos_token_id=7).eos_token_ids == {7}
    assert shape(eos_token_id=[7, 9]).eos_token_ids == {7, 9}
    assert shape().context == 256
    assert shape(**LINEAR).context == 768
    assert shape(**DYNAMIC).context == 192
    assert shape(**LLAMA3).context == 256
    assert shape(**YARN).context == 256
    assert shape(**rope("yarn", factor=8.0, original_max_position_embeddings=64)).context == 512


def test_the_end_tokens_of_generation_config_count_too(
    tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    folder = make_checkpoint(tmp_path, "llama", eos_token_id=7)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert open_checkpoint(folder).shape.eos_token_ids == {7, 9}
    (folder / "generation_config.json").write_text("[")
    with pytest.raises(ModelError, match=r"generation_config.json is damaged"):
        open_checkpoint(folder)
