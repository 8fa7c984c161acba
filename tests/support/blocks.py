"""Heads that draft a block in one pass, as the ``speculators`` library defines them, in torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
    repeat_kv,
)

from outrider.checkpoints.head_tensors import CODEBOOKS, SELECTOR
from outrider.checkpoints.heads import DFLASH, DFLASH2, MOST_CANDIDATES
from tests.support.head_checks import Change, saved

MASK = 207
"""The id of masks."""


class Conv(nn.Module):
    """DFlash2's kernels of a sublayer: of what enters it, and of what leaves it."""

    def __init__(self, width: int, taps: int, group: int) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.empty(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * width // group, bias=False)
        self.taps, self.group = taps, group

    def kernels(self, x: Tensor) -> Tensor:
        """Kernels [rows, 2, taps, width]."""
        more = self.kernel_projection(x).view(len(x), 2, self.taps, -1)
        return self.base_kernel + more.repeat_interleave(self.group, -1)

    def blend(self, x: Tensor, kernels: Tensor) -> Tensor:
        """Each row's sum of itself and those before it in the block."""
        total = torch.zeros_like(x)
        for tap in range(self.taps):
            before = torch.cat([torch.zeros_like(x[:tap]), x[: len(x) - tap]])
            total = total + before * kernels[:, tap]
        return total


class Layer(nn.Module):
    """A layer of Qwen3 whose attention sees keys and values made of states."""

    def __init__(self, config: Qwen3Config, index: int, taps: int, group: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.self_attn, self.mlp = Qwen3Attention(config, index), Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(width, config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(width, config.rms_norm_eps)
        if taps:
            self.attention_conv, self.mlp_conv = Conv(width, taps, group), Conv(width, taps, group)
        self.taps = taps

    def attend(self, x: Tensor, states: Tensor, turns: Any, seen: Tensor) -> Tensor:
        """Attention of a block's rows over states and themselves, as ``seen`` says."""
        own, both = self.self_attn, torch.cat([states, x])
        split = (1, -1, own.head_dim)
        q = own.q_norm(own.q_proj(x).view(len(x), *split[1:])).transpose(0, 1)[None]
        k = own.k_norm(own.k_proj(both).view(len(both), *split[1:])).transpose(0, 1)[None]
        v = own.v_proj(both).view(len(both), *split[1:]).transpose(0, 1)[None]
        padded = torch.cat([torch.zeros_like(q[:, :, :1]).expand(-1, -1, len(states), -1), q], 2)
        q, k = apply_rotary_pos_emb(padded, k, *turns)
        k, v = (repeat_kv(each, own.num_key_value_groups) for each in (k, v))
        scores = q[:, :, len(states) :] @ k.transpose(2, 3) * own.scaling
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return own.o_proj((weights @ v)[0].transpose(0, 1).flatten(1))

    def forward(self, x: Tensor, states: Tensor, turns: Any, seen: Tensor) -> Tensor:
        """The rows behind the layer."""
        for norm, part, run in (
            (self.input_layernorm, "attention_conv", lambda y: self.attend(y, states, turns, seen)),
            (self.post_attention_layernorm, "mlp_conv", self.mlp),
        ):
            y = norm(x)
            if self.taps:
                conv = getattr(self, part)
                kernels = conv.kernels(y)
                y = conv.blend(run(conv.blend(y, kernels[:, 0])), kernels[:, 1])
            else:
                y = run(y)
            x = x + y
        return x


class BlockReference(nn.Module):
    """A head as the ``speculators`` library defines it, for one block."""

    def __init__(
        self, target: Path, kind: str, ids: int | None = None, window: int = 0,
        causal: bool | None = None, reads: tuple[int, ...] = (-1, 0), rank: int = 6,
        biased: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.reads, self.top_k, self.everywhere = reads, 5, False
        self.as_target = False
        self.target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        of, self.kind, self.window = self.target.config, kind, window
        width, self.rank = of.hidden_size, rank
        self.causal = window > 0 and (kind != DFLASH2 if causal is None else causal)
        kinds = ["sliding_attention" if window else "full_attention", "full_attention"]
        self.config = Qwen3Config(
            hidden_size=width, vocab_size=of.vocab_size, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=24, intermediate_size=96,
            max_position_embeddings=256, rms_norm_eps=1e-5, rope_theta=5000.0,
            attn_implementation="eager", attention_bias=biased, layer_types=kinds,
            sliding_window=window or None, use_sliding_window=window > 0,
        )  # fmt: skip
        taps = 3 if kind == DFLASH2 else 0
        self.layers = nn.ModuleList([Layer(self.config, i, taps, 4) for i in range(2)])
        self.fc = nn.Linear(len(reads) * width, width, bias=False)
        self.hidden_norm, self.norm = Qwen3RMSNorm(width, 1e-5), Qwen3RMSNorm(width, 1e-5)
        chosen = np.random.default_rng(3).permutation(of.vocab_size)[:ids]
        self.ids = None if ids is None else np.sort(chosen)
        size = of.vocab_size if ids is None else ids
        self.lm_head = None if ids is None else nn.Linear(width, size, bias=False)
        self.before = nn.Parameter(torch.empty(of.vocab_size, rank)) if kind != DFLASH else None
        self.behind = nn.Parameter(torch.empty(size, rank)) if kind != DFLASH else None
        self.projection = nn.Linear(width, rank, bias=False) if kind == DFLASH2 else None
        torch.manual_seed(5)
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if not name.startswith("target."):
                    scale = 1.0 if "norm" in name or weight.dim() == 1 else weight.shape[-1] ** -0.5
                    weight.copy_(torch.randn_like(weight) * scale)

    def save(self, folder: Path, change: Change | None = None, layout: str = "speculators") -> Path:
        """Save the head, as the library does, or as the authors of DFlash do."""
        before, behind = CODEBOOKS.get(self.kind, ("", ""))
        projection = f"{SELECTOR}hidden_projection.weight"
        renamed = {"before": before, "behind": behind, "projection.weight": projection}
        own = {n: t for n, t in self.state_dict().items() if not n.startswith("target.")}
        tensors = {renamed.get(n, n): t.clone() for n, t in own.items()}
        if self.ids is not None:
            tensors["d2t"] = torch.from_numpy(self.ids - np.arange(len(self.ids)))
        layer = self.config.to_dict()
        if layout == "zlab":
            config = {
                **layer, "architectures": ["DFlashDraftModel"], "block_size": 8,
                "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [*self.reads]},
            }  # fmt: skip
        else:
            config = {
                "speculators_model_type": self.kind, "transformer_layer_config": layer,
                "draft_vocab_size": len(self.ids) if self.ids is not None else layer["vocab_size"],
                "block_size": 8, "mask_token_id": MASK, "markov_rank": self.rank,
                "selector_rank": self.rank,
                "selector_top_k": self.top_k, "conv_kernel_size": 3, "conv_group_size": 4,
                "aux_hidden_state_layer_ids": [n + 1 for n in self.reads],
                "sliding_window_non_causal": not self.causal,
                "speculators_config": {
                    "algorithm": self.kind, "default_proposal_method": "greedy",
                    "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
                    "verifier": {"name_or_path": "tiny", "architectures": []},
                },
            }  # fmt: skip
        return saved(folder, config, tensors, change)

    @torch.no_grad()
    def states(self, ids: list[int]) -> Tensor:
        """What layers make keys and values of, for each token."""
        layers = self.target(torch.tensor([ids]), output_hidden_states=True).hidden_states
        return self.hidden_norm(self.fc(torch.cat([layers[n + 1][0] for n in self.reads], -1)))

    @torch.no_grad()
    def scores(self, logits: Any, before: int, state: Any) -> Any:
        """The scores of all ids behind a token, of a row's logits and state."""
        context = self.before[before]
        if self.projection is not None:
            context = context * self.projection(torch.from_numpy(state))
        scores = torch.full((len(self.before),), -torch.inf)
        own = slice(None) if self.ids is None else torch.from_numpy(self.ids)
        scores[own] = torch.from_numpy(logits)[own] + self.behind @ context
        return scores.numpy()

    @torch.no_grad()
    def forward(self, ids: list[int], states: Tensor, masks: int) -> tuple[Tensor, Tensor]:
        """Logits and states of a block behind ``ids``, whose last one is its first token."""
        rows = torch.tensor([[ids[-1], *[MASK] * masks]])
        table, count = self.target.get_input_embeddings(), len(ids) - 1
        x = table(rows)[0] if self.as_target else F.embedding(rows[0], table.weight)
        places = torch.arange(count + 1 + masks)[None]
        turns = Qwen3RotaryEmbedding(self.config)(x, places)
        own = torch.ones(1 + masks, 1 + masks, dtype=torch.bool)
        for index, layer in enumerate(self.layers):
            narrow = self.window > 0 and index == 0
            base = torch.ones(1 + masks, count, dtype=torch.bool)
            if narrow:
                base[:, : max(0, count - self.window)] = False
            seen = torch.cat(
                [base, own.tril() if (narrow and self.causal) or self.everywhere else own], 1
            )
            x = layer(x, states, turns, seen)
        x = self.norm(x)
        head = self.target.lm_head if self.lm_head is None else self.lm_head
        return head(x), x


def agreeing_block(folder: Path, target: Path, kind: str) -> Path:
    """Save a head that often says what a target says whose layers add little to its embeddings.

    Its layers say little too, and its scores of a token behind another are the target's logits
    behind that other's embedding.
    """
    head = BlockReference(target, kind, rank=AutoConfig.from_pretrained(target).hidden_size)
    head.top_k, of = MOST_CANDIDATES, head.target.model
    with torch.no_grad():
        for layer in head.layers:
            layer.self_attn.o_proj.weight.mul_(0.02)
            layer.mlp.down_proj.weight.mul_(0.02)
            if kind == DFLASH2:
                for conv in (layer.attention_conv, layer.mlp_conv):
                    conv.base_kernel.mul_(0.1)
        head.norm.weight.fill_(0.05)
        embedding = of.embed_tokens.weight
        head.before.copy_(F.rms_norm(embedding, embedding.shape[1:], of.norm.weight, 1e-6))
        head.behind.copy_(head.target.lm_head.weight)
        if head.projection is not None:
            mask = F.rms_norm(embedding[MASK], embedding.shape[1:], head.norm.weight, 1e-5)
            head.projection.weight.copy_((mask / mask.square().sum()).expand(head.rank, -1))
    return head.save(folder)
