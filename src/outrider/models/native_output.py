"""The output matrix of a target that the native step runs, by itself."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..native.checks import free_with
from .native import NativeTransformer
from .native_model import heads_config, without_layers, words_of
from .native_store import NativeStore
from .rows import Segment

Floats = NDArray[np.float32]


class NativeOutput:
    """A target's last norm and output matrix: the logits of states after its last layer.

    To the library it is a head of Medusa without blocks, which borrows both.
    """

    def __init__(self, target: NativeTransformer) -> None:
        shape, library = without_layers(target.shape), target.library
        config = heads_config(shape, target.dtype, target.max_length, target.coarse, 1, 0)
        self.target, self.handle = target, library.new_model(config, None)
        free_with(self, library.free, "model", self.handle)
        library.borrow(self.handle, target.handle)
        library.check(self.handle)
        self._store = NativeStore(library, self.handle, shape, 1, 1)

    def logits(self, states: Floats) -> Floats:
        """Return the logits fp32 [rows, vocabulary] of states fp32 [rows, hidden_size]."""
        shape, count = self.target.shape, len(states)
        rows = [Segment([0], 0, [0], 1, 0, key=str(i)) for i in range(count)]
        logits = np.empty((count, shape.vocab_size), np.float32)
        nothing = np.empty((0, count, shape.hidden_size), np.float32)
        handles = self.handle, self._store.handle
        library = self.target.library
        library.forward(*handles, words_of(rows), (), (), logits, nothing, states)
        if shape.logits_scale != 1:
            logits /= shape.logits_scale
        if shape.logits_cap is not None:
            logits = np.tanh(logits / shape.logits_cap) * shape.logits_cap
        return logits
