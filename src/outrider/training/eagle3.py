"""EAGLE-3 heads in PyTorch, unrolled in training as they draft (training-time test).

Li et al., "EAGLE-3: Scaling up inference acceleration of large language models via training-time
test", 2025, section 3; heads that draft in one pass: Hui et al., "P-EAGLE: parallel-drafting
EAGLE", 2026. Names of parameters are those of the ``speculators`` library.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints.heads import PARTS, Head
from ..checkpoints.rope import Rope
from .teacher import Lesson

Unrolling = Generator[Tensor, Tensor | None, None]
"""Yields the output matrix's inputs at each depth; is sent the numbers of drafts to continue."""


class Rows(NamedTuple):
    """The rows of several samples, concatenated, as a head reads them.

    Row i of a sample has its token i + 1 at position i + 1, and the target's hidden states of token
    i, ``fused`` [rows, layers * width]. ``drafts`` are the rows after which drafts begin: the
    target said the next token. ``begins`` and ``firsts`` are where each sample begins among all
    rows and among ``drafts``.
    """

    tokens: Tensor
    positions: Tensor
    fused: Tensor
    drafts: Tensor
    begins: list[int]
    firsts: list[int]

    def keep(self, which: Tensor) -> Rows:
        """Return the same rows with only some drafts, given by ascending number."""
        firsts = torch.searchsorted(which, torch.tensor(self.firsts)).tolist()
        return self._replace(drafts=self.drafts[which], firsts=firsts)


def rows_of(lessons: Sequence[Lesson]) -> Rows:
    """Return the rows of several samples from their lessons."""
    tokens, positions, fused, drafts = [], [], [], []
    begins, firsts = [0], [0]
    for lesson in lessons:
        count = len(lesson.tokens) - 1
        tokens.append(lesson.tokens[1:])
        positions.append(torch.arange(1, count + 1))
        fused.append(lesson.hidden[:, :count].transpose(0, 1).flatten(1).float())
        drafts.append(lesson.rows[lesson.rows >= 1] - 1 + begins[-1])
        begins.append(begins[-1] + count)
        firsts.append(firsts[-1] + len(drafts[-1]))
    return Rows(
        torch.cat(tokens), torch.cat(positions), torch.cat(fused), torch.cat(drafts), begins, firsts
    )


class Norm(nn.Module):
    """RMSNorm, fp32 inside."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` [..., width] normalised."""
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Attention over real and drafted rows; its inputs are [embedding, state]."""

    def __init__(self, head: Head, inputs: int) -> None:
        super().__init__()
        a = head.architecture
        assert a is not None
        self.heads, self.kv_heads, self.size, self.scale = (
            a.num_heads, a.num_kv_heads, a.head_dim, a.scale,
        )  # fmt: skip
        self.q_proj = nn.Linear(inputs, a.num_heads * a.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, a.num_kv_heads * a.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, a.num_kv_heads * a.head_dim, bias=False)
        self.o_proj = nn.Linear(a.num_heads * a.head_dim, a.hidden_size, bias=False)

    def keys(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, [kv heads, rows, size] each."""
        shape = len(x), self.kv_heads, self.size
        k = turned(self.k_proj(x).view(shape).transpose(0, 1), cos, sin)
        return k, self.v_proj(x).view(shape).transpose(0, 1)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return queries, [kv heads, queries of each, rows, size]."""
        q = self.q_proj(x).view(len(x), self.heads, self.size).transpose(0, 1)
        grouped = turned(q, cos, sin)
        return grouped.view(self.kv_heads, -1, len(x), self.size)

    def attend(self, q: Tensor, rows: Rows, real: tuple[Tensor, Tensor],
               drafted: Sequence[tuple[Tensor, Tensor]]) -> Tensor:  # fmt: skip
        """Return the output of attention for each draft, [drafts, width].

        A draft sees the real rows of its sample up to the one where it begins, and its own drafted
        rows so far.
        """
        seen: list[Tensor] = []
        spans = zip(rows.begins, rows.begins[1:], rows.firsts, rows.firsts[1:], strict=False)
        for begin, end, first, stop in spans:
            if first == stop:
                continue
            k, v = (each[:, None, begin:end] for each in real)
            own = q[:, :, first:stop]
            scores = own @ k.transpose(-1, -2)
            hidden = torch.arange(end - begin) > (rows.drafts[first:stop, None] - begin)
            scores = scores.masked_fill(hidden, -torch.inf)
            tails = [(own * k[:, None, first:stop]).sum(-1, keepdim=True) for k, _ in drafted]
            weights = (torch.cat([scores, *tails], -1) * self.scale).float().softmax(-1).to(q.dtype)
            out = weights[..., : end - begin] @ v
            for i, (_, v) in enumerate(drafted, end - begin):
                out = out + weights[..., i : i + 1] * v[:, None, first:stop]
            seen.append(out)
        joined = torch.cat(seen, 2).flatten(0, 1).transpose(0, 1)
        mixed: Tensor = self.o_proj(joined.flatten(1))
        return mixed


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``x`` [..., rows, size] rotated by the rotary tables of its rows."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Mlp(nn.Module):
    """A gated MLP."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP of ``x`` [rows, width]."""
        mixed: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return mixed


