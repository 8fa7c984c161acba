"""Heads beside a target, run by the native step; where Python processes logits, chains only."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from ..base.config import HEADS, NO_RECIPES, Recipe
from ..checkpoints.architecture import Architecture
from ..checkpoints.dtypes import FLOAT32, Array
from ..checkpoints.head_tensors import HeadTensors, check_tensors, drafted_ids
from ..checkpoints.heads import PEAGLE, Head, check_target
from ..checkpoints.weights import Loader
from ..errors import ModelError
from ..native.interface import PAIRED
from ..sampling.shared_noise import Noise
from .base import Output, Store
from .decide import DraftInput, DraftNodes, SampleInput, Samples, sample_in_python
from .native import NativeTransformer, same_bits
from .native_model import NativeModel, PythonDraft, heads_config, step_config, without_layers
from .native_store import NativeStore
from .rows import Segment, lone_rows

Floats = NDArray[np.float32]
EMBEDDING = "model.embed_tokens.weight"


def head_recipe(quantization: str | None) -> Recipe | None:
    """Return the recipe of a head's matrices: ``HEADS`` for "auto", None to leave them."""
    if quantization == "auto":
        return Recipe.parse(HEADS)
    return None if quantization in (None, *NO_RECIPES) else Recipe.parse(str(quantization))


def check_fits(head: Head, target: NativeTransformer) -> None:
    """Refuse a head of another target, or whose tensors are not what its config says."""
    check_target(head, target.shape, target.hidden_size, target.hidden_layers)
    check_tensors(head)


def saying_as(own: Architecture, target: NativeTransformer) -> Architecture:
    """Return the architecture ``own`` with logits scaled and capped as the target's are."""
    said = target.shape
    return replace(own, logits_scale=said.logits_scale, logits_cap=said.logits_cap)


def own_embedding(head: Head, source: HeadTensors, target: NativeTransformer) -> Array | None:
    """Return a head's embedding, None where it is the target's."""
    assert head.architecture is not None
    width = head.architecture.hidden_size
    if EMBEDDING not in source:
        if width != target.hidden_size:
            raise ModelError(
                f"{head.folder} has no embedding, and that of the target is {target.hidden_size} "
                f"wide where the head's states are {width}; convert the checkpoint again."
            )
        return None
    own = np.ascontiguousarray(source.get(EMBEDDING, (head.vocab_size, width), target.dtype))
    theirs = target.embedding
    same = theirs is not None and theirs.shape == own.shape and same_bits(own, theirs)
    return None if same else own


