"""Any other model that transformers loads, behind the same protocol: slower, and as exact.

Where a row stands decides the shape of the forward that computes it: positions are cut into spans
of ``TILE`` from 0 on, and every forward runs one whole span over a cache that ends where the span
begins, padded behind the last row. So a row's logits are the same bits in any dtype, however the
work is cut up, and whatever the model does inside.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from ..errors import ModelError
from .base import Output, Store
from .families import UNREADABLE, read_config, read_shape
from .rows import TILE, Segment, padded
from .transformer import choose_dtype

logger = logging.getLogger("outrider")

CACHES = ("past_key_values", "cache_params", "state")
"""Under these names models return what they keep, and take it again."""
PLAIN = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
PRODUCTS = (F.linear, torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.__matmul__)


class FixedProducts(TorchFunctionMode):
    """Pads products of fewer than ``TILE`` rows to ``TILE``, as experts have them.

    How many of a span's rows an expert gets depends on the rows behind, which must not matter.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in PRODUCTS and args[0].dim() == 2 and args[0].shape[0] < TILE:
            x, *rest = args
            spare = TILE - x.shape[0]
            return func(F.pad(x, (0, 0, 0, spare)), *rest, **(kwargs or {}))[: x.shape[0]]
        return func(*args, **(kwargs or {}))


@dataclass
class _Kept:
    """One sequence: its ``tokens`` so far, and the model's ``cache`` after some of them."""

    tokens: list[int] = field(default_factory=list)
    cache: Any = None


class SequenceStore:
    """Caches by ``Segment.key``: a ``base.Store`` whose pages are only counted."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.kept: dict[str, _Kept] = {}

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Never asked for: chains stand where they are.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("this model's cache cannot be rearranged; draft chains only.")

    def release(self, key: str) -> None:
        """Free the cache of ``key`` at once."""
        self.kept.pop(key, None)


class Fallback:
    """A checkpoint run by transformers: a ``base.Model``.

    Chains only, one sequence a forward. A model whose state cannot go back (Mamba, RWKV, hybrids)
    has ``truncates`` False and runs row by row. One that returns no cache computes its sequence
    anew for every span.

    Args:
        folder, dtype, device: as ``Transformer``'s.

    Raises:
        ModelError: transformers cannot load it, tensors are missing, or its rows depend on later
            ones.
    """

    trees = False

    def __init__(self, folder: Path, dtype: str, device: torch.device) -> None:
        config = read_config(folder)
        self.shape = read_shape(config, folder)
        self.dtype = choose_dtype(dtype, self.shape.dtype)
        self.device = device
        self._model = _load(folder, self.dtype).to(device).eval()
        self._short_heads = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        self._ropes = [m for m in self._model.modules() if hasattr(m, "max_seq_len_cached")]
        self._cache: str | None = None
        self._layers: list[type] = []
        self.truncates = True
        with torch.inference_mode():
            self._look(folder)
            self._bytes = self._measure()
        self._check(folder)

    def _look(self, folder: Path) -> None:
        """Find out what the model keeps, from a forward."""
        try:
            found = self._model(torch.tensor([[0, 0]], device=self.device), use_cache=True)
        except Exception as error:
            raise ModelError(
                f"{folder}: transformers loads this {self.shape.family!r} model, but cannot run it "
                f"on two tokens ({type(error).__name__}: {error}); it cannot be served."
            ) from error
        self._cache = next((n for n in CACHES if getattr(found, n, None) is not None), None)
        cache = getattr(found, self._cache) if self._cache else None
        if isinstance(cache, DynamicCache):
            self._layers = [type(layer) for layer in cache.layers]
        plain = bool(self._layers) and all(layer in PLAIN for layer in self._layers)
        # What a class says of itself, and what its cache is made of.
        stateful = getattr(self._model, "_is_stateful", False)
        self.truncates = self._cache is None or (plain and not stateful)
        if self._cache is not None and not self.truncates and not self._remembers():
            self._cache = None  # it keeps part of its state in itself

    def _remembers(self) -> bool:
        """Whether a sequence's state is all in its cache: another one between changes nothing."""

        def rows(store: SequenceStore, key: str, *tokens: int) -> torch.Tensor:
            return self._rows(Segment(tokens, len(store.kept[key].tokens) if key in store.kept else 0,
                                      (), 1, 4, key=key), store)

        alone, shared = SequenceStore(1), SequenceStore(1)
        rows(alone, "a", 1, 2)
        rows(shared, "a", 1, 2)
        rows(shared, "b", 3, 4, 5)
        return torch.equal(rows(alone, "a", 3), rows(shared, "a", 3))
