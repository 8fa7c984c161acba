"""Options of the native families' configs, their types and transformers' defaults."""

from __future__ import annotations

from typing import Any

TYPES = {
    **dict.fromkeys(
        (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
            "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
            "original_max_position_embeddings", "no_rope_layer_interval", "sliding_window_pattern",
            "decoder_sparse_step", "moe_intermediate_size", "shared_intermediate_size",
            "query_pre_attn_scalar", "conv_L_cache", "block_multiple_of", "linear_conv_kernel_dim",
            "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
            "linear_num_value_heads", "full_attention_interval", "mamba_n_heads", "mamba_n_groups",
            "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand", "mamba_num_heads",
            "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "mamba_d_ssm",
            "n_routed_experts", "n_group", "topk_group", "moe_latent_size",
        ),
        "size",
    ),
    **dict.fromkeys(
        (
            "sliding_window", "max_window_layers", "num_experts_per_tok", "num_experts",
            "num_local_experts", "num_dense_layers", "first_k_dense_replace", "n_shared_experts",
            "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
        ),
        "whole",
    ),
    **dict.fromkeys(
        (
            "rms_norm_eps", "norm_eps", "layer_norm_epsilon", "final_logit_softcapping",
            "attn_logit_softcapping", "embedding_multiplier", "logits_scaling",
            "residual_multiplier", "attention_multiplier", "block_ffn_dim_multiplier",
            "lm_head_multiplier", "key_multiplier", "attention_out_multiplier",
            "attention_in_multiplier", "ssm_in_multiplier", "ssm_out_multiplier",
            "routed_scaling_factor", "swiglu_limit", "swiglu_alpha", "clip_qkv",
        ),
        "number",
    ),
    **dict.fromkeys(
        (
            "tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window",
            "norm_topk_prob", "use_bidirectional_attention", "is_encoder_decoder", "conv_bias",
            "block_auto_adjust_ff_dim", "tiled_value_heads", "mamba_conv_bias", "mamba_proj_bias",
            "use_conv_bias", "use_bias", "mamba_rms_norm", "mamba_norm_before_gate",
            "projectors_bias", "use_expert_bias", "use_qk_norm",
        ),
        "flag",
    ),
    **dict.fromkeys(
        (
            "hidden_act", "hidden_activation", "position_embedding_type", "mlp_hidden_act",
            "mamba_hidden_act", "hybrid_override_pattern",
        ),
        "text",
    ),
    **dict.fromkeys(("mlp_only_layers", "no_rope_layers", "full_attn_idxs"), "numbers"),
    **dict.fromkeys(("mlp_multipliers", "ssm_multipliers"), "multipliers"),
    "layer_types": "texts",
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), "ids"),
}  # fmt: skip
"""The type of each option; a "size" is a whole number from 1."""
NONE_COUNTS = (
    "sliding_window", "final_logit_softcapping", "attn_logit_softcapping", "bos_token_id",
    "eos_token_id", "pad_token_id", "mamba_d_ssm",
)  # fmt: skip
"""Options for which null means none; for others it means the default."""
KEPT = ("quantization_config", "architectures", "time_step_limit")
"""Options that any model may have, kept as they are given."""
RENAMED = {
    "qwen3_moe": {"num_experts": "num_local_experts"},
    "olmoe": {"num_experts": "num_local_experts"},
    "mixtral": {"num_local_experts": "num_experts"},
    "gpt_oss": {"num_local_experts": "num_experts"},
    "glm4_moe": {"n_routed_experts": "num_local_experts"},
    "lfm2_moe": {"tie_word_embeddings": "tie_embedding"},
    "granitemoehybrid": {"layer_types": "layers_block_type"},
    "nemotron_h": {
        "layer_types": "layers_block_type",
        "n_groups": "mamba_n_groups",
        "conv_kernel": "mamba_d_conv",
        "use_conv_bias": "mamba_conv_bias",
    },
    "lfm2": {"tie_word_embeddings": "tie_embedding", "intermediate_size": "block_ff_dim"},
}
"""Other names of options, used if the usual one is missing."""
FIRST = {
    "lfm2": ("tie_word_embeddings", "intermediate_size"),
    "lfm2_moe": ("tie_word_embeddings",),
    "nemotron_h": ("n_groups", "conv_kernel", "use_conv_bias"),
}
"""Options whose other name is used if both are given."""
THETA = {
    "smollm3": 2e6,
    "lfm2": 1e6,
    "lfm2_moe": 1e6,
    "mixtral": 1e6,
    "gpt_oss": 1.5e5,
    "gemma3_text": 1e6,
    "olmo3": 5e5,
}
NEAR_THETA = {"gemma3_text": 1e4, "olmo3": 5e5}
"""Bases of ropes that are not 10,000; and those of layers with a window."""

