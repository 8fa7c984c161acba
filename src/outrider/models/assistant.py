"""Gemma 4's assistant in torch: drafts from the target's keys and values, without a cache.

A draft's first row takes the last token's embedding and the target's state before it, later rows
the last drafted token's and the assistant's own state. All rows have the last token's position.
Names and rules are those of transformers' ``SinglePositionMultiTokenCandidateGenerator``, except
that a row sees exactly the committed entries: transformers lets it see one that may be stale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ..checkpoints.assistant import (
    CENTROIDS,
    EMBEDDING,
    HEAD,
    ORDER,
    check_assistant,
    heads_of,
    read_layers,
    shapes_of,
)
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.formats.shared import Tensors
from ..sampling.shared_noise import Noise
from .base import Output, Store
from .decide import DraftInput, DraftNodes
from .fallback import Fallback, KeptSequence, SequenceStore
from .python_step import PythonStep
from .rows import Segment
from .tensors import as_array, as_tensor

Entries = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, each [1, heads, rows, size of a head]."""
SLIDING = "sliding_attention"


@dataclass
class Context:
    """The inputs of a draft's rows: ``entries`` by kind of layer, and the ``state`` [1, width]."""

    position: int
    entries: dict[str, Entries]
    state: torch.Tensor


class Assistant(PythonStep):
    """An assistant beside its ``target``, which it makes keep the states of its last rows.

    Drafts are chains, each sequence's by itself. ``new_store`` returns nothing that is read:
    segments go with the target's store.
    """

    trees = False
    paged = False
    truncates = True

    def __init__(self, checkpoint: Checkpoint, target: Fallback) -> None:
        check_assistant(checkpoint, target.config)
        config, tensors = checkpoint.config, checkpoint.tensors
        assert isinstance(tensors, Tensors)
        self.target = target
        self.shape, self.dtype, self.device = checkpoint.shape, target.dtype, target.device
        self._text: Any = config.get_text_config()
        self._weights = {
            name: as_tensor(tensors.get(name, shape, self.dtype)).to(self.device)
            for name, shape in shapes_of(checkpoint).items()
            if name != ORDER
        }
        self._head = self._weights[HEAD if HEAD in self._weights else EMBEDDING]
        self._groups: torch.Tensor | None = None
        """The ids of each group [groups, ids]; None if all ids are scored."""
        if config.use_ordered_embeddings:
            ids = tensors.raw(ORDER, (self.shape.vocab_size,)).astype(np.int64)
            if not np.array_equal(np.sort(ids), np.arange(len(ids))):
                raise tensors.wrong(ORDER, "does not hold each id once")
            self._groups = as_tensor(ids).to(self.device).view(config.num_centroids, -1)
            self._top: int = config.centroid_intermediate_top_k
        # Imported here, since only these models need it.
        from transformers.activations import ACT2FN

        self._activation = ACT2FN[self._text.hidden_activation]
        self._decoder = target.decoder
        self._read = read_layers(target.config.get_text_config())
        self._contexts: dict[str, Context] = {}
        target.keeps_states = True

    def page_bytes(self, page_size: int) -> int:
        """Return 0: there is no cache."""
        return 0

    def added_bytes(self, beside: object) -> int:
        """Return the bytes of all weights: none are the target's."""
        return sum(weight.nbytes for weight in self._weights.values())

    def new_store(self, num_pages: int, page_size: int) -> SequenceStore:
        return SequenceStore(page_size)

    def try_rows(self, count: int, store: Store) -> None:
        """See ``RowsModel``; the rows see one entry each."""
        kinds = {kind: heads_of(self._text, i) for i, kind in enumerate(self._text.layer_types)}
        none = {kind: self._zeros(1, heads.number, 1, heads.size) for kind, heads in kinds.items()}
        width = self._weights["post_projection.weight"].shape[0]
        entries = {kind: (zeros, zeros) for kind, zeros in none.items()}
        self._contexts[""] = Context(1, entries, self._zeros(1, width))
        self.run([Segment([1], 1, (), 1, 1)] * count, store)
        del self._contexts[""]

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self._head.dtype, device=self.device)

    def can_draft(self, store: Store, key: str, length: int) -> bool:
        """Return whether the target has read all but the last of a sequence's tokens."""
        assert isinstance(store, SequenceStore)
        kept = store.kept.get(key)
        return kept is not None and kept.state(length - 2) is not None

    def draft(
        self,
        segments: Sequence[Segment],
        store: Store,
        inputs: Sequence[DraftInput | None],
        noise: Noise,
        needs_logits: bool = False,
    ) -> list[DraftNodes]:
        """See ``RowsModel``; a segment is the last token of a sequence in the target's store."""
        assert isinstance(store, SequenceStore)
        self._contexts = {s.key: self._context(store.kept[s.key], s.start) for s in segments}
        return super().draft(segments, store, inputs, noise, needs_logits)

    def _context(self, kept: KeptSequence, position: int) -> Context:
        """Return what a draft after the token at ``position`` reads; that has no entry yet."""
        state, entries = kept.state(position - 1), {}
        assert state is not None
        for kind, layer in self._read.items():
            # |distance| <= window, where the target's own rows see distances below it.
            window = self._text.sliding_window if kind == SLIDING else position
            rows = slice(max(0, position - window), position)
            own = kept.cache.layers[layer]
            entries[kind] = own.keys[:, :, rows], own.values[:, :, rows]
        return Context(position, entries, state)

    @torch.inference_mode()
    def run(self, segments: Sequence[Segment], store: Store, hidden: Sequence[int] = ()) -> Output:
        """Return the logits after each segment's last token, whose draft's context advances."""
        logits = [
            self._row(segment.tokens[-1], self._contexts[segment.key]) for segment in segments
        ]
        return Output(as_array(torch.cat(logits)))

    def _row(self, token: int, context: Context) -> torch.Tensor:
        """Return the logits after a token, fp32 [1, vocabulary]; keep the state that it leaves."""
        weights = self._weights
        embedding = self._decoder.embed_tokens(torch.tensor([token], device=self.device))
        x = torch.cat((embedding, context.state), -1)
        h = F.linear(x, weights["pre_projection.weight"])
        position = torch.tensor([[context.position]], device=self.device)
        turns = {kind: self._turn(position, kind) for kind in context.entries}
        for layer, kind in enumerate(self._text.layer_types):
            name = f"model.layers.{layer}."
            x = self._norm(h, f"{name}input_layernorm")
            mixed = self._attention(x, f"{name}self_attn.", context.entries[kind], turns[kind])
            h = h + self._norm(mixed, f"{name}post_attention_layernorm")
            inner = self._mlp(self._norm(h, f"{name}pre_feedforward_layernorm"), f"{name}mlp.")
            h = h + self._norm(inner, f"{name}post_feedforward_layernorm")
            h = h * weights[f"{name}layer_scalar"]
        h = self._norm(h, "model.norm")
        context.state = F.linear(h, weights["post_projection.weight"])
        return self._logits(h).float()

    def _turn(self, position: torch.Tensor, kind: str) -> Entries:
        """Return cosines and sines [1, size], as the target's keys are turned by."""
        cos, sin = self._decoder.rotary_emb(self._head, position, kind)
        return cos[0], sin[0]

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        wide, weight = x.float(), self._weights[f"{name}.weight"].float()
        mean = wide.pow(2).mean(-1, keepdim=True) + self._text.rms_norm_eps
        normed: torch.Tensor = (wide * mean.pow(-0.5) * weight).to(x.dtype)
        return normed

    def _mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate, up, down = (self._weights[f"{name}{p}_proj.weight"] for p in ("gate", "up", "down"))
        inner: torch.Tensor = self._activation(F.linear(x, gate)) * F.linear(x, up)
        return F.linear(inner, down)

    def _attention(
        self, x: torch.Tensor, name: str, entries: Entries, turn: Entries
    ) -> torch.Tensor:
        """Return a layer's attention, before the residual stream; products are not scaled."""
        (keys, values), (cos, sin) = entries, turn
        heads, size = keys.shape[1], keys.shape[3]
        queries = F.linear(x, self._weights[f"{name}q_proj.weight"]).view(-1, size)
        queries = self._norm(queries, f"{name}q_norm")
        first, second = queries.chunk(2, -1)
        queries = queries * cos + torch.cat((-second, first), -1) * sin
        # Neighbouring heads share keys: they stand for rows of one head.
        grouped = queries.view(1, heads, -1, size)
        mixed = F.scaled_dot_product_attention(grouped, keys, values, scale=1.0)
        return F.linear(mixed.reshape(1, -1), self._weights[f"{name}o_proj.weight"])

    def _logits(self, h: torch.Tensor) -> torch.Tensor:
        """Return the logits of a last state; -inf for ids of groups that are not scored."""
        if self._groups is None:
            return F.linear(h, self._head)
        scores = F.linear(h, self._weights[CENTROIDS])[0]
        ids = self._groups[scores.topk(self._top).indices].flatten()
        logits = torch.full((1, len(self._head)), -torch.inf, dtype=h.dtype, device=h.device)
        logits[:, ids] = F.linear(h, self._head[ids])
        return logits
