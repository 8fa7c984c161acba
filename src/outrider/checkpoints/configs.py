"""Configs of native families, read without transformers, which takes two seconds to import.

Names, defaults and derived options are those of transformers' config of the same family.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

from ..base.extras import torch_for
from ..base.fields import Fields
from .defaults import (
    DEFAULTS,
    FIRST,
    GPT_OSS_ROPE,
    KEPT,
    MINISTRAL3_ROPE,
    MISTRAL3_TEXT,
    NEAR_THETA,
    NONE_COUNTS,
    RENAMED,
    THETA,
    TYPES,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ModelConfig: TypeAlias = "PlainConfig | PretrainedConfig"
"""A config: ours for a native family, transformers' for another."""
WRAPPERS = {
    "gemma3": "gemma3_text", "mistral3": "mistral", "qwen3_5": "qwen3_5_text",
    "exaone4_5": "exaone4", "qwen3_5_moe": "qwen3_5_moe_text",
}  # fmt: skip
"""Models of images and text whose text part is of a native family, by default this one."""
SAME = {"mimo": "qwen2"}
"""Model types that differ from a native family in MTP layers only."""
UNTIED = ("qwen3_5", "qwen3_5_moe", "exaone4_5")
"""Wrappers that do not tie heads unless they say so."""
KINDS = ("full_attention", "sliding_attention")
CONV, LINEAR, BESIDE, MLP, MOE = "conv", "linear_attention", "hybrid", "mlp", "moe"
"""Kinds of layers: short convolutions, linear attention, linear attention beside attention, MLPs
only, mixtures of experts only."""
SHARES = {
    "phi3": 1.0,
    "qwen3_5_text": 0.25,
    "qwen3_5_moe_text": 0.25,
    "qwen3_next": 0.25,
    "glm4_moe": 0.5,
}
"""Families that rotate a part of each head, and that part if the config does not give it."""
PATTERN = {"M": LINEAR, "*": KINDS[0], "-": MLP, "E": MOE}
"""Kinds of Nemotron-H's layers, by the letters of its pattern."""
MULTIPLIERS = {"mlp_multipliers": 2, "ssm_multipliers": 5}
"""Falcon-H1's multipliers of gate and MLP, and of z, x, B, C and dt."""
LEGACY = {"attention": "full_attention", "mamba": "linear_attention"}
"""Older names of kinds of layers."""
TRAINED_IN_ROPE = ("llama3", "yarn", "longrope")
"""Types of ropes whose options have the trained context."""


class LinearNames(NamedTuple):
    """A family's names for the options of its linear attention."""

    key_heads: str
    value_heads: str
    key_dim: str
    value_dim: str
    taps: str = "linear_conv_kernel_dim"
    conv_bias: str = ""
    bias: str = ""


_MAMBA = LinearNames(
    "mamba_n_groups", "mamba_n_heads", "mamba_d_state", "mamba_d_head", "mamba_d_conv",
    "mamba_conv_bias", "mamba_proj_bias",
)  # fmt: skip
_DELTA = LinearNames(
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim",
)  # fmt: skip
LINEAR_NAMES = {
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "qwen3_next": _DELTA,
    "granitemoehybrid": _MAMBA,
    "falcon_h1": _MAMBA,
    "nemotron_h": LinearNames(
        "n_groups", "mamba_num_heads", "ssm_state_size", "mamba_head_dim", "conv_kernel",
        "use_conv_bias", "use_bias",
    ),
}  # fmt: skip


class PlainConfig(SimpleNamespace):
    """The options of the native family ``model_type``, or of a wrapper of one.

    They are read as attributes, as in transformers' ``PretrainedConfig``.
    """

    attribute_map: ClassVar[dict[str, str]] = {}

    def get_text_config(self, decoder: bool = True) -> PlainConfig:
        """Return the config of the part that decodes: the whole, except for wrappers."""
        text: PlainConfig = getattr(self, "text_config", self)
        return text


def auto_config(what: str) -> Any:
    """Return transformers' ``AutoConfig``; refuse ``what`` if transformers is missing."""
    with torch_for(what):
        from transformers import AutoConfig
    return AutoConfig


def whole(config: ModelConfig) -> PretrainedConfig:
    """Return ``config`` as transformers' own, with all its defaults; its checks may raise."""
    if not isinstance(config, PlainConfig):
        return config
    options = config_json(config)
    family = options.pop("model_type")
    complete: PretrainedConfig = auto_config("transformers' own model").for_model(family, **options)
    return complete


def config_json(config: PlainConfig) -> dict[str, Any]:
    """Return the content of a model's config.json."""
    return {
        name: config_json(value) if isinstance(value, PlainConfig) else value
        for name, value in vars(config).items()
    }


