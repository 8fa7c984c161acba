"""Reads a checkpoint's config: its shape for any model, its architecture for a native family.

Names of tensors and options are those of Hugging Face's models of the same name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ..base.fields import Fields, read_object
from ..base.limits import LARGEST_INT
from ..errors import ModelError, shown
from .architecture import (
    Architecture,
    Family,
    LinearAttention,
    Mixer,
    Multipliers,
    Shape,
)
from .configs import (
    BESIDE,
    CONV,
    LINEAR,
    LINEAR_NAMES,
    MLP,
    MOE,
    LinearNames,
    ModelConfig,
    PlainConfig,
)
from .dtypes import PLAIN
from .formats.gguf import is_gguf
from .mixtures import (
    GLM4_MOE,
    GPT_OSS,
    GRANITE_MOE,
    LFM2_MOE,
    MIXTRAL,
    MOST_EXPERTS,
    NEMOTRON_MOE,
    NEXT,
    QWEN_MOE,
    SHARING,
    WIDEST,
    read_mixture,
)
from .rope import ROPE_TYPES, STILL, check_rope, head_dim, rope_parameters, rotary_dim

MIXERS: dict[str, Mixer] = {
    "full_attention": "attention", "sliding_attention": "attention", CONV: "conv", LINEAR: "linear",
    BESIDE: "beside", MLP: "none", MOE: "none",
}  # fmt: skip
"""What mixes tokens in layers of each kind of ``layer_types``."""
CLAMPED = "clamped"
"""The activation of gpt-oss, which limits gate and up."""
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", CLAMPED)
UNGATED = "relu2"
"""The activation of MLPs without gates."""
UNBOUNDED = 32768
"""Tokens of context for a model whose config names no limit."""
EPSILONS = ("norm_eps", "layer_norm_epsilon", "rms_norm_eps")
"""Families' names for the number that keeps norms from dividing by 0."""
UNLIMITED = ([0, math.inf], [0, {"__float__": "Infinity"}])
"""How configs write that the steps of Mamba-2 have no limits."""
MOST_TAPS = 64
"""Most tokens that a short convolution spans."""


LFM2 = (
    ("input_layernorm", "operator_norm"), ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.o_proj", "self_attn.out_proj"), ("self_attn.q_norm", "self_attn.q_layernorm"),
    ("self_attn.k_norm", "self_attn.k_layernorm"), ("mlp.gate_proj", "feed_forward.w1"),
    ("mlp.up_proj", "feed_forward.w3"), ("mlp.down_proj", "feed_forward.w2"),
    ("model.norm", "model.embedding_norm"),
)  # fmt: skip
FALCON_H1 = (
    ("post_attention_layernorm", "pre_ff_layernorm"), ("model.norm", "model.final_layernorm"),
    *((f"mlp.{name}_proj", f"feed_forward.{name}_proj") for name in ("gate", "up", "down")),
)  # fmt: skip
NEMOTRON_H = (
    ("input_layernorm", "norm"), ("model.embed_tokens", "model.embeddings"),
    ("model.norm", "model.norm_f"), ("mamba", "mixer"),
    *((f"self_attn.{name}_proj", f"mixer.{name}_proj") for name in "qkvo"),
    *((f"mlp.{name}_proj", f"mixer.{name}_proj") for name in ("up", "down")),
    *((f"mamba.{name}", f"mixer.{name}") for name in ("in_proj", "conv1d", "norm", "out_proj")),
)  # fmt: skip
_OLMO = Family(norms="after", qk_norm=True, wide_norms=True)
FAMILIES = {
    "llama": Family(),
    "mistral": Family(qkv_bias=False, output_bias=False, windowed=True),
    "ministral": Family(qkv_bias=False, output_bias=False),
    "ministral3": Family(qkv_bias=False, output_bias=False, windowed=True),
    "qwen2": Family(qkv_bias=True, output_bias=False),
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(qk_norm=True, windowed=True, experts=QWEN_MOE),
    "mixtral": Family(qkv_bias=False, output_bias=False, windowed=True, experts=MIXTRAL),
    "olmoe": Family(qk_norm=True, wide_norms=True, experts=QWEN_MOE),
    "granitemoe": Family(experts=GRANITE_MOE),
    "gpt_oss": Family(experts=GPT_OSS, sinks=True),
    "smollm3": Family(),
    "gemma2": Family(norms="around", shifted=True, scaled=True, attention_cap=True),
    "gemma3_text": Family(norms="around", shifted=True, scaled=True, qk_norm=True),
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "exaone4": Family(norms="after", qkv_bias=False, output_bias=False, qk_norm=True),
    "phi3": Family(
        qkv_bias=False, output_bias=False, partial=True, windowed=True,
        fused_heads="self_attn.qkv_proj", fused_mlp="mlp.gate_up_proj",
    ),
    "granite": Family(),
    "qwen3_5_text": Family(partial=True, shifted=True, qk_norm=True, gated=True),
    "qwen3_5_moe_text": Family(
        partial=True, shifted=True, qk_norm=True, gated=True, experts=SHARING
    ),
    "qwen3_next": Family(
        partial=True, shifted=True, qk_norm=True, gated=True, grouped=True, experts=NEXT
    ),
    "glm4_moe": Family(output_bias=False, partial=True, experts=GLM4_MOE),
    "lfm2": Family(qkv_bias=False, output_bias=False, qk_norm=True, names=LFM2),
    "lfm2_moe": Family(
        qkv_bias=False, output_bias=False, qk_norm=True, names=LFM2, experts=LFM2_MOE
    ),
    "granitemoehybrid": Family(
        fused_mlp="shared_mlp.input_linear", down="shared_mlp.output_linear", mamba=True,
        experts=GRANITE_MOE,
    ),
    "falcon_h1": Family(output_bias=False, mamba=True, names=FALCON_H1),
    "nemotron_h": Family(
        qkv_bias=False, output_bias=False, ungated=True, lone=True, mamba=True, names=NEMOTRON_H,
        experts=NEMOTRON_MOE,
    ),
}  # fmt: skip
CLASSES = {
    "gemma3_text": "Gemma3", "granitemoehybrid": "GraniteMoeHybrid", "falcon_h1": "FalconH1",
    "nemotron_h": "NemotronH", "qwen3_moe": "Qwen3Moe", "smollm3": "SmolLM3",
    "qwen3_next": "Qwen3Next",
    "granitemoe": "GraniteMoe", "gpt_oss": "GptOss", "lfm2_moe": "Lfm2Moe", "glm4_moe": "Glm4Moe",
}  # fmt: skip
"""Names of families' classes that are not the capitalised family name."""


