"""Which checkpoints can be run, which of them natively, and what their configs say.

Names of tensors and options are those of Hugging Face's models of the same name.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, StrictDataclassError
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
)

from ..errors import ModelError
from ..gguf import is_gguf
from .formats.gguf_config import read_gguf_config
from .formats.registry import find_format
from .rope import ROPE_TYPES, head_dim, rope_parameters, rotary_dim

logger = logging.getLogger("outrider")

Folder = str | Path  # of a checkpoint; a GGUF file will do as well
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OSError)
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
UNBOUNDED = 32768
"""The context of a model that names none: tokens that such a model is let run to."""


@dataclass(frozen=True)
class Family:
    """What a family does that its config does not say."""

    qkv_bias: bool | None = None  # None: as the config's attention_bias says
    output_bias: bool | None = None
    qk_norm: bool = False
    fused: bool = False  # qkv_proj and gate_up_proj stand as one tensor each
    partial: bool = False  # part of a head may turn
    gemma: bool = False  # norms weigh 1 + w, and stand behind attention and MLP too
    attention_cap: bool = False  # attn_logit_softcapping counts (transformers' Gemma 3 ignores it)
    windowed: bool = False  # sliding_window, where given, is that of every layer
    experts: bool = False


FAMILIES = {
    "llama": Family(),
    "mistral": Family(qkv_bias=False, output_bias=False, windowed=True),
    "qwen2": Family(qkv_bias=True, output_bias=False),
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(qk_norm=True, windowed=True, experts=True),
    "gemma2": Family(gemma=True, attention_cap=True),
    "gemma3_text": Family(gemma=True, qk_norm=True),
    "phi3": Family(qkv_bias=False, output_bias=False, fused=True, partial=True, windowed=True),
    "granite": Family(),
}


@dataclass(frozen=True)
class Shape:
    """What the engine knows of a model: its words and its length.

    ``context`` is in tokens, ``dtype`` the checkpoint's.
    """

    family: str
    vocab_size: int
    context: int
    dtype: torch.dtype
    eos_token_ids: frozenset[int]


@dataclass(frozen=True)
class Architecture(Shape):
    """One native model's architecture, in plain numbers.

    ``head_dim`` and widths are in elements, ``rotary_dim`` of them turn. ``kinds`` and ``windows``
    go by layer: which rope, and how many positions a row sees, itself included (None: all).
    ``scale`` is on the products of attention, ``attention_cap`` and ``logits_cap`` bound them and
    the logits. ``sparse`` layers have ``num_experts`` experts of ``expert_size``, of which a row
    takes ``top_experts``.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    norm_eps: float
    activation: str
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    fused: bool
    gemma: bool
    kinds: tuple[str | None, ...]
    windows: tuple[int | None, ...]
    scale: float
    attention_cap: float | None
    logits_cap: float | None
    embedding_scale: float
    residual_scale: float
    logits_scale: float
    sparse: tuple[bool, ...]
    num_experts: int
    top_experts: int
    expert_size: int
    renormalised: bool

    @property
    def reach(self) -> int | None:
        """How many positions a row's logits depend on, itself included; None: all before it."""
        return None if None in self.windows else 1 + sum(w - 1 for w in self.windows if w)


def find_folder(model: Folder) -> Path:
    """The folder of a checkpoint: ``model`` itself, or the hub's snapshot of that name.

    A GGUF file stands for itself.

    Raises:
        ModelError: it is neither a folder nor a name that the hub (or its cache) knows.
    """
    path = Path(model).expanduser()
    if path.exists() or is_gguf(path) or not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(model)):
        return path
    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
        return Path(snapshot_download(str(model), allow_patterns=patterns))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"model {str(model)!r} is no folder here, and the hub did not give it: {reason}"
        ) from None


def read_config(folder: Path) -> PretrainedConfig:
    """The checkpoint's config.json, or what a GGUF file's metadata say.

    Raises:
        ModelError: there is no such folder, no config.json, or it cannot be read.
    """
    if is_gguf(folder):
        return read_gguf_config(folder)
    if not folder.is_dir():
        raise ModelError(
            f"model {str(folder)!r} is not a folder; give one with a config.json, or a .gguf file."
        )
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} has no config.json; give a Hugging Face checkpoint's folder or a .gguf file."
        )
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (*UNREADABLE, StrictDataclassError) as error:
        if "auto_map" in (folder / "config.json").read_text(encoding="utf-8", errors="replace"):
            raise ModelError(
                f"{folder} needs Python code of its own (auto_map in config.json), which is never "
                "run; give a checkpoint that transformers has code for."
            ) from None
        # Of several paragraphs the first says what is wrong, over a line or two.
        reason = " ".join(str(error).strip().split("\n\n")[0].split()) or type(error).__name__
        raise ModelError(f"{folder / 'config.json'} cannot be used: {reason}") from None
    if getattr(config, "auto_map", None):
        logger.info("%s: its own code (auto_map) is ignored; transformers' is run.", folder)
    return config


def read_shape(config: PretrainedConfig, folder: Path) -> Shape:
    """What ``config`` says of any causal language model.

    Raises:
        ModelError: transformers has no causal language model of this type, it does not read left
            to right, or its weights are quantised in a way that is not read.
    """
    text = config.get_text_config(decoder=True)
    kind = config.model_type
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"{folder}: model_type {kind!r} is not supported: transformers has no causal language "
            "model of it; give one that AutoModelForCausalLM loads."
        )
    encoder = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(text, "is_decoder", False)
    if encoder or config.is_encoder_decoder or getattr(text, "use_bidirectional_attention", False):
        raise ModelError(
            f"{folder}: model_type {kind!r} has an encoder, which reads both ways; only models "
            "that read left to right can be decoded."
        )
    find_format(getattr(config, "quantization_config", None), folder)
    return Shape(
        family=kind,
        vocab_size=text.vocab_size,
        context=context_length(text),
        dtype=getattr(config, "dtype", None) or getattr(text, "dtype", None) or torch.float32,
        eos_token_ids=end_token_ids(text, folder) | end_token_ids(config, folder),
    )


