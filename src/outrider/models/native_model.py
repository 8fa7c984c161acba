"""A model that the native step runs: whole, or a head beside one."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoints.architecture import Architecture, Mixture
from ..checkpoints.coded import Coded
from ..checkpoints.configs import ModelConfig
from ..checkpoints.dtypes import Array
from ..checkpoints.quantize import Matrix, Quantized
from ..checkpoints.rope import STILL, Rope
from ..checkpoints.weights import Loader
from ..errors import ModelError
from ..native.checks import free_with, within
from ..native.interface import (
    DTYPES,
    GATES,
    HEADS,
    MIXERS,
    MLPS,
    ROUTERS,
    Config,
    DraftBudget,
)
from ..native.library import Library
from ..native.masks import AllowedAfter
from ..native.native_sampling import NativeNoise, NativePipeline
from ..sampling.shared_noise import Noise
from .base import Output, RowsModel, Store
from .decide import DraftInput, DraftNodes, allowed_after, mask_bytes
from .native_store import NativeStore
from .rows import Segment, lone_rows, planted_of

PythonDraft = Callable[[Sequence[Segment], Sequence[DraftInput | None], Noise], list[DraftNodes]]


def step_config(shape: Architecture, dtype: np.dtype[Any], max_length: int, coarse: bool) -> Config:
    """Return the library's config of a model with layers of ``shape``."""
    return Config(
        dtype=DTYPES[dtype],
        layers=shape.num_layers,
        hidden=shape.hidden_size,
        inner=shape.intermediate_size,
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocabulary=shape.vocab_size,
        max_length=max_length,
        norm_eps=shape.norm_eps,
        scale=shape.scale,
        embedding_scale=shape.embedding_scale,
        residual_scale=shape.residual_scale,
        logits_scale=shape.logits_scale,
        activation=GATES[shape.activation],
        heat=shape.heat,
        heat_step=shape.heat_step,
        attention_cap=shape.attention_cap or 0,
        logits_cap=shape.logits_cap or 0,
        coarse=coarse,
        convs=shape.mixers.count("conv"),
        linears=shape.mixers.count("linear"),
        besides=shape.mixers.count("beside"),
        nones=shape.mixers.count("none"),
        taps=shape.conv_taps,
        gated=shape.layout.gated,
        **vars(shape.multipliers),
        **({} if shape.linear is None else vars(shape.linear)),
        **({} if shape.mixture is None else _of_mixture(shape.mixture)),
    )


def _of_mixture(mixture: Mixture) -> dict[str, Any]:
    """Return the fields of ``Config`` about experts."""
    return {
        "experts": mixture.experts,
        "top_experts": mixture.top,
        "expert_inner": mixture.width,
        "shared_inner": mixture.shared,
        "shared_gated": mixture.shared_gated,
        "router": ROUTERS[mixture.router],
        "renormalised": mixture.renormalised,
        "routed_scale": mixture.scale,
        "expert_groups": mixture.groups,
        "top_groups": mixture.top_groups,
    }


def heads_config(
    shape: Architecture, dtype: np.dtype[Any], max_length: int, coarse: bool, count: int,
    blocks: int,
) -> Config:  # fmt: skip
    """Return the library's config of ``count`` heads of ``blocks`` blocks each beside a target.

    ``shape`` is the target's, ``without_layers``.
    """
    config = step_config(shape, dtype, max_length, coarse)
    config.layers, config.blocks, config.input = count, blocks, HEADS
    return config


def without_layers(shape: Architecture) -> Architecture:
    """Return a model's architecture with its output matrix and without its layers."""
    layout = replace(shape.layout, gated=False)
    return replace(shape, mixers=(), linear=None, mixture=None, layout=layout)


def rope_tables(kinds: Sequence[str | None], far: bool) -> list[tuple[str | None, bool]]:
    """Return the rotary tables of layers of ``kinds``: which rope, and whether for far rows."""
    own = [kind for kind in dict.fromkeys(kinds) if kind != STILL]
    return [(kind, late) for kind in own for late in ((False, True) if far else (False,))]


