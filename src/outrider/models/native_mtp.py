"""The layers of a checkpoint that predict further tokens (MTP), which the native step runs."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..checkpoints.files import Files
from ..checkpoints.mtp import NORMS, mtp_architecture, mtp_tensors
from ..checkpoints.weights import Loader
from ..native.interface import JOINED
from .base import Output, Store
from .native import NativeTransformer
from .native_heads import HeadModel, head_recipe
from .native_model import step_config
from .rows import Segment

Floats = NDArray[np.float32]


class NativeMtp(HeadModel):
    """MTP layers beside their target, with its embedding and output matrix.

    The row of a token begins with the state behind the token before it: of the target the last
    norm's output, of a drafted token that of these layers' own. There is none of the first token.
    ``quantization`` is as of ``NativeHead``.
    """

    def __init__(
        self,
        files: Files,
        target: NativeTransformer,
        max_length: int,
        quantization: str | None,
    ) -> None:
        a = mtp_architecture(files, target.shape)
        self.target = target
        self.target_layers = (target.hidden_layers - 1,)
        self.hidden_layers, self.hidden_size = a.num_layers, a.hidden_size
        recipe = head_recipe(quantization)
        loader = Loader(mtp_tensors(files, a.head_dim), a, target.dtype, True, recipe)
        own = step_config(a, target.dtype, max_length, recipe is not None and recipe.coarse)
        own.input, own.fused, own.fused_norms = JOINED, 2 * a.hidden_size, len(NORMS)
        own.output_normed = True
        super().__init__(target.library, a, own, target.dtype, None, target.ropes)
        self.library.borrow(self.handle, target.handle)
        joined = loader.matrix("fc.weight", a.hidden_size, 2 * a.hidden_size, recipe)
        self._pack(0, "fuse", joined)
        norms = [loader.norm(name)[: a.hidden_size] for name in NORMS]
        self.library.set_vector(self.handle, 0, "fuse", np.concatenate(norms))
        for index in range(a.num_layers):
            self._load_layer(loader, index)
        self.library.set_vector(self.handle, 0, "final", loader.norm("model.norm")[: a.hidden_size])
        self.library.check(self.handle)

    def fuse(
        self, hidden: Sequence[Floats], which: array[int], states: Floats, to: array[int]
    ) -> None:
        """Make states of rows ``which`` of the target's last hidden states, to rows ``to``."""
        self.library.fuse(self.handle, hidden, which, states, to)

    def run(self, segments: Sequence[Segment], store: Store, hidden: Sequence[int] = ()) -> Output:
        """See ``base.Model``; behind the last layer is what the next rows begin with."""
        return self.forward(segments, store, None, hidden)