def read_architecture(
    config: PretrainedConfig, folder: Path, window: int | None = None
) -> Architecture | None:
    """The architecture of a model that runs natively; None where family or option has no such path.

    With ``window`` no layer's row sees more positions than that, itself included.

    Raises:
        ModelError: see ``read_shape``; or the config contradicts itself.
    """
    shape = read_shape(config, folder)
    family = FAMILIES.get(config.model_type)
    if family is None or not _options_fit(config, family):
        return None
    kv_heads = config.num_key_value_heads or config.num_attention_heads
    if config.num_attention_heads % kv_heads:
        raise ModelError(
            f"{folder}: num_key_value_heads is {kv_heads}, which does not divide "
            f"num_attention_heads ({config.num_attention_heads}); correct its config.json."
        )
    bias = bool(getattr(config, "attention_bias", False))
    layers, kinds = config.num_hidden_layers, _kinds(config)
    windowed = [family.windowed or kind == "sliding_attention" for kind in kinds]
    own = getattr(config, "sliding_window", None)
    limits = [own if w else None for w in windowed]
    sized = float(getattr(config, "query_pre_attn_scalar", None) or head_dim(config)) ** -0.5
    return Architecture(
        **{field.name: getattr(shape, field.name) for field in fields(shape)},
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim(config),
        rotary_dim=rotary_dim(config),
        norm_eps=config.rms_norm_eps,
        activation=_activation(config),
        tied=bool(config.tie_word_embeddings),
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=bias if family.output_bias is None else family.output_bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=family.qk_norm,
        fused=family.fused,
        gemma=family.gemma,
        # One rope for all layers, unless the config lists them by kind.
        kinds=tuple(k if k in (config.rope_parameters or {}) else None for k in kinds),
        windows=tuple(min(filter(None, (limit, window)), default=None) for limit in limits),
        scale=float(getattr(config, "attention_multiplier", sized)),
        attention_cap=config.attn_logit_softcapping if family.attention_cap else None,
        logits_cap=getattr(config, "final_logit_softcapping", None),
        embedding_scale=float(
            config.hidden_size**0.5 if family.gemma else getattr(config, "embedding_multiplier", 1)
        ),
        residual_scale=float(getattr(config, "residual_multiplier", 1)),
        logits_scale=float(getattr(config, "logits_scaling", 1)),
        sparse=tuple(family.experts and _is_sparse(config, i) for i in range(layers)),
        num_experts=getattr(config, "num_experts", 0),
        top_experts=getattr(config, "num_experts_per_tok", 0),
        expert_size=getattr(config, "moe_intermediate_size", 0),
        renormalised=bool(getattr(config, "norm_topk_prob", False)),
    )


def _options_fit(config: PretrainedConfig, family: Family) -> bool:
    """Whether the native path has what this config asks for."""
    if _activation(config) not in ACTIVATIONS:
        return False
    for kind in {kind if kind in config.rope_parameters else None for kind in _kinds(config)}:
        parameters = rope_parameters(config, kind)
        turning = rotary_dim(config, kind)
        if parameters.get("rope_type", "default") not in ROPE_TYPES:
            return False
        if turning != head_dim(config) and (not family.partial or turning % 2):
            return False
    return head_dim(config) % 2 == 0


def _activation(config: PretrainedConfig) -> str:
    return str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "silu"))


def _kinds(config: PretrainedConfig) -> list[str]:
    """ "sliding_attention" or "full_attention" for each layer."""
    return list(
        getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    )


def _is_sparse(config: PretrainedConfig, layer: int) -> bool:
    dense = layer in config.mlp_only_layers or config.num_experts <= 0
    return not dense and (layer + 1) % config.decoder_sparse_step == 0


def end_token_ids(config: PretrainedConfig, folder: Path) -> frozenset[int]:
    """EOS of config.json and of generation_config.json, where chat models list more of them.

    Raises:
        ModelError: generation_config.json is damaged.
    """
    listed = [getattr(config, "eos_token_id", None)]
    file = folder / "generation_config.json"
    if file.is_file():
        try:
            listed.append(json.loads(file.read_text(encoding="utf-8")).get("eos_token_id"))
        except (ValueError, AttributeError):
            raise ModelError(f"{file} is damaged; fetch the checkpoint again.") from None
    return frozenset(i for ids in listed for i in ([ids] if isinstance(ids, int) else ids or ()))


def context_length(config: PretrainedConfig) -> int:
    """Tokens the model can attend to, its rope scaling included; ``UNBOUNDED`` if it names none."""
    names = ("max_position_embeddings", "max_seq_len", "seq_length", "context_length")
    named = [n for n in (getattr(config, name, None) for name in names) if n]
    if not named:
        return UNBOUNDED
    trained, parameters = int(named[0]), rope_parameters(config)
    if parameters.get("rope_type") in ("linear", "dynamic", "yarn"):
        original = parameters.get("original_max_position_embeddings") or trained
        return max(trained, int(original * float(parameters.get("factor") or 1.0)))
    return trained
