"""Makes the metadata of a GGUF file from a checkpoint of Hugging Face: its model and tokenizer.

The result is read back and compared with the checkpoint; differences are refused.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers

from ..base.fields import Fields
from ..base.outside.text import printable
from ..errors import ModelError
from ..text.codec import TextCodec
from .architecture import Architecture
from .checkpoint import Checkpoint
from .families import read_shape
from .formats.gguf import GGUF, StoredTensor
from .formats.gguf_config import GRANITE, divisors, gguf_config
from .formats.gguf_ends import end_token_ids
from .formats.gguf_header import Metadata
from .formats.gguf_tokenizer import (
    COMPOSED,
    CUTS,
    SPACE,
    SPECIALS,
    TEMPLATE,
    WHOLE,
    gguf_tokenizer,
)
from .rope import rope_parameters

NAMES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "granite": "granite",
}  # fmt: skip
"""Families that are written, and their GGUF architectures."""
ROPES = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": (
        "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
    ),
}  # fmt: skip
"""Rope types that a file can express, and their options."""
FREE = ("family", "layout", "dtype", "eos_token_ids")
"""Fields of an ``Architecture`` that may differ when read back; ``NAMES`` joins two families."""
ENDS = ("eos", "eot", "eom")
"""Keys for end tokens."""
TRIAL = (
    "def greet(name):\n    return f'Hello, {name}!'  # 1234567 it's we'LL\t\n\n\r\n  x",
    "  Two  spaces, ÄPFEL, naïve cafe\u0301, 漢字かな, Привет мир, مرحبا 123, हिन्दी 한국어 und",
    " 😀👍🏽 ½ ² HTTPServer camelCase snake_case 3.14e-10 0x1F a/b\\c \"quoted\" $100 <|x|> [1] ..",
    "\n\n\n word\u00a0\u3000\u200b\ttab 10,000.50 don't I'm they'RE a's O'Neil's  \n \n",
    "", " ", "a", "\n",
)  # fmt: skip
"""Texts that the tokenizer must encode in the same way before and after."""


def gguf_metadata(
    checkpoint: Checkpoint, codec: TextCodec, tensors: Mapping[str, StoredTensor]
) -> dict[str, Any]:
    """Return the metadata of a file with ``tensors`` that holds ``checkpoint``.

    Raises ModelError: it has something that a file cannot express.
    """
    architecture = checkpoint.architecture
    if architecture is None or architecture.family not in NAMES:
        raise unfit(checkpoint.folder, f"a {checkpoint.shape.family!r} model as configured")
    metadata = _model(checkpoint, architecture)
    metadata |= _words(codec, architecture.vocab_size)
    file = GGUF(checkpoint.folder, Metadata(checkpoint.folder, metadata), {}, dict(tensors), ())
    more = sorted(architecture.eos_token_ids - end_token_ids(file))
    free = [key for end in ENDS if (key := f"tokenizer.ggml.{end}_token_id") not in metadata]
    if len(more) > len(free):
        raise unfit(checkpoint.folder, f"a model with end tokens {more}")
    metadata |= dict(zip(free, more, strict=False))
    _compare(checkpoint, architecture, replace(file, metadata=Metadata(file.path, metadata)))
    return metadata


def unfit(folder: Path, what: str) -> ModelError:
    """Return the error about something that a GGUF file cannot hold."""
    held = f"a GGUF file is written of {', '.join(NAMES)}"
    return ModelError(f"{folder}: {what} cannot be written as GGUF; {held}.")


def rope_divisors(checkpoint: Checkpoint) -> npt.NDArray[np.float32] | None:
    """Return the divisors of Llama 3's rope frequencies, fp32 [head_dim / 2]; None without."""
    options, architecture = rope_parameters(checkpoint.config), checkpoint.architecture
    if architecture is None or options.get("rope_type") != "llama3":
        return None
    rope = Fields(options, f"{checkpoint.folder}: rope_parameters")
    low, high = rope.number("low_freq_factor", 1.0), rope.number("high_freq_factor", 4.0)
    if not 0 < low < high:
        raise rope.refuse("low_freq_factor", "a number above 0 and below high_freq_factor")
    trained = rope.whole("original_max_position_embeddings", 1)
    base, factor = rope.number("rope_theta"), rope.number("factor", positive=True)
    return divisors(base, architecture.head_dim, trained, factor, low, high).astype(np.float32)


