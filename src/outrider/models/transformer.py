"""The native forward of the Llama-like families: any mix of rows through any of the layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from ..cache.store import KVStore, page_bytes
from .attention import Attention
from .families import Rope, Shape, read_config, read_shape
from .rows import TILE, Rows
from .weights import PACKED_LINEAR, LayerWeights, load_weights


@dataclass(frozen=True)
class Output:
    """``logits`` fp32 [wanted rows, vocabulary]; ``hidden`` by layer, [rows, hidden_size]."""

    logits: torch.Tensor | None
    hidden: dict[int, torch.Tensor]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [padded rows, in] times weight [out, in], plus bias, in tiles of ``TILE`` rows in fp32.

    Libraries choose another kernel, with another order of summation, for another number of rows.
    A fixed tile keeps a row's result the same whatever comes along. oneDNN's bf16 kernels were
    measured (AMX) to sum in one order for up to 32 rows, and beyond that for most shapes, so low
    precision goes through whole; ``numerical_ties`` reports where that is not enough.
    """
    if weight.is_mkldnn:
        out: torch.Tensor = PACKED_LINEAR(x, weight, bias, "none", [], "")
        return out
    if x.dtype != torch.float32 or x.shape[0] == TILE:
        return F.linear(x, weight, bias)
    return torch.cat([F.linear(tile, weight, bias) for tile in x.split(TILE)])


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension of x [..., width]; ``weight`` stands twice, [2 * width].

    As the LayerNorm of [x, -x], whose mean is 0 and whose variance is the mean of x squared:
    torch's LayerNorm is one kernel where its RMSNorm is nine.
    """
    width = x.shape[-1]
    both = torch.cat((x, -x), -1)
    return torch.layer_norm(both, (2 * width,), weight, None, eps).narrow(-1, 0, width)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_dtype(name: str, checkpoint: torch.dtype) -> torch.dtype:
    """The arithmetic for a ``dtype`` option, given the checkpoint's.

    "auto" takes the checkpoint's, except bfloat16 and float16 on a CPU without instructions for
    them, where they would be several times slower than float32.
    """
    if name != "auto":
        return DTYPES[name]
    if checkpoint == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.float32
    if checkpoint == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return torch.float32
    return checkpoint


class Transformer:
    """A checkpoint of a native family, ready to run.

    Args:
        folder: a Hugging Face checkpoint.
        dtype: of weights, cache and arithmetic, see ``choose_dtype``.
        device: where it lives.
        max_length: rotary tables reach this far.

    Raises:
        ModelError: the checkpoint is missing, damaged or of a family without a native path.
    """

    def __init__(self, folder: Path, dtype: str, device: torch.device, max_length: int) -> None:
        config = read_config(folder)
        self.shape: Shape = read_shape(config, folder)
        self.dtype = choose_dtype(dtype, self.shape.dtype)
        self.device = device
        self.weights = load_weights(folder, self.shape, self.dtype, device)
        self._rope = Rope(config, max_length, self.dtype, device)
        self._scale = self.shape.head_dim**-0.5

    def page_bytes(self, page_size: int) -> int:
        """Bytes of cache that a page of this model takes."""
        s = self.shape
        return page_bytes(s.num_layers, s.num_kv_heads, s.head_dim, page_size, self.dtype.itemsize)

    def new_store(self, num_pages: int, page_size: int) -> KVStore:
        """An empty cache for this model."""
        s = self.shape
        return KVStore(
            s.num_layers, s.num_kv_heads, s.head_dim, num_pages, page_size, self.dtype, self.device
        )

    @torch.inference_mode()
    def forward(
        self,
        rows: Rows,
        store: KVStore,
        layers: Sequence[int] | None = None,
        hidden: Sequence[int] = (),
    ) -> Output:
        """Run ``rows`` and write their keys and values to ``store``.

        Args:
            rows: what to run, see ``build_rows``.
            store: this model's cache.
            layers: which layers to run, in order; None runs all.
            hidden: layers whose output (the residual stream after them) is wanted; -1 is the
                embedding.

        Returns:
            Logits of the rows that want them (None when none does) and the hidden states. A row
            that is not finite, or attends to one, has NaN logits; no other row is touched by it.
        """
        s = self.shape
        attention = Attention(rows, store, s.num_heads, s.num_kv_heads)
        turned = s.num_heads + s.num_kv_heads
        cos, sin = self._rope.rows(rows.positions, rows.lengths, turned, s.num_kv_heads)
        x = F.embedding(rows.tokens, self.weights.embedding)
        kept = {-1: x[: rows.count]} if -1 in hidden else {}
        for index in range(s.num_layers) if layers is None else layers:
            weights = self.weights.layers[index]
            x = x + self._attend(x, weights, index, store, rows, attention, cos, sin)
            x = x + self._mlp(x, weights)
            if index in hidden:
                kept[index] = x[: rows.count]
        # The norm is NaN or infinite when anything is, and cheap: look closer only then.
        size = float(torch.linalg.vector_norm(x, dtype=torch.float32))
        if store.any_harmed or not math.isfinite(size):
            store.mark(rows.slots[: rows.count], ~x[: rows.count].isfinite().all(-1))
        if not rows.num_logits:
            return Output(None, kept)
        if rows.logits is not None:
            x = x.index_select(0, rows.logits)
        x = self._norm(x, self.weights.norm)
        logits = linear(x, self.weights.head)[: rows.num_logits].float()
        if store.any_harmed:
            harmed = rows.seeing(store.harmed)
            harmed = harmed if rows.logits is None else harmed.index_select(0, rows.logits)
            logits[harmed[: rows.num_logits]] = float("nan")
        return Output(logits, kept)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, self.shape.norm_eps)

    def _attend(
        self,
        x: torch.Tensor,
        weights: LayerWeights,
        index: int,
        store: KVStore,
        rows: Rows,
        attention: Attention,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        s = self.shape
        qkv = linear(self._norm(x, weights.input_norm), weights.qkv, weights.qkv_bias)
        heads = qkv.view(-1, s.num_heads + 2 * s.num_kv_heads, s.head_dim)
        if weights.q_norm is not None and weights.k_norm is not None:
            queries, keys = heads.split((s.num_heads, s.num_kv_heads, s.num_kv_heads), 1)[:2]
            queries.copy_(self._norm(queries, weights.q_norm))
            keys.copy_(self._norm(keys, weights.k_norm))
        swapped = heads.roll(s.head_dim // 2, -1)
        heads.mul_(cos).addcmul_(swapped, sin)
        # A NaN would reach whoever reads these lanes, masked or not: see ``KVStore.mark``.
        entries = heads[:, s.num_heads :].nan_to_num()
        store.layers[index].index_copy_(1, rows.slots, entries.transpose(0, 1))
        out = attention(heads[:, : s.num_heads], index, self._scale)
        return linear(out, weights.output, weights.output_bias)

    def _mlp(self, x: torch.Tensor, weights: LayerWeights) -> torch.Tensor:
        inner = linear(self._norm(x, weights.post_norm), weights.gate_up, weights.gate_up_bias)
        gate, up = inner.chunk(2, -1)
        return linear(F.silu(gate).mul_(up), weights.down, weights.down_bias)
