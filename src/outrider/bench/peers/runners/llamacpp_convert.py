"""Writes a Llama checkpoint as GGUF: CHECKPOINT FOLDER DTYPE.

float32 is the checkpoint's own numbers; of a bfloat16 file llama-quantize makes the others:
bfloat16 is F16, which ran faster than BF16, int8 Q8_0 and int4 Q4_0; norms are always float32.
Prompts are given as ids, so only names and merges of the tokenizer go in. No token has a name that
llama.cpp would take for an end, and the padding token stands for the end: what must not end the
output would otherwise be banned from it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip
QUANTISED = {"bfloat16": "F16", "int8": "Q8_0", "int4": "Q4_0"}
KINDS = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
Array = np.ndarray[Any, Any]


def tensors(checkpoint: Path) -> Iterator[tuple[str, str, Array]]:
    """(name, dtype as safetensors calls it, values; bfloat16 as its bits), read without torch."""
    for file in sorted(checkpoint.glob("*.safetensors")):
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
        data = np.memmap(file, np.uint8, "r", 8 + size)
        for name, about in header.items():
            if name != "__metadata__":
                begin, end = about["data_offsets"]
                bits = data[begin:end].view(KINDS[about["dtype"]])
                yield name, about["dtype"], bits.reshape(about["shape"])


def float32(kind: str, values: Array) -> Array:
    """The same numbers in float32."""
    if kind == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def gguf_name(name: str) -> str:
    """``model.layers.3.mlp.up_proj.weight`` -> ``blk.3.ffn_up.weight``."""
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        number, _, rest = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{number}.{NAMES[rest]}.weight"
    return f"{NAMES[stem]}.weight"


def interleaved(values: Array, heads: int) -> Array:
    """Rows of q or k from Hugging Face's order of rotary halves to llama.cpp's pairs."""
    rows, columns = values.shape
    halves = values.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, columns)


def describe(writer: gguf.GGUFWriter, config: dict[str, Any], checkpoint: Path) -> None:
    """The model's shape and its vocabulary."""
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise SystemExit(f"rope type {rope['rope_type']!r} is not converted")
    head = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    names = [f"<unused {i}>" for i in range(config["vocab_size"])]
    for name, i in tokenizer["model"]["vocab"].items():
        names[i] = name
    for added in tokenizer["added_tokens"]:
        names[added["id"]] = f"<special {added['id']}>"
    merges = tokenizer["model"].get("merges", [])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(names))
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    end = config.get("pad_token_id")
    writer.add_eos_token_id(config["eos_token_id"] if end is None else end)
    writer.add_add_bos_token(False)


def write(checkpoint: Path, file: Path, full: bool) -> None:
    """Write ``file``, its matrices in float32 (``full``) or bfloat16."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama":
        raise SystemExit(f"only Llama checkpoints are converted, not {config['model_type']}")
    heads = config["num_attention_heads"]
    groups = {"q_proj": heads, "k_proj": config.get("num_key_value_heads") or heads}
    writer = gguf.GGUFWriter(file, "llama")
    describe(writer, config, checkpoint)
    for name, kind, values in tensors(checkpoint):
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        part = name.split(".")[-2]
        laid = interleaved(values, groups[part]) if part in groups else values
        if full or values.ndim == 1:
            writer.add_tensor(gguf_name(name), float32(kind, laid))
        elif kind == "BF16":
            raw = np.ascontiguousarray(laid).view(np.uint8)
            writer.add_tensor(gguf_name(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            bits = gguf.quants.quantize(float32(kind, laid), gguf.GGMLQuantizationType.BF16)
            writer.add_tensor(gguf_name(name), bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if full else gguf.LlamaFileType.MOSTLY_BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Convert; leaves FOLDER/model.gguf."""
    checkpoint, folder, dtype = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    file = folder / "model.gguf"
    if dtype not in QUANTISED:
        write(checkpoint, file, dtype == "float32")
        return
    whole = folder / "bf16.gguf"
    write(checkpoint, whole, False)
    subprocess.run([os.environ["PEER_QUANTIZE"], whole, file, QUANTISED[dtype]], check=True)
    whole.unlink()


if __name__ == "__main__":
    main()