def _model(checkpoint: Checkpoint, a: Architecture) -> dict[str, Any]:
    """Return the file's metadata about the model."""
    config, options = checkpoint.config, rope_parameters(checkpoint.config)
    kind = str(options.get("rope_type", "default"))
    known = {"rope_type", "rope_theta", *ROPES.get(kind, ())}
    if kind not in ROPES or any(
        value is not None for n, value in options.items() if n not in known
    ):
        said = sorted(name for name in options if name not in known)
        raise unfit(checkpoint.folder, f"rope of type {kind!r} with {', '.join(said)}")
    own: dict[str, Any] = {
        "block_count": a.num_layers,
        "context_length": Fields(vars(config), str(checkpoint.folder)).whole(
            "max_position_embeddings", 1
        ),
        "embedding_length": a.hidden_size,
        "feed_forward_length": a.intermediate_size,
        "attention.head_count": a.num_heads,
        "attention.head_count_kv": a.num_kv_heads,
        "attention.key_length": a.head_dim,
        "attention.value_length": a.head_dim,
        "attention.layer_norm_rms_epsilon": float(a.norm_eps),
        "rope.dimension_count": a.head_dim,
        "rope.freq_base": float(options["rope_theta"]),
        "vocab_size": a.vocab_size,
    }
    if kind in ("linear", "yarn"):
        own |= {"rope.scaling.type": kind, "rope.scaling.factor": float(options["factor"])}
        trained = options.get("original_max_position_embeddings")
        own |= {"rope.scaling.original_context_length": trained} if trained else {}
    if a.family == "granite":
        own |= {name: float(getattr(config, option)) for option, name, _ in GRANITE}
    family = NAMES[a.family]
    general = {
        "architecture": family, "type": "model", "name": printable(checkpoint.folder.resolve().name)
    }  # fmt: skip
    return {f"general.{name}": value for name, value in general.items()} | {
        f"{family}.{name}": value for name, value in own.items()
    }


def _compare(checkpoint: Checkpoint, ours: Architecture, file: GGUF) -> None:
    """Refuse a file that describes another model than its checkpoint."""
    theirs = read_shape(gguf_config(file), checkpoint.folder)
    other = [
        field.name
        for field in fields(ours)
        if field.name not in FREE
        and _single(getattr(ours, field.name)) != _single(getattr(theirs, field.name, None))
    ]
    if other:
        values = ", ".join(f"{name} = {getattr(ours, name)!s:.80}" for name in other)
        raise unfit(checkpoint.folder, f"a model with {values}")


def _single(value: object) -> object:
    """Return a number as fp32, the type that files have."""
    return struct.pack("<f", value) if isinstance(value, float) else value


def _words(codec: TextCodec, size: int) -> dict[str, Any]:
    """Return the file's metadata about a tokenizer; refuse one that would differ when read back."""
    unable = f"{codec.source}: its tokenizer cannot be written as GGUF"
    state = json.loads(codec.backend.to_str())["model"]
    if state.get("type") != "BPE":
        raise ModelError(f"{unable}: it is {state.get('type')}, and only BPE is.")
    if max(state["vocab"].values(), default=size) >= size:
        raise ModelError(f"{unable}: it has ids beyond the model's vocabulary of {size}.")
    texts = _texts(codec.backend, state, size)
    expected = [codec.backend.encode(text).ids for text in texts]
    for options in _candidates(codec, state, size):
        metadata = {f"tokenizer.ggml.{name}": value for name, value in options.items()}
        if isinstance(codec.chat_template, str):
            metadata[TEMPLATE] = codec.chat_template
        else:
            for name, template in (codec.chat_template or {}).items():
                metadata[TEMPLATE if name == "default" else f"{TEMPLATE}.{name}"] = template
        words = gguf_tokenizer(GGUF(codec.source, Metadata(codec.source, metadata), {}, {}, ()))
        if words and [words.backend.encode(text).ids for text in texts] == expected:
            return metadata
    raise ModelError(f"{unable}: how it cuts texts has no name there that gives the same tokens.")


