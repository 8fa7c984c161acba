"""GGUF files made of tiny checkpoints, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
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


AFTER = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OWN_NAMES: dict[str, dict[str, str]] = {
    "gemma2": {**AFTER, "pre_feedforward_layernorm": "ffn_norm"},
    "gemma3_text": {**AFTER, "pre_feedforward_layernorm": "ffn_norm"},
    "olmo2": AFTER,
    "olmo3": AFTER,
    "exaone4": AFTER,
    "phi3": {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    "lfm2": {
        "operator_norm": "attn_norm", "ffn_norm": "ffn_norm", "self_attn.out_proj": "attn_output",
        "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm",
        "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down",
        "conv.in_proj": "shortconv.in_proj", "conv.conv": "shortconv.conv",
        "conv.out_proj": "shortconv.out_proj",
    },
    "qwen3_5_text": {
        "post_attention_layernorm": "post_attention_norm",
        "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate",
        "linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_a": "ssm_alpha",
        "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
        "linear_attn.out_proj": "ssm_out",
    },
}  # fmt: skip
MAMBA = {
    "mamba.in_proj": "ssm_in", "mamba.conv1d": "ssm_conv1d", "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out", "shared_mlp.output_linear": "ffn_down",
}  # fmt: skip
OWN_NAMES["granitemoehybrid"] = MAMBA
OWN_NAMES["falcon_h1"] = {
    **MAMBA,
    "pre_ff_layernorm": "ffn_norm",
    **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
OWN_NAMES["nemotron_h"] = {
    "norm": "attn_norm", **{k.replace("mamba", "mixer"): v for k, v in MAMBA.items()},
    **{k.replace("self_attn", "mixer"): v for k, v in NAMES.items() if "self_attn" in k},
    **{f"mixer.{part}_proj": f"ffn_{part}" for part in ("up", "down")},
}  # fmt: skip
PARAMETERS = {
    **dict.fromkeys(("linear_attn.dt_bias", "mamba.dt_bias", "mixer.dt_bias"), "ssm_dt.bias"),
    **dict.fromkeys(("linear_attn.A_log", "mamba.A_log", "mixer.A_log"), "ssm_a"),
    **dict.fromkeys(("mamba.D", "mixer.D"), "ssm_d"),
}
ARCHITECTURES = {
    "gemma3_text": "gemma3", "olmo3": "olmo2", "ministral3": "mistral3", "qwen3_5_text": "qwen35",
    "granitemoehybrid": "granitehybrid", "falcon_h1": "falcon-h1",
}  # fmt: skip
"""Those whose name is not the model type."""
INTERLEAVED = (
    "llama", "granite", "smollm3", "ministral3", "granitemoehybrid", "nemotron_h",
)  # fmt: skip
SIZES = {"hidden_size": 64, "intermediate_size": 96}


def file_name(name: str, family: str = "llama") -> str:
    """The name that a tensor has in a GGUF file."""
    name = name.replace("backbone.", "model.")
    module, _, part = name.rpartition(".")
    if name == "model.embedding_norm.weight":
        return "token_embd_norm.weight"
    if name == "model.final_layernorm.weight":
        return "output_norm.weight"
    if name in ("model.embeddings.weight", "model.norm_f.weight"):
        return "token_embd.weight" if "embeddings" in name else "output_norm.weight"
    if not module.startswith("model.layers."):
        return f"{NAMES[module]}.{part}"
    for parameter, own in PARAMETERS.items():
        if name.endswith(parameter):
            return f"blk.{module.split('.')[2]}.{own}"
    _, _, index, rest = module.split(".", 3)
    if rest == "pre_ff_layernorm":  # so by gguf's own table
        return f"blk.{index}.ffn_norm"
    return f"blk.{index}.{OWN_NAMES.get(family, {}).get(rest) or NAMES[rest]}.{part}"


usual_file_name = file_name


MTP = {
    "mtp.fc": "eh_proj", "mtp.pre_fc_norm_embedding": "enorm", "mtp.pre_fc_norm_hidden": "hnorm",
    "mtp.norm": "shared_head_norm",
}  # fmt: skip


def mtp_name(name: str, family: str, layers: int) -> str:
    """The name of a tensor of an MTP layer, which is a block behind ``layers`` others."""
    module, _, part = name.rpartition(".")
    if module in MTP:
        return f"blk.{layers}.nextn.{MTP[module]}.{part}"
    _, _, number, rest = name.split(".", 3)
    return file_name(f"model.layers.{layers + int(number)}.{rest}", family)


def mtp_metadata(layers: int, kind: str = "qwen35") -> Callable[[gguf.GGUFWriter], None]:
    """Writes that one block behind ``layers`` others is an MTP layer."""

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_block_count(layers + 1)
        writer.add_uint32(f"{kind}.nextn_predict_layers", 1)

    return fill


def interleaved(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Queries' or keys' rows as llama.cpp's converter stores Llama's."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def halved(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def tiled(
    name: str, values: np.ndarray[Any, Any], config: Any, back: bool = False
) -> np.ndarray[Any, Any]:
    """A delta net's tensor with its value heads in the order of llama.cpp's converter, or back."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    size, first = config.linear_value_head_dim, 2 * keys * config.linear_key_head_dim
    groups = (heads // keys, keys) if back else (keys, heads // keys)

    def turned(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        grouped = rows.reshape(*groups, -1, *rows.shape[1:])
        return grouped.swapaxes(0, 1).reshape(rows.shape)

    if "in_proj_qkv" in name or "conv1d" in name:
        return np.concatenate([values[:first], turned(values[first:])])
    if any(part in name for part in ("in_proj_z", "in_proj_a", "in_proj_b", "A_log", "dt_bias")):
        return turned(values)
    if "linear_attn.out_proj" in name:
        assert values.shape[1] == heads * size
        return turned(values.T).T
    return values


def metadata(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    """What the converter writes of a config."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if config.model_type == "nemotron_h":
        mlps = [k == "mlp" for k in config.layer_types]
        writer.add_feed_forward_length([config.intermediate_size * each for each in mlps])
    else:
        shared = getattr(config, "shared_intermediate_size", None)
        writer.add_feed_forward_length(shared or config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if config.model_type == "lfm2":
        heads = config.num_key_value_heads
        writer.add_head_count_kv([heads * (k != "conv") for k in config.layer_types])
        writer.add_shortconv_l_cache(config.conv_L_cache)
        writer.add_layer_norm_rms_eps(config.norm_eps)
    elif config.model_type in ("granitemoehybrid", "nemotron_h", "falcon_h1"):
        mamba(writer, config)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.model_type == "qwen3_5_text":
        heads, size = config.linear_num_value_heads, config.linear_value_head_dim
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(heads)
        writer.add_ssm_inner_size(heads * size)
        writer.add_full_attention_interval(config.full_attention_interval)
        writer.add_rope_dimension_count(int(config.head_dim * 0.25))
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_vocab_size(config.vocab_size)
    rope = config.rope_parameters
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    windowed = config.model_type in ("gemma2", "gemma3_text", "olmo3", "exaone4")
    if windowed and config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
    if config.model_type in ("olmo3", "exaone4"):
        writer.add_sliding_window_pattern([k == "sliding_attention" for k in config.layer_types])
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if config.model_type == "phi3":
        size = config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(int(size * rope["partial_rotary_factor"]))
        writer.add_sliding_window(config.sliding_window or 0)
        if rope["rope_type"] == "longrope":
            trained = rope["original_max_position_embeddings"]
            writer.add_rope_scaling_orig_ctx_len(trained)
            more = np.log(config.max_position_embeddings / trained) / np.log(trained)
            writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + max(0.0, more))))
            for kind in ("long", "short"):
                factors = np.array(rope[f"{kind}_factor"], np.float32)
                writer.add_tensor(f"rope_factors_{kind}.weight", factors)
    if "granite" in config.model_type:
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def mamba(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    """What the converter writes of Granite 4-H and Nemotron-H."""
    heads = config.num_key_value_heads
    if config.model_type == "falcon_h1":
        writer.add_head_count_kv(heads)
    else:
        writer.add_head_count_kv([heads * (k == "full_attention") for k in config.layer_types])
        writer.add_rope_scaling_finetuned(False)
    if config.model_type == "nemotron_h":
        writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        if config.model_type == "granitemoehybrid":
            writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    mamba_sizes(writer, config)


def mamba_sizes(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    """What the converter writes of the sizes of Mamba-2, with experts or without."""
    if config.model_type == "nemotron_h":
        values, size = config.mamba_num_heads, config.mamba_head_dim
        taps, states, groups = config.conv_kernel, config.ssm_state_size, config.n_groups
    else:
        values, size = config.mamba_n_heads, config.mamba_d_head
        taps, states = config.mamba_d_conv, config.mamba_d_state
        groups = config.mamba_n_groups
    writer.add_ssm_conv_kernel(taps)
    writer.add_ssm_state_size(states)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_inner_size(values * size)
    writer.add_ssm_time_step_rank(values)


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


def blocks(values: np.ndarray[Any, Any], kind: Kind) -> np.ndarray[Any, Any]:
    """``values`` in blocks of a type; random ones of K-quants, which the package only reads."""
    places = {Kind.Q4_K: (0, 2), Kind.Q6_K: (208,)}
    if kind not in places:
        return quantize(values, kind)
    size = gguf.GGML_QUANT_SIZES[kind][1]
    shape = (len(values), values.shape[1] // 256, size)
    made = np.random.default_rng(values.size).integers(0, 256, shape, dtype=np.uint8)
    for at, scale in zip(
        places[kind], (5e-4 if kind == Kind.Q4_K else 6e-5, 3.75e-3), strict=False
    ):
        made[..., at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    return made.reshape(len(values), -1)


def convert(
    source: Path,
    path: Path,
    kind: Kind | Callable[[str], Kind],
    fill: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
    skip: str = "nothing",
    plain: bool = True,
) -> tuple[Path, Path]:
    """``source`` as a GGUF file, and what the file says as a ``plain`` checkpoint."""
    config = open_checkpoint(source).config
    family = config.model_type
    writer = gguf.GGUFWriter(path, ARCHITECTURES.get(family, family))
    metadata(writer, config)

    def file_name(name: str, family: str) -> str:
        if name.startswith("mtp."):
            return mtp_name(name, family, config.num_hidden_layers)
        return usual_file_name(name, family)

    fill(writer)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if config.rope_parameters.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config.rope_parameters, size))
    said = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if skip in name:
            continue
        values = tensor.float().numpy()
        count = next((n for p, n in heads.items() if p in name), None)
        turned = count is not None and family in INTERLEAVED
        stored = interleaved(values, count) if turned and count else values
        if "linear_attn" in name:
            stored = tiled(name, values, config)
        lone = ("mamba." in name or "mixer." in name) and values.ndim == 1
        if "shared_mlp.input_linear" in name:
            own = kind(name) if callable(kind) else kind
            packed = [blocks(np.ascontiguousarray(half), own) for half in np.split(values, 2)]
            for part, half in zip(("gate", "up"), packed, strict=True):
                key = f"blk.{name.split('.')[2]}.ffn_{part}.weight"
                writer.add_tensor(key, half, raw_dtype=own)
            stored = np.concatenate([dequantize(half, own) for half in packed])
        elif lone and ("A_log" in name or name.endswith((".D", "norm.weight"))):
            made = -np.exp(stored) if "A_log" in name else stored
            groups = getattr(config, "n_groups", None) or config.mamba_n_groups
            rows = groups if name.endswith("norm.weight") else len(made)
            writer.add_tensor(file_name(name, family), made.reshape(rows, -1))
        elif "conv.weight" in name or "conv1d.weight" in name:
            writer.add_tensor(file_name(name, family), np.ascontiguousarray(stored[:, 0]))
            stored = values
        elif name.endswith("A_log"):
            writer.add_tensor(file_name(name, family), -np.exp(stored))
            stored = values
        elif values.ndim == 1:
            shifts = "gemma" in family or (family == "qwen3_5_text" and "linear_attn" not in name)
            shift = np.float32(shifts and (name.startswith("mtp.") or name.endswith("norm.weight")))
            writer.add_tensor(file_name(name, family), np.ascontiguousarray(stored + shift))
            stored = values
        else:
            own = kind(name) if callable(kind) else kind
            packed = blocks(np.ascontiguousarray(stored), own)
            writer.add_tensor(file_name(name, family), packed, raw_dtype=own)
            stored = dequantize(packed, own)
        back = halved(stored, count) if turned and count and values.ndim > 1 else stored
        if "linear_attn" in name and stored is not values:
            back = tiled(name, stored, config, back=True)
        if plain:
            said[name] = torch.from_numpy(np.ascontiguousarray(back))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    folder = path.parent / f"{path.stem}-plain"
    if not plain:
        return path, folder
    folder.mkdir()
    save_file(said, folder / "model.safetensors", metadata={"format": "pt"})
    for file in source.glob("*"):
        if file.name != "model.safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    return path, folder


def byte_level(
    cut: str = "gpt-2", vocabulary: int = 0, **more: Any
) -> Callable[[gguf.GGUFWriter], None]:
    """Writes ``conftest``'s tokenizer as the converter does, with tokens up to a vocabulary."""

    def fill(writer: gguf.GGUFWriter) -> None:
        model = json.loads(byte_level_tokenizer().to_str())["model"]
        tokens = sorted(model["vocab"], key=model["vocab"].get)
        tokens += [f"[PAD{i}]" for i in range(len(tokens), vocabulary)]
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


def add_pieces(writer: gguf.GGUFWriter, tokens: list[str], own: Sequence[str] = ()) -> None:
    """Write SentencePiece tokens: three control tokens, 256 bytes, then pieces by their rank.

    ``own`` are tokens of the user behind them.
    """
    writer.add_token_list([*tokens, *own])
    scores = [0.0 if i < 259 else 259.0 - i for i in range(len(tokens))]
    writer.add_token_scores(scores + [-1000.0] * len(own))
    types = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    writer.add_token_types(types + [4] * len(own))
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