class NativeModel(RowsModel):
    """A model in the C++ library, which knows it by its ``handle``.

    Numbers out of range raise ModelError. An ``embedding`` is kept beside the packed weights.
    """

    device = "cpu"
    shape: Architecture
    likely = 0
    """Rows of the head that drafts come from, see ``Library.set_likely``; 0 for all of it."""

    def __init__(
        self,
        library: Library,
        shape: Architecture,
        config: Config,
        dtype: np.dtype[Any],
        embedding: Array | None,
        ropes: ModelConfig | None = None,
    ) -> None:
        self.library, self.shape, self.dtype, self.embedding = library, shape, dtype, embedding
        self.max_length: int = config.max_length
        self.handle = library.new_model(config, embedding)
        free_with(self, library.free, "model", self.handle)
        self.ropes, self._turned = ropes, 0
        self._tables = rope_tables(shape.kinds, config.far > 0)
        self._turn(2)

    def _turn(self, length: int) -> None:
        """Extend the rotary tables, if there are any, to ``length`` positions.

        They grow with the cache, which no sequence exceeds: tables for a model's longest context
        can take more memory than all its weights.
        """
        length = min(length, self.max_length)
        if self.ropes is None or length <= self._turned:
            return
        for number, (kind, far) in enumerate(self._tables):
            rope = Rope(self.ropes, length, kind)
            self.library.set_rotary(self.handle, number, *rope.halves(far))
        self._turned = length

    def _pack(
        self,
        index: int,
        kind: str,
        matrix: Matrix,
        bias: Array | None = None,
        beside: int | None = None,
    ) -> None:
        """Give a matrix to the library; the model ``beside`` may hold the same."""
        library, handle = self.library, self.handle
        if isinstance(matrix, Quantized):
            parts = matrix.codes, matrix.scales, matrix.zeros, matrix.bits, matrix.group
            library.set_quantized(handle, index, kind, *parts, bias, beside)
        elif isinstance(matrix, Coded):
            library.set_coded(handle, index, kind, matrix, bias, beside)
        else:
            library.set_matrix(handle, index, kind, matrix, bias, beside)

    def _load_layer(
        self, loader: Loader, index: int, inputs: int | None = None, normed: bool = True
    ) -> None:
        """Pack one layer; its arrays are freed before the next is read, to save memory."""
        library, model = self.library, self.handle
        weights = loader.layer(index, inputs, normed)
        mlp, experts = weights.mlp, weights.experts
        self._set_layer(index)
        if weights.qkv is not None and weights.output is not None:
            self._pack(index, "qkv", weights.qkv, weights.qkv_bias)
            self._pack(index, "output", weights.output, weights.output_bias)
        if weights.beside is not None:
            self._pack(index, "beside_qkv", weights.beside.qkv)
            self._pack(index, "beside_output", weights.beside.output)
        for inner in (mlp, experts):
            if inner is not None:
                self._pack(index, "gate_up", inner.gate_up, inner.gate_up_bias)
                self._pack(index, "down", inner.down, inner.down_bias)
        if experts is not None:
            self._pack(index, "router", experts.router, experts.router_bias)
            if (shared := experts.shared) is not None:
                self._pack(index, "shared_gate_up", shared.gate_up, shared.gate_up_bias)
                self._pack(index, "shared_down", shared.down, shared.down_bias)
        norms = {
            "input": weights.input_norm,
            "mlp": weights.mlp_norm,
            "after": weights.attention_norm,
            "output": weights.output_norm,
            "q": weights.q_norm,
            "k": weights.k_norm,
        }
        for name, norm in norms.items():
            if norm is not None:  # loaded twice in a row, as torch's kernels want them
                library.set_vector(model, index, name, norm[: len(norm) // 2])
        vectors = {"taps": weights.taps, "taps_bias": weights.taps_bias, "sinks": weights.sinks}
        if experts is not None:
            vectors["router_bias"] = experts.choice_bias
        if weights.linear is not None:
            self._pack(index, "rates", weights.linear.rates)
            vectors |= {"decay": weights.linear.decay, "dt_bias": weights.linear.dt_bias}
            vectors |= {"gated": weights.linear.norm, "skip": weights.linear.skip}
        for name, vector in vectors.items():
            if vector is not None:
                library.set_vector(model, index, name, vector.ravel())

    def _set_layer(self, index: int) -> None:
        """Set a layer's mixer, MLP, window and rotary table."""
        a, window = self.shape, self.shape.windows[index]
        # A window beyond the longest sequence hides nothing.
        seen = None if window is None else min(window, self.max_length)
        kind = a.kinds[index]
        table = -1 if kind == STILL else self._tables.index((kind, False))
        mixer = MIXERS[a.mixers[index]]
        mlp = MLPS["mixture" if a.sparse[index] else "dense" if a.mlps[index] else "none"]
        self.library.set_layer(self.handle, index, mixer, mlp, seen, table)

    def added_bytes(self, beside: RowsModel | None) -> int:
        """See ``base.Model``; norms and rotary tables do not count."""
        near = beside if isinstance(beside, NativeModel) else None
        if near is not None and near.library.isa != self.library.isa:
            near = None
        own = self.embedding
        held = own is None or (near is not None and own is near.embedding)
        packed = self.library.weight_bytes(self.handle, None if near is None else near.handle)
        return packed + (0 if held or own is None else own.nbytes)

    def page_bytes(self, page_size: int) -> int:
        """Return the bytes of cache that a page of this model takes."""
        return self.library.page_bytes(self.handle, page_size)

    def state_bytes(self, drafted: int) -> int:
        """See ``base.RowsModel``; states are fp32."""
        return 4 * self.shape.state_size(drafted) + self.kept_state_bytes

    @property
    def kept_state_bytes(self) -> int:
        """See ``base.RowsModel``."""
        return 4 * self.shape.state_size(0)

    def new_store(self, num_pages: int, page_size: int) -> NativeStore:
        """Return an empty cache for this model."""
        store = NativeStore(self.library, self.handle, self.shape, num_pages, page_size)
        self._turn(store.num_slots)
        return store

    @property
    def _drafted(self) -> int:
        """The number of logits that drafts are drawn from."""
        return self.likely or self.shape.vocab_size

    def try_rows(self, count: int, store: Store) -> None:
        rows = lone_rows(count, self.shape.vocab_size)
        if self.shape.stateful:  # in as few sequences as may be, since each takes much memory
            rows = [*_long_rows(count, self.max_length, store.page_size)]
        self.forward(rows, store, vocabulary=self._drafted)

    def _states(self, segments: Sequence[Segment]) -> NDArray[np.float32] | None:
        """Return the states that rows take as input, None if they take only embeddings."""
        return None

    def _num_rows(self, segments: Sequence[Segment]) -> int:
        """Return how many rows go through layers."""
        return sum(len(segment.tokens) + len(segment.nodes) for segment in segments)

    def forward(
        self,
        segments: Sequence[Segment],
        store: Store,
        sublayers: Sequence[int] | None = None,
        hidden: Sequence[int] = (),
        wanted: int | None = None,
        vocabulary: int | None = None,
    ) -> Output:
        """Return the model's own logits and the ``hidden`` states, both fp32.

        ``wanted`` replaces the number of logits' rows that segments want. Logits are of all ids, or
        of likely ones if ``vocabulary`` is their number. ``sublayers``: None runs all.
        """
        assert isinstance(store, NativeStore)
        if wanted is None:
            wanted = sum(segment.logits for segment in segments)
        words, states = words_of(segments, store.slots(segments)), self._states(segments)
        rows = self._num_rows(segments)
        logits = np.empty((wanted, vocabulary or self.shape.vocab_size), np.float32)
        kept = np.empty((len(hidden), rows, self.hidden_size), np.float32)
        if sublayers is None:
            sublayers = range(2 * self.hidden_layers)
        handles = self.handle, store.handle
        self.library.forward(*handles, words, sublayers, hidden, logits, kept, states)
        return Output(logits if wanted else None, dict(zip(hidden, kept, strict=True)))

    def draft(
        self,
        segments: Sequence[Segment],
        store: Store,
        inputs: Sequence[DraftInput | None],
        noise: Noise,
        needs_logits: bool = False,
        sublayers: Sequence[int] = (),
    ) -> list[DraftNodes]:
        """See ``base.RowsModel``; what needs no Python is drafted in one call.

        C++ calls back for a grammar's masks, which depend on the drafted tokens. Empty
        ``sublayers``, see ``Library.forward``, run all; drafting in Python always runs all.
        """
        assert isinstance(store, NativeStore)
        native = isinstance(noise, NativeNoise) and not needs_logits
        pipelines: list[int] = []
        limits: list[DraftBudget] = []
        planted = False
        before: list[int] = []
        drafting: list[int] = []
        masks: dict[int, AllowedAfter] = {}
        fast: list[Segment] = []
        slow: list[int] = []
        for i, asked in enumerate(inputs):
            if asked is not None:
                pipeline = asked.sequence.pipeline
                if not native or not pipeline.native_handle:
                    slow.append(i)
                    continue
                if pipeline.penalises:
                    assert isinstance(pipeline, NativePipeline)
                    pipeline.know(asked.sequence.tokens)
                if pipeline.has_grammar:
                    masks[len(drafting)] = allowed_after(asked.sequence, noise.vocab_size)
                pipelines.append(pipeline.native_handle)
                limits.append(asked.limits)
                tokens, position = asked.sequence.tokens, asked.position
                before.append(len(tokens) if position is None else position)
                planted |= segments[i].planted is not None
                drafting.append(i)
            fast.append(segments[i])
        most = max([limit.nodes for limit in limits], default=1)
        within("a draft's length", most, 1, store.num_slots)
        nodes = [DraftNodes([], [])] * len(segments)
        if fast:
            words = words_of(fast, store.slots(fast))
            laws = [planted_of(segments[i]) for i in drafting] if planted else ()
            vocabulary = self.shape.vocab_size if planted else self._drafted
            drafts = self.library.draft(
                *(self.handle, store.handle, words, vocabulary, pipelines, limits, laws),
                masks=masks,
                mask_bytes=mask_bytes(noise.vocab_size) if masks else 0,
                states=self._states(fast),
                sublayers=sublayers,
                before=before,
            )
            for i, drafted in zip(drafting, drafts, strict=True):
                nodes[i] = drafted
        if slow:
            some = [segments[i] for i in slow], [inputs[i] for i in slow]
            drafts = self._in_python(store, needs_logits)(*some, noise)
            for i, drafted in zip(slow, drafts, strict=True):
                nodes[i] = drafted
        return nodes

    @abstractmethod
    def _in_python(self, store: Store, needs_logits: bool) -> PythonDraft:
        """Return the function that drafts where Python processes logits."""


def _long_rows(count: int, longest: int, page_size: int) -> Iterator[Segment]:
    """Yield sequences of up to ``longest`` rows, ``count`` in all, each on pages of its own."""
    each = -(-min(count, longest) // page_size)
    for number, first in enumerate(range(0, count, longest)):
        rows, pages = min(longest, count - first), range(number * each, (number + 1) * each)
        yield Segment([1] * rows, 0, pages, rows, rows, key=str(number))


def words_of(segments: Sequence[Segment], slots: Iterable[int] = repeat(0)) -> array[int]:
    """Return ``segments`` and their states' slots in the library's format, see outrider.h."""
    words = array("i")
    try:
        for segment, slot in zip(segments, slots, strict=False):
            tokens, start, pages, logits, prompt, nodes, parents, _, _, first, _ = segment
            sizes = len(tokens), len(nodes), start, len(pages), logits, first, prompt, slot
            words.extend((*sizes, *tokens, *nodes, *parents))
            words.extend(pages)
    except (OverflowError, TypeError) as error:
        raise ModelError(f"a segment has a number that is not of 32 bits ({error}).") from None
    return words
