"""One native library: its functions over ctypes."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..base.limits import LARGEST_INT
from ..errors import ModelError
from ..sampling.logprobs import Measured
from .checks import (
    LayerRoom,
    Room,
    as_float32,
    at,
    expect,
    int32s,
    refused,
    same_length,
    wide_bias,
    within,
)
from .interface import (
    ABI,
    ASK_MASK,
    DTYPES,
    FUNCTIONS,
    MATRICES,
    SUFFIX_DEPTH,
    VECTORS,
    Config,
    DraftLimits,
    DraftNodes,
    Followed,
    Options,
    Planted,
    QuantizedData,
)
from .masks import NO_MASKS, AllowedAfter, MaskCalls

LIMITS = struct.Struct("=4i2f2Q")
"""A ``DraftLimits`` as C++ reads it, its rates and choices by their addresses."""
PEAKS = ("float32", "bfloat16", "digits of 16", "digits of 8", "digits of 8 by codes of 4")
"""Kinds of products, as src/peak.cpp numbers them: digits are what rows become beside few bits."""
KNOWN_LIMITS = 1024
"""Limits that stay packed; those of one step come again in the next."""


@lru_cache(KNOWN_LIMITS)
def _packed(limits: DraftLimits) -> bytes:
    *numbers, rates, choices = limits
    tables = [0 if each is None else each.pointer for each in (rates, choices)]
    return LIMITS.pack(*numbers, *tables)


def _planted(segments: Sequence[Planted | None]) -> array[int]:
    """Return what is planted as C++ reads it: see src/planted.hpp."""
    words = array("q")
    for each in segments:
        if each is None:
            words.extend((0,) * 6)
            continue
        ids, z, rest, first = each
        count, columns = within("planted entries", len(ids), 1, LARGEST_INT), ids.shape[-1]
        expect(ids, (count, columns), torch.int64)
        expect(z, (count, columns), torch.float32)
        expect(rest, (count,), torch.float32)
        within("a planted position", first, 0, LARGEST_INT)
        words.extend((ids.data_ptr(), z.data_ptr(), rest.data_ptr(), count, columns, first))
    return words


class Library:
    """One loaded library: models, caches, forwards, pipelines, draws, suffixes.

    Its pool of threads starts with the first model.

    Args:
        isa: one of ``ISAS``.
        file: where it is.

    Raises:
        OSError: it cannot be loaded, or was built from other sources.
    """

    def __init__(self, isa: str, file: Path) -> None:
        self.isa = isa
        self._c = loaded = ctypes.CDLL(str(file))
        try:
            if loaded.outrider_abi() != ABI:
                raise OSError(f"{file} was built from other sources; install Outrider again")
            for name, (result, arguments) in FUNCTIONS.items():
                function = getattr(loaded, f"outrider_{name}")
                function.restype, function.argtypes = result, arguments
        except AttributeError as error:
            raise OSError(f"{file} was built from other sources ({error})") from None

    def sets(self) -> int:
        """Return which of ``ISAS`` this CPU can run, a bit each, the first in the lowest bit."""
        return int(self._c.outrider_cpu())

    @property
    def nanoseconds(self) -> int:
        """Time that this process has spent in the library's calls, ns."""
        return int(self._c.outrider_spent())

    def _run(self, function: Any, *arguments: Any) -> None:
        try:
            wrong = function(*arguments)
        except ctypes.ArgumentError as error:
            raise refused(error) from None
        if wrong is not None:
            raise ModelError(f"the native step refused its input: {wrong.decode()}.")

    def _made(self, function: Any, *arguments: Any) -> int:
        """Return the object or number that a function writes to its last argument."""
        made = ctypes.c_int64()
        self._run(function, *arguments, ctypes.byref(made))
        return made.value

    def start(self, threads: int) -> int:
        """Start the pool, at the first call only.

        Returns:
            How many threads it has: fewer than asked for where the system starts no more.
        """
        return int(self._c.outrider_start(within("threads", threads, 1, LARGEST_INT)))

    def new_model(self, config: Config, embedding: torch.Tensor | None) -> int:
        """Return a model without weights; ``embedding`` [embeddings, hidden] must outlive it.

        None where embeddings are tied: tokens are looked up in the head.
        """
        if embedding is not None:
            dtype = next((d for d, number in DTYPES.items() if number == config.dtype), None)
            expect(embedding, (config.embeddings or config.vocabulary, config.hidden), dtype)
        rows = None if embedding is None else embedding.data_ptr()
        return self._made(self._c.outrider_model, ctypes.byref(config), rows)

    def free(self, kind: str, handle: int) -> None:
        """Give the memory of a model, store or pipeline back, once nothing uses it any more."""
        getattr(self._c, f"outrider_{kind}_free")(handle)

    def set_matrix(
        self,
        model: int,
        layer: int,
        kind: str,
        data: torch.Tensor,
        bias: torch.Tensor | None,
        beside: int | None = None,
    ) -> None:
        """Pack ``data`` [out, in], in the model's dtype, with ``bias`` [out].

        A head or embedding that is the same to the bit in the model ``beside`` is held once; either
        model may be freed first.

        Raises:
            ModelError: shape or dtype are not the model's.
        """
        expect(data, tuple(data.shape[:2]), data.dtype if data.dtype in DTYPES else None)
        wide = wide_bias(bias, data.shape[0])
        self._run(
            self._c.outrider_matrix,
            model,
            layer,
            MATRICES[kind],
            data.data_ptr(),
            DTYPES[data.dtype],
            None if wide is None else wide.data_ptr(),
            *data.shape,
            beside,
        )

    def set_quantized(
        self,
        model: int,
        layer: int,
        kind: str,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        bits: int,
        group: int,
        bias: torch.Tensor | None,
        beside: int | None = None,
    ) -> None:
        """Pack a quantised matrix in place of one of the model's dtype, see ``set_matrix``.

        The parts are those of ``models.quantize.Quantized``, ``codes`` [out, in]. Scales are kept
        as fp16 times one power of two, which is exact for what was fp16 or bf16 and within 2^28 of
        the largest.

        Raises:
            ModelError: shapes or dtypes do not fit together, a scale is not finite, or a code or
                zero has more bits than ``bits``.
        """
        out, width = codes.shape
        groups = -(-width // max(1, group))
        codes, scales = codes.contiguous(), scales.contiguous()
        expect(codes, (out, width), torch.uint8)
        expect(scales, (out, groups), torch.float32)
        if zeros is not None:
            zeros = zeros.contiguous()
            expect(zeros, (out, groups), torch.uint8)
        wide = wide_bias(bias, out)
        given = QuantizedData(
            codes=codes.data_ptr(),
            scales=scales.data_ptr(),
            zeros=None if zeros is None else zeros.data_ptr(),
            bits=bits,
            group=group,
            groups=groups,
        )
        self._run(
            self._c.outrider_quantized,
            model,
            layer,
            MATRICES[kind],
            ctypes.byref(given),
            None if wide is None else wide.data_ptr(),
            out,
            width,
            beside,
        )

    def set_ids(self, model: int, targets: Sequence[int], inputs: Sequence[int]) -> None:
        """Say which ids of the target a model's ids are, and which are looked up for the target's.

        -1 stands for none; an empty ``inputs`` for the same ids.
        """
        theirs, ours = int32s("token ids", targets), int32s("token ids", inputs)
        self._run(self._c.outrider_ids, model, at(theirs), len(theirs), at(ours), len(ours))

    def borrow(self, model: int, beside: int) -> None:
        """Let a model look tokens up where the model ``beside`` does, whose embedding stays.

        Medusa's heads take its last norm instead.
        """
        self._run(self._c.outrider_borrow, model, beside)

    def set_vector(self, model: int, number: int, kind: str, data: torch.Tensor) -> None:
        """Keep ``data``, a norm's weight of layer ``number``; the model's own has number 0."""
        wide = data.float().contiguous()
        place, size = VECTORS[kind], wide.numel()
        self._run(self._c.outrider_vector, model, number, place, wide.data_ptr(), size)

    def set_rotary(self, model: int, table: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Keep a rotary table, fp32 [positions, head_dim / 2] each; a longer one may follow."""
        for half in (cos, sin):
            expect(half, tuple(cos.shape[:2]), torch.float32)
        places = cos.data_ptr(), sin.data_ptr()
        self._run(self._c.outrider_rotary, model, table, *places, *cos.shape)

    def set_layer(self, model: int, layer: int, window: int | None, table: int) -> None:
        """Say how many positions a layer's rows see, and which rotary table is theirs."""
        self._run(self._c.outrider_layer, model, layer, window or 0, table)

    def check(self, model: int) -> None:
        """Raise unless the model has all its weights."""
        self._run(self._c.outrider_check, model)

    def shared(self, model: int, beside: int) -> int:
        """Return the bytes of head and packed embedding that both models share."""
        return int(self._c.outrider_shared(model, beside))

    def weight_bytes(self, model: int, beside: int | None) -> int:
        """Return the bytes of a model's matrices, without those that ``beside`` holds too."""
        return int(self._c.outrider_weights(model, beside))

    def page_bytes(self, model: int, page_size: int) -> int:
        """Return the bytes of cache that a page takes."""
        return self._made(self._c.outrider_page_bytes, model, page_size)

    def new_store(self, model: int, pages: int, page_size: int) -> int:
        """Return an empty cache."""
        return self._made(self._c.outrider_store, model, pages, page_size)

    def num_harmed(self, store: int) -> int:
        """Return the number of slots whose row was not finite."""
        return int(self._c.outrider_harmed(store))

    def move(self, store: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy entries between slots, in every layer."""
        count = len(sources)
        same_length(sources, targets)
        pairs = int32s("slots", [*sources, *targets])
        first = at(pairs)
        self._run(self._c.outrider_move, store, first, first + 4 * count, count)

    def forward(
        self,
        model: int,
        store: int,
        words: array[int],
        sublayers: Sequence[int],
        hidden: Sequence[int],
        logits: torch.Tensor,
        kept: torch.Tensor,
        states: torch.Tensor | None = None,
    ) -> None:
        """Run the segments in ``words`` (see src/api.cpp) through some sublayers.

        Twice its number stands for a layer's attention, and one more for its MLP. ``logits`` fp32
        [wanted rows, vocabulary] and ``kept`` fp32 [hidden, rows, width] are written. ``states``
        fp32 [rows, width] are those that rows begin with, where the model wants them.
        """
        if states is not None:
            expect(states, tuple(kept.shape[1:3]), torch.float32)
        expect(logits, tuple(logits.shape[:2]), torch.float32)
        expect(kept, (len(hidden), *kept.shape[1:3]), torch.float32)
        which = int32s("layers", [*sublayers, *hidden])
        first = at(which)
        run = first, len(sublayers), first + 4 * len(sublayers), len(hidden)
        room = logits.data_ptr(), *logits.shape, kept.data_ptr(), *kept.shape[1:]
        given = at(words), len(words), None if states is None else states.data_ptr()
        self._run(self._c.outrider_forward, model, store, *given, *run, *room)

    def fuse(
        self,
        model: int,
        hidden: Sequence[torch.Tensor],
        which: array[int],
        states: torch.Tensor,
        to: array[int],
    ) -> None:
        """Make states of rows ``which`` of hidden states, and put them to rows ``to``.

        ``hidden`` are fp32 [rows, width of the target] each, ``states`` fp32 [any, width].
        """
        same_length(which, to)
        for each in hidden:
            expect(each, tuple(hidden[0].shape[:2]), torch.float32)
        expect(states, tuple(states.shape[:2]), torch.float32)
        parts = array("Q", [each.data_ptr() for each in hidden])
        self._run(
            self._c.outrider_fuse,
            *(model, at(parts), len(parts), *hidden[0].shape, at(which), len(which)),
            *(states.data_ptr(), at(to), *states.shape),
        )

    def new_pipeline(
        self,
        options: Options,
        banned: torch.Tensor | None,
        ends: Sequence[int],
        bias: Mapping[int, float],
        prompt: Sequence[int],
    ) -> int:
        """Return a sequence's pipeline; ``banned`` (bool [vocabulary]) must outlive it."""
        if banned is not None:
            expect(banned, (options.vocabulary,), torch.bool)
        ids = int32s("token ids", [*ends, *bias, *prompt])
        by = array("f", [as_float32("logit_bias", value) for value in bias.values()])
        return self._made(
            self._c.outrider_pipeline,
            ctypes.byref(options),
            None if banned is None else banned.data_ptr(),
            at(ids),
            len(ends),
            at(by),
            len(by),
            len(prompt),
        )

    def count(self, pipeline: int, tokens: Sequence[int]) -> None:
        """Tell a pipeline which tokens of the output were committed since it was last told."""
        ids = int32s("token ids", tokens)
        self._run(self._c.outrider_pipeline_count, pipeline, at(ids), len(ids))

    def apply_pipeline(
        self,
        pipeline: int,
        logits: torch.Tensor,
        output: int,
        paths: list[list[int]],
        late_only: bool,
    ) -> None:
        """Process ``logits``, fp32 [rows, the pipeline's vocabulary], in place."""
        expect(logits, tuple(logits.shape[:2]), torch.float32)
        words = int32s("token ids", [i for path in paths for i in (len(path), *path)])
        self._run(
            self._c.outrider_pipeline_apply,
            pipeline,
            logits.data_ptr(),
            *logits.shape,
            output,
            at(words),
            len(words),
            late_only,
        )

    def draw(
        self, z: torch.Tensor, keys: list[tuple[int, int, int, int]], greedy: list[bool]
    ) -> tuple[list[int], list[float]]:
        """Return the token of each row of ``z``, and its score.

        Args:
            z: fp32 [rows, vocabulary], its rows contiguous.
            keys: seed (its low word, its high word), position and sample of each row.
            greedy: rows without noise.
        """
        rows = z.shape[0]
        if z.stride(1) != 1 or z.dtype != torch.float32:
            raise ModelError("the native step draws from fp32 rows that lie in one piece.")
        same_length(range(rows), keys)
        same_length(range(rows), greedy)
        words = int32s("seeds and positions", [word for key in keys for word in key], "I")
        plain = array("B", greedy)
        tokens, scores = array("i", bytes(4 * rows)), array("f", bytes(4 * rows))
        self._run(
            self._c.outrider_draw,
            z.data_ptr(),
            rows,
            z.stride(0),
            z.shape[1],
            at(words),
            at(plain),
            at(tokens),
            at(scores),
        )
        return tokens.tolist(), scores.tolist()

    def decide(
        self,
        model: int,
        store: int,
        words: array[int],
        pipelines: array[int],
        rows: int,
        logits: Room,
        masks: Sequence[NDArray[np.uint8] | None] = (),
        keeps: Sequence[bool] = (),
        hidden: LayerRoom | None = None,
        first: int = 0,
        planted: Sequence[Planted | None] = (),
    ) -> tuple[array[int], array[float]]:
        """Run the segments in ``words`` and draw for those that have a pipeline.

        Args:
            model, store, words: as of ``forward``.
            pipelines: uint64, of each segment that wants logits, 0 for none: its logits stay as
                they are.
            rows: how many want logits; a segment with a pipeline wants those of its last token and
                of all its nodes.
            logits: at least that many rows; what is kept follows them.
            masks: none, or one of the pipeline's vocabulary for each row.
            keeps: of each pipeline, whether its segment's logits are kept as they were; none keeps
                none.
            hidden: where the states of its layers go, from row ``first`` on; None if they are not
                wanted.
            planted: none, or of each segment that wants logits what its rows have instead.

        Returns:
            The token of each row and its score, 0 where there is no pipeline.
        """
        pointers = flags = which = states = entries = None
        layers = hidden_rows = width = mask_bytes = 0
        if masks:
            same_length(range(rows), masks)
            mask_bytes = min((len(mask) for mask in masks if mask is not None), default=0)
            pointers = array("Q", [0 if mask is None else mask.ctypes.data for mask in masks])
        if keeps:
            same_length(pipelines, keeps)
            flags = array("B", keeps)
        if planted:
            same_length(pipelines, planted)
            entries = _planted(planted)
        if hidden is not None:
            layers, hidden_rows, width = len(hidden.layers), hidden.rows, hidden.width
            which, states = at(hidden.layers), hidden.pointer
        sizes = array(  # the layout is that of DecideSizes in src/decide.cpp
            "q",
            (
                len(words),
                len(pipelines),
                rows,
                logits.rows,
                logits.width,
                layers,
                hidden_rows,
                first,
                width,
                mask_bytes,
            ),
        )
        tokens, scores = array("i", bytes(4 * rows)), array("f", bytes(4 * rows))
        self._run(
            self._c.outrider_decide,
            model,
            store,
            sizes.buffer_info()[0],
            words.buffer_info()[0],
            pipelines.buffer_info()[0],
            None if entries is None else at(entries),
            None if flags is None else at(flags),
            None if pointers is None else at(pointers),
            logits.pointer,
            which,
            states,
            tokens.buffer_info()[0],
            scores.buffer_info()[0],
        )
        return tokens, scores

    def draft(
        self,
        model: int,
        store: int,
        words: array[int],
        pipelines: Sequence[int],
        limits: Sequence[DraftLimits],
        planted: Sequence[Planted | None] = (),
        masks: Mapping[int, AllowedAfter] = NO_MASKS,
        mask_bytes: int = 0,
        states: torch.Tensor | None = None,
        before: Sequence[int] = (),
        sublayers: Sequence[int] = (),
    ) -> list[DraftNodes]:
        """Run the segments in ``words`` and go on from those that want logits.

        Args:
            model, store, words: as of ``forward``; page tables reach to the end of the draft.
            pipelines: of each segment that drafts.
            limits: of each of them.
            planted: none, or of each segment that drafts what its rows have instead.
            masks: by the number of a draft, what returns the tokens that may follow drafted ids,
                None for all; what it raises is raised here.
            mask_bytes: of the shortest mask.
            states: fp32 [rows, width], those that rows begin with, or of heads [drafts, width];
                None where the model wants none.
            sublayers: those that are run, as of ``forward``; none for all.
            before: of each segment that drafts the position of its first drafted token in the
                target's sequence; none where that is the number of the segment's tokens.

        Returns:
            What was drafted; less than asked for where a pipeline leaves nothing to draw.
        """
        same_length(pipelines, limits)
        if planted:
            same_length(pipelines, planted)
        count, most = len(limits), max([limit.nodes for limit in limits], default=0)
        try:
            numbers = b"".join([_packed(limit) for limit in limits])
        except struct.error as error:
            raise ModelError(f"limits of drafts are not of 32 bits ({error}).") from None
        size = count * most
        within("mask_bytes", mask_bytes, 0, LARGEST_INT)
        num_states = width = 0
        if states is not None:
            expect(states, tuple(states.shape[:2]), torch.float32)
            num_states, width = states.shape
        if before:
            same_length(limits, before)
        positions = int32s("positions", before) if before else None
        parts = int32s("sublayers", sublayers) if sublayers else None
        sizes = array(  # the layout is that of DraftSizes in src/draft.cpp
            "q", (len(words), count, most, mask_bytes, num_states, width, len(sublayers))
        )
        handles = array("Q", pipelines)
        entries = _planted(planted) if planted else None
        whole, chances = array("i", bytes(4 * (3 * size + count))), array("f", bytes(8 * size))
        asking = MaskCalls(masks, mask_bytes) if masks else None
        flags = array("B", [number in masks for number in range(count)]) if masks else None
        self._run(
            self._c.outrider_draft,
            model,
            store,
            at(sizes),
            at(words),
            at(handles),
            None if entries is None else at(entries),
            numbers,
            None if positions is None else at(positions),
            None if states is None else states.data_ptr(),
            None if parts is None else at(parts),
            None if flags is None else at(flags),
            ASK_MASK() if asking is None else ASK_MASK(asking.address),
            at(whole),
            at(chances),
        )
        if asking is not None:
            asking.check()
        ints, floats = whole.tolist(), chances.tolist()
        drafts, first, second, third = [], 0, size, 2 * size
        for nodes in ints[3 * size :]:
            drafts.append(
                DraftNodes(
                    ints[first : first + nodes],
                    ints[second : second + nodes],
                    ints[third : third + nodes],
                    floats[first : first + nodes],
                    floats[second : second + nodes],
                )
            )
            first, second, third = first + most, second + most, third + most
        return drafts

    def logprobs(
        self, z: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], count: int
    ) -> Measured:
        """Return what ``logprobs.measure`` does; ``z`` is fp32 [any, vocabulary]."""
        count = min(count, z.shape[1])
        expect(z, tuple(z.shape[:2]), torch.float32)
        same_length(rows, tokens)
        within("count", count, 0, z.shape[1])
        which, ids = int32s("rows", rows), int32s("token ids", tokens)
        own, ranks = array("f", bytes(4 * len(ids))), array("i", bytes(4 * len(ids)))
        room = bytes(4 * count * len(ids))
        top, values = array("i", room), array("f", room)
        self._run(
            self._c.outrider_logprobs,
            z.data_ptr(),
            z.shape[0],
            len(ids),
            z.shape[1],
            at(which),
            at(ids),
            count,
            at(own),
            at(ranks),
            at(top),
            at(values),
        )
        places = [slice(row * count, (row + 1) * count) for row in range(len(ids))]
        return (
            own.tolist(),
            ranks.tolist(),
            [top[place].tolist() for place in places],
            [values[place].tolist() for place in places],
        )

    def new_suffix(self, room: int) -> int:
        """Return an index of the last ``room`` places of a text."""
        return self._made(self._c.outrider_suffix, room)

    def extend_suffix(self, index: int, tokens: Sequence[int], ends: bool) -> None:
        """Append tokens to an index's text; with ``ends``, what comes next is another text."""
        ids = int32s("token ids", tokens)
        self._run(self._c.outrider_suffix_extend, index, at(ids), len(ids), ends)

    def drop_suffix(self, index: int, count: int) -> int:
        """Forget the oldest places of an index; return how many are left."""
        return self._made(self._c.outrider_suffix_drop, index, count)

    def draft_suffix(self, index: int, store: int | None, depth: int, nodes: int) -> Followed:
        """Return the best draft behind an index's text, by it or by ``store``."""
        out = array("i", bytes(4 * 4 * SUFFIX_DEPTH))
        count = self._made(self._c.outrider_suffix_draft, index, store, depth, nodes, at(out))
        rows = range(0, len(out), SUFFIX_DEPTH)
        return Followed(*(out[row : row + count].tolist() for row in rows))

    def read(self, memory: NDArray[np.uint8]) -> None:
        """Read ``memory`` [a multiple of 128 KiB] once, with the threads of a step."""
        self._run(self._c.outrider_read, memory.ctypes.data, memory.nbytes)

    def multiply(self, kind: str, pieces: int) -> int:
        """Do products of one of ``PEAKS`` in registers, with a step's threads; return how many."""
        return self._made(self._c.outrider_peak, PEAKS.index(kind), pieces)
