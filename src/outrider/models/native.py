"""A checkpoint that the native step runs: ``Transformer``'s model, in C++."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ..base.config import Recipe
from ..base.limits import LARGEST_INT
from ..checkpoints.architecture import Architecture, Mixture
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.configs import ModelConfig
from ..checkpoints.dtypes import DTYPES as NAMED
from ..checkpoints.dtypes import Array, native_dtype
from ..checkpoints.rope import STILL, rope_parameters
from ..checkpoints.weights import SLOW_TO_QUANTISE, Loader, layer_numbers
from ..native.interface import DTYPES, GATES, TABLES
from ..native.library import Library
from ..native.native_sampling import NativeNoise, NativePipeline
from ..sampling.shared_noise import Noise
from .base import Model, Output, Store
from .decide import EMPTY, Keep, SampleInput, Samples, grammar_masks, sample_in_python, with_kept
from .kept_weights import Kept
from .native_model import NativeModel, PythonDraft, rope_tables, step_config, words_of
from .native_store import NativeStore
from .python_step import draft_in_python
from .rows import Segment, planted_of

LARGEST_HEAD = 256
LANES, MOST_TAPS, MOST_KEY_DIM, MOST_STATE = 16, 8, 256, 1 << 24
"""Channels of layers with states are a multiple of the first. The others are limits: tokens that a
convolution spans, elements of a key, and channels of a linear attention's convolution."""
SLOW_TO_LOAD = 1 << 30
"""Weights of this many elements and more are loaded under a progress bar."""


def covers(config: ModelConfig, architecture: Architecture, dtype: np.dtype[Any]) -> bool:
    """Return True if the native step has everything that a checkpoint needs."""
    a = architecture
    ropes = _rope_types(config, a)
    return (
        dtype in DTYPES
        and a.activation in GATES  # RELU2 in families without gates alone
        and (a.mixture is None or _mixes(a, a.mixture))
        and a.head_dim <= LARGEST_HEAD
        and (not a.stateful or _keeps_states(a))
        and len(a.attending) > 0
        and len(rope_tables(a.kinds, "longrope" in ropes)) <= TABLES
        and "dynamic" not in ropes
    )


def _mixes(a: Architecture, mixture: Mixture) -> bool:
    """Return whether the native step runs a model's mixtures: widths are multiples of ``LANES``."""
    return a.hidden_size % LANES == 0 and mixture.width % LANES == 0


def _keeps_states(a: Architecture) -> bool:
    """Return whether the native step runs a model's layers with states."""
    linear = a.linear
    if linear is None:
        fits = a.hidden_size % LANES == 0 and 3 * a.hidden_size <= LARGEST_INT
    else:
        sizes = linear.key_dim, linear.value_dim
        fits = all(size % LANES == 0 for size in sizes) and linear.key_dim <= MOST_KEY_DIM
        fits = fits and linear.conv_width <= MOST_STATE
    return a.conv_taps <= MOST_TAPS and fits


def _rope_types(config: ModelConfig, a: Architecture) -> set[str]:
    kinds = set(a.kinds) - {STILL}
    return {str(rope_parameters(config, kind).get("rope_type", "default")) for kind in kinds}


def _far(config: ModelConfig, a: Architecture, max_length: int) -> int:
    """Return the length beyond which longrope rotates rows otherwise; 0 if none is that long."""
    if "longrope" not in _rope_types(config, a):
        return 0
    trained = int(rope_parameters(config)["original_max_position_embeddings"])
    return trained if trained < max_length else 0


def same_bits(a: Array, b: Array) -> bool:
    """Return whether arrays are the same to the bit."""
    return a.dtype == b.dtype and np.array_equal(a.view(np.uint8), b.view(np.uint8))


def is_native(checkpoint: Checkpoint, dtype: str = "auto") -> bool:
    """Return True if the native step runs a checkpoint in a dtype, "auto" for its own."""
    a = checkpoint.architecture
    if a is None or dtype not in ("auto", *NAMED):
        return False
    return covers(checkpoint.config, a, native_dtype(dtype, a.dtype))


