"""GGUF files of tiny mixtures of experts, as llama.cpp's converter writes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.experts import fuse_experts
from tests.support.ggufs import NAMES, blocks, interleaved, mamba_sizes, tiled

ARCHITECTURES = {
    "qwen3_moe": "qwen3moe", "mixtral": "llama", "olmoe": "olmoe", "granitemoe": "granitemoe",
    "granitemoehybrid": "granitehybrid", "gpt_oss": "gpt-oss", "qwen3_5_moe_text": "qwen35moe",
    "lfm2_moe": "lfm2moe", "glm4_moe": "glm4moe", "nemotron_h": "nemotron_h_moe",
}  # fmt: skip
MODULES = {
    **NAMES, "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp", "feed_forward.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.shared_expert.{p}_proj": f"ffn_{p}_shexp" for p in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{p}_proj": f"ffn_{p}_shexp" for p in ("gate", "up", "down")},
    "shared_mlp.output_linear": "ffn_down_shexp",
    "norm": "attn_norm", "mixer.gate": "ffn_gate_inp",
    **{f"mixer.{p}_proj": NAMES[f"self_attn.{p}_proj"] for p in "qkvo"},
    **{f"mixer.{p}_proj": f"ffn_{p}" for p in ("up", "down")},
    **{f"mixer.shared_experts.{p}_proj": f"ffn_{p}_shexp" for p in ("up", "down")},
    "mixer.in_proj": "ssm_in", "mixer.conv1d": "ssm_conv1d", "mixer.norm": "ssm_norm",
    "mixer.out_proj": "ssm_out",
    "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down",
    "operator_norm": "attn_norm", "ffn_norm": "ffn_norm", "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj", "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out", "mamba.in_proj": "ssm_in", "mamba.conv1d": "ssm_conv1d",
    "mamba.norm": "ssm_norm", "mamba.out_proj": "ssm_out",
    **{name: f"nextn.{name}" for name in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
    **{f"shared_head.{part}": f"nextn.shared_head_{part}" for part in ("norm", "head")},
}  # fmt: skip
PARAMETERS = {
    "linear_attn.dt_bias": "ssm_dt.bias", "mamba.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a", "mamba.A_log": "ssm_a", "mamba.D": "ssm_d",
    "self_attn.sinks": "attn_sinks.weight", "feed_forward.expert_bias": "exp_probs_b.bias",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.dt_bias": "ssm_dt.bias", "mixer.A_log": "ssm_a", "mixer.D": "ssm_d",
}  # fmt: skip
POST = ("gpt_oss", "qwen3_5_moe_text", "glm4_moe")
"""Families whose norm before MLPs is called post_attention_norm."""
TOPS = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "model.embeddings.weight": "token_embd.weight", "model.norm_f.weight": "output_norm.weight",
    "model.embedding_norm.weight": "token_embd_norm.weight", "lm_head.weight": "output.weight",
}  # fmt: skip


def metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    """What the converter writes of a config."""
    family, heads = config.model_type, config.num_key_value_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_vocab_size(config.vocab_size)
    writer.add_head_count(config.num_attention_heads)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(size)
    writer.add_value_length(size)
    eps = ("norm_eps", "layer_norm_epsilon", "rms_norm_eps")
    writer.add_layer_norm_rms_eps(next(getattr(config, n) for n in eps if hasattr(config, n)))
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": 1e4}
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_expert_count(getattr(config, "num_experts", None) or config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    writer.add_feed_forward_length(getattr(config, "intermediate_size", None) or inner)
    if family not in ("mixtral", "granitemoe", "granitemoehybrid", "olmoe"):
        writer.add_expert_feed_forward_length(inner)
    if family in ("lfm2_moe", "granitemoehybrid", "nemotron_h"):
        kinds = [kind == "full_attention" for kind in config.layer_types]
        writer.add_head_count_kv([heads * attends for attends in kinds])
    else:
        writer.add_head_count_kv(heads)
    if "granite" in family:
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if family == "granitemoehybrid":
        writer.add_rope_scaling_finetuned(False)
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
        mamba_sizes(writer, config)
    if family == "nemotron_h":
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        mamba_sizes(writer, config)
    if family == "gpt_oss":
        writer.add_sliding_window(config.sliding_window)
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if family == "qwen3_5_moe_text":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
        writer.add_rope_dimension_count(int(size * 0.25))
    if family == "lfm2_moe":
        writer.add_shortconv_l_cache(config.conv_L_cache)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
    if family in ("glm4_moe", "nemotron_h"):
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if family == "glm4_moe":
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_rope_dimension_count(int(size * 0.5))


def file_name(name: str, family: str) -> str:
    """The name that a tensor of transformers' model has in a file."""
    if name in TOPS:
        return TOPS[name]
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    assert layer is not None
    if layer[2] in PARAMETERS:
        return f"blk.{layer[1]}.{PARAMETERS[layer[2]]}"
    module, _, part = layer[2].rpartition(".")
    if module == "post_attention_layernorm" and family in POST:
        return f"blk.{layer[1]}.post_attention_norm.{part}"
    return f"blk.{layer[1]}.{MODULES[module]}.{part}"