def read_shape(config: ModelConfig, folder: Path) -> Shape:
    """Return the shape of a model: an ``Architecture`` if its family and options are native."""
    text = config.get_text_config(decoder=True)
    kind = config.model_type
    _check_kind(config, text, folder)
    values = fields_of(text, folder)
    said = getattr(config, "dtype", None) or getattr(text, "dtype", None) or "float32"
    dtype = {d.name: d for d in PLAIN}.get(str(said).removeprefix("torch."))
    if dtype is None:
        needed = "float32, bfloat16, float16 or float64 is needed"
        raise ModelError(f"{values.where}: dtype is {shown(said)}; {needed}.")
    shape = Shape(
        family=kind,
        vocab_size=values.whole("vocab_size", 1),
        context=context_length(text, values),
        dtype=dtype,
        eos_token_ids=end_token_ids(config, text, folder),
    )
    return _architecture(text, folder, shape) or shape


def _check_kind(config: ModelConfig, text: ModelConfig, folder: Path) -> None:
    """Refuse a config of anything but a causal language model."""
    kind, encoder = config.model_type, False
    if not isinstance(config, PlainConfig):
        from transformers.models.auto.modeling_auto import (
            MODEL_FOR_CAUSAL_LM_MAPPING,
            MODEL_FOR_MASKED_LM_MAPPING,
        )

        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ModelError(
                f"{folder}: model_type {kind!r} is not supported: transformers has no causal "
                "language model of it; give one that AutoModelForCausalLM loads."
            )
        masked = type(config) in MODEL_FOR_MASKED_LM_MAPPING
        encoder = masked and not getattr(text, "is_decoder", False)
    # In Gemma 4 the tokens of an image may see each other; those of text read left to right.
    both_ways = getattr(text, "use_bidirectional_attention", False) not in (None, False, "vision")
    if encoder or config.is_encoder_decoder or both_ways:
        raise ModelError(
            f"{folder}: model_type {kind!r} has an encoder, which reads both ways; only models "
            "that read left to right can be decoded."
        )


def fields_of(config: ModelConfig, folder: Path) -> Fields:
    """Return the options of ``config``, typed; renamed ones also under their common name."""
    file = folder if is_gguf(folder) else folder / "config.json"
    options = dict(vars(config))
    options |= {name: options.get(own) for name, own in config.attribute_map.items()}
    return Fields(options, str(file))