class Layer(nn.Module):
    """The head's decoder layer, which reads embedding and state side by side."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        a = head.architecture
        assert a is not None
        self.hidden_norm = Norm(a.hidden_size, a.norm_eps)
        self.input_layernorm = Norm(a.hidden_size, a.norm_eps)
        self.self_attn = Attention(head, 2 * a.hidden_size)
        self.post_attention_layernorm = Norm(a.hidden_size, a.norm_eps)
        self.mlp = Mlp(a.hidden_size, a.intermediate_size)


class Eagle3(nn.Module):
    """An EAGLE-3 head of one layer, as its config says; ``embedding`` is the target's.

    The embedding and the output rows are frozen. A new head has the target's output rows, with
    which it overfits less. ``context`` is the longest sample. In a P-EAGLE head, rows of later
    depths have a mask in place of the token, and of the states that an EAGLE-3 head feeds back.
    """

    cos: Tensor
    sin: Tensor
    embedding: Tensor

    def __init__(self, head: Head, embedding: Tensor, context: int) -> None:
        super().__init__()
        a = head.architecture
        assert a is not None
        assert head.config is not None
        self.head = head
        parts = len(head.layers or ()) or PARTS
        wide = parts * head.hidden_size
        together = head.fused_norms == ("input_norm.weight",)
        self.input_norm = Norm(wide, a.norm_eps) if together else None
        self.fc_norm = (
            nn.ModuleList(Norm(head.hidden_size, a.norm_eps) for _ in range(parts))
            if head.fused_norms and not together
            else None
        )
        self.fc = nn.Linear(wide, a.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(head)])
        self.norm = Norm(a.hidden_size, a.norm_eps)
        self.lm_head = nn.Linear(a.hidden_size, a.vocab_size, bias=False).requires_grad_(False)
        masked = head.mask_token is not None
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, wide)) if masked else None
        tables = Rope(head.config, context + 16).halves()
        for name, table in zip(("cos", "sin"), tables, strict=True):
            self.register_buffer(name, torch.from_numpy(np.ascontiguousarray(table)), False)
        self.register_buffer("embedding", embedding, False)

    def states(self, fused: Tensor) -> Tensor:
        """Return the head's states, [rows, width], of the target's, [rows, layers * width]."""
        if self.input_norm is not None:
            fused = self.input_norm(fused)
        if self.fc_norm is not None:
            parts = fused.chunk(len(self.fc_norm), -1)
            fused = torch.cat([n(x) for n, x in zip(self.fc_norm, parts, strict=True)], -1)
        state: Tensor = self.fc(fused)
        return state

    def unroll(self, rows: Rows, depth: int) -> Unrolling:
        """Yield the output matrix's inputs at each depth of the drafts, [drafts, width].

        Drafts are assumed right so far: rows have the sample's own tokens. Gradients with respect
        to the yielded tensors can be computed after the last depth.
        """
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        attention, last = layer.self_attn, len(rows.tokens) - 1
        states = self.states(rows.fused)
        x, residual = self._inputs(layer, rows.tokens, states)
        real = attention.keys(x, self.cos[rows.positions], self.sin[rows.positions])
        x, residual = x[rows.drafts], residual[rows.drafts]
        drafted: list[tuple[Tensor, Tensor]] = []
        for step in range(depth):
            positions = rows.positions[rows.drafts] + step
            cos, sin = self.cos[positions], self.sin[positions]
            if step:
                tokens = rows.tokens[(rows.drafts + step).clamp(max=last)]
                if self.mask_hidden is not None:
                    tokens = torch.full_like(tokens, self.head.mask_token or 0)
                    states = self.states(self.mask_hidden[0]).expand(len(tokens), -1)
                x, residual = self._inputs(layer, tokens, states)
                drafted.append(attention.keys(x, cos, sin))
            seen = attention.attend(attention.queries(x, cos, sin), rows, real, drafted)
            states = residual + seen
            states = states + layer.mlp(layer.post_attention_layernorm(states))
            normed = self.norm(states)
            if self.head.output_normed:
                states = normed
            which = yield normed
            if which is not None:
                rows, states, residual = rows.keep(which), states[which], residual[which]
                drafted = [(k[:, which], v[:, which]) for k, v in drafted]

    def logits(self, depth: int, x: Tensor) -> Tensor:
        """Return the logits of drafted ids, [rows, ids]; all depths have one output matrix."""
        drafted: Tensor = self.lm_head(x)
        return drafted

    def _inputs(self, layer: Layer, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs of attention for tokens and states, and the residual stream."""
        embedded = layer.input_layernorm(self.embedding[tokens].to(states.dtype))
        normed = layer.hidden_norm(states)
        return torch.cat([embedded, normed], -1), normed if self.head.state_normed else states
