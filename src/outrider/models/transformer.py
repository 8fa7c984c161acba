"""The torch forward of the Llama-like families: any mix of rows through all layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ..base.config import Recipe
from ..cache.store import Store
from ..checkpoints.architecture import Architecture, Mixture
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.families import CLAMPED
from ..checkpoints.rope import STILL
from .attention import Attention
from .base import Output
from .kv_store import KVStore
from .linear_attention import linear_attention
from .python_step import PythonStep
from .rows import Segment
from .states import Walks, alike, short_conv
from .tensors import as_array, torch_dtype
from .tiles import TILE, Rows, build_rows, padded
from .torch_weights import (
    PACKED_LINEAR,
    TorchExperts,
    TorchLayer,
    TorchMlp,
    Weights,
    load_weights,
)
from .turns import Turns


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x [padded rows, in] times weight [out, in], plus bias, fp32 in tiles of ``TILE`` rows.

    Libraries choose another kernel, with another order of summation, for another number of rows;
    a fixed tile keeps a row's result the same. Low precision goes through whole, padded as
    ``row_unit`` says: oneDNN's bf16 kernels were measured (AMX) to sum in one order for up to 32
    rows, and beyond that for most shapes; ``numerical_ties`` reports where that is not enough.
    """
    if weight.is_mkldnn:
        out: torch.Tensor = PACKED_LINEAR(x, weight, bias, "none", [], "")
        return out
    if len(weight) < TILE and bias is None:  # MKL sums 2 or 3 outputs by a row's place in the tile
        return linear(x, F.pad(weight, (0, 0, 0, TILE - len(weight)))).narrow(-1, 0, len(weight))
    if x.dtype != torch.float32 or x.shape[0] == TILE:
        return F.linear(x, weight, bias)
    return torch.cat([F.linear(tile, weight, bias) for tile in x.split(TILE)])


