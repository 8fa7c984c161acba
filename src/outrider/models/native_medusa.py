"""Medusa's heads, which the native step runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..checkpoints.formats.shared import Tensors
from ..checkpoints.head_tensors import check_tensors
from ..checkpoints.heads import Head, check_target
from ..checkpoints.weights import Loader
from ..native.interface import HEADS
from .base import Output, Store
from .head_chains import HeadModel, head_recipe
from .native import NativeTransformer
from .native_model import pack, step_config
from .native_store import NativeStore
from .rows import Segment


class NativeMedusa(HeadModel):
    """Heads that each draft one token from the target's last hidden state, and have no cache.

    A segment stands for a sequence; its first row's state is the target's residual stream behind
    the last layer. ``quantization`` is as of ``NativeHead``. Cai et al., "Medusa: Simple LLM
    inference acceleration framework with multiple decoding heads", 2024.
    """

    def __init__(self, head: Head, target: NativeTransformer, quantization: str | None) -> None:
        check_target(head, target.shape, target.hidden_size, target.hidden_layers)
        check_tensors(head)
        self.head, self.target = head, target
        self.hidden_size, self.num_heads = target.hidden_size, head.longest or 1
        recipe, source = head_recipe(quantization), Tensors(head.files)
        library, dtype, each = target.library, target.dtype, head.blocks + 1
        loader = Loader(source, target.shape, dtype, self.device, keeps=True, recipe=recipe)
        config = step_config(target.shape, dtype, target.max_length, recipe)
        config.layers, config.blocks, config.input = self.num_heads, head.blocks, HEADS
        super().__init__(library, target.shape, config, dtype, None)
        library.borrow(self.handle, target.handle)
        for number in range(self.num_heads * each):
            place, block = divmod(number, each)
            last = block == head.blocks
            name = f"{place}.{block}." + ("" if last else "linear.")
            shape = (head.vocab_size if last else head.hidden_size), head.hidden_size
            matrix, bias = loader.matrix(f"{name}weight", *shape, recipe), None
            if f"{name}bias" in source:
                bias = source.get(f"{name}bias", shape[:1], torch.float32)
            pack(library, self.handle, number, "draft", matrix, bias)
        library.check(self.handle)

    def new_store(self, num_pages: int, page_size: int) -> NativeStore:
        """Return an empty cache, with a page for each head at least; it takes no memory."""
        return super().new_store(max(num_pages, self.num_heads), page_size)

    def try_rows(self, count: int, store: Store) -> None:
        self.run([self.segment(torch.ones(1, self.hidden_size), "")] * count, store)

    def run(self, segments: Sequence[Segment], store: Store, hidden: Sequence[int] = ()) -> Output:
        """Return the logits of each segment's heads, [segments * heads, vocabulary]."""
        return self._forward(segments, store, wanted=len(segments) * self.num_heads)

    def segment(self, states: torch.Tensor, key: str) -> Segment:
        """Return the segment of a sequence whose last state is ``states`` fp32 [1, hidden_size]."""
        later = self.num_heads - 1
        pages, parents = range(1 + later), range(-1, later - 1)
        nodes = [0] * later
        return Segment([0], 0, pages, 1 + later, 0, nodes, parents, key, states=states)

    def _draft_pass(self, store: Store, segment: Segment) -> tuple[torch.Tensor, None]:
        logits = self.run([segment], store).logits
        assert logits is not None
        return logits, None
