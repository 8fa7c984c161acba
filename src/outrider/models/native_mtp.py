"""Layers that continue from a target's last state: a checkpoint's own (MTP) or a head's."""

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
    """Layers beside their target that read a linear map of embedding and state, a row per token.

    The row of a token takes the state of the token before it: the target's last norm's output, or
    for a drafted token these layers' own. The first token has no row. Logits are of the target's
    output matrix; the embedding is the target's unless one is given. ``norms`` names the norms of
    embedding and state; without them the first layer has no norm before attention, and none
    follows the last layer. ``loader`` reads the layers, ``bias`` is that of the linear map.
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
        """See ``base.Model``; the states after the last layer are what the next rows take."""
        return self.forward(segments, store, None, hidden)


class NativeMtp(JoinedModel):
    """MTP layers of a checkpoint beside their target; ``quantization`` as in ``NativeHead``."""

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
