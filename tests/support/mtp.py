"""MTP layers of random weights in tiny checkpoints of each kind, and the same in torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.exaone4.modeling_exaone4 import Exaone4DecoderLayer, Exaone4RMSNorm
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer, Glm4MoeRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeDecoderLayer,
    Qwen3_5MoeRMSNorm,
)

from outrider.base.fields import read_object
from tests.support.chunked import vary
from tests.support.experts import fuse_experts

OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"], "head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "qwen3_5_moe_text": {
        "layer_types": ["linear_attention", "full_attention"], "head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 20,
    },
    "exaone4": {
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20,
        "num_key_value_heads": 1,
    },
    "mimo": {"num_key_value_heads": 1},
    "glm4_moe": {
        "head_dim": 16, "num_experts_per_tok": 3, "n_routed_experts": 8, "n_group": 4,
        "topk_group": 2, "moe_intermediate_size": 32, "n_shared_experts": 2,
        "routed_scaling_factor": 1.7, "use_qk_norm": True, "attention_bias": True,
    },
}  # fmt: skip
"""Options of small targets by their model type."""
LIKE = {"qwen3_5_text": 1, "qwen3_5_moe_text": 1, "exaone4": 0, "mimo": 0, "glm4_moe": 1}
"""The layer of a target that the MTP layer is like."""
SHIFTED = ("qwen3_5_text", "qwen3_5_moe_text")
"""Those whose norms weigh 1 + w."""
AS = {"mimo": "qwen2"}
"""Model types as transformers has them."""
LAYERS = {
    "qwen3_5_text": (Qwen3_5DecoderLayer, Qwen3_5RMSNorm),
    "qwen3_5_moe_text": (Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm),
    "exaone4": (Exaone4DecoderLayer, Exaone4RMSNorm),
    "mimo": (Qwen2DecoderLayer, Qwen2RMSNorm),
    "glm4_moe": (Glm4MoeDecoderLayer, Glm4MoeRMSNorm),
}
OWN_NAMES = {
    "mimo": (
        "model.mtp_layers.0.",
        {
            "fc": "input_proj", "pre_fc_norm_embedding": "token_layernorm",
            "pre_fc_norm_hidden": "hidden_layernorm", "norm": "final_layernorm",
        },
    ),
    "glm4_moe": (
        "model.layers.2.",
        {
            "fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm",
            "norm": "shared_head.norm",
        },
    ),
}  # fmt: skip
"""The beginning of a family's names, and the modules outside of the decoder layer."""
UNREAD = {"glm4_moe": ("embed_tokens", "shared_head.head")}
"""What files hold twice. Here the second ones differ from the target's, to be told apart."""


def own_name(family: str, name: str) -> str:
    """The name of an MTP tensor, ``layers.0.*`` or as Qwen3.5 has it, in a family's files."""
    if family not in OWN_NAMES:
        return f"mtp.{name}"
    begins, modules = OWN_NAMES[family]
    module, _, part = name.removeprefix("layers.0.").rpartition(".")
    return f"{begins}{modules.get(module, module)}.{part}"


def make_mtp(make_checkpoint: Callable[..., Path], folder: Path, family: str) -> Path:
    """Write a tiny checkpoint with an MTP layer to ``folder``."""
    made = make_checkpoint(folder, AS.get(family, family), tokenizer=True, **OPTIONS[family])
    config = read_object(made / "config.json")
    (made / "config.json").write_text(json.dumps(config | {"model_type": family}))
    return with_layer(vary(made), family)


def with_layer(folder: Path, family: str, **changed: torch.Tensor | None) -> Path:
    """Add an MTP layer as a family has it, like one of the target's.

    ``changed`` tensors, by their module's last name, are others or None.
    """
    tensors, own = load_file(folder / "model.safetensors"), dict[str, torch.Tensor]()
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    width = tensors["model.norm.weight"].shape[0]
    begins = f"model.layers.{LIKE[family]}."
    for name in [name for name in tensors if name.startswith(begins)]:
        part = own_name(family, f"layers.0.{name.removeprefix(begins)}")
        scaled = tensors[name] if tensors[name].ndim == 1 else random(*tensors[name].shape)
        own[part] = scaled.clone()
    own[own_name(family, "fc.weight")] = random(width, 2 * width)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        norm = (family not in SHIFTED) + 0.3 * torch.randn(width, generator=generator)
        own[own_name(family, f"{name}.weight")] = norm
    for name in UNREAD.get(family, ()):
        own[own_name(family, f"{name}.weight")] = random(*tensors["lm_head.weight"].shape)
    for part, tensor in changed.items():
        (name,) = [n for n in own if n.endswith(f".{part}.weight")]
        del own[name]
        if tensor is not None:
            own[name] = tensor
    save_file(tensors | own, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Reference:
    """The layer in torch, of transformers' decoder layer, over whole sequences."""

    def __init__(self, folder: Path, family: str) -> None:
        options = read_object(folder / "config.json") | {"model_type": AS.get(family, family)}
        config = AutoConfig.for_model(**options)
        self.target = AutoModelForCausalLM.from_pretrained(folder, config=config).eval()
        self.tensors, self.family = load_file(folder / "model.safetensors"), family
        make, self.make_norm = LAYERS[family]
        self.layer = make(self.target.config, LIKE[family])
        begins = own_name(family, "layers.0.x.weight").removesuffix("x.weight")
        own = {n.removeprefix(begins): t for n, t in self.tensors.items() if n.startswith(begins)}
        # In some families norms and the linear have the same beginning.
        loaded = self.layer.load_state_dict(fuse_experts(own), strict=family not in OWN_NAMES)
        assert not loaded.missing_keys
        self.eps, self.width = config.rms_norm_eps, config.hidden_size

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[own_name(self.family, f"{name}.weight")]

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        norm: Any = self.make_norm(self.width, self.eps)
        norm.weight.data.copy_(self.tensor(name))
        normed: torch.Tensor = norm(x)
        return normed

    @torch.no_grad()
    def __call__(self, ids: list[int], states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and states behind the tokens from the second one on, of states before them.

        ``before`` is what the norm turns into states.
        """
        model, later = self.target.model, torch.tensor([ids[1:]])
        embedded = self.norm("pre_fc_norm_embedding", model.embed_tokens(later))
        state = self.norm("pre_fc_norm_hidden", states[None])
        both = (state, embedded) if self.family == "mimo" else (embedded, state)
        x = torch.cat(both, -1) @ self.tensor("fc").T
        places = torch.arange(1, len(ids))[None]
        behind = places[0][:, None] - places[0][None]
        window = self.target.config.sliding_window if self.family == "exaone4" else len(ids)
        hidden = (behind < 0) | (behind >= window)
        mask = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)[None, None]
        turns = model.rotary_emb(x, places)
        x = self.layer(x, position_embeddings=turns, attention_mask=mask, position_ids=places)
        self.before = (x[0] if isinstance(x, tuple) else x)[0]
        x = self.norm("norm", self.before)
        return self.target.lm_head(x), x

    @torch.no_grad()
    def states(self, ids: list[int]) -> torch.Tensor:
        last: torch.Tensor = self.target.model(torch.tensor([ids])).last_hidden_state[0]
        return last
