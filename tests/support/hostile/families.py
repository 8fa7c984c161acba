"""Options of configs that say all that their families can say, ropes of every type among them."""

from __future__ import annotations

from typing import Any


def rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **options}}


WINDOWS = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA = {
    "head_dim": 16, "query_pre_attn_scalar": 16, "final_logit_softcapping": 4.0,
    "attn_logit_softcapping": 1.5,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, **rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=64)},
    "qwen3": {"head_dim": 16, "use_sliding_window": True, "sliding_window": 24,
              "max_window_layers": 1, "attention_bias": True},
    "gemma2": {**WINDOWS, **GEMMA},
    "gemma3_text": {**WINDOWS, **GEMMA, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}},
    "smollm3": {**WINDOWS, "use_sliding_window": True, "no_rope_layers": [1, 0],
                "no_rope_layer_interval": 2},
    "phi3": {"sliding_window": 24, "original_max_position_embeddings": 64, **rope(
        "longrope", partial_rotary_factor=0.5, short_factor=[1.0, 1.5], long_factor=[2.0, 5.0],
        original_max_position_embeddings=64)},
    "olmo2": {"attention_bias": True, **rope("dynamic", factor=2.0)},
    "olmo3": {**WINDOWS, **rope("yarn", factor=4.0, original_max_position_embeddings=64,
                                attention_factor=1.2)},
    "exaone4": {**WINDOWS, "sliding_window_pattern": 2},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0,
                "attention_multiplier": 0.2, "attention_bias": True, "mlp_bias": True},
    "granitemoehybrid": {
        "num_local_experts": 0, "mamba_n_heads": 4, "shared_intermediate_size": 52,
        "layer_types": ["full_attention"] * 2, "attention_multiplier": 0.3,
        "position_embedding_type": "rope"},
    "ministral": {**WINDOWS, "head_dim": 16},
    "ministral3": {"head_dim": 16, **rope(
        "yarn", factor=4.0, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=16,
        beta_fast=32.0, beta_slow=1.0, truncate=False, llama_4_scaling_beta=0.3)},
}  # fmt: skip
"""By model type, beside the sizes of ``tests.support.tiny``."""
IN_FILES = ("llama", "qwen3", "gemma3_text", "smollm3", "phi3", "olmo3", "granite", "ministral3")
"""Those of which GGUF files are made."""
