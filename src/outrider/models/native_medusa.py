"""Medusa's heads, which the native step runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..checkpoints.formats.shared import Tensors
from ..checkpoints.head_tensors import check_tensors
from ..checkpoints.heads import Head, check_target
from ..checkpoints.weights import Loader
from ..native.checks import free_with
from ..native.interface import HEADS, Config
from .base import Output, Store
from .head_chains import HeadChains, Passes
from .native import NativeTransformer, words_of
from .native_head import head_recipe, states_of
from .native_store import NativeStore
from .rows import Segment


class NativeMedusa(HeadChains, NativeTransformer):
    """Heads that each draft one token from the target's last hidden state, and have no cache.

    A segment stands for a sequence; its first row's state is the target's residual stream behind
    the last layer. Cai et al., "Medusa: Simple LLM inference acceleration framework with multiple
    decoding heads", 2024.

    Args:
        head: as its checkpoint says.
        target: the model whose hidden states it goes on from.
        quantization: a recipe's text, "auto" for int8, or one of ``NO_RECIPES``.

    Raises:
        ModelError: the checkpoint is damaged, or made for another target.
    """

    def __init__(self, head: Head, target: NativeTransformer, quantization: str | None) -> None:
        check_target(head, target.shape, target.hidden_size, target.hidden_layers)
        check_tensors(head)
        self.head, self.target = head, target
        self.dtype, self.library, self.shape = target.dtype, target.library, target.shape
        self.hidden_layers, self.hidden_size = 0, target.hidden_size
        self.embedding = None
        self.num_heads = head.longest or 1
        recipe, source = head_recipe(quantization), Tensors(head.files)
        self.coarse = recipe is not None and recipe.coarse
        loader = Loader(source, target.shape, self.dtype, self.device, keeps=True, recipe=recipe)
        library, each = self.library, head.blocks + 1
        self.handle = library.new_model(self._config(1), None)
        free_with(self, library.free, "model", self.handle)
        library.borrow(self.handle, target.handle)
        for number in range(self.num_heads * each):
            place, block = divmod(number, each)
            last = block == head.blocks
            name = f"{place}.{block}." + ("" if last else "linear.")
            shape = (head.vocab_size if last else head.hidden_size), head.hidden_size
            matrix, bias = loader.matrix(f"{name}weight", *shape, recipe), None
            if f"{name}bias" in source:
                bias = source.get(f"{name}bias", shape[:1], torch.float32)
            self._set(number, "draft", matrix, bias)
        library.check(self.handle)

    def _config(self, max_length: int) -> Config:
        config = super()._config(self.target.max_length)
        config.layers, config.blocks, config.input = self.num_heads, self.head.blocks, HEADS
        return config

    def _turn(self, length: int) -> None:
        """Nothing turns by position."""

    def new_store(self, num_pages: int, page_size: int) -> NativeStore:
        """Return an empty cache, with a page for each head at least; it takes no memory."""
        return super().new_store(max(num_pages, self.num_heads), page_size)

    def try_rows(self, count: int, store: Store) -> None:
        self.run([self.segment(torch.ones(1, self.hidden_size), "")] * count, store)

    def run(self, segments: Sequence[Segment], store: Store, hidden: Sequence[int] = ()) -> Output:
        """Return the logits of each segment's heads, [segments * heads, vocabulary]."""
        assert isinstance(store, NativeStore)
        count, wide = len(segments), self.shape.vocab_size
        logits, kept = (
            torch.empty(count * self.num_heads, wide),
            torch.empty(0, count, self.hidden_size),
        )
        states, handles = self._states(segments), (self.handle, store.handle)
        self.library.forward(*handles, words_of(segments), (), (), logits, kept, states)
        return Output(logits)

    def segment(self, states: torch.Tensor, key: str) -> Segment:
        """Return the segment of a sequence whose last state is ``states`` fp32 [1, hidden_size]."""
        later = self.num_heads - 1
        pages, parents = range(1 + later), range(-1, later - 1)
        nodes = [0] * later
        return Segment([0], 0, pages, 1 + later, 0, nodes, parents, key, states=states)

    def _states(self, segments: Sequence[Segment]) -> torch.Tensor | None:
        return states_of(segments)

    def _passes(self, store: Store) -> Passes:
        def passes(segment: Segment) -> tuple[torch.Tensor, Segment | None]:
            logits = self.run([segment], store).logits
            assert logits is not None
            return logits, None

        return passes
