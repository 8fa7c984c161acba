"""A tiny Gemma 4, its assistant, and transformers' own model of the latter."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM
from transformers.models.gemma4.configuration_gemma4 import Gemma4Config, Gemma4TextConfig
from transformers.models.gemma4_assistant.configuration_gemma4_assistant import (
    Gemma4AssistantConfig,
)

from tests.support.exactness import END
from tests.support.on_disk import kept_on_disk
from tests.support.tiny import randomise

VOCABULARY = 216
"""Those of the tokenizer, padded to groups of the same size."""
WINDOW = 8
WIDTH = 32
FULL, SLIDING = "full_attention", "sliding_attention"
ALIKE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "global_head_dim": 16, "sliding_window": WINDOW, "max_position_embeddings": 256,
    "eos_token_id": END, "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
"""What a target and its assistant have in common."""
TARGETS: dict[str, dict[str, Any]] = {
    # As in E2B: the last layers share keys and values, and tokens have an input in each layer.
    "shared": {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 4,
               "vocab_size_per_layer_input": VOCABULARY, "use_double_wide_mlp": True},
    # As in the larger ones: values of full layers are their keys, and have fewer heads.
    "alike": {"attention_k_eq_v": True, "num_global_key_value_heads": 1,
              "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"},
}  # fmt: skip
ORDERED = {"use_ordered_embeddings": True, "num_centroids": 24, "centroid_intermediate_top_k": 8}
"""The best third of an output matrix is read."""
PARTS: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


@kept_on_disk
def make_gemma4(folder: Path, kind: str, wrapped: bool = False) -> Path:
    """Save a target of one of ``TARGETS``, inside a model of images if it is ``wrapped``."""
    text = Gemma4TextConfig(
        **ALIKE, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=4,
        layer_types=[SLIDING, FULL] * 2, final_logit_softcapping=1.5, **TARGETS[kind],
    )  # fmt: skip
    config: Any = text
    if wrapped:
        sees = {**PARTS, "patch_size": 4, "position_embedding_size": 8}
        names = "image_token", "video_token", "audio_token", "boi_token", "eoi_token", "boa_token"
        ids = {f"{name}_id": VOCABULARY - 1 - i for i, name in enumerate((*names, "eoa_token"))}
        config = Gemma4Config(
            text_config=text.to_dict(), vision_config=sees, audio_config=None, **ids
        )
    model = AutoModelForCausalLM.from_config(config)
    randomise(model, 0)
    model.save_pretrained(folder)
    return folder


def _modes(config: Gemma4TextConfig) -> list[str | None]:
    """Return what transformers 5.23 refuses to: the modes of layers that all share."""
    if config.num_kv_shared_layers == config.num_hidden_layers:
        return ["reuse"] * config.num_hidden_layers
    return MODES(config)


MODES: Any = vars(Gemma4TextConfig)["kv_sharing_modes"].fget


def of_transformers(config: Any) -> Any:
    """Return transformers' model of an assistant's config, or of its folder."""
    load: Any = AutoModelForCausalLM
    with patch.object(Gemma4TextConfig, "kv_sharing_modes", property(_modes)):
        if isinstance(config, Path):
            return load.from_pretrained(config, dtype=torch.float32).eval()
        return load.from_config(config)


@kept_on_disk
def make_assistant(folder: Path, kind: str, ordered: bool = False, **options: Any) -> Path:
    """Save an assistant of a target of one of ``TARGETS``; ``options`` are of its text config."""
    same = ("attention_k_eq_v", "num_global_key_value_heads")
    text: dict[str, Any] = {
        **ALIKE, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
        "layer_types": [SLIDING] * 3 + [FULL], "num_kv_shared_layers": 4,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
        **{name: value for name, value in TARGETS[kind].items() if name in same}, **options,
    }  # fmt: skip
    width = text.pop("backbone_hidden_size", WIDTH)
    config = Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(**text), backbone_hidden_size=width,
        **(ORDERED if ordered else {}),
    )  # fmt: skip
    model = of_transformers(config)
    randomise(model, 1)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.layer_scalar.fill_(0.7)
            layer.self_attn.q_norm.weight.mul_(0.3)  # so that each entry counts
        if ordered:
            order = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(2))
            model.masked_embedding.token_ordering.copy_(order)
    model.save_pretrained(folder)
    return folder
