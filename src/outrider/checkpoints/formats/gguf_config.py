"""The config of a model, from the metadata of its GGUF file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...base.fields import Fields
from ...base.limits import LARGEST_INT
from ...errors import ModelError, shown
from ..configs import CONV, KINDS, LINEAR, LINEAR_NAMES, MLP, MOE, PlainConfig, plain_config
from .gguf import GGUF
from .gguf_ends import end_token_ids
from .gguf_header import AGAIN
from .gguf_types import Kind


class Form(NamedTuple):
    """The Hugging Face model that a GGUF architecture stands for, as in llama.cpp.

    The last layer of each ``period`` sees all positions, unless the file says otherwise.
    """

    family: str
    interleaved: bool = False  # elements i and i + 1 of a query or key head are rotated together
    period: int = 0
    windowed: str = ""  # the family if a window is given


FORMS = {
    "llama": Form("llama", interleaved=True),
    "qwen2": Form("qwen2"),
    "qwen3": Form("qwen3"),
    "granite": Form("granite", interleaved=True),
    "gemma2": Form("gemma2", period=2),
    "gemma3": Form("gemma3_text", period=6),
    "olmo2": Form("olmo2", period=4, windowed="olmo3"),
    "exaone4": Form("exaone4", period=4),
    "phi3": Form("phi3"),
    "smollm3": Form("smollm3", interleaved=True),
    "mistral3": Form("llama", interleaved=True),
    "lfm2": Form("lfm2"),
    "qwen35": Form("qwen3_5_text"),
    "granitehybrid": Form("granitemoehybrid", interleaved=True),
    "nemotron_h": Form("nemotron_h", interleaved=True),
    "nemotron_h_moe": Form("nemotron_h", interleaved=True),
    "falcon-h1": Form("falcon_h1"),
    "qwen3moe": Form("qwen3_moe"),
    "olmoe": Form("olmoe"),
    "granitemoe": Form("granitemoe", interleaved=True),
    "gpt-oss": Form("gpt_oss", period=2),
    "lfm2moe": Form("lfm2_moe"),
    "glm4moe": Form("glm4_moe"),
    "qwen35moe": Form("qwen3_5_moe_text"),
}
"""The architectures that are read; Mistral's are "llama" and "mistral3", Mixtral's is "llama"."""
PARTIAL = ("phi3", "qwen35", "qwen35moe", "glm4moe")
"""Architectures that rotate a part of each head."""
EXAONE_32B, EXAONE_WINDOW = ("exaone4", 64), 4096
"""The model (by its layers) whose first files do not give its windows, and its window."""
NEMOTRON = ("nemotron_h", "nemotron_h_moe")
"""Architectures whose layers have one sublayer."""
PREDICTING = ("qwen35", "exaone4", "qwen35moe", "glm4moe", "nemotron_h_moe")
"""Architectures whose files may have MTP layers after the others."""
BY_LAYER = ("lfm2", "lfm2moe", "granitehybrid", *NEMOTRON)
"""Architectures whose files list each layer's number of key heads: 0 without attention."""
MAMBA = ("granitehybrid", *NEMOTRON, "falcon-h1")
"""Architectures with Mamba-2."""
SOFTMAX, SIGMOID, SELECTED = 1, 2, 3
MIXTURES = {
    "llama": SOFTMAX, "qwen3moe": SOFTMAX, "olmoe": SOFTMAX, "granitemoe": SOFTMAX,
    "granitehybrid": SOFTMAX, "qwen35moe": SOFTMAX, "gpt-oss": SELECTED, "lfm2moe": SIGMOID,
    "glm4moe": SIGMOID, "nemotron_h_moe": SIGMOID,
}  # fmt: skip
"""Architectures whose mixtures of experts are read, and llama.cpp's number for their weighing."""
STILL_PERIOD = 4
"""The last of every this many layers of SmolLM3 has no rope."""
WIDE_QUERIES = {("gemma2", 46), ("gemma3", 62)}
"""Models of 27B, by their layers: their queries are scaled by another size than the head's."""
SCALINGS = ("none", "linear", "yarn")
TRAINED = [1 << power for power in range(4, 21)]
"""Original contexts that are tried for Llama 3's scaling; Meta's models have 8192."""
GRANITE = (
    ("attention_multiplier", "attention.scale", None),
    ("embedding_multiplier", "embedding_scale", 1.0),
    ("residual_multiplier", "residual_scale", 1.0),
    ("logits_scaling", "logit_scale", 1.0),
)
"""Options of Granite, their names in files, and their defaults; None stands for head_dim**-0.5."""