_ALL: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "is_encoder_decoder": False,
}
_BIAS: dict[str, Any] = {"attention_bias": False}
_BIASES = _BIAS | {"mlp_bias": False}
_MISTRAL = _ALL | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_QWEN = _ALL | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "bos_token_id": None,
    "eos_token_id": None,
    "use_sliding_window": False,
    "sliding_window": 4096,
}
_LAYERED = {"max_window_layers": 28, "layer_types": None}
_SILENT = {name: value for name, value in _ALL.items() if name != "hidden_act"}
_GEMMA = _SILENT | {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "use_bidirectional_attention": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_OLMO = _ALL | _BIAS | {
    "vocab_size": 50304,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 1,
    "bos_token_id": None,
    "eos_token_id": 50279,
}  # fmt: skip
_GRANITE = {
    "attention_bias": False,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _ALL | _BIASES,
    "mistral": _MISTRAL,
    "ministral": _MISTRAL | {"layer_types": None},
    "ministral3": _MISTRAL | {
        "vocab_size": 131072, "num_hidden_layers": 34, "head_dim": 128, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144, "sliding_window": None, "pad_token_id": 11,
    },
    "qwen2": _QWEN | _LAYERED,
    "qwen3": _QWEN | _LAYERED | _BIAS | {"head_dim": 128},
    "qwen3_moe": _QWEN | _BIAS | {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
        "num_key_value_heads": 4, "decoder_sparse_step": 1, "moe_intermediate_size": 768,
        "num_experts_per_tok": 8, "num_experts": 128, "norm_topk_prob": False,
        "mlp_only_layers": None,
    },
    "mixtral": _MISTRAL | {
        "rms_norm_eps": 1e-5, "sliding_window": None, "num_experts_per_tok": 2,
        "num_local_experts": 8,
    },
    "olmoe": _OLMO | {
        "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16,
        "num_attention_heads": 16, "max_position_embeddings": 4096, "clip_qkv": None,
        "num_experts_per_tok": 8, "num_experts": 64, "norm_topk_prob": False,
    },
    "granitemoe": _ALL | _GRANITE | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": _ALL | {
        "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "sliding_window": 128, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": None, "attention_bias": True,
        "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702, "layer_types": None,
    },
    "glm4_moe": _ALL | _BIAS | {
        "vocab_size": 151552, "intermediate_size": 10944, "num_hidden_layers": 46,
        "num_attention_heads": 96, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": None,
        "moe_intermediate_size": 1408, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "n_routed_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "norm_topk_prob": True, "use_qk_norm": False,
    },
    "smollm3": _ALL | _BIASES | {
        "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 32768,
        "pad_token_id": 128004, "bos_token_id": 128000, "eos_token_id": 128001,
        "use_sliding_window": False, "sliding_window": None, "no_rope_layers": None,
        "no_rope_layer_interval": 4, "layer_types": None, "tie_word_embeddings": True,
    },
    "gemma2": _GEMMA | {
        "vocab_size": 256000, "max_position_embeddings": 8192, "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0, "use_bidirectional_attention": None,
    },
    "gemma3_text": _GEMMA | {
        "vocab_size": 262208, "max_position_embeddings": 131072, "final_logit_softcapping": None,
        "attn_logit_softcapping": None, "sliding_window_pattern": 6,
    },
    "olmo2": _OLMO,
    "olmo3": _OLMO | {"sliding_window": 4096, "layer_types": None},
    "exaone4": _ALL | {
        "vocab_size": 102400, "intermediate_size": 16384, "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5, "bos_token_id": 0, "sliding_window": 4096,
        "sliding_window_pattern": 4, "layer_types": None,
    },
    "phi3": _ALL | {
        "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
        "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "eos_token_id": 32000, "pad_token_id": 32000, "sliding_window": None,
    },
    "granite": _ALL | _GRANITE | {"mlp_bias": False},
    "qwen3_5_text": _ALL | _BIAS | {
        "vocab_size": 248320, "intermediate_size": 12288, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 32768,
        "bos_token_id": None, "eos_token_id": None, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "tiled_value_heads": False, "full_attention_interval": 4,
        "layer_types": None,
    },
    "qwen3_5_moe_text": _BIAS | {
        name: value for name, value in _ALL.items() if name != "intermediate_size"
    } | {
        "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "max_position_embeddings": 32768, "bos_token_id": None, "eos_token_id": None,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "tiled_value_heads": False,
        "full_attention_interval": 4, "layer_types": None, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "num_experts_per_tok": 8, "num_experts": 256,
    },
    "qwen3_next": _ALL | _BIAS | {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632,
        "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "max_position_embeddings": 32768, "bos_token_id": None,
        "eos_token_id": None, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "tiled_value_heads": False, "full_attention_interval": 4, "layer_types": None,
        "decoder_sparse_step": 1, "mlp_only_layers": None, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "num_experts_per_tok": 10, "num_experts": 512,
        "norm_topk_prob": True,
    },
    "lfm2_moe": {name: value for name, value in _SILENT.items() if name != "rms_norm_eps"} | {
        "vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 7168,
        "num_key_value_heads": 8, "max_position_embeddings": 128000, "norm_eps": 1e-5,
        "tie_word_embeddings": True, "pad_token_id": 0, "conv_bias": False, "conv_L_cache": 3,
        "layer_types": None, "moe_intermediate_size": 1792, "num_dense_layers": 2,
        "num_experts_per_tok": 4, "num_experts": 32, "use_expert_bias": True,
        "routed_scaling_factor": 1.0, "norm_topk_prob": True,
    },
    "lfm2": {name: value for name, value in _SILENT.items() if name != "rms_norm_eps"} | {
        "vocab_size": 65536, "hidden_size": 2560, "intermediate_size": 12288,
        "num_key_value_heads": 8, "max_position_embeddings": 128000, "norm_eps": 1e-5,
        "tie_word_embeddings": True, "pad_token_id": 0, "conv_bias": False, "conv_L_cache": 3,
        "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True, "full_attn_idxs": None, "layer_types": None,
    },
    "granitemoehybrid": _ALL | _GRANITE | {
        "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024,
        "position_embedding_type": None, "layer_types": None, "mamba_n_heads": 128,
        "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": None, "mamba_d_conv": 4,
        "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False,
    },
    "falcon_h1": _ALL | _BIASES | {
        "vocab_size": 128000, "intermediate_size": 14336, "num_key_value_heads": 8,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "pad_token_id": 0,
        "mamba_d_ssm": 1024, "mamba_n_heads": 128, "mamba_d_head": None, "mamba_n_groups": 1,
        "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
        "mamba_proj_bias": False, "mamba_norm_before_gate": True, "mamba_rms_norm": False,
        "projectors_bias": False, "lm_head_multiplier": 1.0, "embedding_multiplier": 1.0,
        "mlp_multipliers": None, "key_multiplier": 1.0, "attention_out_multiplier": 1.0,
        "attention_in_multiplier": 1.0, "ssm_multipliers": None, "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": 1.0,
    },
    "nemotron_h": {
        name: value for name, value in _SILENT.items() if name != "rms_norm_eps"
    } | {
        "vocab_size": 131072, "intermediate_size": 21504, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 4096, "pad_token_id": 0, "mlp_bias": False,
        "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "layer_norm_epsilon": 1e-5,
        "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8,
        "conv_kernel": 4, "use_conv_bias": True, "use_bias": False, "layer_types": None,
        "hybrid_override_pattern": None, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
        "moe_latent_size": None, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "n_shared_experts": 1,
    },
}  # fmt: skip
"""Each family's options and their defaults; None for options that follow from others."""
MISTRAL3_TEXT: dict[str, Any] = {
    "head_dim": 128, "hidden_size": 5120, "intermediate_size": 32768,
    "max_position_embeddings": 131072, "num_hidden_layers": 40, "rms_norm_eps": 1e-5,
    "rope_theta": 1e9, "sliding_window": None, "vocab_size": 131072,
}  # fmt: skip
"""The text part of a wrapper whose config does not describe it."""
GPT_OSS_ROPE: dict[str, Any] = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
MINISTRAL3_ROPE: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0,
    "original_max_position_embeddings": 16384, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