def _added(backend: Tokenizer, size: int) -> dict[int, AddedToken]:
    """Return the added tokens that the model knows, by their ids."""
    added = backend.get_added_tokens_decoder()
    return {id: token for id, token in added.items() if id < size}


def _texts(backend: Tokenizer, state: Mapping[str, Any], size: int) -> list[str]:
    """Return the texts to try, with special tokens if the tokenizer is a byte-level BPE."""
    special = [token.content for token in _added(backend, size).values()][:8]
    return [*TRIAL, *([] if state.get("byte_fallback") else ["a ".join(["", *special, " b"])])]


def _candidates(codec: TextCodec, state: Mapping[str, Any], size: int) -> Iterator[dict[str, Any]]:
    """Yield possible metadata about a tokenizer, one for each fitting way to split texts."""
    backend = codec.backend
    tokens = [f"[PAD{i}]" for i in range(size)]
    kinds = [int(TokenType.UNUSED)] * size
    for token, id in state["vocab"].items():
        tokens[id], kinds[id] = token, int(TokenType.NORMAL)
    for id, added in _added(backend, size).items():
        tokens[id] = added.content
        kinds[id] = int(TokenType.CONTROL if added.special else TokenType.USER_DEFINED)
    options: dict[str, Any] = {"tokens": tokens, "token_type": kinds, **_specials(codec, size)}
    merges = [m.split(" ", 1) if isinstance(m, str) else m for m in state["merges"]]
    if state.get("byte_fallback"):
        scores = [0.0] * size
        for rank, (left, right) in enumerate(merges):
            id = state["vocab"].get(left + right)
            if id is not None and not scores[id]:
                scores[id] = -1.0 - rank
        for octet in range(256):
            if (id := state["vocab"].get(f"<0x{octet:02X}>")) is not None:
                kinds[id] = int(TokenType.BYTE)
        unknown = state["vocab"].get(state.get("unk_token"))
        if unknown is not None:
            options["unknown_token_id"] = unknown
            kinds[unknown] = int(TokenType.UNKNOWN)
        prefix = backend.encode("a", add_special_tokens=False).tokens[:1]
        options |= {"add_space_prefix": bool(prefix and prefix[0].startswith(SPACE))}
        yield {"model": "llama", "pre": "default", "scores": scores, **options}
        return
    options["merges"] = [" ".join(merge) for merge in merges]
    seen = set()
    for cut, expressions in CUTS.items():
        way = (expressions, cut in WHOLE, cut in COMPOSED)
        if way not in seen and _cuts_alike(backend, expressions):
            yield {"model": "gpt2", "pre": cut, **options}
        seen.add(way)


def _cuts_alike(backend: Tokenizer, expressions: tuple[str, ...]) -> bool:
    """Return whether a tokenizer splits the trial texts where ``expressions`` do."""
    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in expressions]
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ours = pre_tokenizers.Sequence([*splits, bytewise])
    theirs = backend.pre_tokenizer
    return theirs is not None and all(
        [p for p, _ in ours.pre_tokenize_str(text)] == [p for p, _ in theirs.pre_tokenize_str(text)]
        for text in TRIAL
    )


def _specials(codec: TextCodec, size: int) -> dict[str, Any]:
    """Return the ids of special tokens, and which of them surround a text."""
    backend = codec.backend
    ids = {
        key: id
        for name, key in SPECIALS.items()
        if (id := backend.token_to_id(str(codec.special_tokens.get(name)))) is not None
        and id < size
    }
    inner, outer = (backend.encode("a", add_special_tokens=each).ids for each in (False, True))
    first = outer.index(inner[0]) if inner and inner[0] in outer else 0
    if first:
        ids.setdefault("bos_token_id", outer[0])
    if codec.end_token_ids:
        ids["eos_token_id"] = min(codec.end_token_ids)
    return {**ids, "add_bos_token": first > 0, "add_eos_token": len(outer) > first + len(inner)}
