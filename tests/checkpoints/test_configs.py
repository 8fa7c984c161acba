"""Configs of native families are transformers' own, read without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from outrider.checkpoints.architecture import Architecture
from outrider.checkpoints.configs import PlainConfig, config_json, plain_config, whole
from outrider.checkpoints.defaults import DEFAULTS, TYPES
from outrider.checkpoints.families import FAMILIES, read_shape
from outrider.errors import ModelError

FILE = "model/config.json"
TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5}
LONG = {
    "type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6, "factor": 4.0,
}  # fmt: skip
GIVEN: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    *((family, TINY) for family in FAMILIES),
    *((family, TINY | {"rope_theta": 5e5, "eos_token_id": [3, 4]}) for family in FAMILIES),
    *(
        (family, TINY | {"rope_scaling": scaling, "max_position_embeddings": 512})
        for family in ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "olmo2", "granite")
        for scaling in (LINEAR, LLAMA3, YARN)
    ),
    ("llama", TINY | {"rope_parameters": {**YARN, "original_max_position_embeddings": 128}}),
    ("llama", TINY | {"head_dim": 24, "num_key_value_heads": None, "attention_bias": True}),
    ("llama", TINY | {"dtype": "bfloat16", "tie_word_embeddings": True, "mlp_bias": True}),
    ("llama", TINY | {"torch_dtype": "float16", "eos_token_id": None}),
    ("mistral", TINY | {"sliding_window": None}),
    ("ministral", TINY | {"sliding_window": None}),
    ("qwen2", TINY | {"use_sliding_window": True, "max_window_layers": 3}),
    (
        "qwen2",
        TINY
        | {
            "use_sliding_window": True,
            "max_window_layers": 3,
            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": {"rope_theta": 2e4}},
        },
    ),
    ("qwen3", TINY | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
    ("qwen3_moe", TINY | {"num_experts": 6, "mlp_only_layers": [1], "norm_topk_prob": True}),
    ("qwen3_moe", TINY | {"num_local_experts": 5}),
    ("smollm3", TINY | {"use_sliding_window": True, "sliding_window": 32}),
    ("exaone4", TINY | {"sliding_window": 16, "sliding_window_pattern": 2}),
    ("smollm3", TINY | {"no_rope_layer_interval": 3}),
    ("gemma2", TINY | {"final_logit_softcapping": None}),
    ("gemma3_text", TINY | {"sliding_window_pattern": 3, "rope_local_base_freq": 9e3}),
    ("gemma3_text", TINY | {"rope_parameters": {"full_attention": LINEAR}}),
    ("gemma3_text", TINY | {"layer_types": ["full_attention"] * 7}),
    ("olmo3", TINY | {"rope_scaling": YARN}),
    ("phi3", TINY | {"rope_scaling": LONG, "partial_rotary_factor": 0.75}),
    ("phi3", TINY | {"original_max_position_embeddings": 64, "sliding_window": 16}),
    ("lfm2", TINY | {"full_attn_idxs": [2, 4], "block_ff_dim": 192, "tie_embedding": False}),
    ("lfm2", TINY | {"block_ffn_dim_multiplier": 1.5, "conv_L_cache": 4, "conv_bias": True}),
    ("qwen3_5_text", TINY | {"full_attention_interval": 3, "linear_num_key_heads": 2}),
    ("granitemoehybrid", TINY | {"layer_types": ["attention", *["mamba"] * 6]}),
    ("granitemoehybrid", TINY | {"mamba_d_head": "auto", "mamba_d_state": 16}),
    ("falcon_h1", TINY | {"mamba_d_ssm": None, "mamba_n_heads": 4, "mlp_multipliers": [1.0, 2.0]}),
    ("falcon_h1", TINY | {"mamba_d_ssm": 96, "mamba_n_heads": 3, "mamba_rms_norm": True}),
    ("nemotron_h", TINY | {"hybrid_override_pattern": "M-*M-M*"}),
    ("nemotron_h", TINY | {"layers_block_type": ["attention", "mamba", "mlp"], "n_groups": 2}),
    ("nemotron_h", TINY | {"mamba_n_groups": 4, "mamba_d_conv": 3, "mamba_conv_bias": False}),
    ("granitemoehybrid", TINY | {"layers_block_type": ["attention"] * 7}),
    ("mixtral", TINY | {"num_experts": 5, "sliding_window": 16}),
    ("olmoe", TINY | {"num_local_experts": 5, "clip_qkv": 8.0}),
    ("gpt_oss", TINY | {"num_local_experts": 4, "rope_scaling": YARN}),
    ("glm4_moe", TINY | {"n_routed_experts": 8, "first_k_dense_replace": 2}),
    ("lfm2_moe", TINY | {"num_experts": 4, "layer_types": ["conv"] * 7, "tie_embedding": False}),
    ("granitemoe", TINY | {"num_local_experts": 4, "attention_multiplier": 0.5}),
    ("granitemoehybrid", TINY | {"position_embedding_type": "rope", "num_local_experts": 0}),
]
FREE = {"head_dim", "num_key_value_heads", "sliding_window_pattern", "full_attention_interval",
    "tiled_value_heads", "layer_types",
}  # fmt: skip
"""What ours fills in where theirs leaves it to the model."""
UNUSED = (
    "attention_bias", "mamba_proj_bias",
)  # fmt: skip
"""What nothing reads of Nemotron-H without experts."""
WRAPPED: list[tuple[str, dict[str, Any]]] = [
    ("gemma3", {"text_config": TINY}),
    ("gemma3", {"text_config": {**TINY, "model_type": "gemma3_text"}, "dtype": "bfloat16"}),
    ("gemma3", {}),
    ("mistral3", {"text_config": TINY, "eos_token_id": 7}),
    ("mistral3", {"text_config": {**TINY, "model_type": "ministral3", "dtype": "bfloat16"}}),
    ("mistral3", {"tie_word_embeddings": False}),
    ("qwen3_5", {"text_config": TINY}),
    ("qwen3_5_moe", {"text_config": TINY}),
    (
        "qwen3_5",
        {"text_config": {**TINY, "tie_word_embeddings": True}, "tie_word_embeddings": True},
    ),
]


def theirs_of(family: str, given: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = AutoConfig.for_model(family, **given).to_dict()
    if "num_local_experts" in options and family == "qwen3_moe":
        options["num_experts"] = options.pop("num_local_experts")
    if family == "nemotron_h":
        options["layer_types"] = options.pop("layers_block_type")
        options["num_hidden_layers"] = len(options["layer_types"])
        options = {name: value for name, value in options.items() if name not in UNUSED}
    return without_dense(options)


def without_dense(options: dict[str, Any]) -> dict[str, Any]:
    """Without the width of MLPs that a family has not, though it is given."""
    if options["model_type"] == "qwen3_5_moe_text":
        options.pop("intermediate_size", None)
    return options


def named(ropes: dict[str, Any]) -> dict[str, Any]:
    """Return rope options without older names of theirs, and what nothing reads."""
    left = {name: named(each) if isinstance(each, dict) else each for name, each in ropes.items()}
    return {n: each for n, each in left.items() if n not in ("type", "max_position_embeddings")}


def check(plain: PlainConfig, theirs: dict[str, Any]) -> None:
    ours = config_json(plain)
    for name, value in ours.items():
        if name == "rope_parameters":
            assert name not in theirs or named(value) == named(theirs[name])
        elif name not in FREE or theirs.get(name) is not None:
            assert value == theirs.get(name, value and "missing"), name
    said = {name for name in TYPES if theirs.get(name) is not None}
    assert said <= ours.keys()


@pytest.mark.parametrize(("family", "given"), GIVEN)
def test_options_are_transformers(family: str, given: dict[str, Any]) -> None:
    given = ({"mamba_n_heads": 4} if family == "granitemoehybrid" else {}) | given
    plain = plain_config({"model_type": family, **given}, FILE)
    assert plain is not None
    theirs = theirs_of(family, given)
    check(plain, theirs)
    if "rope_parameters" in theirs:  # Nemotron-H has no rope
        again = whole(plain).rope_parameters
        assert named(again) == named(theirs["rope_parameters"])


@pytest.mark.parametrize(("family", "given"), WRAPPED)
def test_wrappers_parts_for_text_are_transformers(family: str, given: dict[str, Any]) -> None:
    plain = plain_config({"model_type": family, **given}, FILE)
    assert plain is not None
    theirs = AutoConfig.for_model(family, **given)
    assert plain.tie_word_embeddings == theirs.tie_word_embeddings
    assert plain.eos_token_id == getattr(theirs, "eos_token_id", None)
    check(plain.get_text_config(), without_dense(theirs.get_text_config(decoder=True).to_dict()))


def test_every_native_family_has_defaults() -> None:
    assert DEFAULTS.keys() == FAMILIES.keys()
    assert all(name in TYPES for options in DEFAULTS.values() for name in options)


def test_other_families_are_none() -> None:
    assert plain_config({"model_type": "mamba"}, FILE) is None
    wrapped = {"model_type": "mistral3", "text_config": {"model_type": "mamba"}}
    assert plain_config(wrapped, FILE) is None


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [
        ("hidden_size", "64", "a whole number from 1 to"),
        ("num_attention_heads", 0, "a whole number from 1 to"),
        ("rms_norm_eps", [], "a finite number"),
        ("tie_word_embeddings", "yes", "true or false"),
        ("hidden_act", 3, "a text"),
        ("eos_token_id", "end", "an id, or a list of ids"),
        ("rope_parameters", [1], "an object"),
        ("rope_theta", "high", "a finite number"),
        ("model_type", 7, "a text"),
    ],
)
def test_a_wrong_type_is_refused(name: str, value: object, needed: str) -> None:
    with pytest.raises(ModelError, match=f"^{FILE}: {name} is .*; {needed}.* is needed"):
        plain_config({"model_type": "llama", name: value}, FILE)


@pytest.mark.parametrize("pattern", ["", "MX-*", "M*-m"])
def test_a_pattern_of_other_letters_is_refused(pattern: str) -> None:
    with pytest.raises(ModelError, match=r"hybrid_override_pattern is .*; a text of M, \*, -, E"):
        plain_config({"model_type": "nemotron_h", "hybrid_override_pattern": pattern}, FILE)


HYBRID = TINY | {"mamba_n_heads": 4, "layer_types": ["attention", *["mamba"] * 6]}
HYBRID |= {"num_local_experts": 0}


@pytest.mark.parametrize(
    ("more", "native"),
    [
        ({}, True),
        ({"time_step_limit": [0.0, float("inf")]}, True),
        ({"time_step_limit": [0.001, 0.1]}, False),
        ({"time_step_limit": "none"}, False),
        ({"hidden_act": "gelu_pytorch_tanh"}, False),
    ],
)
def test_only_what_the_step_computes_is_native(
    more: dict[str, Any], native: bool, tmp_path: Path
) -> None:
    config = plain_config({"model_type": "granitemoehybrid", **HYBRID, **more}, FILE)
    assert config is not None
    assert isinstance(read_shape(config, tmp_path), Architecture) == native


@pytest.mark.parametrize(
    ("groups", "chosen", "top", "said"),
    [
        (5, 1, 2, "n_group is 5; a divisor of 12 up to 6"),
        (12, 6, 2, "n_group is 12; a divisor of 12 up to 6"),
        (13, 1, 2, "n_group is 13; a whole number from 1 to 12"),
        (4, 5, 2, "topk_group is 5; a whole number from 1 to 4"),
        (4, 1, 4, "topk_group is 1; groups of 4 experts, num_experts_per_tok, or more"),
    ],
)
def test_groups_that_experts_do_not_fill_are_refused(
    groups: int, chosen: int, top: int, said: str, tmp_path: Path
) -> None:
    options = {"n_group": groups, "topk_group": chosen, "num_experts_per_tok": top}
    options |= {"n_routed_experts": 12, "num_key_value_heads": 4}
    config = plain_config({"model_type": "glm4_moe"} | TINY | options, FILE)
    assert config is not None
    with pytest.raises(ModelError, match=said):
        read_shape(config, tmp_path)


def test_wrong_types_in_parts_name_the_part() -> None:
    options = {"model_type": "gemma3", "text_config": {"layer_types": "full"}}
    with pytest.raises(ModelError, match=r"text_config: layer_types is 'full'; a list of texts"):
        plain_config(options, FILE)
    ropes = {"model_type": "gemma3_text", "rope_parameters": {"full_attention": 4}}
    with pytest.raises(ModelError, match="an object with an object full_attention is needed"):
        plain_config(ropes, FILE)


@pytest.mark.parametrize(
    "more",
    [
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": None}},
        {"model_type": "gemma3_text", "layer_types": ["sliding_attention"] * 7,
         "rope_parameters": {"full_attention": {"partial_rotary_factor": []}}},
    ],
)  # fmt: skip
def test_shares_that_are_null_or_of_no_layer_turn_whole_heads(more: dict[str, Any]) -> None:
    config = plain_config({"model_type": "llama"} | TINY | {"head_dim": 16} | more, FILE)
    assert config is not None
    shape = read_shape(config, Path(FILE))
    assert isinstance(shape, Architecture)
    assert shape.rotary_dim == 16
