"""The config of a model, from the metadata of its GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType as Kind

from ...base.fields import Fields, one_line
from ...base.limits import LARGEST_INT
from ...errors import ModelError, shown
from ..configs import PlainConfig, whole
from .gguf import GGUF

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES = ("llama", "qwen2", "qwen3", "granite")
"""Supported architectures of GGUF, which are model types as well; Mistral's is "llama"."""
INTERLEAVED = ("llama", "granite")
SCALINGS = ("none", "linear", "yarn")
TRAINED = [1 << power for power in range(4, 21)]
"""Original contexts that Llama 3's scaling is tried with; Meta's models have 8192."""
GRANITE = (
    ("attention_multiplier", "attention.scale", None),
    ("embedding_multiplier", "embedding_scale", 1.0),
    ("residual_multiplier", "residual_scale", 1.0),
    ("logits_scaling", "logit_scale", 1.0),
)
"""Options of Granite, their names in files, and their defaults; None stands for head_dim**-0.5."""

KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""Ids that a file may name; padding or another file follows where a hole was filled."""
TEXTS = frozenset(
    {
        "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>",
        "<end_of_turn>", "<end_of_utterance>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
        "<eos>", "</s>", "[EOS]", "<EOT>", "_<EOT>", "[EOT]", "<turn|>", "<|tool_response>", "[e~[",
        "<｜end▁of▁sentence｜>",
        "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",
        "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
    }
)  # fmt: skip
HARMONY = {"<|return|>", "<|call|>"}
"""In vocabularies that have these, "<|end|>" ends a message but not a turn."""
NORMAL = 1


def interleaves(metadata: Mapping[str, Any]) -> bool:
    """Return whether elements i and i + 1 of a query or key head turn together."""
    return metadata.get("general.architecture") in INTERLEAVED


def _unread(path: Path, what: str) -> ModelError:
    return ModelError(f"{path}: {what}; give the model as a Hugging Face checkpoint.")


def gguf_config(file: GGUF) -> PretrainedConfig:
    """Return the config of the model in a GGUF file."""
    path = file.path
    family = file.fields.text("general.architecture", "")
    if family not in FAMILIES:
        only = f"only of {', '.join(FAMILIES)}"
        raise _unread(path, f"GGUF files of architecture {shown(family)} are not read, {only}")
    config = PlainConfig(model_type=family, **_options(file, family))
    if config.rope_parameters["rope_type"] != "default":  # transformers scales these
        try:
            whole(config)
        except Exception as error:  # of whatever kind transformers' checks raise
            raise ModelError(f"{path}: its metadata cannot be used: {one_line(error)}.") from None
    return cast("PretrainedConfig", config)


def _options(file: GGUF, family: str) -> dict[str, Any]:
    tensors, fields = file.tensors, _per_model(file, family)
    if f"{family}.expert_count" in fields and fields.whole(f"{family}.expert_count"):
        raise _unread(file.path, "GGUF files of mixtures of experts are not read")

    def size(name: str, default: int | None = None, high: int = LARGEST_INT) -> int:
        return fields.whole(f"{family}.{name}", 1, high, default)

    heads, width = size("attention.head_count"), size("embedding_length")
    head_dim = size("attention.key_length", max(1, width // heads))
    turning = size("rope.dimension_count", head_dim)
    values = size("attention.value_length", head_dim)
    if not head_dim == turning == values or head_dim % 2:
        heads_of = f"heads of which {turning} of {head_dim} elements turn and values have {values}"
        raise _unread(file.path, f"{heads_of} are not read")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    begins = "tokenizer.ggml.bos_token_id"
    options: dict[str, Any] = {
        "vocab_size": len(tokens) if isinstance(tokens, list) and tokens else size("vocab_size"),
        "hidden_size": width,
        "intermediate_size": size("feed_forward_length"),
        "num_hidden_layers": size("block_count", high=max(1, len(tensors))),
        "num_attention_heads": heads,
        "num_key_value_heads": size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": size("context_length"),
        "rms_norm_eps": fields.number(f"{family}.attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(file, fields, family, head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": fields.whole(begins) if begins in fields else None,
        "eos_token_id": sorted(end_token_ids(file)) or None,
        "pad_token_id": None,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "dtype": _dtype({t.kind for t in tensors.values()}),
    }
    if family == "granite":
        for option, name, default in GRANITE:
            options[option] = fields.number(f"granite.{name}", default or head_dim**-0.5)
    return options


def _per_model(file: GGUF, family: str) -> Fields:
    """Return the metadata, lists of one value repeated for each layer replaced by that value."""
    metadata = dict(file.metadata)
    for name, value in metadata.items():
        if name.startswith(f"{family}.") and isinstance(value, list) and value:
            if all(each == value[0] for each in value):
                metadata[name] = value[0]
            elif len(value) == file.metadata.get(f"{family}.block_count"):
                raise _unread(file.path, f"layers that differ in {name!r} are not read")
    return Fields(metadata, str(file.path))


def _dtype(kinds: set[Kind]) -> torch.dtype:
    """Return the dtype to compute in: the file's, or bfloat16 for quantised weights."""
    if kinds <= {Kind.F32}:
        return torch.float32
    return torch.float16 if kinds <= {Kind.F32, Kind.F16} else torch.bfloat16


