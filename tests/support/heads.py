"""Tiny heads for tiny targets: their checkpoints, and an EAGLE-3 head in plain torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig

from tests.support.exactness import planted_pair

MASK = 7
"""The token of rows that stand for later positions."""


@dataclass(frozen=True)
class Eagle:
    """The conventions of one head; of ``layers``, whose outputs it takes, -1 is the embedding."""

    layers: tuple[int, ...] = (0, 1, 1)
    drafted: int = 120
    state_normed: bool = False
    output_normed: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    depth: int = 1
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    inner: int = 96
    theta: float = 10000.0
    eps: float = 1e-5
    parallel: bool = False
    window: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class Reference(nn.Module):
    """EAGLE-3 as its paper and SafeAILab's code define it, one sequence at a time.

    ``rows`` reads tokens t[1:] beside the states of t[:-1]; row i stands at position i.
    """

    def __init__(self, about: Eagle, width: int, vocabulary: int) -> None:
        super().__init__()
        self.about, self.width, self.vocabulary = about, width, vocabulary
        a, parts = about, len(about.layers)
        queries, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
        self.fc = nn.Linear(parts * width, width, bias=False)
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList()
        for index in range(a.depth):
            inputs = width if index else 2 * width
            layer = nn.Module()
            layer.self_attn = nn.Module()
            for name, out in (("q", queries), ("k", keys), ("v", keys)):
                setattr(layer.self_attn, f"{name}_proj", nn.Linear(inputs, out, bias=False))
            layer.self_attn.o_proj = nn.Linear(queries, width, bias=False)
            layer.mlp = nn.Module()
            layer.mlp.gate_proj = nn.Linear(width, a.inner, bias=False)
            layer.mlp.up_proj = nn.Linear(width, a.inner, bias=False)
            layer.mlp.down_proj = nn.Linear(a.inner, width, bias=False)
            names = ["input_layernorm", "post_attention_layernorm"]
            for name in names if index else [*names, "hidden_norm"]:
                setattr(layer, name, nn.RMSNorm(width, eps=a.eps))
            self.layers.append(layer)
        self.norm = nn.RMSNorm(width, eps=a.eps)
        self.lm_head = nn.Linear(width, a.drafted, bias=False)
        self.input_norm = nn.RMSNorm(parts * width, eps=a.eps) if a.norm_before_fc else None
        norms = [nn.RMSNorm(width, eps=a.eps) for _ in range(parts)]
        self.fc_norm = nn.ModuleList(norms) if a.fc_norm else None
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, parts * width)) if a.parallel else None
        kept = torch.randperm(vocabulary)[: a.drafted].sort().values
        self.register_buffer("d2t", kept - torch.arange(a.drafted))
        self.register_buffer("t2d", torch.zeros(vocabulary, dtype=torch.bool))
        self.t2d[kept] = True

    def fused(self, hidden: Tensor) -> Tensor:
        """The states of the target's hidden states, [rows, parts * width]."""
        if self.input_norm is not None:
            hidden = self.input_norm(hidden)
        if self.fc_norm is not None:
            parts = hidden.chunk(len(self.fc_norm), -1)
            hidden = torch.cat([n(p) for n, p in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(hidden)

    def rows(
        self, tokens: Tensor, states: Tensor, positions: Tensor, cache: list[Any], seen: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return logits [rows, drafted] and the states that the next rows begin with.

        ``cache`` holds keys and values by layer, ``seen`` which of them, old and new, rows see.
        """
        x, a = states, self.about
        for index, layer in enumerate(self.layers):
            if index:
                h = layer.input_layernorm(x)
            else:
                normed = layer.hidden_norm(x)
                h = torch.cat([layer.input_layernorm(self.embed_tokens(tokens)), normed], -1)
                x = normed if a.state_normed else x
            q, k, v = (
                getattr(layer.self_attn, f"{name}_proj")(h).view(len(h), -1, a.head_dim)
                for name in "qkv"
            )
            q, k = self._turned(q, positions), self._turned(k, positions)
            if len(cache) == index:
                cache.append((k, v))
            else:
                cache[index] = tuple(map(torch.cat, zip(cache[index], (k, v), strict=True)))
            keys, values = (
                each.repeat_interleave(a.heads // a.kv_heads, 1).transpose(0, 1)
                for each in cache[index]
            )
            weights = q.transpose(0, 1) @ keys.transpose(1, 2) / a.head_dim**0.5
            weights = weights.masked_fill(~seen, -torch.inf).softmax(-1)
            out = (weights @ values).transpose(0, 1).reshape(len(h), -1)
            x = x + layer.self_attn.o_proj(out)
            h = layer.post_attention_layernorm(x)
            x = x + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(h)) * layer.mlp.up_proj(h))
        normed = self.norm(x)
        return self.lm_head(normed), normed if a.output_normed else x

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        half = self.about.head_dim // 2
        rates = self.about.theta ** (-torch.arange(half) / half)
        angles = positions[:, None] * rates
        cos, sin = (f(angles).repeat(1, 2)[:, None] for f in (torch.cos, torch.sin))
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def make_head(about: Eagle, target: PretrainedConfig, seed: int = 0) -> Reference:
    """A random head whose logits are spread."""
    torch.manual_seed(seed)
    head = Reference(about, target.hidden_size, target.vocab_size)
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if "norm" in name:
                weight.copy_(torch.rand_like(weight) + 0.5)
            elif weight.dim() == 2 and "embed" not in name:
                weight.copy_(torch.randn_like(weight) * weight.shape[1] ** -0.5)
            elif name == "mask_hidden":
                weight.copy_(torch.randn_like(weight))
        head.lm_head.weight.mul_(3)
    return head.eval()


def save_head(
    head: Reference, folder: Path, layout: str = "speculators", embeds: bool = True
) -> Path:
    """Save a head as ``speculators`` does, or as SafeAILab does."""
    folder.mkdir(parents=True, exist_ok=True)
    a = head.about
    tensors = {n: t.detach().clone().contiguous() for n, t in head.state_dict().items()}
    layer: dict[str, Any] = {
        "model_type": "llama", "hidden_size": head.width, "intermediate_size": a.inner,
        "num_hidden_layers": a.depth, "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads, "head_dim": a.head_dim, "vocab_size": head.vocabulary,
        "rms_norm_eps": a.eps, "rope_theta": a.theta, "hidden_act": "silu",
        "max_position_embeddings": 64,
    }  # fmt: skip
    flags = {
        "norm_before_residual": a.state_normed, "norm_output": a.output_normed,
        "norm_before_fc": a.norm_before_fc, "fc_norm": a.fc_norm,
    }  # fmt: skip
    if not embeds:
        del tensors["embed_tokens.weight"]
    if a.window is not None:
        kinds = {"layer_types": ["sliding_attention"] * a.depth, "use_sliding_window": True}
        layer |= {"sliding_window": a.window, **kinds}
    if layout == "speculators":
        kind = "peagle" if a.parallel else "eagle3"
        config = {
            "architectures": ["Eagle3Speculator"], "speculators_model_type": kind,
            "speculators_version": "0.9.0", "draft_vocab_size": a.drafted,
            "transformer_layer_config": layer, **flags,
            "eagle_aux_hidden_state_layer_ids": [i + 1 for i in a.layers],
            "speculators_config": {
                "algorithm": kind, "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
                "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
            },
        }  # fmt: skip
        if a.parallel:
            config["mask_token_id"] = MASK
    else:
        tensors = {n.replace("layers.0.", "midlayer."): t for n, t in tensors.items()}
        config = {"architectures": ["LlamaForCausalLMEagle3"], **layer}
        config["draft_vocab_size"] = a.drafted
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [*a.layers]}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, **a.extra}))
    return folder


def make_medusa(
    folder: Path, width: int, vocabulary: int, heads: int = 3, blocks: int = 1,
    borrows: bool = False,
) -> Any:  # fmt: skip
    """Save random Medusa heads as the authors' code names them; return their tensors.

    Heads that borrow have the target's output matrix.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(heads)
    tensors = {}
    for head in range(heads):
        for block in range(blocks):
            tensors[f"{head}.{block}.linear.weight"] = torch.randn(width, width) * width**-0.5
            tensors[f"{head}.{block}.linear.bias"] = torch.randn(width) / 4
        if not borrows:
            tensors[f"{head}.{blocks}.weight"] = torch.randn(vocabulary, width) * 2 * width**-0.5
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    about = {"medusa_num_heads": heads, "medusa_num_layers": blocks, "base_model_name_or_path": "x"}
    if borrows:
        about |= {"original_lm_head": True, "vocab_size": vocabulary, "hidden_size": width}
    (folder / "config.json").write_text(json.dumps(about))
    return tensors


def taciturn_target(folder: Path, head_dim: int) -> Path:
    """Save a target whose layers say little, so that heads without training can agree with it."""
    folder = planted_pair(folder, head_dim=head_dim)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if "o_proj" in name or "down_proj" in name:
            weight.mul_(0.03)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def agreeing_head(about: Eagle, target: Path) -> Reference:
    """A head that often says what a target says whose layers add little to its embeddings.

    Each row attends to itself, by queries and keys that are the token's embedding, and says what
    the target's head makes of that. States have some say too.
    """
    weights = load_file(target / "model.safetensors")
    head = make_head(about, AutoConfig.from_pretrained(target))
    width, (layer, *_) = head.width, head.layers
    assert about.heads * about.head_dim == about.kv_heads * about.head_dim == width
    assert about.state_normed  # else a state would carry the tokens before it
    kept = head.d2t + torch.arange(about.drafted)
    with torch.no_grad():
        head.embed_tokens.weight.copy_(weights["model.embed_tokens.weight"])
        head.lm_head.weight.copy_(weights["lm_head.weight"][kept])
        head.norm.weight.copy_(weights["model.norm.weight"])
        head.fc.weight.mul_(0.05)
        layer.input_layernorm.weight.fill_(1)
        layer.hidden_norm.weight.fill_(0.05)
        layer.mlp.down_proj.weight.mul_(0.1)
        for name, size in (("q", 2.5), ("k", 1.0), ("v", 1.0)):
            projection = getattr(layer.self_attn, f"{name}_proj").weight.mul_(0.02)
            projection[:, :width] += size * torch.eye(width)
        layer.self_attn.o_proj.weight.copy_(torch.eye(width))
        if head.mask_hidden is not None:
            head.mask_hidden.mul_(0.1)
    return head


def agreeing_medusa(folder: Path, target: Path, heads: int = 3) -> Path:
    """Save Medusa heads that often know what follows, where one token follows from the last.

    Least squares from a token's normalised embedding to what the target says some tokens later.
    """
    weights = load_file(target / "model.safetensors")
    embedding, norm = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
    vocabulary, width = embedding.shape
    normed = F.rms_norm(embedding, (width,), norm, 1e-6)
    follows = (normed @ weights["lm_head.weight"].T).argmax(-1)
    tensors = make_medusa(folder, width, vocabulary, heads)
    token = follows
    for head in range(heads):
        token = follows[token]
        tensors[f"{head}.0.linear.weight"] *= 0.02
        tensors[f"{head}.0.linear.bias"] *= 0.02
        answers = F.one_hot(token, vocabulary).float()
        tensors[f"{head}.1.weight"] = (
            12 * torch.linalg.lstsq(normed, answers).solution.T.contiguous()
        )
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return folder