def plain_config(options: Mapping[str, Any], where: str) -> PlainConfig | None:
    """Return the config of the model that a config.json describes; None if its family is foreign.

    A value of a wrong type is a ModelError, which begins with ``where``.
    """
    values = Fields(options, where)
    family = values.text("model_type")
    family = SAME.get(family, family)
    if family in WRAPPERS:
        return _wrapper(family, values, options)
    return _config(family, options, where) if family in DEFAULTS else None


def _wrapper(family: str, values: Fields, options: Mapping[str, Any]) -> PlainConfig | None:
    part, inner = values.section("text_config"), options.get("text_config")
    own = WRAPPERS[family]
    if family == "mistral3":
        own = part.text("model_type", own)
        inner = MISTRAL3_TEXT if inner is None else inner
    if own not in DEFAULTS:
        return None
    given = {name: _read(values, name) for name in ("tie_word_embeddings", "is_encoder_decoder")}
    tied = given["tie_word_embeddings"]
    return PlainConfig(
        model_type=family,
        text_config=_config(own, inner or {}, part.where),
        tie_word_embeddings=tied is True or (tied is None and family not in UNTIED),
        is_encoder_decoder=given["is_encoder_decoder"] is True,
        eos_token_id=options.get("eos_token_id"),
        **_kept(options),
    )


def _config(family: str, options: Mapping[str, Any], where: str) -> PlainConfig:
    given = dict(options)
    for name, other in RENAMED.get(family, {}).items():
        first = name in FIRST.get(family, ()) and given.get(other) is not None
        if given.get(name) is None or first:
            given[name] = given.get(other)
    if given.get("mamba_d_head") == "auto":
        given["mamba_d_head"] = None
    if family == "exaone4":
        given["sliding_window_pattern"] = _period(given.get("sliding_window_pattern"))
    values = Fields(given, where)
    config: dict[str, Any] = {"model_type": family}
    for name, default in DEFAULTS[family].items():
        value = _read(values, name)
        none = value is None and name in given and name in NONE_COUNTS
        config[name] = default if value is None and not none else value
    _follow(family, config, values)
    scaling, ropes = (_copied(values, given, n) for n in ("rope_scaling", "rope_parameters"))
    bases = values.number("rope_theta", THETA.get(family, 1e4))
    near = values.number("rope_local_base_freq", NEAR_THETA.get(family, 1e4))
    if family in NEAR_THETA:
        ropes = _ropes_of_kinds(ropes, scaling, {KINDS[0]: bases, KINDS[1]: near}, values)
    else:
        ropes = _one_rope(family, scaling or ropes, bases, values)
    _standardise(family, config, ropes, given)
    return PlainConfig(**config, **_kept(given), rope_parameters=ropes)


def _read(values: Fields, name: str) -> Any:
    """Return an option, checked for its type; None if it is null or missing."""
    if name not in values:
        return None
    match TYPES[name]:
        case "size":
            return values.whole(name, 1)
        case "whole":
            return values.whole(name)
        case "number":
            return values.number(name)
        case "flag":
            return values.flag(name)
        case "text":
            return values.text(name)
        case "numbers":
            return values.listed(name, int)
        case "multipliers":
            return values.numbers(name, MULTIPLIERS[name])
        case "texts":
            return [LEGACY.get(kind, kind) for kind in values.listed(name, str)]
    return values.ids(name)