def form_of(metadata: Mapping[str, Any]) -> Form:
    """Return the form of a file's architecture; an unknown one has "llama"'s."""
    return FORMS.get(str(metadata.get("general.architecture")), FORMS["llama"])


def _unread(path: Path, what: str) -> ModelError:
    return ModelError(f"{path}: {what}; give the model as a Hugging Face checkpoint.")


def gguf_config(file: GGUF) -> PlainConfig:
    """Return the config of the model in a GGUF file."""
    path = file.path
    name = file.fields.text("general.architecture", "")
    if name not in FORMS:
        only = f"only of {', '.join(FORMS)}"
        raise _unread(path, f"GGUF files of architecture {shown(name)} are not read, {only}")
    config = plain_config(_options(file, name), str(path))
    assert config is not None  # the family of each form is native
    _check_layers(file, name, config.num_hidden_layers)
    return config


def _check_layers(file: GGUF, name: str, count: int) -> None:
    """Refuse layers beyond ``count``, except those for multi-token prediction (MTP)."""
    beyond: dict[int, str] = {}
    predict: set[int] = set()
    for key in file.tensors:
        layer = re.match(r"blk\.([0-9]{1,9})\.(nextn\.)?", key)
        if layer and int(layer[1]) >= count:
            beyond.setdefault(int(layer[1]), key)
            predict |= {int(layer[1])} if layer[2] else set()
    for number in sorted(beyond.keys() - predict):
        raise ModelError(
            f"{file.path} has a tensor {beyond[number]!r}, but {name}.block_count is {count}; "
            f"{AGAIN}."
        )