class HeadModel(NativeModel):
    """A model whose rows take states as input.

    ``mask_state`` is the state of later positions, fp32 [1, width], for heads that draft in one
    pass. ``drafted_ids`` are the target's ids of its logits, None for all. It drafts at most
    ``longest`` tokens, None for any number.
    """

    mask_state: Floats | None = None
    drafted_ids: NDArray[np.int64] | None = None
    longest: int | None = None

    def try_rows(self, count: int, store: Store) -> None:
        state = np.ones((1, self.hidden_size), np.float32)
        self.run([row._replace(states=state) for row in lone_rows(count)], store)

    def behind(self, segment: Segment, depth: int, last: int) -> Segment:
        """Return a segment with the rows that drafting ``depth`` tokens after it needs.

        ``last`` is the last known token; with most heads the segment ends with it.
        """
        return segment._replace(logits=1)

    def fuse(
        self,
        hidden: Sequence[Floats],
        which: array[int],
        states: Floats,
        to: array[int],
    ) -> None:
        """Compute states from rows of the target's hidden states, see ``Library.fuse``."""
        self.library.fuse(self.handle, hidden, which, states, to)

    def _of_target(self, output: Output, vocabulary: int) -> Output:
        """Return an output whose logits are over the target's ``vocabulary``."""
        if output.logits is None or self.drafted_ids is None:
            return output
        logits = np.full((len(output.logits), vocabulary), -np.inf, np.float32)
        logits[:, self.drafted_ids] = output.logits
        return Output(logits, output.hidden)

    def _set_ids(self, ids: list[int] | None) -> None:
        """Set which of the target's ids its logits are of, None for all."""
        if ids is not None:
            self.library.set_ids(self.handle, ids, ())
            self.drafted_ids = np.array(ids)

    def _draft_pass(self, store: Store, segment: Segment) -> tuple[Floats, Segment | None]:
        """Return the logits of a pass, a row for each next depth, and the segment of the next pass.

        That has the last row's state; None if the head drafts in one pass.
        """
        behind = self.hidden_layers
        output = self.run([segment], store, (behind,))
        assert output.logits is not None
        if self.mask_state is not None:
            return output.logits, None
        return output.logits, segment._replace(logits=1, states=output.hidden[behind][-1:])

    def _states(self, segments: Sequence[Segment]) -> Floats | None:
        states = [segment.states for segment in segments if segment.states is not None]
        if len(states) != len(segments):
            raise ModelError("a row of a head begins with no state.")
        return states[0] if len(states) == 1 else np.concatenate(states)

    def _in_python(self, store: Store, needs_logits: bool) -> PythonDraft:
        return partial(self._draft_chains, store)

    def _draft_chains(
        self,
        store: Store,
        segments: Sequence[Segment],
        inputs: Sequence[DraftInput | None],
        noise: Noise,
    ) -> list[DraftNodes]:
        return [
            DraftNodes.chain([] if asked is None else self._chain(store, segment, asked, noise))
            for segment, asked in zip(segments, inputs, strict=True)
        ]

    def _chain(self, store: Store, segment: Segment, asked: DraftInput, noise: Noise) -> list[int]:
        """Return the tokens drawn one after the other; fewer if nothing is left to draw."""
        drafted: list[int] = []
        depth, following = asked.limits.depth, segment
        position = segment.start + len(segment.tokens)
        while len(drafted) < depth:
            logits, more = self._draft_pass(store, following)
            for line in logits[: depth - len(drafted)]:
                token = self._drawn(line, segment, asked, drafted, noise)
                if token is None:
                    return drafted
                drafted.append(token)
            if more is None:
                break
            following = more._replace(tokens=drafted[-1:], start=position + len(drafted) - 1)
        return drafted

    def _drawn(
        self,
        line: Floats,
        segment: Segment,
        asked: DraftInput,
        drafted: Sequence[int],
        noise: Noise,
    ) -> int | None:
        """Return the token drawn from a row of logits after ``drafted``, None if there is none."""
        wish = SampleInput(asked.sequence, True, drafted=[*drafted])
        one = segment._replace(logits=1, nodes=(), parents=())
        drawn = sample_in_python(Samples([0], [0.0], line[None]), [one], [wish], [0], noise)
        return drawn.tokens[0] if isfinite(drawn.scores[0]) else None


