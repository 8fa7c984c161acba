"""GGUF files made of tiny checkpoints, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import PretrainedConfig

from outrider.checkpoints.checkpoint import open_checkpoint
from tests.support.tiny import SPECIALS, TEMPLATE, byte_level_tokenizer

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


SIZES = {"hidden_size": 64, "intermediate_size": 96}


def file_name(name: str) -> str:
    """The name that a tensor has in a GGUF file."""
    module, _, part = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{NAMES[module]}.{part}"
    _, _, index, rest = module.split(".", 3)
    return f"blk.{index}.{NAMES[rest]}.{part}"


def interleaved(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Queries' or keys' rows as llama.cpp's converter stores Llama's."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def halved(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def metadata(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    """What the converter writes of a config."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if config.model_type == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def llama3_factors(rope: dict[str, Any], size: int) -> np.ndarray[Any, Any]:
    """What the converter stores as rope_freqs.weight."""
    found = []
    for at in range(0, size, 2):
        wave = 2 * np.pi * rope["rope_theta"] ** (at / size)
        trained, low, high = rope["original_max_position_embeddings"], 1.0, 4.0
        if wave < trained / high:
            found.append(1.0)
        elif wave > trained / low:
            found.append(rope["factor"])
        else:
            smooth = (trained / wave - low) / (high - low)
            found.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(found, np.float32)


def convert(
    source: Path,
    path: Path,
    kind: Kind | Callable[[str], Kind],
    fill: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
    skip: str = "nothing",
) -> tuple[Path, Path]:
    """``source`` as a GGUF file, and what the file says as a plain checkpoint."""
    config = open_checkpoint(source).config
    family = config.model_type
    writer = gguf.GGUFWriter(path, family)
    metadata(writer, config)
    fill(writer)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config.rope_parameters, size))
    plain = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if skip in name:
            continue
        values = tensor.float().numpy()
        count = next((n for p, n in heads.items() if p in name), None)
        turned = count is not None and family in ("llama", "granite")
        stored = interleaved(values, count) if turned and count else values
        if values.ndim == 1:
            writer.add_tensor(file_name(name), np.ascontiguousarray(stored))
        else:
            own = kind(name) if callable(kind) else kind
            packed = quantize(np.ascontiguousarray(stored), own)
            writer.add_tensor(file_name(name), packed, raw_dtype=own)
            stored = dequantize(packed, own)
        back = halved(stored, count) if turned and count else stored
        plain[name] = torch.from_numpy(np.ascontiguousarray(back))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    folder = path.parent / f"{path.stem}-plain"
    folder.mkdir()
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    for file in source.glob("*"):
        if file.name != "model.safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    return path, folder


def byte_level(cut: str = "gpt-2", **more: Any) -> Callable[[gguf.GGUFWriter], None]:
    """Writes ``conftest``'s tokenizer as the converter does."""

    def fill(writer: gguf.GGUFWriter) -> None:
        model = json.loads(byte_level_tokenizer().to_str())["model"]
        tokens = sorted(model["vocab"], key=model["vocab"].get)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(cut)
        writer.add_token_list(tokens)
        writer.add_token_types([3 if t in SPECIALS else 1 for t in tokens])
        writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
        values = {"eos_token_id": 0, "chat_template": TEMPLATE} | more
        for name, value in values.items():
            getattr(writer, f"add_{name}")(value)

    return fill


def empty(path: Path, fill: Callable[[gguf.GGUFWriter], object]) -> Path:
    """A file without weights."""
    writer = gguf.GGUFWriter(path, "llama")
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def pieces() -> tuple[Tokenizer, list[str]]:
    """A tokenizer like Llama 2's, with all bytes, and its tokens in order."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    octets = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "<s>", "</s>", *octets], show_progress=False
    )
    tokenizer.train_from_iterator([" the quick brown fox jumps over the lazy dog the fox"], trainer)
    vocab = tokenizer.get_vocab()
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["id"] < 3]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer, sorted(vocab, key=vocab.__getitem__)


def add_pieces(writer: gguf.GGUFWriter, tokens: list[str]) -> None:
    """Write SentencePiece tokens: three control tokens, 256 bytes, then pieces by their rank."""
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0 if i < 259 else 259.0 - i for i in range(len(tokens))])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def split(path: Path, most: int) -> list[Path]:
    """The file at ``path`` again, in parts of at most ``most`` tensors that the package writes."""
    whole = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=most)
    writer.kv_data[0].clear()
    for key, field in whole.fields.items():
        if not key.startswith("GGUF."):
            kind, *items = field.types
            writer.add_key_value(key, field.contents(), kind, items[0] if items else None)
    for tensor in whole.tensors:
        writer.add_tensor(tensor.name, tensor.data.copy(), raw_dtype=tensor.tensor_type)
    count = -(-len(whole.tensors) // most)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return [path.with_name(f"{path.stem}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]


def changed(**values: Any) -> Callable[[gguf.GGUFWriter], None]:
    def fill(writer: gguf.GGUFWriter) -> None:
        for name, value in values.items():
            getattr(writer, f"add_{name}")(value)

    return fill