def _kept(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that any model may have."""
    kept = {name: options[name] for name in KEPT if options.get(name) is not None}
    return {"dtype": options.get("dtype") or options.get("torch_dtype"), **kept}


def _follow(family: str, config: dict[str, Any], values: Fields) -> None:
    """Fill in options that follow from others."""
    if family == "nemotron_h":
        _follow_pattern(config, values)
    heads, layers = config["num_attention_heads"], range(config["num_hidden_layers"])
    if config["num_key_value_heads"] is None:
        config["num_key_value_heads"] = heads
    if config["head_dim"] is None:
        config["head_dim"] = config["hidden_size"] // heads
    if family == "falcon_h1":
        for name, count in MULTIPLIERS.items():
            config[name] = config[name] or [1.0] * count
    if config.get("mamba_d_head", 0) is None:
        inner = config.get("mamba_d_ssm") or config["mamba_expand"] * config["hidden_size"]
        config["mamba_d_head"] = inner // config["mamba_n_heads"]
    if family in ("qwen2", "qwen3", "qwen3_moe") and not config["use_sliding_window"]:
        config["sliding_window"] = None
    if config.get("mlp_only_layers", ()) is None:
        config["mlp_only_layers"] = []
    if config.get("no_rope_layers", ()) is None:
        period = config["no_rope_layer_interval"]
        config["no_rope_layers"] = [int((layer + 1) % period != 0) for layer in layers]
    if config.get("layer_types", ()) is None:
        if family == "granitemoehybrid":
            config["layer_types"] = ["linear_attention" for _ in layers]
        elif family in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"):
            period = config["full_attention_interval"]
            config["layer_types"] = [LINEAR if (i + 1) % period else KINDS[0] for i in layers]
        elif family == "lfm2_moe":
            config["layer_types"] = [KINDS[0] for _ in layers]
        elif family == "lfm2":
            if config["full_attn_idxs"] is None:
                config["full_attn_idxs"] = [*layers]
            attending = config["full_attn_idxs"]
            config["layer_types"] = [KINDS[0] if i in attending else CONV for i in layers]
        else:
            config["layer_types"] = [KINDS[_slides(family, config, layer)] for layer in layers]


def _period(pattern: Any) -> Any:
    """Return the period of EXAONE's layers: "LLLG" means 4, and 0 means null."""
    if isinstance(pattern, str) and re.fullmatch("L*G", pattern):
        return len(pattern)
    return None if type(pattern) is int and pattern == 0 else pattern


def _follow_pattern(config: dict[str, Any], values: Fields) -> None:
    """Fill in the kinds of Nemotron-H's layers, and how many there are."""
    pattern = config.pop("hybrid_override_pattern")
    if config["layer_types"] is None:
        pattern = "ME*-" if pattern is None else pattern
        if not pattern or not set(pattern) <= PATTERN.keys():
            raise values.refuse("hybrid_override_pattern", f"a text of {', '.join(PATTERN)}")
        config["layer_types"] = [PATTERN[letter] for letter in pattern]
    config["num_hidden_layers"] = len(config["layer_types"])


def _slides(family: str, config: dict[str, Any], layer: int) -> bool:
    """Return whether a layer sees a window, for configs that do not say it."""
    match family:
        case "gemma2" | "gpt_oss":
            return layer % 2 == 0
        case "exaone4" if config["sliding_window"] is None:
            return False
        case "gemma3_text" | "exaone4":
            return bool((layer + 1) % config["sliding_window_pattern"])
        case "olmo3":
            return (layer + 1) % 4 != 0
        case "smollm3":
            still = layer < len(config["no_rope_layers"]) and not config["no_rope_layers"][layer]
            return config["use_sliding_window"] and config["sliding_window"] is not None and still
    return config["sliding_window"] is not None and layer >= config.get("max_window_layers", 0)


def _copied(values: Fields, options: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return a copy of the object ``name``; None if it is null or missing."""
    values.section(name)  # refuses other values
    return None if options.get(name) is None else dict(options[name])


def _one_rope(
    family: str, ropes: dict[str, Any] | None, base: float, values: Fields
) -> dict[str, Any]:
    """Return the options of the rope that all layers share, or those given by kind."""
    if ropes is None:
        ropes = dict({"ministral3": MINISTRAL3_ROPE, "gpt_oss": GPT_OSS_ROPE}.get(family, {}))
    share = values.number("partial_rotary_factor", 1.0)
    more = {"partial_rotary_factor": share} if "partial_rotary_factor" in values else {}
    if family in SHARES:
        share = values.number("partial_rotary_factor", SHARES[family])
        more = {"partial_rotary_factor": share}
    nested = [kind for kind in KINDS if kind in ropes]
    for kind in nested:
        ropes[kind] = {"rope_theta": base} | more | _part(ropes, kind, values)
    return ropes if nested else {"rope_theta": base} | more | ropes


def _ropes_of_kinds(
    ropes: dict[str, Any] | None, scaling: dict[str, Any] | None, bases: dict[str, float],
    values: Fields,
) -> dict[str, Any]:  # fmt: skip
    """Return the options of ropes by kind; ``scaling`` is for layers that see all positions."""
    ropes = dict(ropes or {})
    for kind, base in bases.items():
        given = _part(ropes, kind, values) | (scaling or {} if kind == KINDS[0] else {})
        ropes[kind] = {"rope_theta": base} | (given or {"rope_type": "default"})
    return ropes


def _part(ropes: dict[str, Any], kind: str, values: Fields) -> dict[str, Any]:
    part = ropes.get(kind)
    if not isinstance(part, dict | None):
        raise values.refuse("rope_parameters", f"an object with an object {kind}")
    return dict(part or {})


def _standardise(
    family: str, config: dict[str, Any], ropes: dict[str, Any], given: Mapping[str, Any]
) -> None:
    """Give each rope its type, and the trained context if its type needs it."""
    nested = [kind for kind in KINDS if isinstance(ropes.get(kind), dict)]
    name = "original_max_position_embeddings"
    trained = config.get(name, given.get(name))
    for rope in [ropes[kind] for kind in nested] or [ropes]:
        rope.setdefault("rope_type", rope.get("type", "default"))
        if family == "phi3" and rope["rope_type"] in ("su", "yarn"):
            rope["rope_type"] = "longrope"
        if rope["rope_type"] in TRAINED_IN_ROPE:
            if trained is not None and not nested:
                rope[name] = trained
            rope.setdefault(name, config["max_position_embeddings"])