def row_unit(weights: Weights) -> int:
    """Return the multiple that rows are padded to: 1 if products of few rows sum alike, else TILE.

    Measured on random rows, for every shape of a product: the bits of the first n of ``TILE`` rows
    must be those of n rows. They are with oneDNN's bf16 kernels (AMX), but not with MKL's fp32.
    """
    products = {w.shape: w for layer in weights.layers for w in layer.products()}
    products[weights.head.shape] = weights.head
    dtype, device = weights.embedding.dtype, weights.embedding.device
    random = torch.Generator().manual_seed(0)
    for weight in products.values():
        x = torch.randn(TILE, weight.shape[1], generator=random).to(device, dtype)
        whole = linear(x, weight)
        for n in range(1, TILE):
            part = x[:n].contiguous()
            if not torch.equal(linear(part, weight), whole[:n]):
                return TILE
    return 1


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMSNorm of x [..., width] over its width; ``weight`` is repeated, [2 * width].

    Computed as the LayerNorm of [x, -x], whose mean is 0 and whose variance is the mean of x
    squared: torch's LayerNorm is one kernel where its RMSNorm is nine.
    """
    return mirrored_norm(torch.cat((x, -x), -1), weight, eps)


def mirrored_norm(both: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``rms_norm`` of x, given [x, -x]."""
    width = both.shape[-1]
    return torch.layer_norm(both, (width,), weight, None, eps).narrow(-1, 0, width // 2)


def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    """Return x times a number."""
    return x if by == 1 else x * by


class ResidualStream:
    """The residual stream x [rows, width], kept beside its negative as ``mirrored_norm`` wants."""

    def __init__(self, x: torch.Tensor) -> None:
        self._both = x.new_empty(x.shape[0], 2 * x.shape[1])
        self.x, self._negative = self._both.chunk(2, -1)
        self.x.copy_(x)

    def norm(self, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return the RMSNorm of the present x."""
        torch.neg(self.x, out=self._negative)
        return mirrored_norm(self._both, weight, eps)


class Transformer(PythonStep):
    """A checkpoint of a native family in torch; rotary tables reach ``max_length`` positions."""

    truncates = True
    shape: Architecture

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: np.dtype[Any],
        device: str,
        max_length: int,
        recipe: Recipe | None = None,
    ) -> None:
        config, architecture = checkpoint.config, checkpoint.architecture
        assert architecture is not None
        self.shape = architecture
        self.trees = not architecture.stateful
        self.hidden_layers, self.hidden_size = architecture.num_layers, architecture.hidden_size
        self.dtype, self.device = np.dtype(dtype), device
        self._dtype, self._device = torch_dtype(self.dtype), torch.device(device)
        self.weights = load_weights(checkpoint.tensors, self.shape, self.dtype, device, recipe)
        with torch.inference_mode():
            self._unit = TILE if self._dtype == torch.float32 else row_unit(self.weights)
        kinds = set(architecture.kinds) - {STILL}
        self._ropes = {k: Turns(config, max_length, self._dtype, self._device, k) for k in kinds}
        # Keys that are rotated by the prompt's length can serve that prompt only.
        self.paged = not any(rope.by_length for rope in self._ropes.values())
        self.paged &= not architecture.stateful
        # Imported here, since it takes a second that the native step can save.
        from transformers.activations import ACT2FN

        gate = architecture.activation
        self._activation = ACT2FN["silu" if gate == CLAMPED else gate]

    def page_bytes(self, page_size: int) -> int:
        """Return the bytes of cache that a page of this model takes."""
        s = self.shape
        return 2 * len(s.attending) * s.num_kv_heads * s.head_dim * page_size * self.dtype.itemsize

    def state_bytes(self, drafted: int) -> int:
        """See ``base.RowsModel``; states are fp32."""
        return 4 * self.shape.state_size(drafted)

    def new_store(self, num_pages: int, page_size: int) -> KVStore:
        """Return an empty cache for this model."""
        s = self.shape
        sizes = len(s.attending), s.num_kv_heads, s.head_dim, num_pages, page_size
        return KVStore(*sizes, self._dtype, self._device)

    @torch.inference_mode()
    def run(self, segments: Sequence[Segment], store: Store, hidden: Sequence[int] = ()) -> Output:
        """See ``base.Model``."""
        assert isinstance(store, KVStore)
        rows = build_rows(segments, store.page_size, store.num_slots, self._device, self._unit)
        s = self.shape
        windows = [s.windows[layer] for layer in s.attending]
        attention = Attention(rows, store, s.num_heads, s.num_kv_heads, windows, s.attention_cap)
        walks = Walks(store.states, segments) if s.stateful else None
        x, kept = self._layers(rows, store, attention, walks, hidden, False)
        # The norm is NaN or infinite when anything is, and cheap: look closer only then.
        finite = math.isfinite(float(torch.linalg.vector_norm(x, dtype=torch.float32)))
        if not finite:
            # A NaN in the cache reaches every row that reads its lane, even masked: run it clean.
            x, kept = self._layers(rows, store, attention, walks, hidden, True)
        if walks is not None:
            walks.commit()
        if store.any_harmed or not finite:
            store.mark(rows.slots[: rows.count], ~x[: rows.count].isfinite().all(-1))
        states = {layer: as_array(x.float()) for layer, x in kept.items()}
        if not rows.num_logits:
            return Output(None, states)
        if rows.logits is not None:
            x = x.index_select(0, rows.logits)
        x = rms_norm(x, self.weights.norm, s.norm_eps)
        logits = linear(x, self.weights.head)[: rows.num_logits].float()
        if s.logits_scale != 1:
            logits /= s.logits_scale
        if s.logits_cap is not None:
            logits = (logits / s.logits_cap).tanh_() * s.logits_cap
        if store.any_harmed:
            harmed = rows.seeing(store.harmed, s.reach)
            harmed = harmed if rows.logits is None else harmed.index_select(0, rows.logits)
            logits[harmed[: rows.num_logits]] = float("nan")
        return Output(as_array(logits), states)

    def _layers(
        self,
        rows: Rows,
        store: KVStore,
        attention: Attention,
        walks: Walks | None,
        hidden: Sequence[int],
        clean: bool,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Return the residual stream after all layers, and after those of ``hidden``.

        With ``clean`` no NaN is written to the cache.
        """
        s = self.shape
        turned = s.num_heads + s.num_kv_heads
        turns: dict[str | None, tuple[torch.Tensor, torch.Tensor] | None] = {STILL: None}
        for kind, rope in self._ropes.items():
            turns[kind] = rope.rows(rows.positions, rows.lengths, turned, s.num_kv_heads)
        heat = self._heat(rows.positions) if s.heat else None
        embedded = F.embedding(rows.tokens, self.weights.embedding)
        if s.embedding_scale != 1:
            # Rounded first, as transformers does.
            embedded = embedded * torch.tensor(s.embedding_scale, dtype=self._dtype)
        stream = ResidualStream(embedded)
        kept = {-1: stream.x[: rows.count].clone()} if -1 in hidden else {}
        places = {layer: place for place, layer in enumerate(s.attending)}
        for index, weights in enumerate(self.weights.layers):
            adds: list[torch.Tensor] = []  # outputs of parallel mixers, which read the same rows
            x = self._normed(stream, weights.input_norm)
            if index in places:
                own, place = weights.beside or weights, places[index]
                assert own.qkv is not None
                assert own.output is not None
                heads, gates = self._heads(x, own.qkv, weights, turns[s.kinds[index]])
                if heat is not None:
                    heads.narrow(1, 0, s.num_heads).mul_(heat)
                entries = heads.narrow(1, s.num_heads, 2 * s.num_kv_heads)
                entries = entries.nan_to_num() if clean else entries
                store.write(place, entries, rows.slots, rows.first_slot, rows.count)
                out = attention(heads.narrow(1, 0, s.num_heads), place, s.scale, weights.sinks)
                if gates is not None:
                    out = out * alike(torch.sigmoid, gates)
                out = linear(out, own.output, None if weights.beside else weights.output_bias)
                adds.append(scaled(out, s.multipliers.attention_out))
            if weights.taps is not None:
                assert walks is not None
                assert weights.output is not None
                out = self._with_states(walks, index, x, weights)
                out = linear(out, weights.output, weights.output_bias)
                adds.append(scaled(out, s.multipliers.linear_out))
            for out in adds:
                if weights.attention_norm is not None:
                    out = rms_norm(out, weights.attention_norm, s.norm_eps)
                stream.x.add_(out, alpha=s.residual_scale)
            if weights.mlp is not None or weights.mixed is not None:
                x = self._normed(stream, weights.mlp_norm)
                out = self._behind(x, weights)
                if weights.output_norm is not None:
                    out = rms_norm(out, weights.output_norm, s.norm_eps)
                stream.x.add_(scaled(out, s.multipliers.mlp_out), alpha=s.residual_scale)
            if index in hidden:
                kept[index] = stream.x[: rows.count].clone()
        return stream.x, kept

    def _normed(self, stream: ResidualStream, norm: torch.Tensor | None) -> torch.Tensor:
        return stream.x.contiguous() if norm is None else stream.norm(norm, self.shape.norm_eps)

    def _with_states(
        self, walks: Walks, index: int, x: torch.Tensor, weights: TorchLayer
    ) -> torch.Tensor:
        """Return the output of a layer with states for its normed rows, before its last product."""
        own, taps = weights.linear, weights.taps
        assert weights.qkv is not None
        assert taps is not None
        inputs = linear(x, weights.qkv, weights.qkv_bias)
        if own is None or self.shape.linear is None:
            return short_conv(walks, index, inputs, taps, weights.taps_bias)
        rates = linear(x, own.rates)
        sizes, eps = self.shape.linear, self.shape.norm_eps
        return linear_attention(
            walks, index, inputs, rates, taps, weights.taps_bias, own, sizes, eps
        )

    def _heat(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the factors of queries at ``positions`` [rows]: [rows, 1, 1]."""
        far = torch.floor(positions / self.shape.heat_step)
        return (1 + self.shape.heat * torch.log(1 + far)).to(self._dtype)[:, None, None]

    def _heads(
        self,
        x: torch.Tensor,
        qkv: torch.Tensor,
        weights: TorchLayer,
        turn: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return queries, keys and values [rows, all heads, head_dim], rotated by their positions.

        Also return the gates of attention [rows, heads * head_dim], None if the family has none.
        """
        s, gates = self.shape, None
        made = linear(x, qkv, weights.qkv_bias if weights.beside is None else None)
        if s.layout.gated:
            size = s.num_heads * s.head_dim
            queries, gates, rest = made.tensor_split((size, 2 * size), -1)
            made = torch.cat((queries, rest), -1)
        heads = made.view(-1, s.num_heads + 2 * s.num_kv_heads, s.head_dim)
        if weights.q_norm is not None and weights.k_norm is not None:
            queries, keys = heads.split((s.num_heads, s.num_kv_heads, s.num_kv_heads), 1)[:2]
            if s.layout.wide_norms:
                queries, keys = (each.view(len(x), -1) for each in (queries, keys))
            queries.copy_(rms_norm(queries, weights.q_norm, s.norm_eps))
            keys.copy_(rms_norm(keys, weights.k_norm, s.norm_eps))
        if turn is None:
            return heads, gates
        cos, sin = turn
        swapped = heads.roll(s.head_dim // 2, -1)
        return heads.mul_(cos).addcmul_(swapped, sin), gates

    def _behind(self, x: torch.Tensor, weights: TorchLayer) -> torch.Tensor:
        """Return the output of a layer's MLP or mixture for the normed rows after its mixer."""
        if weights.mixed is not None:
            return self._mixed(x, weights.mixed)
        assert weights.mlp is not None
        return self._mlp(x, weights.mlp)

    def _mlp(self, x: torch.Tensor, weights: TorchMlp) -> torch.Tensor:
        inner = linear(x, weights.gate_up, weights.gate_up_bias)
        if self.shape.layout.ungated:
            inner = self._activation(inner)
        else:
            gate, up = inner.chunk(2, -1)
            gate = scaled(gate, self.shape.multipliers.mlp_gate)
            inner = self._gated(gate, up)
        return linear(inner, weights.down, weights.down_bias)

    def _gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self.shape.activation == CLAMPED:
            gate, up = gate.clamp(max=7), up.clamp(-7, 7)
            return (up + 1) * gate * alike(torch.sigmoid, gate * 1.702)
        out: torch.Tensor = self._activation(gate).mul_(up)
        return out

    def _mixed(self, x: torch.Tensor, weights: TorchExperts) -> torch.Tensor:
        """Return the sum of each row's best experts, weighted by the router, and the shared one.

        Rows of an expert go in tiles of ``TILE``.
        """
        mixture = self.shape.mixture
        assert mixture is not None
        scores = linear(x, weights.router).float()
        scores, own = scores[:, : mixture.experts], scores[:, mixture.experts :]
        if weights.router_bias is not None:
            scores = scores + weights.router_bias
        chances = scores.softmax(-1)
        if mixture.router == "sigmoid":
            chances = alike(torch.sigmoid, scores)
        ranked = chances if mixture.router == "sigmoid" else scores
        if weights.choice_bias is not None:
            ranked = ranked + weights.choice_bias
        if mixture.groups > 1:
            ranked = _of_open_groups(ranked, mixture)
        chosen = ranked.sort(dim=-1, descending=True, stable=True)[1][:, : mixture.top]
        best = chances.gather(-1, chosen)
        if mixture.renormalised or mixture.router == "selected":
            best = best / (best.sum(-1, keepdim=True) + 1e-20)  # as transformers, for sigmoids
        best = (best * mixture.scale).to(x.dtype)
        each = x.new_zeros(len(x), mixture.top, x.shape[1])
        for expert in chosen.unique().tolist():
            rows, place = torch.where(chosen == expert)
            spare = padded(len(rows), TILE) - len(rows)
            tiled = F.pad(x.index_select(0, rows), (0, 0, 0, spare))
            each[rows, place] = self._mlp(tiled, weights.mlps[expert])[: len(rows)]
        out = torch.zeros_like(x)
        for rank in range(mixture.top):
            out += each[:, rank] * best[:, rank, None]
        if weights.shared is not None:
            shared = self._mlp(x, weights.shared)
            if mixture.shared_gated:
                shared = shared * alike(torch.sigmoid, own).to(x.dtype)
            out += shared
        return out


def _of_open_groups(ranked: torch.Tensor, mixture: Mixture) -> torch.Tensor:
    """Return ``ranked`` [rows, experts], with -inf outside the groups that each row may go to.

    They are those with the largest sums of their two best (DeepSeek-V3, arXiv 2412.19437, 2.1.2).
    """
    sums = ranked.unflatten(-1, (mixture.groups, -1)).topk(2)[0].sum(-1)
    best = sums.sort(dim=-1, descending=True, stable=True)[1][:, : mixture.top_groups]
    is_open = torch.zeros_like(sums, dtype=torch.bool).scatter_(-1, best, True)
    inside = is_open.repeat_interleave(mixture.experts // mixture.groups, -1)
    return ranked.masked_fill(~inside, float("-inf"))
