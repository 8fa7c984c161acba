"""A tiny target of which some sublayers matter little: a seed draws which."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from exactness import END, VOCABULARY

from benchmarks import skipping

LAYERS = 12
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "initializer_range": 0.15,
    "tie_word_embeddings": False, "eos_token_id": END, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip


useless = partial(skipping.useless, layers=LAYERS)


def planted_target(folder: Path, seed: int) -> Path:
    """Save a target in which ``useless(seed)`` say little, and every other sublayer matters."""
    skipping.planted(seed, LAYERS, 0.02, **SIZES).save_pretrained(folder)
    return folder
