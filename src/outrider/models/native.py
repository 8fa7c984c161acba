"""A checkpoint that the native step runs: ``Transformer``'s model, in C++."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..base.config import Recipe
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.dtypes import native_dtype
from ..checkpoints.families import Architecture
from ..checkpoints.quantize import Matrix, Quantized
from ..checkpoints.rope import BY_LENGTH, Rope, rope_parameters
from ..checkpoints.weights import SLOW_TO_QUANTISE, Loader, Mlp, layer_numbers
from ..errors import ModelError
from ..native.checks import free_with, within
from ..native.interface import DTYPES, TABLES, Config, DraftLimits
from ..native.library import Library
from ..native.masks import AllowedAfter
from ..native.native_sampling import NativeNoise, NativePipeline
from ..sampling.shared_noise import Noise
from .base import Model, Output, Store
from .decide import (
    DraftInput,
    DraftNodes,
    Keep,
    SampleInput,
    Samples,
    allowed_after,
    grammar_masks,
    mask_bytes,
    sample_in_python,
    with_kept,
)
from .native_store import NativeStore
from .planted import entries
from .rows import Segment
from .tree_draft import draft_in_python

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LARGEST_HEAD = 256
SLOW_TO_LOAD = 1 << 30
"""Weights of this many elements and more are loaded under a progress bar."""


def covers(config: PretrainedConfig, architecture: Architecture, dtype: torch.dtype) -> bool:
    """Return True if the native step has everything that a checkpoint needs."""
    a = architecture
    ropes = {str(rope_parameters(config, kind).get("rope_type", "default")) for kind in a.kinds}
    return (
        dtype in DTYPES
        and a.activation == "silu"
        and not a.gemma
        and a.attention_cap is None
        and a.logits_cap is None
        and not any(a.sparse)
        and a.head_dim <= LARGEST_HEAD
        and len(set(a.kinds)) <= TABLES
        and not ropes & set(BY_LENGTH)
    )


def is_native(checkpoint: Checkpoint) -> bool:
    """Return True if the native step runs a checkpoint in its own dtype."""
    a = checkpoint.architecture
    return a is not None and covers(checkpoint.config, a, native_dtype("auto", a.dtype))


class NativeTransformer(Model):
    """A checkpoint of a family that ``covers`` admits.

    Every row goes through the same kernels in the same order of summation, whatever comes along:
    its logits are bit-equal in any company, on one instruction set.

    Args:
        library: whose step runs it.
        checkpoint: of a native family.
        dtype: of weights and cache, see ``dtypes.native_dtype``; sums are fp32.
        max_length: positions of a sequence at most.
        recipe: makes the weights few-bit.
        beside: a model that is there already; an embedding or head that is the same in both, to the
            bit as they are held, is held once.

    Raises:
        ModelError: the checkpoint is damaged.
    """

    trees = True
    paged = True
    truncates = True
    device = torch.device("cpu")
    shape: Architecture
    coarse: bool
    """Whether quantised matrices take activations of 8 bits."""

    def __init__(
        self,
        library: Library,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        max_length: int,
        recipe: Recipe | None = None,
        beside: NativeTransformer | None = None,
    ) -> None:
        self.dtype = dtype
        assert checkpoint.architecture is not None
        self.shape = a = checkpoint.architecture
        self.hidden_layers, self.hidden_size = a.num_layers, a.hidden_size
        self.library = library
        kinds = list(dict.fromkeys(a.kinds))
        source = checkpoint.tensors
        loader = Loader(source, a, self.dtype, self.device, torch.Tensor.contiguous, True, recipe)
        if beside is not None and beside.library is not library:
            beside = None
        embedding = loader.table()
        # Tied, the head is the only copy, and tokens are looked up in it.
        self.embedding: torch.Tensor | None = None
        self.shared_bytes = 0
        """Bytes of embedding and head that the other model holds too."""
        # Not beside a packed one, which could not be compared with it.
        plain = beside is None or beside.embedding is not None
        if isinstance(embedding, torch.Tensor) and not a.tied and plain:
            self.embedding = self._held(embedding, beside)
        self.coarse = recipe is not None and recipe.coarse
        self.handle = library.new_model(self._config(max_length), self.embedding)
        free_with(self, library.free, "model", self.handle)
        near = None if beside is None else beside.handle
        self._set(0, "head", loader.head(embedding), None, near)
        if self.embedding is None and not a.tied:
            self._set(0, "embedding", embedding, None, near)
        del embedding  # before the layers come
        if near is not None:
            self.shared_bytes += library.shared(self.handle, near)
        self._turning = checkpoint.config, kinds
        self.max_length, self._turned = max_length, 0
        self._turn(1)
        slow = SLOW_TO_LOAD if recipe is None else SLOW_TO_QUANTISE
        for index in layer_numbers(a, "Packing weights", slow):
            self._load_layer(loader, index, kinds.index(a.kinds[index]))
        library.set_vector(self.handle, 0, "final", loader.norm("model.norm")[: a.hidden_size])
        library.check(self.handle)

    def _config(self, max_length: int) -> Config:
        a = self.shape
        return Config(
            dtype=DTYPES[self.dtype],
            layers=a.num_layers,
            hidden=a.hidden_size,
            inner=a.intermediate_size,
            heads=a.num_heads,
            kv_heads=a.num_kv_heads,
            head_dim=a.head_dim,
            vocabulary=a.vocab_size,
            max_length=max_length,
            norm_eps=a.norm_eps,
            scale=a.scale,
            embedding_scale=a.embedding_scale,
            residual_scale=a.residual_scale,
            logits_scale=a.logits_scale,
            coarse=self.coarse,
        )

    def _turn(self, length: int) -> None:
        """Let the rotary tables reach ``length`` positions, as far as sequences do."""
        length = min(length, self.max_length)
        if length <= self._turned:
            return
        config, kinds = self._turning
        for number, kind in enumerate(kinds):
            rope = Rope(config, length, torch.float32, self.device, kind)
            self.library.set_rotary(self.handle, number, *rope.halves())
        self._turned = length

    def _held(self, embedding: torch.Tensor, beside: NativeTransformer | None) -> torch.Tensor:
        """``embedding`` [vocabulary, hidden], or that of ``beside`` where it is the same."""
        theirs = None if beside is None else beside.embedding
        mine = embedding.contiguous()
        if theirs is None or theirs.dtype != mine.dtype:
            return mine
        if not torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)):
            return mine
        self.shared_bytes = theirs.nbytes
        return theirs

    def _load_layer(
        self, loader: Loader, index: int, table: int, inputs: int | None = None
    ) -> None:
        """Pack one layer; what was read is dropped before the next, so that memory stays single."""
        library, model, a = self.library, self.handle, self.shape
        weights = loader.layer(index, inputs)
        mlp = weights.mlp
        assert isinstance(mlp, Mlp)
        for kind, matrix, bias in (
            ("qkv", weights.qkv, weights.qkv_bias),
            ("output", weights.output, weights.output_bias),
            ("gate_up", mlp.gate_up, mlp.gate_up_bias),
            ("down", mlp.down, mlp.down_bias),
        ):
            self._set(index, kind, matrix, bias)
        window = a.windows[index]  # one beyond the longest sequence hides nothing
        seen = None if window is None else min(window, self.max_length)
        library.set_layer(model, index, seen, table)
        # Norms stand twice, as torch's kernels want them.
        library.set_vector(model, index, "input", weights.input_norm[: a.hidden_size])
        library.set_vector(model, index, "mlp", weights.mlp_norm[: a.hidden_size])
        if weights.q_norm is not None and weights.k_norm is not None:
            library.set_vector(model, index, "q", weights.q_norm[: a.head_dim])
            library.set_vector(model, index, "k", weights.k_norm[: a.head_dim])

    def _set(
        self,
        index: int,
        kind: str,
        matrix: Matrix,
        bias: torch.Tensor | None,
        beside: int | None = None,
    ) -> None:
        if isinstance(matrix, Quantized):
            parts = matrix.codes, matrix.scales, matrix.zeros, matrix.bits, matrix.group
            self.library.set_quantized(self.handle, index, kind, *parts, bias, beside)
        else:
            self.library.set_matrix(self.handle, index, kind, matrix, bias, beside)

    def added_bytes(self, beside: Model | None) -> int:
        """See ``base.Model``; norms and rotary tables do not count."""
        near = beside if isinstance(beside, NativeTransformer) else None
        if near is not None and near.library is not self.library:
            near = None
        own = self.embedding
        held = own is None or (near is not None and own is near.embedding)
        packed = self.library.weight_bytes(self.handle, None if near is None else near.handle)
        return packed + (0 if held or own is None else own.nbytes)

    def page_bytes(self, page_size: int) -> int:
        """Return the bytes of cache that a page of this model takes."""
        return self.library.page_bytes(self.handle, page_size)

    def new_store(self, num_pages: int, page_size: int) -> NativeStore:
        """Return an empty cache for this model.

        Rotary tables grow with it: no sequence is longer than the cache, and the longest context of
        a model can take more memory than all its weights.
        """
        store = NativeStore(self.library, self.handle, self.shape, num_pages, page_size)
        self._turn(store.num_slots)
        return store

    def run(self, segments: Sequence[Segment], store: Store, hidden: Sequence[int] = ()) -> Output:
        """See ``base.Model``; hidden states are fp32.

        Raises:
            ModelError: a token, page, position or layer is out of range.
        """
        assert isinstance(store, NativeStore)
        wanted = sum(segment.logits for segment in segments)
        rows = sum(len(segment.tokens) + len(segment.nodes) for segment in segments)
        s = self.shape
        logits = torch.empty(wanted, s.vocab_size)
        kept = torch.empty(len(hidden), rows, s.hidden_size)
        words, sublayers = words_of(segments), range(2 * s.num_layers)
        self.library.forward(self.handle, store.handle, words, sublayers, hidden, logits, kept)
        return Output(logits if wanted else None, dict(zip(hidden, kept, strict=True)))

    def run_some(self, segment: Segment, store: Store, sublayers: Sequence[int]) -> torch.Tensor:
        """Return the logits of a segment's rows by some sublayers, as of ``Library.forward``.

        The cache is filled in the layers whose attention is run. Raises what ``run`` does.
        """
        assert isinstance(store, NativeStore)
        logits = torch.empty(segment.logits, self.shape.vocab_size)
        kept = torch.empty(0, len(segment.tokens) + len(segment.nodes), self.shape.hidden_size)
        words = words_of([segment])
        self.library.forward(self.handle, store.handle, words, sublayers, (), logits, kept)
        return logits

    def decide(
        self,
        segments: Sequence[Segment],
        store: Store,
        inputs: Sequence[SampleInput | None],
        noise: Noise | None,
        hidden: Sequence[int] = (),
    ) -> Samples:
        """See ``base.Model``; rows that need no Python are decided in the forward's own call.

        Python has a say in rows with a processor or bad words of several tokens, and in rows behind
        drafted tokens that penalties count. What a grammar has to say comes as masks.

        Raises:
            ModelError: a token, page, position or layer is out of range.
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
        room, states = store.room(rows + kept), None
        if hidden:
            count = sum(len(segment.tokens) + len(segment.nodes) for segment in segments)
            states = store.hidden_room(hidden, count)
        tokens, scores = self.library.decide(
            self.handle,
            store.handle,
            words_of(segments),
            array("Q", pipelines),
            rows,
            room,
            masks,
            keeps if kept else (),
            None if states is None else states.room,
            0 if states is None else states.first,
            [entries(s) for s, a in zip(segments, inputs, strict=True) if a] if planted else (),
        )
        samples = Samples(tokens, scores, room.tensor)
        if states is not None:
            samples = samples._replace(hidden=states)
        if keeping:
            samples = with_kept(samples, segments, inputs, slow)
        if slow:
            samples = samples._replace(logits=room.tensor[:rows])
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

    def _states(self, segments: Sequence[Segment]) -> torch.Tensor | None:
        """Return the states that rows begin with, None where they begin with an embedding."""
        return None

    def draft(
        self,
        segments: Sequence[Segment],
        store: Store,
        inputs: Sequence[DraftInput | None],
        noise: Noise,
        needs_logits: bool = False,
        sublayers: Sequence[int] = (),
    ) -> list[DraftNodes]:
        """See ``base.Model``; chains that need no Python are drafted in one call.

        A chain also ends where its pipeline leaves nothing to draw. C++ calls back for a grammar's
        masks, which follow from what was drafted. Of ``sublayers``, as of ``Library.forward``, none
        stand for all; Python runs all.

        Raises:
            ModelError: a token, page or position is out of range.
        """
        assert isinstance(store, NativeStore)
        native = isinstance(noise, NativeNoise) and not needs_logits
        pipelines: list[int] = []
        limits: list[DraftLimits] = []
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
                    self._handle(SampleInput(asked.sequence))
                if pipeline.has_grammar:
                    masks[len(drafting)] = allowed_after(asked.sequence, noise.vocab_size)
                pipelines.append(pipeline.native_handle)
                limits.append(asked.limits)
                before.append(len(asked.sequence.tokens))
                planted |= segments[i].planted is not None
                drafting.append(i)
            fast.append(segments[i])
        most = max([limit.nodes for limit in limits], default=1)
        within("a draft's length", most, 1, store.num_slots)
        nodes = [DraftNodes([], [])] * len(segments)
        if fast:
            words = words_of(fast)
            laws = [entries(segments[i]) for i in drafting] if planted else ()
            drafts = self.library.draft(
                *(self.handle, store.handle, words, pipelines, limits, laws),
                masks=masks,
                mask_bytes=mask_bytes(noise.vocab_size) if masks else 0,
                states=self._states(fast),
                sublayers=sublayers,
                before=before,
            )
            for i, drafted in zip(drafting, drafts, strict=True):
                nodes[i] = drafted
        if slow:
            some = [segments[i] for i in slow], store, [inputs[i] for i in slow]
            drafts = self._in_python(*some, noise, needs_logits)
            for i, drafted in zip(slow, drafts, strict=True):
                nodes[i] = drafted
        return nodes

    def _in_python(
        self,
        segments: Sequence[Segment],
        store: Store,
        inputs: Sequence[DraftInput | None],
        noise: Noise,
        needs_logits: bool,
    ) -> list[DraftNodes]:
        """See ``draft``; drafts where Python processes logits."""
        return draft_in_python(self, segments, store, inputs, noise, needs_logits)


def words_of(segments: Sequence[Segment]) -> array[int]:
    """``segments`` as the library reads them, see src/api.cpp."""
    words = array("i")
    try:
        for tokens, start, pages, logits, _, nodes, parents, _, _, first, _ in segments:
            sizes = len(tokens), len(nodes), start, len(pages), logits, first
            words.extend((*sizes, *tokens, *nodes, *parents))
            words.extend(pages)
    except (OverflowError, TypeError) as error:
        raise ModelError(f"a segment has a number that is not of 32 bits ({error}).") from None
    return words
