"""Writes a Llama checkpoint as GGUF: CHECKPOINT FOLDER DTYPE.

float32 is the checkpoint's own numbers; of a bfloat16 file llama-quantize makes the others:
bfloat16 is F16, which ran faster than BF16, int8 Q8_0 and int4 Q4_0; norms are always float32.
Prompts are given as ids, so only names and merges of the tokenizer go in. No token has a name that
llama.cpp would take for an end, and the padding token stands for the end: what must not end the
output would otherwise be banned from it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.utility import LocalTensor, SafetensorsLocal

QUANTISED = {"bfloat16": "F16", "int8": "Q8_0", "int4": "Q4_0"}
KINDS = {"F16": np.float16, "F32": np.float32}
BF16 = gguf.GGMLQuantizationType.BF16
Array = np.ndarray[Any, Any]


def interleaved(values: Array, heads: int) -> Array:
    """Return rows of q or k in llama.cpp's pairs, from Hugging Face's order of rotary halves."""
    rows, columns = values.shape
    halves = values.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, columns)


def describe(writer: gguf.GGUFWriter, config: dict[str, Any], checkpoint: Path) -> None:
    """Write the model's shape and its vocabulary."""
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise SystemExit(f"rope type {rope['rope_type']!r} is not converted")
    head = config.get("head_dim") or config["hidden_size"] // heads
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    names = [f"<unused {i}>" for i in range(config["vocab_size"])]
    for name, i in tokenizer["model"]["vocab"].items():
        names[i] = name
    for added in tokenizer["added_tokens"]:
        names[added["id"]] = f"<special {added['id']}>"
    merges = tokenizer["model"].get("merges", [])
    end = config.get("pad_token_id")
    metadata = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "head_count": heads,
        "head_count_kv": config.get("num_key_value_heads") or heads,
        "key_length": head,
        "value_length": head,
        "rope_dimension_count": head,
        "rope_freq_base": rope.get("rope_theta") or config.get("rope_theta", 10000.0),
        "layer_norm_rms_eps": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"],
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "gpt-2",
        "token_list": names,
        "token_types": [gguf.TokenType.NORMAL] * len(names),
        "token_merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
        "eos_token_id": config["eos_token_id"] if end is None else end,
        "add_bos_token": False,
    }
    for name, value in metadata.items():
        getattr(writer, f"add_{name}")(value)


def write(checkpoint: Path, file: Path, full: bool) -> None:
    """Write ``file``, its matrices in float32 (``full``) or bfloat16."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama":
        raise SystemExit(f"only Llama checkpoints are converted, not {config['model_type']}")
    heads = config["num_attention_heads"]
    groups = {"q_proj": heads, "k_proj": config.get("num_key_value_heads") or heads}
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(file, "llama")
    describe(writer, config, checkpoint)
    tensors: dict[str, LocalTensor] = {}
    for weights in checkpoint.glob("*.safetensors"):
        tensors |= SafetensorsLocal(weights).tensors
    for name, stored in tensors.items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        raw = stored.mmap_bytes()
        if stored.dtype == "BF16":
            values = gguf.quants.dequantize(raw.reshape(stored.shape[0], -1), BF16)
        else:
            values = raw.view(KINDS[stored.dtype]).astype(np.float32)
        values = values.reshape(stored.shape)
        part = name.split(".")[-2]
        if part in groups:
            values = interleaved(values, groups[part])
        new_name = str(known.get_name(name, try_suffixes=(".weight",)))
        if full or values.ndim == 1:
            writer.add_tensor(new_name, values)
        else:
            writer.add_tensor(new_name, gguf.quants.quantize(values, BF16), raw_dtype=BF16)
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