def parts_of(name: str, tensor: torch.Tensor, family: str) -> dict[str, torch.Tensor]:
    """The tensors that a file has instead of one with gates and what they gate; of experts, all."""
    layer = re.match(r"model\.layers\.\d+\.", name)
    assert layer is not None
    blk = f"blk.{layer[0].split('.')[2]}"
    bias = name.endswith("_bias")
    part = "bias" if bias else "weight"
    if "experts.up_proj" in name:
        return {f"{blk}.ffn_up_exps.weight": tensor}
    if "down_proj" in name:
        turned = tensor.transpose(1, 2) if family == "gpt_oss" and not bias else tensor
        return {f"{blk}.ffn_down_exps.{part}": turned}
    if "shared_mlp" in name:
        gate, up = tensor.chunk(2)
        return {f"{blk}.ffn_gate_shexp.{part}": gate, f"{blk}.ffn_up_shexp.{part}": up}
    if family == "gpt_oss":
        gate, up = tensor[..., ::2], tensor[..., 1::2]
        if not bias:
            gate, up = gate.transpose(1, 2), up.transpose(1, 2)
    else:
        gate, up = tensor.chunk(2, 1)
    return {f"{blk}.ffn_gate_exps.{part}": gate, f"{blk}.ffn_up_exps.{part}": up}


def further_layers(source: Path, layers: int) -> dict[str, torch.Tensor]:
    """The tensors of layers behind those of the model, which predict further tokens."""
    tensors = load_file(source / "model.safetensors")
    number = re.compile(r"model\.layers\.(\d+)\.")
    found = {name: number.match(name) for name in tensors}
    return fuse_experts({n: tensors[n] for n, at in found.items() if at and int(at[1]) >= layers})


def convert_mixture(
    source: Path,
    path: Path,
    kind: Kind,
    joined: bool = False,
    fill: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
    skip: str = "nothing",
) -> tuple[Path, Path]:
    """``source`` as a GGUF file, and what the file says as a plain checkpoint.

    With ``joined`` gates of experts and what they gate are one tensor. ``skip`` is the expression
    for names that the file does not get.
    """
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = model.config
    family = config.model_type
    writer = gguf.GGUFWriter(path, ARCHITECTURES[family])
    metadata(writer, config)
    fill(writer)
    further = further_layers(source, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    pairs = family in ("mixtral", "granitemoe", "granitemoehybrid", "nemotron_h")
    mamba = family in ("granitemoehybrid", "nemotron_h")

    def put(key: str, values: torch.Tensor) -> torch.Tensor:
        """Write a tensor, and return what it says."""
        array: NDArray[Any] = np.ascontiguousarray(values.numpy())
        coded = array.ndim > 1 and array.shape[-1] % 32 == 0 and "gate_inp" not in key
        if not coded or key.endswith(".bias"):
            writer.add_tensor(key, array)
            return values
        packed = blocks(array.reshape(-1, array.shape[-1]), kind)
        shaped = packed.reshape(*array.shape[:-1], -1)
        writer.add_tensor(key, shaped, raw_dtype=kind)
        return torch.from_numpy(dequantize(packed, kind).reshape(array.shape).copy())

    with torch.no_grad():
        for name, tensor in (model.state_dict() | further).items():
            if re.search(skip, name):
                continue
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            if re.search(r"\.experts\.(gate_up|up|down)_proj|shared_mlp\.input", name):
                made = parts_of(name, tensor, family)
                names, values = [*made], [*made.values()]
                if joined and len(values) == 2 and "exps.weight" in names[0]:
                    key = names[0].replace("ffn_gate_exps", "ffn_gate_up_exps")
                    values = [*put(key, torch.cat(values, 1)).chunk(2, 1)]
                else:
                    values = [put(key, each) for key, each in made.items()]
                if family == "gpt_oss":
                    if len(values) == 2:
                        values = [
                            torch.stack(values, -1).flatten(-2)
                            if "_bias" in name
                            else torch.stack([v.transpose(1, 2) for v in values], -1).flatten(-2)
                        ]
                    elif "_bias" not in name:
                        values = [values[0].transpose(1, 2)]
                tensor.copy_(
                    torch.cat(values, 0 if "shared_mlp" in name else 1)
                    if len(values) == 2
                    else values[0]
                )
                continue
            key, stored = file_name(name, family), tensor
            count = next((n for p, n in heads.items() if p in name), None)
            if pairs and count:
                stored = torch.from_numpy(interleaved(tensor.numpy(), count))
            delta = "linear_attn" in name
            if delta:
                stored = torch.from_numpy(np.ascontiguousarray(tiled(name, stored.numpy(), config)))
            if "conv" in key and tensor.dim() == 3:
                stored = stored[:, 0]
            if key.endswith("ssm_a"):
                stored = -torch.exp(stored)
            shifted = family == "qwen3_5_moe_text" and key.endswith("norm.weight")
            if shifted and "linear_attn" not in name:
                stored = tensor + 1
            if "gate_inp_shexp" in key:
                stored = tensor[0]
            if mamba and re.search(r"ssm_(a|d)$", key):
                stored = stored[:, None]
            if mamba and "ssm_norm" in key:
                groups = getattr(config, "n_groups", None) or config.mamba_n_groups
                stored = stored.reshape(groups, -1)
            said = put(key, stored) if "ssm_norm" not in key else (
                writer.add_tensor(key, stored.numpy()), stored)[1]  # fmt: skip
            if stored.dim() == 2 and tensor.dim() == 2 and not key.endswith("ssm_a"):
                array = said.numpy()
                if pairs and count:
                    array = _back(array, count)
                if delta:
                    array = tiled(name, array, config, back=True)
                tensor.copy_(torch.from_numpy(np.ascontiguousarray(array)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    folder = path.parent / f"{path.stem}-plain"
    model.save_pretrained(folder)
    return path, folder


def _back(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    halves = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))
