"""Heads of EAGLE-1 and EAGLE-2, which the native step runs.

Li et al., "EAGLE: Speculative sampling requires rethinking feature uncertainty", 2024; EAGLE-2
drafts other trees with the same heads.
"""

from __future__ import annotations

from ..checkpoints.dtypes import FLOAT32
from ..checkpoints.head_tensors import HeadTensors
from ..checkpoints.heads import Head
from ..checkpoints.weights import Loader
from .native import NativeTransformer
from .native_heads import check_fits, head_recipe, own_embedding, saying_as
from .native_mtp import JoinedModel


class NativeEagle1(JoinedModel):
    """A head of EAGLE-1 beside its target: layers after a linear map of embedding and state.

    It has no norm before its first layer nor after its last one, whose output is the next state
    and the input of the target's output matrix. ``quantization`` is that of ``NativeHead``.
    """

    def __init__(
        self, head: Head, target: NativeTransformer, max_length: int, quantization: str | None
    ) -> None:
        assert head.architecture is not None
        assert head.config is not None
        check_fits(head, target)
        a = saying_as(head.architecture, target)
        source = HeadTensors(head.files)
        loader = Loader(source, a, target.dtype, True, head_recipe(quantization))
        bias = "fc.bias"
        super().__init__(
            loader,
            target,
            max_length,
            head.config,
            embedding=own_embedding(head, source, target),
            bias=source.get(bias, (a.hidden_size,), FLOAT32) if bias in source else None,
        )