def _rope(file: GGUF, fields: Fields, family: str, head_dim: int) -> dict[str, Any]:
    """Return the rope options in transformers' form."""
    base = fields.number(f"{family}.rope.freq_base", 10000.0, positive=True)
    factors = file.tensors.get("rope_freqs.weight")
    if factors is not None:
        if factors.kind != Kind.F32 or factors.shape != (head_dim // 2,):
            raise ModelError(f"{file.path}: tensor 'rope_freqs.weight' is not {head_dim // 2} F32.")
        return _divided(file.read(factors).view(np.float32), base, head_dim)
    kind = fields.text(f"{family}.rope.scaling.type", "none")
    factor = fields.number(f"{family}.rope.scaling.factor", 0.0, 0.0)
    factor = factor or fields.number(f"{family}.rope.scale_linear", 0.0, 0.0)
    if kind not in SCALINGS:
        raise ModelError(f"{file.path}: rope scaling {shown(kind)} is not read from GGUF files.")
    if kind == "none" or not factor:
        return {"rope_type": "default", "rope_theta": base}
    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": base, "factor": factor}
    trained = fields.whole(f"{family}.rope.scaling.original_context_length", default=0)
    if kind == "yarn" and trained:
        parameters["original_max_position_embeddings"] = trained
    return parameters


def _divided(
    factors: np.ndarray[Any, np.dtype[np.float32]], base: float, size: int
) -> dict[str, Any]:
    """Return rope options that divide the frequencies by ``factors`` [size / 2].

    They are Llama 3's scaling if that yields these factors (``llama.cpp`` stores no other here),
    else a list of the factors.
    """
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelError(
            "tensor 'rope_freqs.weight' holds numbers that are not positive and finite."
        )
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
    """Return what Llama 3's scaling divides the frequencies of a head by: [size / 2]."""
    waves = 2 * np.pi * base ** (np.arange(0, size, 2) / size)
    smooth = np.clip((trained / waves - low) / (high - low), 0.0, 1.0)
    return np.asarray(1 / ((1 - smooth) / factor + smooth))


def end_token_ids(file: GGUF) -> frozenset[int]:
    """Return the ids that end a turn: those that the file names, and those known by their text.

    Many files name only the base model's EOS, or no end of a turn at all. So llama.cpp recognises
    such tokens by their texts, too ("end of generation" in ``llama-vocab.cpp``): this is its list.
    A normal token that merges produce is a word, whatever its text: Qwen's vocabulary has "</s>".
    Damaged lists of the tokenizer are ignored here; reading the tokenizer refuses them.
    """
    fields = file.fields
    names = [name for key in KEYS if (name := f"tokenizer.ggml.{key}_token_id") in fields]
    tokens, kinds, merges = (_listed(file, name) for name in ("tokens", "token_type", "merges"))
    known = {token: i for i, token in enumerate(tokens) if token in TEXTS}
    if known.keys() >= HARMONY:
        known.pop("<|end|>", None)
    normal = {token for token, i in known.items() if i < len(kinds) and kinds[i] == NORMAL}
    if normal:
        normal &= {str(merge).replace(" ", "", 1) for merge in merges}
    ends = {i for token, i in known.items() if token not in normal}
    return frozenset({fields.whole(name) for name in names} | ends)


def _listed(file: GGUF, name: str) -> list[Any]:
    value = file.metadata.get(f"tokenizer.ggml.{name}")
    return value if isinstance(value, list) else []
