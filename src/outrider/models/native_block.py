"""Heads that draft a block in one pass, run by the native step: DFlash, DFlash2 and DSpark.

Chen et al., "DFlash: Block diffusion for flash speculative decoding", 2026. The rows of a block are
the last token and masks. They see each other, and the keys and values that each layer computes from
the target's states. DFlash2 (as in the ``speculators`` library) mixes the rows of a block before
and after each sublayer; it and DSpark ("DSpark", arXiv 2607.05147, 2026) add to a token's logit a
score that depends on the token before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..checkpoints.dtypes import FLOAT32, Array
from ..checkpoints.head_tensors import CODEBOOKS, CONVOLVED, SELECTOR, HeadTensors, drafted_ids
from ..checkpoints.heads import DFLASH2, Head
from ..checkpoints.weights import Loader
from ..native.interface import BLOCK
from ..sampling.shared_noise import Noise
from .base import Output, RowsModel, Store
from .decide import DraftInput
from .native import NativeTransformer
from .native_heads import HeadModel, check_fits, head_recipe, saying_as
from .native_model import step_config
from .rows import Segment

Floats = NDArray[np.float32]


class NativeBlock(HeadModel):
    """A head of ``BLOCKS`` beside its target; ``quantization`` is that of ``NativeHead``.

    A segment has tokens with states, which become keys and values only. If it wants logits, the
    last token follows, and masks as nodes. Each state is that of its own token.
    """

    def __init__(
        self, head: Head, target: NativeTransformer, max_length: int, quantization: str | None
    ) -> None:
        a, block = head.architecture, head.block
        assert a is not None
        assert block is not None
        assert head.config is not None
        check_fits(head, target)
        a = saying_as(a, target) if head.borrows_logits else a
        self.head, self.target, self.block = head, target, block
        self.target_layers = head.target_layers(target.hidden_layers)
        self.hidden_layers, self.hidden_size = a.num_layers, a.hidden_size
        recipe, source = head_recipe(quantization), HeadTensors(head.files)
        library, loader = target.library, Loader(source, a, target.dtype, True, recipe)
        config = step_config(a, target.dtype, max_length, recipe is not None and recipe.coarse)
        config.embeddings, config.input = head.vocab_size, BLOCK
        config.fused, config.output_normed = len(self.target_layers) * a.hidden_size, True
        config.causal, config.causal_windows = block.causal, block.causal_windows
        config.kernel_taps, config.kernel_group = block.taps, block.group
        if block.as_target and target.shape.family.startswith("gemma"):
            # Gemma's embedding module scales its output; in other families the model does.
            config.embedding_scale = target.shape.embedding_scale
        super().__init__(library, a, config, target.dtype, None, head.config)
        if not head.borrows_logits:
            self._pack(0, "head", loader.head(np.empty(0)), None, target.handle)
        library.borrow(self.handle, target.handle)
        self._pack(0, "fuse", loader.matrix("fc.weight", a.hidden_size, config.fused, recipe))
        for name, kind in (("model.hidden_norm", "state"), ("model.norm", "final")):
            library.set_vector(self.handle, 0, kind, loader.norm(name)[: a.hidden_size])
        for index in range(a.num_layers):
            self._load_layer(loader, index)
            if block.taps:
                self._load_kernels(loader, source, index)
        self._set_ids(None if head.borrows_logits else drafted_ids(source, head))
        self.longest, self._codebooks = head.longest, tuple[Array, ...]()
        self._projection: Floats | None = None
        if block.rank:
            self._load_transitions(source)
        library.check(self.handle)

    def _load_kernels(self, loader: Loader, source: HeadTensors, index: int) -> None:
        """Give a layer the kernels that mix rows of a block."""
        taps, width = self.block.taps, self.hidden_size
        for part in CONVOLVED:
            base, kind = f"model.layers.{index}.{part}_conv.", f"{part}_kernels"
            numbers = 2 * taps * width // self.block.group
            more = loader.matrix(f"{base}kernel_projection.weight", numbers, width, loader.recipe)
            self._pack(index, kind, more)
            kernels = source.get(f"{base}base_kernel", (2, taps, width), FLOAT32)
            self.library.set_vector(self.handle, index, kind, kernels.ravel())

    def _load_transitions(self, source: HeadTensors) -> None:
        """Give the library the scores of tokens after others; this object keeps the arrays."""
        rank = self.block.rank
        sizes = self.head.vocab_size, self.shape.vocab_size
        self._codebooks = tuple(
            np.ascontiguousarray(source.get(name, (size, rank), self.dtype))
            for name, size in zip(CODEBOOKS[self.head.kind], sizes, strict=True)
        )
        if self.head.kind == DFLASH2:
            name = f"{SELECTOR}hidden_projection.weight"
            own = source.get(name, (rank, self.hidden_size), FLOAT32)
            self._projection = np.ascontiguousarray(own)
        before, behind = self._codebooks
        scored = before, behind, self._projection
        self.library.set_transitions(self.handle, self.block.top_k, *scored)

    def behind(self, segment: Segment, depth: int, last: int) -> Segment:
        """Return the segment with the last token, and masks for the draft."""
        masks, token = depth - self.block.from_anchor, self.head.mask_token
        assert token is not None
        return segment._replace(
            tokens=[*segment.tokens, last],
            logits=depth,
            nodes=[token] * masks,
            parents=range(-1, masks - 1),
        )

    def added_bytes(self, beside: RowsModel | None) -> int:
        own = [*self._codebooks, *([] if self._projection is None else [self._projection])]
        return super().added_bytes(beside) + sum(table.nbytes for table in own)

    def try_rows(self, count: int, store: Store) -> None:
        size = max(2, min(self.block.size, self.max_length))
        states, page = np.empty((0, self.hidden_size), np.float32), 0
        blocks: list[Segment] = []
        while count > 0:
            masks = max(1, min(size, count) - 1)
            pages = range(page, page - (-(1 + masks) // store.page_size))
            parents = range(-1, masks - 1)
            blocks.append(Segment([1], 0, pages, masks, 1, [1] * masks, parents, states=states))
            count, page = count - 1 - masks, pages.stop
        self.run(blocks, store)

    def _num_rows(self, segments: Sequence[Segment]) -> int:
        return sum(1 + len(segment.nodes) for segment in segments if segment.logits)

    def run(self, segments: Sequence[Segment], store: Store, hidden: Sequence[int] = ()) -> Output:
        """See ``base.Model``; logits are over the target's vocabulary, states of blocks' rows.

        The states after the last layer are what the output matrix reads.
        """
        output = self.forward(segments, store, None, hidden)
        return self._of_target(output, self.head.vocab_size)

    def _chain(self, store: Store, segment: Segment, asked: DraftInput, noise: Noise) -> list[int]:
        output = self.run([segment], store, (self.hidden_layers,))
        assert output.logits is not None
        states = output.hidden[self.hidden_layers][-len(output.logits) :]
        drafted: list[int] = []
        for line, state in zip(output.logits[: asked.limits.depth], states, strict=False):
            if self.block.rank:
                before = drafted[-1] if drafted else segment.tokens[-1]
                line = self.scored(line, before, state)
            token = self._drawn(line, segment, asked, drafted, noise)
            if token is None:
                break
            drafted.append(token)
        return drafted

    def scored(self, logits: Floats, before: int, state: Floats) -> Floats:
        """Return the scores of the likeliest ids after a token, -inf for others: [vocabulary].

        ``logits`` are of all ids of the target, ``state`` fp32 [width] of the row that drafts.
        """
        ids = np.arange(len(logits)) if self.drafted_ids is None else self.drafted_ids
        own = logits[ids]
        top = np.argsort(-own, kind="stable")[: self.block.top_k]
        rows_before, rows_behind = self._codebooks
        context = rows_before[before].astype(np.float32)
        if self._projection is not None:
            context = context * (self._projection @ state)
        scores = np.full(len(logits), -np.inf, np.float32)
        scores[ids[top]] = own[top] + rows_behind[top].astype(np.float32) @ context
        return scores
