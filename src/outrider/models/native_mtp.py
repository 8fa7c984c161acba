"""Layers that go on from a target's last state, of a checkpoint's own (MTP) or others'."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..checkpoints.configs import ModelConfig
from ..checkpoints.dtypes import Array
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


class JoinedModel(HeadModel):
    """Layers beside their target that read a linear of embedding and state, a row of a token.

    The row of a token begins with the state behind the token before it: of the target the last
    norm's output, of a drafted token that of these layers' own. There is none of the first token.
    Logits are of the target's output matrix, and so is the embedding unless there is one of its
    own. Norms of embedding and state are named by ``norms``; where there are none, neither the
    first layer has one before attention nor the last one behind it. ``loader`` reads the layers,
    ``bias`` is the linear's.
    """

    def __init__(
        self,
        loader: Loader,
        target: NativeTransformer,
        max_length: int,
        ropes: ModelConfig | None,
        norms: Sequence[str] = (),
        embedding: Array | None = None,
        bias: Array | None = None,
    ) -> None:
        a, recipe = loader.architecture, loader.recipe
        self.target = target
        self.target_layers = (target.hidden_layers - 1,)
        self.hidden_layers, self.hidden_size = a.num_layers, a.hidden_size
        own = step_config(a, target.dtype, max_length, recipe is not None and recipe.coarse)
        own.input, own.fused, own.fused_norms = JOINED, 2 * a.hidden_size, len(norms)
        own.output_normed = bool(norms)
        super().__init__(target.library, a, own, target.dtype, embedding, ropes)
        self.library.borrow(self.handle, target.handle)
        joined = loader.matrix("fc.weight", a.hidden_size, 2 * a.hidden_size, recipe)
        self._pack(0, "fuse", joined, bias)
        for index in range(a.num_layers):
            self._load_layer(loader, index, normed=bool(norms or index))
        if norms:
            both = [loader.norm(name)[: a.hidden_size] for name in norms]
            self.library.set_vector(self.handle, 0, "fuse", np.concatenate(both))
            last = loader.norm("model.norm")[: a.hidden_size]
            self.library.set_vector(self.handle, 0, "final", last)
        self.library.check(self.handle)

    def run(self, segments: Sequence[Segment], store: Store, hidden: Sequence[int] = ()) -> Output:
        """See ``base.Model``; behind the last layer is what the next rows begin with."""
        return self.forward(segments, store, None, hidden)


class NativeMtp(JoinedModel):
    """MTP layers of a checkpoint beside their target; ``quantization`` is as of ``NativeHead``."""

    def __init__(
        self,
        files: Files,
        target: NativeTransformer,
        max_length: int,
        quantization: str | None,
    ) -> None:
        a, recipe = mtp_architecture(files, target.shape), head_recipe(quantization)
        loader = Loader(mtp_tensors(files, a.head_dim), a, target.dtype, True, recipe)
        super().__init__(loader, target, max_length, target.ropes, NORMS)