def _options(file: GGUF, name: str) -> dict[str, Any]:
    tensors, fields = file.tensors, _per_model(file, name)
    experts = fields.whole(f"{name}.expert_count", default=0)
    if experts and name not in MIXTURES:
        raise _unread(file.path, f"mixtures of experts of architecture {name} are not read")
    if name == "granite" and not _has_rope(file, name):
        raise _unread(file.path, "GGUF files of models without a rope are not read")

    def size(key: str, default: int | None = None, high: int = LARGEST_INT) -> int:
        return fields.whole(f"{name}.{key}", 1, high, default)

    heads, width = size("attention.head_count"), size("embedding_length")
    head_dim = size("attention.key_length", max(1, width // heads))
    turning = head_dim if name in MAMBA else size("rope.dimension_count", head_dim)
    values = size("attention.value_length", head_dim)
    partial = name in PARTIAL and turning % 2 == 0 and _share(turning, head_dim) < 1
    if head_dim != values or head_dim % 2 or not (turning == head_dim or partial):
        heads_of = f"heads of which {turning} of {head_dim} elements turn and values have {values}"
        raise _unread(file.path, f"{heads_of} are not read")
    tokens = file.metadata.count("tokenizer.ggml.tokens")
    begins = "tokenizer.ggml.bos_token_id"
    options: dict[str, Any] = {
        "model_type": FORMS[name].family,
        "vocab_size": tokens or size("vocab_size"),
        "hidden_size": width,
        "intermediate_size": (
            _inner(file)
            if name in NEMOTRON
            else size("feed_forward_length", size("expert_feed_forward_length", 1))
            if experts
            else size("feed_forward_length")
        ),
        "num_hidden_layers": _num_layers(fields, name, size("block_count", high=len(tensors) or 1)),
        "num_attention_heads": heads,
        "num_key_value_heads": (
            _attending_heads(file, name)
            if name in BY_LAYER
            else size("attention.head_count_kv", heads)
        ),
        "head_dim": head_dim,
        "max_position_embeddings": size("context_length"),
        "rms_norm_eps": fields.number(f"{name}.attention.{_eps(fields, name)}"),
        "rope_parameters": _rope(file, fields, name, turning, head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": fields.whole(begins) if begins in fields else None,
        "eos_token_id": sorted(end_token_ids(file)) or None,
        "pad_token_id": None,
        "attention_bias": _has_bias(file, "attn_q"),
        "mlp_bias": any(_has_bias(file, f"ffn_{part}") for part in ("gate", "up", "down")),
        "dtype": _dtype({t.kind for t in tensors.values()}),
    }
    options |= _more(file, fields, name, options)
    if experts:
        options |= _mixture(file, fields, name, options)
    return options | _windows(file, fields, name, options)


def _mixture(file: GGUF, fields: Fields, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options about experts, by the names of the family's config."""

    def size(key: str, default: int | None = None) -> int:
        return fields.whole(f"{name}.expert_{key}", default=default)

    weighed = MIXTURES[name]
    if size("gating_func", weighed) not in (0, weighed):
        raise _unread(file.path, "experts that are weighed in another way are not read")
    group_count, groups_used = (size(f"group_{what}", 0) or 1 for what in ("count", "used_count"))
    groups = {"n_group": group_count, "topk_group": groups_used}
    if group_count > 1 and name not in ("glm4moe", "nemotron_h_moe"):
        raise _unread(file.path, "experts that are chosen within groups are not read")
    count, top = size("count"), size("used_count")
    width = size("feed_forward_length", options["intermediate_size"])
    layers = range(options["num_hidden_layers"])
    dense = [i for i in layers if f"blk.{i}.ffn_gate_inp.weight" not in file.tensors]
    leading = dense == [*range(len(dense))]
    more: dict[str, Any] = {"num_experts_per_tok": top}
    normed = fields.flag(f"{name}.expert_weights_norm", name != "olmoe")
    scale = fields.number(f"{name}.expert_weights_scale", 0.0) or 1.0
    if name in ("llama", "granitemoe", "granitehybrid", "gpt-oss"):
        if dense:
            raise _unread(file.path, "mixtures of experts in some layers only are not read")
        if scale != 1:
            raise _unread(file.path, "experts whose weights have a scale are not read")
        own = {"llama": "mixtral"}.get(name, FORMS[name].family)
        shared = size("shared_feed_forward_length", 0)
        if name == "granitemoe" and shared:
            raise _unread(file.path, "experts beside an MLP that all tokens share are not read")
        more |= {"model_type": own, "num_local_experts": count, "intermediate_size": width}
        return more | ({"shared_intermediate_size": shared} if name == "granitehybrid" else {})
    more |= {"moe_intermediate_size": width, "norm_topk_prob": normed}
    if name == "nemotron_h_moe":
        if fields.whole(f"{name}.moe_latent_size", default=0):
            raise _unread(file.path, "experts of a width between are not read")
        return more | groups | {
            "n_routed_experts": count, "routed_scaling_factor": scale,
            "moe_shared_expert_intermediate_size": size("shared_feed_forward_length", 0),
        }  # fmt: skip
    if name in ("qwen3moe", "olmoe"):
        if scale != 1 or (name == "olmoe" and (dense or width != options["intermediate_size"])):
            raise _unread(file.path, "experts of this kind are not read")
        return more | {"num_experts": count, "mlp_only_layers": dense}
    if not leading:
        raise _unread(file.path, "mixtures of experts in some layers only are not read")
    if name == "qwen35moe":
        if dense:
            raise _unread(file.path, "mixtures of experts in some layers only are not read")
        shared = size("shared_feed_forward_length")
        return more | {"num_experts": count, "shared_expert_intermediate_size": shared}
    more |= {"routed_scaling_factor": scale}
    if name == "lfm2moe":
        return more | {"num_experts": count, "num_dense_layers": len(dense)}
    return more | groups | {
        "n_routed_experts": count, "first_k_dense_replace": len(dense),
        "n_shared_experts": size("shared_count", 0),
        "use_qk_norm": any(key.endswith("attn_q_norm.weight") for key in file.tensors),
    }  # fmt: skip


def _has_bias(file: GGUF, module: str) -> bool:
    """Return whether a module has a bias in any layer; some layers may lack the module."""
    return any(re.fullmatch(rf"blk\.[0-9]+\.{module}\.bias", key) for key in file.tensors)


def _share(turning: int, head_dim: int) -> float:
    """Return the share of a head that is rotated; 1 if no share gives ``turning`` elements."""
    share = turning / head_dim
    return share if turning < head_dim and int(head_dim * share) == turning else 1.0


def _num_layers(fields: Fields, name: str, blocks: int) -> int:
    """Return the number of layers in a file; its last blocks may be MTP layers."""
    key = f"{name}.nextn_predict_layers"
    further = fields.whole(key, default=0) if name in PREDICTING else 0
    if further >= blocks:
        raise fields.refuse(key, f"fewer than the {blocks} of block_count")
    return blocks - further


def _has_rope(file: GGUF, name: str) -> bool:
    """Return whether a Granite has a rope, which a flag with another name says."""
    return bool(file.metadata.get(f"{name}.rope.scaling.finetuned", True))


def _inner(file: GGUF) -> int:
    """Return the width of Nemotron-H's MLPs: the metadata has 0 for some converters' files."""
    ups = (tensor for key, tensor in file.tensors.items() if key.endswith("ffn_up.weight"))
    up = next(ups, None)
    return 1 if up is None else up.shape[0]


def _attending_heads(file: GGUF, name: str) -> int:
    """Return the number of key heads of layers with attention; other layers have none."""
    key = f"{name}.attention.head_count_kv"
    given = file.metadata.get(key)
    heads = {n for n in (given if isinstance(given, list) else [given]) if n != 0}
    count = heads.pop() if len(heads) == 1 else None
    if type(count) is not int:
        raise file.fields.refuse(key, "for each layer one number of heads, or 0")
    return count


def _lfm2(file: GGUF, fields: Fields, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options about LFM2's short convolutions."""
    key, layers = f"{name}.attention.head_count_kv", options["num_hidden_layers"]
    given = file.metadata.get(key)
    heads = given if isinstance(given, list) else [given] * layers
    if len(heads) != layers:
        raise file.fields.refuse(key, f"a number of heads for each of {layers} layers")
    return {
        "norm_eps": options["rms_norm_eps"],
        "layer_types": ["full_attention" if each else CONV for each in heads],
        "conv_L_cache": fields.whole(f"{name}.shortconv.l_cache", 1),
        "block_auto_adjust_ff_dim": False,
    }


def _kinds(file: GGUF, layers: int, marks: Mapping[str, str], other: str) -> list[str]:
    """Return the kind of each layer: that of the first of ``marks`` that it has, or ``other``."""
    return [
        next((k for part, k in marks.items() if f"blk.{i}.{part}.weight" in file.tensors), other)
        for i in range(layers)
    ]


def _qwen35(file: GGUF, fields: Fields, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options about Qwen3.5's gated delta nets."""

    def size(key: str) -> int:
        return fields.whole(f"{name}.{key}", 1)

    heads, inner = size("ssm.time_step_rank"), size("ssm.inner_size")
    if inner % heads:
        raise fields.refuse(f"{name}.ssm.inner_size", f"a multiple of {heads}, its heads")
    return {
        "linear_conv_kernel_dim": size("ssm.conv_kernel"),
        "linear_key_head_dim": size("ssm.state_size"),
        "linear_value_head_dim": inner // heads,
        "linear_num_key_heads": size("ssm.group_count"),
        "linear_num_value_heads": heads,
        "layer_types": _kinds(file, options["num_hidden_layers"], {"attn_q": KINDS[0]}, LINEAR),
        "tiled_value_heads": True,  # the converters' order
        "rope_parameters": options["rope_parameters"]
        | {"partial_rotary_factor": _share(size("rope.dimension_count"), options["head_dim"])},
    }


def _eps(fields: Fields, name: str) -> str:
    """Return the end of the key of the norms' epsilon; Nemotron-H may have only the other one."""
    usual, other = "layer_norm_rms_epsilon", "layer_norm_epsilon"
    lacks = name in NEMOTRON and f"{name}.attention.{usual}" not in fields
    return other if lacks else usual


def _check_kinds(file: GGUF, name: str, kinds: list[str]) -> None:
    """Refuse layers with two mixers, or with none, and key heads that contradict them."""
    key = f"{name}.attention.head_count_kv"
    given = file.metadata.get(key)
    if isinstance(given, list) and [count > 0 for count in given] != [k == KINDS[0] for k in kinds]:
        raise file.fields.refuse(key, "for each layer 0, or its key heads if it has attention")
    lone = name in NEMOTRON
    one = "one of attention, Mamba-2, an MLP and experts" if lone else "attention or Mamba-2"
    for layer in range(len(kinds)):
        names = ("ssm_in", "attn_q", *(("ffn_up", "ffn_gate_inp") if lone else ()))
        parts = [part for part in names if f"blk.{layer}.{part}.weight" in file.tensors]
        if len(parts) != 1:
            what = " and ".join(parts) or "neither"
            raise ModelError(f"{file.path}: block {layer} has {what}; {one} is needed; {AGAIN}.")


def _mamba(file: GGUF, fields: Fields, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options about Mamba-2 layers, and the kinds of the other layers."""

    def size(key: str) -> int:
        return fields.whole(f"{name}.ssm.{key}", 1)

    layers = options["num_hidden_layers"]
    marks = {"ssm_in": LINEAR, "attn_q": KINDS[0]}
    marks |= {"ffn_gate_inp": MOE} if name in NEMOTRON else {}
    kinds = _kinds(file, layers, marks, MLP)
    if name != "falcon-h1":
        _check_kinds(file, name, kinds)
    heads, inner = size("time_step_rank"), size("inner_size")
    if inner % heads:
        raise fields.refuse(f"{name}.ssm.inner_size", f"a multiple of {heads}, its heads")
    names = LINEAR_NAMES[FORMS[name].family]
    if name != "granitehybrid" and options["attention_bias"]:
        raise _unread(file.path, "biases of attention are not read from GGUF files of this model")
    more = {
        "layer_types": kinds, names.key_heads: size("group_count"), names.value_heads: heads,
        names.key_dim: size("state_size"), names.value_dim: inner // heads,
        names.taps: size("conv_kernel"), names.conv_bias: _has_bias(file, "ssm_conv1d"),
        names.bias: _has_bias(file, "ssm_in") or _has_bias(file, "ssm_out"),
    }  # fmt: skip
    if name == "falcon-h1":  # its multipliers are in the weights
        del more["layer_types"]
        normed = any(key.endswith("ssm_norm.weight") for key in file.tensors)
        own = {"mamba_rms_norm": normed, "mamba_norm_before_gate": False, "mamba_d_ssm": inner}
        return more | own
    if name in NEMOTRON:
        return more | {"layer_norm_epsilon": options["rms_norm_eps"]}
    shared = f"{name}.expert_shared_feed_forward_length"
    return more | {
        "num_local_experts": 0,
        "shared_intermediate_size": fields.whole(shared, default=options["intermediate_size"]),
        "position_embedding_type": "rope" if _has_rope(file, name) else None,
    }


def _more(file: GGUF, fields: Fields, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that only one family has, or has in its own form."""
    size, heads = options["head_dim"], options["num_attention_heads"]
    layers = range(options["num_hidden_layers"])
    more: dict[str, Any] = {}
    if name in MAMBA:
        more |= _mamba(file, fields, name, options)
    if name in ("granite", "granitemoe", "granitehybrid"):
        for option, key, default in GRANITE:
            more[option] = fields.number(f"{name}.{key}", default or size**-0.5)
    elif name == "smollm3":
        more["no_rope_layers"] = [int((layer + 1) % STILL_PERIOD != 0) for layer in layers]
    elif name in ("gemma2", "gemma3"):
        wide = (name, len(layers)) in WIDE_QUERIES
        more["query_pre_attn_scalar"] = options["hidden_size"] // heads if wide else size
        more["hidden_activation"] = "gelu_pytorch_tanh"
        caps = [("final_logit_softcapping", 30.0), ("attn_logit_softcapping", 50.0)]
        for cap, default in caps:
            key, given = f"{name}.{cap}", default if name == "gemma2" else 0.0
            more[cap] = fields.number(key, given, 0.0) or None
    elif name == "phi3":
        ropes = options["rope_parameters"]
        trained = ropes.get("original_max_position_embeddings", options["max_position_embeddings"])
        more["original_max_position_embeddings"] = trained
        more["sliding_window"] = fields.whole("phi3.attention.sliding_window", default=0) or None
    elif name in ("lfm2", "lfm2moe"):
        more |= _lfm2(file, fields, name, options)
    elif name in ("qwen35", "qwen35moe"):
        more |= _qwen35(file, fields, name, options)
    elif name == "glm4moe":
        share = _share(fields.whole("glm4moe.rope.dimension_count", 1), size)
        more["rope_parameters"] = options["rope_parameters"] | {"partial_rotary_factor": share}
    elif name == "mistral3" and "llama_4_scaling_beta" in options["rope_parameters"]:
        more["model_type"] = "ministral3"
    return more


def _windows(file: GGUF, fields: Fields, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options about windows, for families in which some layers have one."""
    form, layers = FORMS[name], options["num_hidden_layers"]
    usual = EXAONE_WINDOW if (name, layers) == EXAONE_32B else 0
    key = f"{name}.attention.sliding_window"
    window = fields.whole(key, default=usual) if form.period else 0
    if not window:
        all_see = {"layer_types": ["full_attention"] * layers} if form.period else {}
        ropes = {"rope_parameters": {"full_attention": options["rope_parameters"]}}
        no_window = {"sliding_window": None} if name == "exaone4" else {}
        return all_see | no_window | (ropes if name == "gemma3" else {})
    key = f"{name}.attention.sliding_window_pattern"
    given = file.metadata.get(key)
    if isinstance(given, list):
        further = fields.whole(f"{name}.nextn_predict_layers", default=0)
        if len(given) not in (layers, layers + further) or not all(e in (0, 1) for e in given):
            raise fields.refuse(key, "a period, or true or false for each layer")
        slides = [bool(each) for each in given[:layers]]
    else:
        period = fields.whole(key, 1, default=form.period)
        slides = [(layer + 1) % period != 0 for layer in range(layers)]
    kinds = ["sliding_attention" if each else "full_attention" for each in slides]
    own: dict[str, Any] = {"layer_types": kinds, "sliding_window": window}
    rope = options["rope_parameters"]
    if name == "gpt-oss":
        if rope["rope_type"] == "yarn":
            own["rope_parameters"] = rope | {"truncate": False}
    elif name == "exaone4":  # layers without a window have no rope
        local = fields.number("exaone4.rope.freq_base_swa", rope["rope_theta"], positive=True)
        own["rope_parameters"] = rope | {"rope_theta": local}
    elif name != "gemma2":
        base = rope["rope_theta"] if name == "olmo2" else 10000.0
        local = fields.number(f"{name}.rope.freq_base_swa", base, positive=True)
        near = {"rope_type": "default", "rope_theta": local}
        own["rope_parameters"] = {"full_attention": rope, "sliding_attention": near}
    return own | ({"model_type": form.windowed} if form.windowed else {})


def _per_model(file: GGUF, family: str) -> Fields:
    """Return the metadata; lists that repeat one value for every layer become that value."""
    own = [name for name in file.metadata if not name.startswith("tokenizer.")]
    own.extend(name for name in file.metadata if name == "tokenizer.ggml.bos_token_id")
    metadata = {name: file.metadata[name] for name in own}
    for name, value in metadata.items():
        if name.startswith(f"{family}.") and isinstance(value, list) and value:
            if all(each == value[0] for each in value):
                metadata[name] = value[0]
            elif name.endswith("sliding_window_pattern") or (
                family in BY_LAYER and name.endswith(("head_count_kv", "feed_forward_length"))
            ):
                continue
            elif len(value) == file.metadata.get(f"{family}.block_count"):
                raise _unread(file.path, f"layers that differ in {name!r} are not read")
    return Fields(metadata, str(file.path))


def _dtype(kinds: set[Kind]) -> str:
    """Return the dtype to compute in: the file's, or bfloat16 for quantised weights."""
    if kinds <= {Kind.F32}:
        return "float32"
    return "float16" if kinds <= {Kind.F32, Kind.F16} else "bfloat16"


def _rope(file: GGUF, fields: Fields, family: str, turning: int, head_dim: int) -> dict[str, Any]:
    """Return the rope options in transformers' form; ``turning`` elements of a head are rotated."""
    base = fields.number(f"{family}.rope.freq_base", 10000.0, positive=True)
    factors = file.tensors.get("rope_freqs.weight")
    if factors is not None:
        return _divided(_factors(file, "rope_freqs.weight", turning), base, turning)
    if family == "phi3":
        return _longrope(file, fields, base, turning, head_dim)
    kind = fields.text(f"{family}.rope.scaling.type", "none")
    factor = fields.number(f"{family}.rope.scaling.factor", 0.0, 0.0)
    factor = factor or fields.number(f"{family}.rope.scale_linear", 0.0, 0.0)
    if kind not in SCALINGS:
        raise _unread(file.path, f"rope scaling {shown(kind)} is not read from GGUF files")
    if kind == "none" or not factor:
        return {"rope_type": "default", "rope_theta": base}
    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": base, "factor": factor}
    trained = fields.whole(f"{family}.rope.scaling.original_context_length", default=0)
    if kind == "yarn":
        parameters |= {"original_max_position_embeddings": trained} if trained else {}
        for option in ("beta_fast", "beta_slow"):
            if f"{family}.rope.scaling.yarn_{option}" in fields:
                parameters[option] = fields.number(f"{family}.rope.scaling.yarn_{option}")
        heat = fields.number(f"{family}.attention.temperature_scale", 0.0, 0.0)
        if family == "mistral3":
            parameters["attention_factor"] = 1.0  # as in llama.cpp
            parameters |= {"llama_4_scaling_beta": heat} if heat and trained else {}
    return parameters


def _factors(file: GGUF, name: str, turning: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the factors [turning / 2] that divide frequencies, finite and above 0."""
    tensor = file.tensors[name]
    if tensor.kind != Kind.F32 or tensor.shape != (turning // 2,):
        raise ModelError(f"{file.path}: tensor {name!r} is not {turning // 2} F32.")
    factors = file.read(tensor).view(np.float32)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        what = "holds numbers that are not positive and finite"
        raise ModelError(f"{file.path}: tensor {name!r} {what}; fetch the file again.")
    return factors


def _longrope(
    file: GGUF, fields: Fields, base: float, turning: int, head_dim: int
) -> dict[str, Any]:
    """Return the rope options of Phi-3 and Phi-4-mini."""
    share = _share(turning, head_dim)
    plain = {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": share}
    names = {f"{kind}_factor": f"rope_factors_{kind}.weight" for kind in ("short", "long")}
    if not all(name in file.tensors for name in names.values()):
        return plain
    lists = {option: _factors(file, name, turning).tolist() for option, name in names.items()}
    trained = fields.whole("phi3.rope.scaling.original_context_length", 1)
    given = "phi3.rope.scaling.attn_factor"
    factor = {"attention_factor": fields.number(given, positive=True)} if given in fields else {}
    own = {"rope_type": "longrope", "original_max_position_embeddings": trained}
    return plain | own | lists | factor


def _divided(
    factors: np.ndarray[Any, np.dtype[np.float32]], base: float, size: int
) -> dict[str, Any]:
    """Return rope options that divide the frequencies by ``factors`` [size / 2].

    They are Llama 3's scaling if that yields these factors (``llama.cpp`` stores no others here),
    else a list of the factors.
    """
    largest = float(factors.max())
    for trained in sorted(TRAINED, key=lambda n: n != 8192):
        if np.allclose(divisors(base, size, trained, largest), factors, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "rope_theta": base,
                "factor": largest,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": trained,
            }
    each = [float(f) for f in factors]
    return {
        "rope_type": "longrope",
        "rope_theta": base,
        "short_factor": each,
        "long_factor": each,
        "attention_factor": 1.0,
        "original_max_position_embeddings": TRAINED[-1],
    }


def divisors(
    base: float, size: int, trained: int, factor: float, low: float = 1.0, high: float = 4.0
) -> npt.NDArray[np.float64]:
    """Return the divisors of a head's frequencies in Llama 3's scaling: [size / 2]."""
    waves = 2 * np.pi * base ** (np.arange(0, size, 2) / size)
    smooth = np.clip((trained / waves - low) / (high - low), 0.0, 1.0)
    return np.asarray(1 / ((1 - smooth) / factor + smooth))
