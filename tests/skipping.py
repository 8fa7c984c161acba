"""A tiny target of which some sublayers matter little: a seed draws which."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from exactness import END, VOCABULARY
from transformers import AutoConfig, AutoModelForCausalLM

LAYERS = 12


def useless(seed: int, layers: int = LAYERS, share: float = 0.45) -> frozenset[int]:
    """The sublayers between the first and the last layer that a seed draws."""
    candidates = range(2, 2 * layers - 2)
    return frozenset(random.Random(seed).sample(candidates, int(share * len(candidates))))


def planted_target(
    folder: Path, seed: int, layers: int = LAYERS, useless_by: float = 0.02, **sizes: int
) -> Path:
    """Save a target in which ``useless(seed)`` say little, and every other sublayer matters."""
    torch.manual_seed(seed)
    options = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 512, "initializer_range": 0.15,
        "tie_word_embeddings": False, "eos_token_id": END, "bos_token_id": None,
        "pad_token_id": None, **sizes,
    }  # fmt: skip
    config = AutoConfig.for_model("llama", num_hidden_layers=layers, **options)
    target = AutoModelForCausalLM.from_config(config)
    little = useless(seed, layers)
    with torch.no_grad():
        for number, layer in enumerate(target.model.layers):
            for part, matrix in enumerate((layer.self_attn.o_proj, layer.mlp.down_proj)):
                if 2 * number + part in little:
                    matrix.weight.mul_(useless_by)
        target.lm_head.weight.mul_(2.0)
    target.save_pretrained(folder)
    return folder