def _architecture(config: ModelConfig, folder: Path, shape: Shape) -> Architecture | None:
    """Return the architecture; None if the family or an option is not native."""
    if not isinstance(config, PlainConfig):
        return None
    family = FAMILIES[config.model_type]
    values = fields_of(config, folder)
    _check_heads(config, values)
    if not _options_fit(config, family):
        return None
    size = head_dim(config)
    heads = values.whole("num_attention_heads", 1, max(1, LARGEST_INT // (3 * size)))
    kv_heads = values.whole("num_key_value_heads", 1, default=heads)
    if heads % kv_heads:
        raise values.refuse("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    bias = bool(getattr(config, "attention_bias", False))
    kinds = _kinds(config)
    windowed = [family.windowed or kind == "sliding_attention" for kind in kinds]
    own_window = values.whole("sliding_window", default=0) if any(windowed) else 0  # 0: no window
    width = values.whole("hidden_size", 1, WIDEST)
    inner = "shared_intermediate_size" if "shared_mlp" in family.down else "intermediate_size"
    ropes = _rope_kinds(config)
    turning = [kind for kind in ropes if kind != STILL]
    scalar = values.number("query_pre_attn_scalar", float(size), positive=True)
    return Architecture(
        **{field.name: getattr(shape, field.name) for field in fields(shape)},
        hidden_size=width,
        intermediate_size=_inner(values, inner),
        num_layers=len(kinds),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        rotary_dim=rotary_dim(config, turning[0]) if turning else size,
        norm_eps=values.number(next(name for name in EPSILONS if name in values), low=0),
        activation=_activation(config),
        tied=bool(config.tie_word_embeddings),
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=bias if family.output_bias is None else family.output_bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        layout=replace(family, qk_norm=True) if values.flag("use_qk_norm", False) else family,
        kinds=tuple(ropes),
        windows=tuple(own_window or None if each else None for each in windowed),
        scale=values.number("attention_multiplier", scalar**-0.5) * _heads_scale(values),
        **_heat(config, values),
        attention_cap=_cap(values, "attn_logit_softcapping") if family.attention_cap else None,
        logits_cap=_cap(values, "final_logit_softcapping"),
        embedding_scale=width**0.5 if family.scaled else values.number("embedding_multiplier", 1),
        residual_scale=values.number("residual_multiplier", 1),
        logits_scale=_logits_scale(values),
        multipliers=_multipliers(values),
        **read_mixture(values, family, kinds),
        mixers=tuple(MIXERS[kind] for kind in kinds),
        mlps=tuple(not family.lone or kind in (MLP, MOE) for kind in kinds),
        **_convolved(values, config, family, kinds),
    )


def _heads_scale(values: Fields) -> float:
    """Return the factor of attention scores that comes from multipliers of inputs and keys."""
    inputs, keys = "attention_in_multiplier", "key_multiplier"
    return values.number(inputs, 1.0) ** 2 * values.number(keys, 1.0)


def _logits_scale(values: Fields) -> float:
    """Return the divisor of logits."""
    if "lm_head_multiplier" in values:
        return 1 / values.number("lm_head_multiplier", positive=True)
    return values.number("logits_scaling", 1, positive=True)


def _multipliers(values: Fields) -> Multipliers:
    """Return Falcon-H1's multipliers; those of others are 1."""
    if "mlp_multipliers" not in values:
        return Multipliers()
    gate, down = values.numbers("mlp_multipliers", 2)
    # Values have the multiplier of attention's inputs too.
    inputs, out = values.number("attention_in_multiplier"), "attention_out_multiplier"
    return Multipliers(inputs * values.number(out), values.number("ssm_out_multiplier"), down, gate)


def _convolved(
    values: Fields, config: PlainConfig, family: Family, kinds: Sequence[str]
) -> dict[str, Any]:
    """Return the fields of ``Architecture`` about mixers with a convolution."""
    plain = (1.0, 1.0, 1.0)
    if not {LINEAR, BESIDE} & {*kinds}:
        biased = values.flag("conv_bias", False)
        return {
            "conv_taps": values.whole("conv_L_cache", 1, MOST_TAPS, 1), "linear": None,
            "conv_bias": biased, "mixer_bias": biased, "convolved": plain,
        }  # fmt: skip
    names = LINEAR_NAMES[config.model_type]
    linear = _linear(values, names, family.mamba)
    if "ssm_multipliers" in values:
        inputs = values.number("ssm_in_multiplier")
        gate, *mixed, step = (inputs * by for by in values.numbers("ssm_multipliers", 5))
        groups = linear.key_heads if values.flag("mamba_rms_norm") else 0
        first = not values.flag("mamba_norm_before_gate")
        plain = (mixed[0], mixed[1], mixed[2])
        linear = replace(
            linear, norm_groups=groups, gate_first=first, gate_scale=gate, step_scale=step
        )
    return {
        "conv_taps": values.whole(names.taps, 1, MOST_TAPS, 1),
        "linear": linear,
        "convolved": plain,
        "conv_bias": bool(names.conv_bias) and values.flag(names.conv_bias),
        "mixer_bias": bool(names.bias) and values.flag(names.bias),
    }


def _inner(values: Fields, name: str) -> int:
    """Return the width of dense MLPs, or of experts if there are no dense ones.

    LFM2's width is computed from its options.
    """
    width = values.whole(name if name in values else "moe_intermediate_size", 1, WIDEST)
    if not values.flag("block_auto_adjust_ff_dim", False):
        return width
    multiple = values.whole("block_multiple_of", 1, WIDEST)
    by = values.number("block_ffn_dim_multiplier", positive=True)
    width = -(-int(by * (2 * width // 3)) // multiple) * multiple
    if not 1 <= width <= WIDEST:
        raise values.refuse("block_ffn_dim_multiplier", f"MLPs of 1 to {WIDEST} elements")
    return width


def _linear(values: Fields, names: LinearNames, mamba: bool) -> LinearAttention:
    """Return the sizes of linear attention."""
    keys, heads, key, value = (values.whole(name, 1, MOST_EXPERTS) for name in names[:4])
    if heads % keys:
        raise values.refuse(names.value_heads, f"a multiple of {names.key_heads} ({keys})")
    tiled = values.flag("tiled_value_heads", False)
    groups = keys if mamba else heads
    linear = LinearAttention(keys, heads, key, value, tiled, mamba, groups, gate_first=mamba)
    if linear.conv_width > WIDEST:
        raise values.refuse(names.value_heads, f"heads of at most {WIDEST} elements in all")
    return linear


def _heat(config: PlainConfig, values: Fields) -> dict[str, Any]:
    """Return the fields of ``Architecture`` about queries at late positions."""
    rope = Fields(rope_parameters(config), f"{values.where}: rope_parameters")
    heat = rope.number("llama_4_scaling_beta", 0.0)
    step = rope.whole("original_max_position_embeddings", 1) if heat else 1
    return {"heat": heat, "heat_step": step}


def _cap(values: Fields, name: str) -> float | None:
    return values.number(name, positive=True) if name in values else None


def _check_heads(config: PlainConfig, values: Fields) -> None:
    """Refuse invalid sizes of heads and rope options."""
    width, heads = values.whole("hidden_size", 1), values.whole("num_attention_heads", 1)
    size = values.whole("head_dim", 1, default=width // heads)
    if size < 1:
        raise values.refuse("hidden_size", "at least num_attention_heads")
    layers = values.whole("num_hidden_layers", 1)
    if len(_kinds(config)) != layers:
        raise values.refuse("layer_types", "a kind for each of num_hidden_layers")
    if "no_rope_layers" in values and len(values.listed("no_rope_layers", int)) < layers:
        raise values.refuse("no_rope_layers", "a 0 or 1 for each of num_hidden_layers")
    if not isinstance(config.rope_parameters, dict):
        raise values.refuse("rope_parameters", "an object")
    for kind in set(_rope_kinds(config)) - {STILL}:
        check_rope(rope_parameters(config, kind), size, f"{values.where}: rope_parameters")


def _options_fit(config: PlainConfig, family: Family) -> bool:
    """Return whether the native path supports the activation, ropes and head size of ``config``."""
    if _activation(config) not in ((UNGATED,) if family.ungated else ACTIVATIONS):
        return False
    if {LINEAR, BESIDE} & {*_kinds(config)} and not _states_fit(config):
        return False
    if not set(_kinds(config)) <= MIXERS.keys():
        return False
    if {LINEAR, BESIDE} & {*_kinds(config)} and config.model_type not in LINEAR_NAMES:
        return False
    if config.model_type == "falcon_h1" and _biased(config):
        return False
    if {MLP, MOE} & {*_kinds(config)} and not family.lone:
        return False
    if getattr(config, "moe_latent_size", None) is not None:
        return False
    if getattr(config, "clip_qkv", None) is not None:
        return False
    for kind in set(_rope_kinds(config)) - {STILL}:
        if rope_parameters(config, kind).get("rope_type", "default") not in ROPE_TYPES:
            return False
        rotated = rotary_dim(config, kind)
        if rotated != head_dim(config) and (not family.partial or rotated % 2):
            return False
    return head_dim(config) % 2 == 0


def _states_fit(config: PlainConfig) -> bool:
    """Return whether convolutions have SiLU, and the steps of Mamba-2 have no limits."""
    activation = getattr(config, "mamba_hidden_act", None) or _activation(config)
    limit = getattr(config, "time_step_limit", None)
    if config.model_type == "nemotron_h":
        limit = None  # transformers reads another option, for prompts alone
    return activation == "silu" and (limit is None or limit in UNLIMITED)


def _biased(config: PlainConfig) -> bool:
    """Return whether a Falcon-H1 has biases, which its multipliers would have to reach."""
    names = ("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias")
    return any(getattr(config, name) for name in names)


def _activation(config: PlainConfig) -> str:
    if config.model_type == "gpt_oss":
        limit, alpha = config.swiglu_limit, config.swiglu_alpha
        return CLAMPED if (limit, alpha) == (7.0, 1.702) else "foreign"
    names = ("hidden_activation", "hidden_act", "mlp_hidden_act")
    return str(next(filter(None, (getattr(config, name, None) for name in names)), "silu"))


def _kinds(config: PlainConfig) -> list[str]:
    """Return the kind of each layer, see ``MIXERS``; it may be a foreign one."""
    usual = BESIDE if config.model_type == "falcon_h1" else "full_attention"
    return getattr(config, "layer_types", None) or [usual] * config.num_hidden_layers


def _rope_kinds(config: PlainConfig) -> list[str | None]:
    """Return the kind of each layer's rope: None if all share one, ``STILL`` without a rope."""
    kinds = _kinds(config)
    turns = getattr(config, "no_rope_layers", None) or [1] * len(kinds)  # 1 has a rope
    if config.model_type == "granitemoehybrid" and config.position_embedding_type != "rope":
        turns = [0] * len(kinds)
    if config.model_type == "nemotron_h":
        turns = [0] * len(kinds)
    if config.model_type == "exaone4" and config.sliding_window is not None:
        turns = [int(kind == "sliding_attention") for kind in kinds]
    own = [kind if kind in config.rope_parameters else None for kind in kinds]
    attends = [MIXERS.get(kind) in ("attention", "beside") for kind in kinds]
    turns = [own and turn for own, turn in zip(attends, turns, strict=False)]
    return [kind if turn else STILL for kind, turn in zip(own, turns, strict=False)]


def end_token_ids(config: ModelConfig, text: ModelConfig, folder: Path) -> frozenset[int]:
    """Return the EOS ids of config.json and generation_config.json; chat models list more there."""
    file, where = folder / "generation_config.json", fields_of(config, folder).where
    values = [(getattr(c, "eos_token_id", None), where) for c in (text, config)]
    if file.is_file():
        values.append((read_object(file).get("eos_token_id"), str(file)))
    end_ids: set[int] = set()
    for value, place in values:
        if value is not None:
            ids = Fields({"eos_token_id": value if isinstance(value, list) else [value]}, place)
            end_ids.update(ids.listed("eos_token_id", int))
    return frozenset(id for id in end_ids if id >= 0)  # some checkpoints write -1 for none


def context_length(config: ModelConfig, values: Fields) -> int:
    """Return the context in tokens, rope scaling included; ``UNBOUNDED`` if none is named."""
    names = ("max_position_embeddings", "max_seq_len", "seq_length", "context_length")
    named = next((name for name in names if name in values), None)
    if named is None:
        return UNBOUNDED
    trained, parameters = values.whole(named, 1), rope_parameters(config)
    if parameters.get("rope_type") not in ("linear", "dynamic", "yarn"):
        return trained
    rope = Fields(parameters, f"{values.where}: rope_parameters")
    original = rope.whole("original_max_position_embeddings", 1, default=trained)
    scaled = original * rope.number("factor", 1.0, positive=True)
    if scaled > LARGEST_INT:
        raise rope.refuse("factor", f"a context of at most {LARGEST_INT} tokens")
    return max(trained, int(scaled))