class NativeTransformer(NativeModel, Model):
    """A checkpoint of a family that ``covers`` admits.

    Every row goes through the same kernels in the same order of summation, whatever the batch: its
    logits are bit-equal in any batch, on one instruction set. Sums are fp32. An embedding or head
    that is bit-equal to that of another model, ``beside``, is shared with it. With ``coarse``,
    activations get 8 bits beside few-bit weights, not 16. Weights come from ``kept`` if it has
    them. With ``coded_cache``, keys and values are codes of 8 bits.
    """

    truncates = True

    def __init__(
        self,
        library: Library,
        checkpoint: Checkpoint,
        dtype: np.dtype[Any],
        max_length: int,
        recipe: Recipe | None = None,
        beside: NativeTransformer | None = None,
        coarse: bool = False,
        kept: Kept | None = None,
        coded_cache: bool = False,
    ) -> None:
        a = checkpoint.architecture
        assert a is not None
        self.hidden_layers, self.hidden_size = a.num_layers, a.hidden_size
        self.coarse = coarse
        if beside is not None and beside.library.isa != library.isa:
            beside = None
        near = None if beside is None else beside.handle
        config = step_config(a, dtype, max_length, coarse)
        config.far = _far(checkpoint.config, a, max_length)
        config.coded_cache = coded_cache
        # Keys that are rotated by the prompt's length can serve that prompt only.
        self.paged = not config.far
        self.trees = not a.stateful
        self.kept = kept
        if kept is not None and kept.there:
            super().__init__(library, a, config, dtype, None, checkpoint.config)
            for index in range(a.num_layers):
                self._set_layer(index)
            if kept.take(library, self.handle, near):
                library.check(self.handle)
                return
        loader = Loader(checkpoint.tensors, a, dtype, True, recipe)
        table, embedding = loader.table(), None
        # A tied head is the only copy, and tokens are looked up in it. Nor is one kept beside a
        # model with a packed embedding, with which it could not be compared.
        plain = beside is None or beside.embedding is not None
        if isinstance(table, np.ndarray) and not a.tied and plain:
            embedding = np.ascontiguousarray(table)
            theirs = None if beside is None else beside.embedding
            if theirs is not None and same_bits(embedding, theirs):
                embedding = theirs
        super().__init__(library, a, config, dtype, embedding, checkpoint.config)
        self._pack(0, "head", loader.head(table), None, near)
        if embedding is None and not a.tied:
            self._pack(0, "embedding", table, None, near)
        del table  # before the layers come
        slow = SLOW_TO_LOAD if recipe is None else SLOW_TO_QUANTISE
        for index in layer_numbers(a, "Packing weights", slow):
            self._load_layer(loader, index)
        library.set_vector(self.handle, 0, "final", loader.norm("model.norm")[: a.hidden_size])
        library.check(self.handle)
        if recipe is not None:
            self.keep()

    def keep(self) -> None:
        """Save the packed weights for later starts, if that is wanted and worth it."""
        if self.kept is not None and self.embedding is None:
            self.kept.keep(self.library, self.handle)

    def run(self, segments: Sequence[Segment], store: Store, hidden: Sequence[int] = ()) -> Output:
        """See ``base.Model``; hidden states are fp32. Raises ModelError."""
        return self.forward(segments, store, None, hidden)

    def decide(
        self,
        segments: Sequence[Segment],
        store: Store,
        inputs: Sequence[SampleInput | None],
        noise: Noise | None,
        hidden: Sequence[int] = (),
    ) -> Samples:
        """See ``base.Model``; rows that need no Python are decided in the forward's own call.

        Python handles rows with a processor or bad words of several tokens, and rows after drafted
        tokens that penalties count. Grammars are passed as masks.
        """
        assert isinstance(store, NativeStore)
        native = isinstance(noise, NativeNoise)
        pipelines: list[int] = []
        keeps: list[bool] = []
        slow: list[int] = []
        grammars: list[int] = []
        planted = False
        rows = kept = keeping = 0
        for i, asked in enumerate(inputs):
            if asked is None:
                continue
            segment, pipeline, keep = segments[i], asked.sequence.pipeline, asked.keep
            count = segment.logits
            handle = pipeline.native_handle if native and count == 1 + len(segment.nodes) else 0
            if handle and (keep or pipeline.penalises or not asked.samples):
                handle = self._handle(asked)
            if not handle:
                slow.append(i)
            elif pipeline.has_grammar:
                grammars.append(i)
            pipelines.append(handle)
            planted |= segment.planted is not None
            keeps.append(keep == Keep.RAW and handle != 0)
            kept += keeps[-1] * count
            keeping += keep
            rows += count
        masks = grammar_masks(segments, inputs, grammars, slow, pipelines) if grammars else ()
        room, states = store.room(rows + kept), EMPTY
        layers, first = None, 0
        if hidden:
            count = sum([len(segment.tokens) + len(segment.nodes) for segment in segments])
            states = store.hidden_room(hidden, count)
            layers, first = states.room, states.first
        tokens, scores = self.library.decide(
            self.handle,
            store.handle,
            words_of(segments, store.slots(segments)),
            array("Q", pipelines),
            rows,
            room,
            masks,
            keeps if kept else (),
            layers,
            first,
            [planted_of(s) for s, a in zip(segments, inputs, strict=True) if a] if planted else (),
        )
        samples = Samples(tokens, scores, room.array, hidden=states)
        if keeping:
            samples = with_kept(samples, segments, inputs, slow)
        if slow:
            samples = samples._replace(logits=room.array[:rows])
            samples = sample_in_python(samples, segments, inputs, slow, noise)
        return samples

    def _handle(self, asked: SampleInput) -> int:
        """Return the handle of an input's pipeline; 0 where Python must process its rows."""
        pipeline = asked.sequence.pipeline
        assert isinstance(pipeline, NativePipeline)
        if not asked.samples or (pipeline.penalises and asked.drafted):
            return 0
        if asked.keep == Keep.PROCESSED and pipeline.vocab_size != self.shape.vocab_size:
            return 0
        pipeline.know(asked.sequence.tokens)
        return pipeline.native_handle

    def _in_python(self, store: Store, needs_logits: bool) -> PythonDraft:
        return partial(draft_in_python, self, store, needs_logits)
