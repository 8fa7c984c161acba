"""The config that a GGUF file's metadata stands for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as Kind
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig

from ...errors import ModelError
from ...gguf import GGUF, open_gguf

FAMILIES = ("llama", "qwen2", "qwen3", "granite")
"""GGUF's architectures that are read, which are model types as well; Mistral is "llama" there."""
INTERLEAVED = ("llama", "granite")
SCALINGS = ("none", "linear", "yarn")
TRAINED = [1 << power for power in range(4, 21)]
"""Contexts that Llama 3's scaling may have been made for; 8192 in those of Meta."""
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


def interleaves(metadata: Mapping[str, Any]) -> bool:
    """Whether neighbours turn together in the heads of queries and keys."""
    return metadata.get("general.architecture") in INTERLEAVED


def read_gguf_config(path: Path) -> PretrainedConfig:
    """The config of the model in ``path``.

    Raises:
        ModelError: the file is damaged, its architecture is not read, or metadata are missing.
    """
    file = open_gguf(path)
    family = file.metadata.get("general.architecture")
    if family not in FAMILIES:
        raise ModelError(
            f"{path}: GGUF files of architecture {family!r} are not read, only of "
            f"{', '.join(FAMILIES)}; give the model as a Hugging Face checkpoint."
        )
    try:
        config: PretrainedConfig = AutoConfig.for_model(family, **_options(file, family))
    except (ValueError, TypeError, ArithmeticError, StrictDataclassError) as error:
        reason = " ".join(str(error).strip().split("\n\n")[0].split())
        raise ModelError(f"{path}: its metadata cannot be used: {reason}") from None
    return config


def _options(file: GGUF, family: str) -> dict[str, Any]:
    known, tensors = file.metadata, file.tensors

    def need(name: str, otherwise: Any = None) -> Any:
        found = known.get(f"{family}.{name}", otherwise)
        if isinstance(found, list):  # one for each layer
            if len(set(found)) != 1:
                raise ModelError(
                    f"{file.path}: layers that differ in '{family}.{name}' are not read; give the "
                    "model as a Hugging Face checkpoint."
                )
            found = found[0]
        if found is None:
            raise ModelError(f"{file.path}: its metadata have no '{family}.{name}'.")
        return found

    if known.get(f"{family}.expert_count"):
        raise ModelError(
            f"{file.path}: GGUF files of mixtures of experts are not read; give the model as a "
            "Hugging Face checkpoint."
        )
    heads, width = need("attention.head_count"), need("embedding_length")
    head_dim = known.get(f"{family}.attention.key_length") or width // max(1, heads)
    turning = known.get(f"{family}.rope.dimension_count", head_dim)
    values = known.get(f"{family}.attention.value_length", head_dim)
    if not head_dim == turning == values or head_dim % 2:
        raise ModelError(
            f"{file.path}: heads of which {turning} of {head_dim} elements turn and values have "
            f"{values} are not read; give the model as a Hugging Face checkpoint."
        )
    ends = [known[f"tokenizer.ggml.{n}"] for n in ENDS if f"tokenizer.ggml.{n}" in known]
    tokens = known.get("tokenizer.ggml.tokens")
    options: dict[str, Any] = {
        "vocab_size": len(tokens) if tokens else need("vocab_size"),
        "hidden_size": width,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": need("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(file, family, head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": known.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": sorted(set(ends)) or None,
        "pad_token_id": None,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "dtype": _dtype({t.kind for t in tensors.values()}),
    }
    if family == "granite":
        options["attention_multiplier"] = known.get("granite.attention.scale", head_dim**-0.5)
        options["embedding_multiplier"] = known.get("granite.embedding_scale", 1.0)
        options["residual_multiplier"] = known.get("granite.residual_scale", 1.0)
        options["logits_scaling"] = known.get("granite.logit_scale", 1.0)
    return options


def _dtype(kinds: set[Kind]) -> torch.dtype:
    """What to compute in: the file's own dtype, or bfloat16 where its weights are quantised."""
    if kinds <= {Kind.F32}:
        return torch.float32
    return torch.float16 if kinds <= {Kind.F32, Kind.F16} else torch.bfloat16


def _rope(file: GGUF, family: str, head_dim: int) -> dict[str, Any]:
    """Rope's options as transformers has them."""
    known = file.metadata
    base = float(known.get(f"{family}.rope.freq_base", 10000.0))
    factors = file.tensors.get("rope_freqs.weight")
    if factors is not None:
        if factors.kind != Kind.F32 or factors.shape != (head_dim // 2,):
            raise ModelError(f"{file.path}: tensor 'rope_freqs.weight' is not {head_dim // 2} F32.")
        return _divided(file.read(factors).view(np.float32), base, head_dim)
    kind = str(known.get(f"{family}.rope.scaling.type", "none"))
    factor = known.get(f"{family}.rope.scaling.factor") or known.get(f"{family}.rope.scale_linear")
    if kind not in SCALINGS:
        raise ModelError(f"{file.path}: rope scaling {kind!r} is not read from GGUF files.")
    if kind == "none" or not factor:
        return {"rope_type": "default", "rope_theta": base}
    found: dict[str, Any] = {"rope_type": kind, "rope_theta": base, "factor": float(factor)}
    trained = known.get(f"{family}.rope.scaling.original_context_length")
    if kind == "yarn" and trained:
        found["original_max_position_embeddings"] = trained
    return found


def _divided(
    factors: np.ndarray[Any, np.dtype[np.float32]], base: float, size: int
) -> dict[str, Any]:
    """Rope whose frequencies are divided by ``factors`` [size / 2].

    Llama 3's scaling where they are that (``llama.cpp`` stores nothing else in this place), else
    one that names each factor.
    """
    largest = float(factors.max())
    waves = 2 * np.pi * base ** (np.arange(0, size, 2) / size)
    for trained in sorted(TRAINED, key=lambda n: n != 8192):
        smooth = np.clip((trained / waves - 1.0) / 3.0, 0.0, 1.0)
        if np.allclose(1 / ((1 - smooth) / largest + smooth), factors, rtol=1e-4):
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
