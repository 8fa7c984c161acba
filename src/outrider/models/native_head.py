"""EAGLE-3 heads that the native step runs."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from ..base.config import Recipe
from ..checkpoints.head_tensors import HeadTensors, check_tensors, drafted_ids
from ..checkpoints.heads import PEAGLE, Head, check_target
from ..checkpoints.weights import Loader
from ..errors import ModelError
from ..native.interface import PAIRED
from .base import Output, Store
from .head_chains import HeadModel, head_recipe
from .native import NativeTransformer
from .native_model import NativeLayers, pack, step_config
from .rows import Segment

EMBEDDING = "model.embed_tokens.weight"


class NativeHead(HeadModel):
    """An EAGLE-3 head beside its target, whose native step runs it.

    The row of a token begins with the state behind the token before it, so there is none of the
    first token. Logits are of the ids that the head drafts, tokens the target's. ``quantization``
    is a recipe's text, "auto" for int8, or one of ``NO_RECIPES``.
    """

    def __init__(
        self, head: Head, target: NativeTransformer, max_length: int, quantization: str | None
    ) -> None:
        assert head.architecture is not None
        assert head.config is not None
        check_target(head, target.shape, target.hidden_size, target.hidden_layers)
        check_tensors(head)
        self.head, self.target, a = head, target, head.architecture
        self.target_layers = head.target_layers(target.hidden_layers)
        self.hidden_layers, self.hidden_size = a.num_layers, a.hidden_size
        recipe, source = head_recipe(quantization), HeadTensors(head.files)
        library, dtype = target.library, target.dtype
        loader = Loader(source, a, dtype, self.device, torch.Tensor.contiguous, True, recipe)
        embedding = self._own_embedding(source)
        config = step_config(a, dtype, max_length, recipe)
        config.embeddings, config.input = head.vocab_size, PAIRED
        config.fused = len(self.target_layers) * head.hidden_size
        config.fused_norms = len(head.fused_norms)
        config.state_normed, config.output_normed = head.state_normed, head.output_normed
        super().__init__(library, a, config, dtype, embedding)
        if embedding is None:
            library.borrow(self.handle, target.handle)
        pack(library, self.handle, 0, "head", loader.head(torch.empty(0)), None, target.handle)
        self._set_fuse(loader, source, recipe)
        self._layers = NativeLayers(self, head.config, max_length)
        for index in range(a.num_layers):
            self._layers.load(loader, index, None if index else 2 * a.hidden_size)
        norm = loader.norm("model.layers.0.hidden_norm")
        library.set_vector(self.handle, 0, "state", norm[: a.hidden_size])
        library.set_vector(self.handle, 0, "final", loader.norm("model.norm")[: a.hidden_size])
        ids = drafted_ids(source, head)
        if ids is not None:
            library.set_ids(self.handle, ids, ())
        self.drafted_ids = torch.tensor(ids if ids is not None else range(a.vocab_size))
        library.check(self.handle)
        self.mask_state = self._mask_state(source)
        """The state of later positions, of heads that draft in one pass: fp32 [1, width]."""

    def _own_embedding(self, source: HeadTensors) -> torch.Tensor | None:
        """Return the head's embedding, None where it is the target's."""
        if EMBEDDING not in source:
            if self.hidden_size != self.target.hidden_size:
                raise ModelError(
                    f"{self.head.folder} has no embedding, and that of the target is "
                    f"{self.target.hidden_size} wide where the head's states are "
                    f"{self.hidden_size}; convert the checkpoint again."
                )
            return None
        shape = self.head.vocab_size, self.hidden_size
        own = source.get(EMBEDDING, shape, self.target.dtype).contiguous()
        theirs = self.target.embedding
        same = theirs is not None and theirs.shape == own.shape and torch.equal(own, theirs)
        return None if same else own

    def _set_fuse(self, loader: Loader, source: HeadTensors, recipe: Recipe | None) -> None:
        """Pack what makes states of the target's hidden states."""
        wide = len(self.target_layers) * self.head.hidden_size
        fuse = loader.matrix("fc.weight", self.hidden_size, wide, recipe)
        pack(self.library, self.handle, 0, "fuse", fuse)
        names = self.head.fused_norms
        if names:
            size = (wide // len(names),)
            norms = [source.get(name, size, torch.float32) for name in names]
            self.library.set_vector(self.handle, 0, "fuse", torch.cat(norms))

    def _mask_state(self, source: HeadTensors) -> torch.Tensor | None:
        if self.head.kind != PEAGLE:
            return None
        parts = len(self.target_layers)
        shape = 1, 1, parts * self.head.hidden_size
        hidden = source.get("mask_hidden", shape, torch.float32).view(parts, 1, -1)
        state = torch.empty(1, self.hidden_size)
        self.fuse([part.contiguous() for part in hidden], array("i", [0]), state, array("i", [0]))
        return state

    def fuse(
        self,
        hidden: Sequence[torch.Tensor],
        which: array[int],
        states: torch.Tensor,
        to: array[int],
    ) -> None:
        """Make states of rows of the target's hidden states, see ``Library.fuse``."""
        self.library.fuse(self.handle, hidden, which, states, to)

    def run(self, segments: Sequence[Segment], store: Store, hidden: Sequence[int] = ()) -> Output:
        """See ``base.Model``; logits are over the target's vocabulary.

        As many layers as there are stand for the states that the next rows of a draft begin with.
        """
        output = self._forward(segments, store, None, hidden)
        if output.logits is None:
            return output
        logits = torch.full((len(output.logits), self.head.vocab_size), -torch.inf)
        logits[:, self.drafted_ids] = output.logits
        return Output(logits, output.hidden)

    def try_rows(self, count: int, store: Store) -> None:
        state = torch.ones(1, self.hidden_size)
        tables = [array("i", (page,)) for page in range(count)]
        self.run([Segment([1], 0, pages, 1, 1, states=state) for pages in tables], store)

    def _draft_pass(self, store: Store, segment: Segment) -> tuple[torch.Tensor, Segment | None]:
        behind = self.hidden_layers
        output = self.run([segment], store, (behind,))
        assert output.logits is not None
        if self.mask_state is not None:
            return output.logits, None
        return output.logits, segment._replace(logits=1, states=output.hidden[behind][-1:])
