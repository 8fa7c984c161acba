"""Distils an EAGLE-3 head from its target, by training-time test.

Li et al., "EAGLE-3: Scaling up inference acceleration of large language models via training-time
test", 2025: the head reads its own states again as it will when it drafts, beside the true tokens.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

STEP_WEIGHT = 0.8
"""Weight of each step of the training-time test, beside that of the one before."""
WARMUP, FALL = 20, 0.6
"""Steps over which rates rise, and the share of the time over which they fall at the end."""


@dataclass(frozen=True)
class EaglePlan:
    """The distillation of one head.

    ``layers`` are those of the target whose outputs it is made from, ``steps`` how often it reads
    its own states. A batch has ``rows`` of ``length`` tokens.
    """

    layers: tuple[int, ...]
    steps: int = 3
    rows: int = 4
    length: int = 256
    muon_rate: float = 5e-3
    adam_rate: float = 1e-3


class EagleHead(nn.Module):
    """An EAGLE-3 head of one layer that begins from its target's weights.

    Args:
        target: whose embedding, head, last norm and last layer it begins from; the embedding is not
            trained.
        layers: of the target, whose outputs it is made from, the last of them first in weight.
    """

    def __init__(self, target: LlamaForCausalLM, layers: tuple[int, ...]) -> None:
        super().__init__()
        c: Any = target.config
        self.config = c
        self.target_layers, width = layers, c.hidden_size
        last: Any = target.model.layers[-1]
        self.embedding = target.model.embed_tokens.weight.detach().float()
        self.fc = nn.Linear(len(layers) * width, width, bias=False)
        self.input_layernorm = nn.RMSNorm(width, eps=c.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(width, eps=c.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=c.rms_norm_eps)
        self.norm = nn.RMSNorm(width, eps=c.rms_norm_eps)
        sizes = {"q": c.num_attention_heads, "k": c.num_key_value_heads, "v": c.num_key_value_heads}
        self.projections = nn.ModuleDict(
            {n: nn.Linear(2 * width, heads * c.head_dim, bias=False) for n, heads in sizes.items()}
        )
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, width, bias=False)
        self.gate_proj = nn.Linear(width, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(width, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, width, bias=False)
        self.lm_head = nn.Linear(width, c.vocab_size, bias=False)
        with torch.no_grad():
            self.fc.weight.mul_(0.1)
            self.fc.weight[:, -width:] += 0.1 * torch.eye(width)
            for name in sizes:
                own = getattr(last.self_attn, f"{name}_proj").weight
                projection: Any = self.projections[name]
                projection.weight.mul_(0.5)
                projection.weight[:, width:].copy_(own)
            self.o_proj.weight.copy_(last.self_attn.o_proj.weight)
            for name in ("gate_proj", "up_proj", "down_proj"):
                getattr(self, name).weight.copy_(getattr(last.mlp, name).weight)
            self.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
            self.hidden_norm.weight.copy_(last.input_layernorm.weight)
            self.norm.weight.copy_(target.model.norm.weight)
            self.lm_head.weight.copy_(target.lm_head.weight)
        angles = torch.arange(c.max_position_embeddings)[:, None] * c.rope_parameters[
            "rope_theta"
        ] ** (-torch.arange(c.head_dim // 2) / (c.head_dim // 2))
        self.cos, self.sin = angles.cos(), angles.sin()

    def _turned(self, x: Tensor, first: int) -> Tensor:
        """Turn x [rows, heads, length, head_dim] by its positions, which begin at ``first``."""
        half = self.config.head_dim // 2
        place = slice(first, first + x.shape[2])
        cos, sin = self.cos[place], self.sin[place]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(
        self, tokens: Tensor, states: Tensor, step: int, cache: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Return logits and the next step's states, [rows, length, ...] each.

        At a step, row i reads token i + step beside its own state of the step before; it sees the
        rows up to i of step 0, and row i of the later ones.

        Args:
            tokens: int64 [rows, length].
            states: fp32 [rows, length, width].
            step: 0 for the target's own states.
            cache: keys and values by step.
        """
        c = self.config
        rows, length = tokens.shape
        both = torch.cat(
            [self.input_layernorm(F.embedding(tokens, self.embedding)), self.hidden_norm(states)],
            -1,
        )
        q, k, v = (
            self.projections[n](both).view(rows, length, -1, c.head_dim).transpose(1, 2)
            for n in "qkv"
        )
        q, k = self._turned(q, step), self._turned(k, step)
        cache.append((k, v))
        keys, values = (torch.cat(each, 2) for each in zip(*cache, strict=True))
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        seen = torch.cat([causal, *[torch.eye(length, dtype=torch.bool)] * step], 1)
        out = F.scaled_dot_product_attention(q, keys, values, seen, enable_gqa=True)
        x = states + self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))
        h = self.post_attention_layernorm(x)
        x = x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))
        return self.lm_head(self.norm(x)), x

    def save(self, folder: Path, longest: int, verifier: str) -> None:
        """Save the head as ``speculators`` does."""
        folder.mkdir(parents=True, exist_ok=True)
        layer = "layers.0."
        names: dict[str, Any] = {
            "fc": self.fc, "norm": self.norm, "lm_head": self.lm_head,
            f"{layer}self_attn.o_proj": self.o_proj,
            **{f"{layer}self_attn.{n}_proj": m for n, m in self.projections.items()},
            **{f"{layer}mlp.{n}_proj": getattr(self, f"{n}_proj") for n in ("gate", "up", "down")},
            **{
                f"{layer}{n}": getattr(self, n)
                for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
            },
        }  # fmt: skip
        tensors: dict[str, Any] = {
            f"{n}.weight": m.weight.detach().bfloat16().contiguous() for n, m in names.items()
        }
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        options = self.config.to_dict() | {"num_hidden_layers": 1, "tie_word_embeddings": False}
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": self.config.vocab_size,
            "norm_before_residual": False,
            "transformer_layer_config": options,
            "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in self.target_layers],
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": longest}],
                "verifier": {"name_or_path": verifier, "architectures": ["LlamaForCausalLM"]},
            },
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def read_target(
    target: LlamaForCausalLM, tokens: Tensor, layers: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return hidden states [rows, length, layers * width] and log probabilities of a target."""
    kept: dict[int, Tensor] = {}
    hooks = [
        target.model.layers[layer].register_forward_hook(
            lambda module, inputs, output, layer=layer: kept.__setitem__(
                layer, output[0] if isinstance(output, tuple) else output
            )
        )
        for layer in layers
    ]
    logits = target(tokens).logits
    for hook in hooks:
        hook.remove()
    hidden = torch.cat([kept[layer] for layer in layers], -1).float()
    return hidden, logits.float().log_softmax(-1)


def loss_of(head: EagleHead, target: LlamaForCausalLM, tokens: Tensor, steps: int) -> Tensor:
    """Return the cross-entropy of a head to its target over a batch, step by step.

    Row i reads token i + 1 beside the state of token i, and says which token i + 2 is.
    """
    hidden, wanted = read_target(target, tokens, head.target_layers)
    count = tokens.shape[1] - 1 - steps
    states = head.fc(hidden[:, :count])
    cache: list[tuple[Tensor, Tensor]] = []
    total = torch.zeros(())
    for step in range(steps):
        read = tokens[:, 1 + step : 1 + step + count]
        logits, states = head(read, states, step, cache)
        laws = wanted[:, 1 + step : 1 + step + count].exp()
        each = -(laws * logits.log_softmax(-1)).sum(-1).mean()
        total = total + STEP_WEIGHT**step * each
    return total


def distil(
    head: EagleHead,
    target: LlamaForCausalLM,
    batches: Iterator[Tensor],
    plan: EaglePlan,
    seconds: float,
    told: Callable[[int, float], None],
) -> int:
    """Train a head in place for some seconds; return the number of steps.

    Args:
        batches: int64 [rows, length] each.
        told: is called with the step and its loss.
    """
    matrices = [p for n, p in head.named_parameters() if p.ndim == 2 and "lm_head" not in n]
    others = [p for n, p in head.named_parameters() if p.ndim != 2 or "lm_head" in n]
    muon: Any = torch.optim.Muon(
        matrices, lr=plan.muon_rate, momentum=0.95, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW(others, lr=plan.adam_rate, betas=(0.9, 0.95), weight_decay=0.0)
    rates = [(group, group["lr"]) for each in (muon, adam) for group in each.param_groups]
    narrow = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    step, first = 0, next(batches)  # what prepares them is not training
    begin = time.monotonic()
    for step, tokens in enumerate(itertools.chain([first], batches), 1):
        done = (time.monotonic() - begin) / seconds
        if done >= 1:
            return step - 1
        for group, rate in rates:
            group["lr"] = rate * min(1.0, step / WARMUP, max(0.02, (1 - done) / FALL))
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            loss = loss_of(head, target, tokens, plan.steps)
        for each in (muon, adam):
            each.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for each in (muon, adam):
            each.step()
        told(step, float(loss.detach()))
    return step