class NativeHead(HeadModel):
    """An EAGLE-3 head beside its target, whose native step runs it.

    The row of a token takes the state of the token before it, so the first token has no row. Logits
    are of the ids that the head drafts, tokens the target's. ``quantization`` is a recipe's text,
    "auto" for ``HEADS``, or one of ``NO_RECIPES``.
    """

    def __init__(
        self, head: Head, target: NativeTransformer, max_length: int, quantization: str | None
    ) -> None:
        assert head.architecture is not None
        assert head.config is not None
        check_fits(head, target)
        self.head, self.target, a = head, target, head.architecture
        self.target_layers = head.target_layers(target.hidden_layers)
        self.hidden_layers, self.hidden_size = a.num_layers, a.hidden_size
        recipe, source = head_recipe(quantization), HeadTensors(head.files)
        library, dtype = target.library, target.dtype
        loader = Loader(source, a, dtype, True, recipe)
        embedding = own_embedding(head, source, target)
        config = step_config(a, dtype, max_length, recipe is not None and recipe.coarse)
        config.embeddings, config.input = head.vocab_size, PAIRED
        config.fused = len(self.target_layers) * head.hidden_size
        config.fused_norms = len(head.fused_norms)
        config.state_normed, config.output_normed = head.state_normed, head.output_normed
        super().__init__(library, a, config, dtype, embedding, head.config)
        if embedding is None:
            library.borrow(self.handle, target.handle)
        self._pack(0, "head", loader.head(np.empty(0)), None, target.handle)
        self._set_fuse(loader, source, recipe)
        for index in range(a.num_layers):
            self._load_layer(loader, index, None if index else 2 * a.hidden_size)
        norm = loader.norm("model.layers.0.hidden_norm")
        library.set_vector(self.handle, 0, "state", norm[: a.hidden_size])
        library.set_vector(self.handle, 0, "final", loader.norm("model.norm")[: a.hidden_size])
        self._set_ids(drafted_ids(source, head))
        library.check(self.handle)
        self.mask_state = self._mask_state(source)

    def behind(self, segment: Segment, depth: int, last: int) -> Segment:
        """Return the segment; for a head of one pass, with a mask for each further token."""
        mask, later, token = self.mask_state, depth - 1, self.head.mask_token
        if mask is None or not later:
            return super().behind(segment, depth, last)
        assert segment.states is not None
        assert token is not None
        return segment._replace(
            logits=1 + later,
            nodes=[token] * later,
            parents=range(-1, later - 1),
            states=np.concatenate([segment.states, mask.repeat(later, 0)]),
        )

    def _set_fuse(self, loader: Loader, source: HeadTensors, recipe: Recipe | None) -> None:
        """Pack the weights that compute states from the target's hidden states."""
        wide = len(self.target_layers) * self.head.hidden_size
        fuse = loader.matrix("fc.weight", self.hidden_size, wide, recipe)
        self._pack(0, "fuse", fuse)
        names = self.head.fused_norms
        if names:
            size = (wide // len(names),)
            norms = [source.get(name, size, FLOAT32) for name in names]
            self.library.set_vector(self.handle, 0, "fuse", np.concatenate(norms))

    def _mask_state(self, source: HeadTensors) -> Floats | None:
        if self.head.kind != PEAGLE:
            return None
        parts = len(self.target_layers)
        shape = 1, 1, parts * self.head.hidden_size
        hidden = source.get("mask_hidden", shape, FLOAT32).reshape(parts, 1, -1)
        state = np.empty((1, self.hidden_size), np.float32)
        self.fuse(list(hidden), array("i", [0]), state, array("i", [0]))
        return state

    def run(self, segments: Sequence[Segment], store: Store, hidden: Sequence[int] = ()) -> Output:
        """See ``base.Model``; logits are over the target's vocabulary.

        The layer after the last stands for the states that the next rows of a draft take.
        """
        output = self.forward(segments, store, None, hidden)
        return self._of_target(output, self.head.vocab_size)


class NativeMedusa(HeadModel):
    """Heads that each draft one token from the target's last hidden state, and have no cache.

    A segment stands for a sequence; its first row's state is the target's residual stream after
    the last layer. Heads without output matrices of their own use the target's, as it is packed.
    ``quantization`` is that of ``NativeHead``. Cai et al., "Medusa: Simple LLM inference
    acceleration framework with multiple decoding heads", 2024.
    """

    def __init__(self, head: Head, target: NativeTransformer, quantization: str | None) -> None:
        check_fits(head, target)
        self.head, self.target = head, target
        self.hidden_size, self.num_heads = target.hidden_size, head.longest or 1
        recipe, source = head_recipe(quantization), HeadTensors(head.files)
        library, dtype, each = target.library, target.dtype, head.blocks + 1
        loader = Loader(source, target.shape, dtype, True, recipe)
        coarse, own = recipe is not None and recipe.coarse, without_layers(target.shape)
        config = heads_config(own, dtype, target.max_length, coarse, self.num_heads, head.blocks)
        super().__init__(library, own, config, dtype, None)
        library.borrow(self.handle, target.handle)
        for number in range(self.num_heads * each):
            place, block = divmod(number, each)
            last = block == head.blocks
            if last and head.borrows_output:
                continue
            name = f"{place}.{block}." + ("" if last else "linear.")
            shape = (head.vocab_size if last else head.hidden_size), head.hidden_size
            matrix, bias = loader.matrix(f"{name}weight", *shape, recipe), None
            if f"{name}bias" in source:
                bias = source.get(f"{name}bias", shape[:1], FLOAT32)
            self._pack(number, "draft", matrix, bias)
        library.check(self.handle)

    def _num_rows(self, segments: Sequence[Segment]) -> int:
        return len(segments)

    def new_store(self, num_pages: int, page_size: int) -> NativeStore:
        """Return an empty cache, with a page for each head at least; it takes no memory."""
        return super().new_store(max(num_pages, self.num_heads), page_size)

    def try_rows(self, count: int, store: Store) -> None:
        self.run([self.segment(np.ones((1, self.hidden_size), np.float32), "")] * count, store)

    def run(self, segments: Sequence[Segment], store: Store, hidden: Sequence[int] = ()) -> Output:
        """Return the logits of each segment's heads, [segments * heads, vocabulary]."""
        return self.forward(segments, store, wanted=len(segments) * self.num_heads)

    def segment(self, states: Floats, key: str) -> Segment:
        """Return the segment of a sequence whose last state is ``states`` fp32 [1, hidden_size]."""
        later = self.num_heads - 1
        pages, parents = range(1 + later), range(-1, later - 1)
        nodes = [0] * later
        return Segment([0], 0, pages, 1 + later, 0, nodes, parents, key, states=states)

    def _draft_pass(self, store: Store, segment: Segment) -> tuple[Floats, None]:
        logits = self.run([segment], store).logits
        assert logits is not None
        return logits, None
