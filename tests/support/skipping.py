"""A tiny target of which some sublayers matter little: a seed draws which."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.drafters.skips import MOST_SKIPPED, Skips
from tests.support.exactness import END, FAMILY_OPTIONS, VOCABULARY

LAYERS = 12
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "initializer_range": 0.15,
    "tie_word_embeddings": False, "eos_token_id": END, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def useless(seed: int) -> Skips:
    """Return the sublayers between the first and the last layer that a seed draws."""
    candidates = range(2, 2 * LAYERS - 2)
    return frozenset(random.Random(seed).sample(candidates, int(MOST_SKIPPED * len(candidates))))


def planted_target(folder: Path, seed: int, family: str = "llama") -> Path:
    """Save a target in which ``useless(seed)`` say little, and every other sublayer matters."""
    torch.manual_seed(seed)
    own = {**FAMILY_OPTIONS.get(family, {}), **SIZES}
    for name in {"layer_types", "no_rope_layers"} & own.keys():
        own[name] = own[name] * (LAYERS // 2)
    config = AutoConfig.for_model(family, num_hidden_layers=LAYERS, **own)
    target = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for number, layer in enumerate(target.model.layers):
            inner = getattr(layer.mlp, "experts", layer.mlp)
            for part, matrix in enumerate((layer.self_attn.o_proj, inner.down_proj)):
                if 2 * number + part in useless(seed):
                    getattr(matrix, "weight", matrix).mul_(0.02)
        target.lm_head.weight.mul_(2.0)
    target.save_pretrained(folder)
    return folder
