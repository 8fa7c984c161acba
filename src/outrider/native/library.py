"""One native library: the functions of src/outrider.h, over cffi."""

from __future__ import annotations

import itertools
import os
from array import array
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.limits import LARGEST_INT
from ..checkpoints.coded import Coded
from ..checkpoints.dtypes import Array
from ..errors import ModelError, shown
from ..sampling.logprobs import ALL, Asked, Measured
from ._interface import ABI, PARAMETERS, ffi
from .checks import LayerRoom, Room, as_float32, expect, floats, same_length, within
from .cores import Cores
from .interface import (
    DTYPES,
    MATRICES,
    PEAKS,
    VECTORS,
    Config,
    DraftBudget,
    DraftNodes,
    Options,
    Planted,
    QuantizedData,
)
from .masks import NO_MASKS, AllowedAfter, MaskCalls

KNOWN_LIMITS = 1024
"""Limits that stay packed; those of one step come again in the next."""

_INTS, _FLOATS, _POINTER = map(ffi.typeof, ("int32_t[]", "float[]", "void *"))
_PIPELINES, _BYTES, _ASK_MASK = map(ffi.typeof, ("Pipeline *[]", "uint8_t[]", "AskMask"))


@lru_cache(KNOWN_LIMITS)
def _packed(limits: DraftBudget) -> Any:
    *numbers, rates, choices = limits
    tables = [ffi.NULL if each is None else each.pointer for each in (rates, choices)]
    try:
        return ffi.new("DraftLimits *", [*numbers, *tables])[0]
    except (OverflowError, TypeError) as error:
        raise ModelError(f"limits of drafts are not of 32 bits ({error}).") from None


def _planted(segments: Sequence[Planted | None]) -> list[Any]:
    """Return what is planted as C++ reads it, entry by entry."""
    entries: list[Any] = []
    for each in segments:
        if each is None:
            entries.append([])
            continue
        ids, z, rest, first = each
        count, columns = within("planted entries", len(ids), 1, LARGEST_INT), ids.shape[-1]
        within("a planted position", first, 0, LARGEST_INT)
        logits = expect(ids, (count, columns), np.int64), expect(z, (count, columns), np.float32)
        entries.append((*logits, expect(rest, (count,), np.float32), count, columns, first))
    return entries


def _wide(bias: Array | None) -> NDArray[np.float32] | None:
    """Return a bias in fp32."""
    return None if bias is None else np.ascontiguousarray(bias, np.float32)


def at(handle: int | None) -> Any:
    """Return an address as a pointer, a null pointer for None."""
    return ffi.cast(_POINTER, handle or 0)


def _refused(types: Sequence[Any], values: Sequence[Any], names: Sequence[str]) -> Exception | None:
    """Return the error of the first of a function's arguments that its type cannot hold."""
    for kind, value, name in zip(types, values, names, strict=True):
        said = name.replace("_", " ")
        try:
            if isinstance(value, list):
                ffi.new(f"{kind.item.cname}[]", value)
        except (OverflowError, TypeError) as error:
            return ModelError(f"{said} has a number that is not of 32 bits ({error}).")
        try:
            if kind.kind == "primitive":
                ffi.new(f"{kind.cname} *", value)
        except (OverflowError, TypeError):
            return ModelError(f"{said} is {shown(value)}; give a number that fits {kind.cname}.")
    return None


class Library:
    """One loaded library: models, caches, forwards, pipelines, draws, suffixes.

    Objects of C++ are known by their addresses. The pool of threads starts with the first model.

    Args:
        isa: one of ``ISAS``.
        file: where it is.

    Raises:
        OSError: it cannot be loaded, or was built from another interface.
    """

    def __init__(self, isa: str, file: Path) -> None:
        self.isa, self.file = isa, file
        self.cores: Cores | None = None
        # It stays loaded: the threads of its pool sleep in it until the process ends.
        self._c = ffi.dlopen(str(file), ffi.RTLD_NOW | ffi.RTLD_NODELETE)
        if getattr(self._c, "outrider_abi", int)() != ABI:
            raise OSError(f"{file} was built from other sources; install Outrider again")

    def sets(self) -> int:
        """Return which of ``ISAS`` this CPU can run, a bit each, the first in the lowest bit."""
        return int(self._c.outrider_cpu())

    def slow_sets(self) -> int:
        """Return which of them are slower than the set before, a bit each."""
        return int(self._c.outrider_slow())

    @property
    def nanoseconds(self) -> int:
        """Time that this process has spent in the library's calls, ns."""
        return int(self._c.outrider_spent())

    @property
    def sampled_nanoseconds(self) -> int:
        """The part of ``nanoseconds`` for rows of logits: processing, draws, log probabilities."""
        return int(self._c.outrider_sampled())

    def run(self, name: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            ModelError: it returns a sentence, or an argument does not fit its type.
        """
        function = getattr(self._c, "outrider_" + name)
        try:
            if self.cores is None:
                sentence = function(*arguments)
            else:
                sentence = self.cores.call(function, *arguments)
        except (OverflowError, TypeError) as error:
            types, names = ffi.typeof(function).args, PARAMETERS[name]
            raise _refused(types, arguments, names) or error from None
        if sentence:
            wrong = ffi.string(sentence).decode()
            raise ModelError(f"the native step refused its input: {wrong}.")

    def made(self, kind: str, name: str, *arguments: Any) -> int:
        """Return the number, or the object's address, that a function writes last."""
        made = ffi.new(f"{kind} *")
        self.run(name, *arguments, made)
        return int(ffi.cast("intptr_t", made[0]))

    def start(self, threads: int) -> int:
        """Start the pool, at the first call only.

        Returns:
            How many threads it has: fewer than asked for where the system starts no more.
        """
        return int(self._c.outrider_start(within("threads", threads, 1, LARGEST_INT)))

    def on(self, cores: Cores, threads: int) -> Library:
        """Return this library with calls that run on some CPUs, in a pool of their own."""
        placed = copy(self)
        placed.cores = cores
        cores.call(self._c.outrider_start_own, within("threads", threads, 1, LARGEST_INT))
        return placed

    def new_model(self, config: Config, embedding: Array | None) -> int:
        """Return a model without weights; ``embedding`` [embeddings, hidden] must outlive it.

        None where embeddings are tied: tokens are looked up in the head.
        """
        dtype = next((d for d, number in DTYPES.items() if number == config.dtype), None)
        shape = config.embeddings or config.vocabulary, config.hidden
        return self.made("Model *", "model", config.pointer, expect(embedding, shape, dtype))

    def free(self, kind: str, handle: int) -> None:
        """Give the memory of a model, store or pipeline back, once nothing uses it any more."""
        getattr(self._c, f"outrider_{kind}_free")(at(handle))

    def set_matrix(
        self,
        model: int,
        layer: int,
        kind: str,
        data: Array,
        bias: Array | None,
        beside: int | None = None,
    ) -> None:
        """Pack ``data`` [out, in], in the model's dtype, with ``bias`` [out].

        A head or embedding that is the same to the bit in the model ``beside`` is held once; either
        model may be freed first.

        Raises:
            ModelError: shape or dtype are not the model's.
        """
        dtype = data.dtype if data.dtype in DTYPES else None
        given = expect(data, data.shape[:2], dtype), DTYPES[data.dtype]
        wide = _wide(bias)
        by, place = expect(wide, (len(data),), np.float32), (at(model), layer, MATRICES[kind])
        self.run("matrix", *place, *given, by, *data.shape, at(beside))

    def set_quantized(
        self,
        model: int,
        layer: int,
        kind: str,
        codes: Array,
        scales: Array,
        zeros: Array | None,
        bits: int,
        group: int,
        bias: Array | None,
        beside: int | None = None,
    ) -> None:
        """Pack a quantised matrix in place of one of the model's dtype, see ``set_matrix``.

        The parts are those of ``checkpoints.quantize.Quantized``, ``codes`` [out, in]. Scales are
        kept as fp16 times one power of two, which is exact for what was fp16 or bf16 and within
        2^28 of the largest.

        Raises:
            ModelError: shapes or dtypes do not fit together, a scale is not finite, or a code or
                zero has more bits than ``bits``.
        """
        out, width = codes.shape
        groups = -(-width // max(1, group))
        codes, scales = np.ascontiguousarray(codes), np.ascontiguousarray(scales)
        zeros = None if zeros is None else np.ascontiguousarray(zeros)
        wide = _wide(bias)
        given = QuantizedData(bits=bits, group=group, groups=groups)
        given.codes = expect(codes, (out, width), np.uint8)
        given.scales = expect(scales, (out, groups), np.float32)
        given.zeros = expect(zeros, (out, groups), np.uint8)
        by, place = expect(wide, (out,), np.float32), (at(model), layer, MATRICES[kind])
        self.run("quantized", *place, given.pointer, by, out, width, at(beside))

    def set_coded(
        self,
        model: int,
        layer: int,
        kind: str,
        matrix: Coded,
        bias: Array | None,
        beside: int | None = None,
    ) -> None:
        """Read a matrix in the codes of GGUF files and pack it, see ``set_matrix``.

        Raises:
            ModelError: a file cannot be read or has changed, a scale is not finite, or the parts do
                not fit.
        """
        out, width = matrix.shape
        parts = ffi.new("CodedData[]", len(matrix.parts))
        orders = [None if p.order is None else p.order.astype(np.int32) for p in matrix.parts]
        wide = _wide(bias)
        by, place = expect(wide, (out,), np.float32), (at(model), layer, MATRICES[kind])
        with ExitStack() as opened:
            for part, order, given in zip(matrix.parts, orders, parts, strict=True):
                given.offset, given.type, given.rows = part.begin, part.kind, part.rows
                given.order = ffi.cast("int32_t *", expect(order, (part.rows,), np.int32))
                given.file = opened.enter_context(part.file.opened()).fileno()
            try:
                self.run("coded", *place, parts, len(parts), by, out, width, at(beside))
            except ModelError as error:
                file, why = matrix.parts[0].file.path, str(error).removesuffix(".")
                raise ModelError(
                    f"{file}: matrix {kind!r} of layer {layer} cannot be read ({why}); fetch the "
                    "file again."
                ) from None

    def keep(self, model: int, path: Path, key: bytes) -> None:
        """Write a model's packed weights to a new file, under a key of 32 bytes."""
        idle = copy(self)
        idle.cores = None  # the CPUs of a drafter's passes are theirs
        idle.run("keep", at(model), os.fsencode(path), key)

    def take_kept(
        self, model: int, path: Path, key: bytes, copies: bool, beside: int | None = None
    ) -> bool:
        """Give a new model the weights that a file keeps under ``key``; False if it keeps none.

        They stay in the file, mapped, if large pages hold it; else they are read if ``copies``. The
        model ``beside`` may hold the same head or embedding. ModelError: the file is damaged.
        """
        given = at(model), os.fsencode(path), key, copies, at(beside)
        return bool(self.made("int32_t", "take", *given))

    def set_ids(self, model: int, targets: Sequence[int], inputs: Sequence[int]) -> None:
        """Say which ids of the target a model's ids are, and which are looked up for the target's.

        -1 stands for none; an empty ``inputs`` for the same ids.
        """
        self.run("ids", at(model), [*targets], len(targets), [*inputs], len(inputs))

    def set_likely(
        self, model: int, size: int, places: Sequence[int], token_ids: Sequence[int]
    ) -> None:
        """Copy rows of the head to places among ``size`` likely ones, which stay as many.

        Drafts, and forwards, may want the logits of these rows alone, see ``draft``.
        """
        same_length(places, token_ids)
        self.run("likely", at(model), size, [*places], [*token_ids], len(places))

    def borrow(self, model: int, beside: int) -> None:
        """Let a model look tokens up where the model ``beside`` does, whose embedding stays.

        Medusa's heads take its last norm instead.
        """
        self.run("borrow", at(model), at(beside))

    def set_transitions(
        self, model: int, top: int, before: Array, behind: Array, projection: Array | None
    ) -> None:
        """Let drafts be drawn by scores behind the token before, see src/outrider.h.

        ``before`` [tokens, rank], ``behind`` [vocabulary, rank] and ``projection`` fp32 [rank,
        width] must outlive the model.
        """
        tables = before, behind, *([] if projection is None else [projection])
        if any(each.ndim != 2 for each in tables) or before.dtype not in DTYPES:
            raise ModelError("scores of tokens are no tables of a dtype that models have.")
        (tokens, rank), dtype = before.shape, before.dtype
        first = expect(before, (tokens, rank), dtype)
        second = expect(behind, (len(behind), rank), dtype)
        width = 0 if projection is None else projection.shape[1]
        rows = ffi.cast("float *", expect(projection, (rank, width), np.float32))
        sizes = top, rank, DTYPES[dtype]
        self.run("transitions", at(model), *sizes, first, tokens, second, len(behind), rows, width)

    def set_vector(self, model: int, number: int, kind: str, data: Array) -> None:
        """Keep ``data``, a norm's weight of layer ``number``; the model's own has number 0."""
        wide = np.ascontiguousarray(data, np.float32)
        pointer, size = expect(wide, wide.shape, np.float32), wide.size
        self.run("vector", at(model), number, VECTORS[kind], pointer, size)

    def set_rotary(self, model: int, table: int, cos: Array, sin: Array) -> None:
        """Keep a rotary table, fp32 [positions, head_dim / 2] each; a longer one may follow."""
        shape = cos.shape[:2]
        halves = [expect(half, shape, np.float32) for half in (cos, sin)]
        self.run("rotary", at(model), table, *halves, *shape)

    def set_layer(
        self, model: int, layer: int, mixer: int, mlp: int, window: int | None, table: int
    ) -> None:
        """Say what mixes a layer's tokens, what MLP it has, and what its rows see.

        Those are the last ``window`` positions, or all, as a rotary table turns them; -1: none.
        """
        self.run("layer", at(model), layer, mixer, mlp, window or 0, table)

    def kept_tokens(self, store: int, slot: int, count: int) -> int:
        """Return behind how many tokens a slot's states [count] are kept; 0 for none."""
        return self.made("int32_t", "kept_states", at(store), slot, ffi.NULL, count)

    def kept_states(self, store: int, slot: int, count: int) -> NDArray[np.float32]:
        """Return the states [count] of a slot at the end of its last full page."""
        states = np.empty(count, np.float32)
        self.made("int32_t", "kept_states", at(store), slot, floats(states), count)
        return states

    def set_states(self, store: int, slot: int, states: Array, tokens: int) -> None:
        """Let a slot's sequence go on behind so many tokens, with their states fp32 [count]."""
        self.run("set_states", at(store), slot, floats(states), len(states), tokens)

    def check(self, model: int) -> None:
        """Raise unless the model has all its weights."""
        self.run("check", at(model))

    def weight_bytes(self, model: int, beside: int | None) -> int:
        """Return the bytes of a model's matrices, without those that ``beside`` holds too."""
        return int(self._c.outrider_weights(at(model), at(beside)))

    def page_bytes(self, model: int, page_size: int) -> int:
        """Return the bytes of cache that a page takes."""
        return self.made("int64_t", "page_bytes", at(model), page_size)

    def new_store(self, model: int, pages: int, page_size: int) -> int:
        """Return an empty cache."""
        return self.made("Store *", "store", at(model), pages, page_size)

    def experts_read(self, store: int) -> int:
        """Return how many experts the forwards over a cache have read, of all layers together."""
        return int(self._c.outrider_experts(at(store)))

    def num_nonfinite(self, store: int) -> int:
        """Return the number of slots whose row was not finite."""
        return int(self._c.outrider_nonfinite(at(store)))

    def move(self, store: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy entries between slots, in every layer."""
        same_length(sources, targets)
        self.run("move", at(store), [*sources], [*targets], len(sources))

    def forward(
        self,
        model: int,
        store: int,
        words: array[int],
        sublayers: Sequence[int],
        hidden: Sequence[int],
        logits: Array,
        kept: Array,
        states: Array | None = None,
    ) -> None:
        """Run the segments in ``words`` (see src/outrider.h) through some sublayers.

        Twice its number stands for a layer's attention, and one more for its MLP. ``logits`` fp32
        [wanted rows, vocabulary] and ``kept`` fp32 [hidden, rows, width] are written. ``states``
        fp32 [states, width] are those that rows begin with, where the model wants them. Logits as
        wide as there are likely rows are of those alone.
        """
        rows, width = kept.shape[1:3]
        given = ffi.from_buffer(_INTS, words), len(words)
        count = 0 if states is None else len(states)
        begin = expect(states, (count, width), np.float32), count
        which = [*sublayers], len(sublayers), [*hidden], len(hidden)
        out = floats(logits), *logits.shape, expect(kept, (len(hidden), rows, width), np.float32)
        self.run("forward", at(model), at(store), *given, *begin, *which, *out, rows, width)

    def fuse(
        self,
        model: int,
        hidden: Sequence[Array],
        which: array[int],
        states: Array,
        to: array[int],
    ) -> None:
        """Make states of rows ``which`` of hidden states, and put them to rows ``to``.

        ``hidden`` are fp32 [rows, width of the target] each, ``states`` fp32 [any, width].
        """
        same_length(which, to)
        shape = hidden[0].shape[:2]
        parts = [expect(each, shape, np.float32) for each in hidden]
        rows = ffi.from_buffer(_INTS, which), len(which)
        out = floats(states), ffi.from_buffer(_INTS, to), *states.shape
        self.run("fuse", at(model), parts, len(parts), *shape, *rows, *out)

    def new_pipeline(
        self,
        options: Options,
        banned: Array | None,
        ends: Sequence[int],
        bias: Mapping[int, float],
        prompt: Sequence[int],
    ) -> int:
        """Return a sequence's pipeline; ``banned`` (bool [vocabulary]) must outlive it."""
        by = [as_float32("logit_bias", value) for value in bias.values()]
        never = expect(banned, (options.vocabulary,), np.bool_)
        ids = [*ends, *bias, *prompt], len(ends), by, len(by), len(prompt)
        return self.made("Pipeline *", "pipeline", options.pointer, never, *ids)

    def count(self, pipeline: int, tokens: Sequence[int]) -> None:
        """Tell a pipeline which tokens of the output were committed since it was last told."""
        self.run("pipeline_count", at(pipeline), [*tokens], len(tokens))

    def apply_pipeline(
        self, pipeline: int, logits: Array, output: int, paths: list[list[int]], late_only: bool
    ) -> None:
        """Process ``logits``, fp32 [rows, the pipeline's vocabulary], in place."""
        words = [i for path in paths for i in (len(path), *path)]
        rows = floats(logits), *logits.shape
        self.run("pipeline_apply", at(pipeline), *rows, output, words, len(words), late_only)

    def draw(
        self, z: Array, keys: list[tuple[int, int, int, int]], greedy: list[bool]
    ) -> tuple[list[int], list[float]]:
        """Return the token of each row of ``z``, and its score.

        Args:
            z: fp32 [rows, vocabulary], its rows contiguous.
            keys: seed (its low word, its high word), position and sample of each row.
            greedy: rows without noise.
        """
        rows = len(z)
        if z.strides[1] != z.itemsize or z.dtype != np.float32:
            raise ModelError("the native step draws from fp32 rows that lie in one piece.")
        same_length(range(rows), keys)
        same_length(range(rows), greedy)
        words = [word for key in keys for word in key]
        tokens, scores = ffi.new(_INTS, rows), ffi.new(_FLOATS, rows)
        stride = z.strides[0] // z.itemsize if rows > 1 else z.shape[1]  # one row's may be any
        given = at(z.ctypes.data), rows, stride, z.shape[1]
        self.run("draw", *given, words, bytes(greedy), tokens, scores)
        return ffi.unpack(tokens, rows), ffi.unpack(scores, rows)

    def noise(self, seed: int, position: int, sample: int, count: int) -> list[float]:
        """Return the noise of the ids below ``count`` at a position."""
        values = ffi.new(_FLOATS, count)
        self.run("noise", seed, position, sample, count, values)
        return ffi.unpack(values, count)  # type: ignore[no-any-return]

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
    ) -> tuple[list[int], list[float]]:
        """Run the segments in ``words``, see ``forward``, and draw for those that have a pipeline.

        Args:
            pipelines: uint64, of each segment that wants logits; 0 leaves its logits as they are.
            rows: how many want logits; ``logits`` has room for them, and behind them for those that
                are kept as they were.
            masks, keeps, planted: none, or one for each row, pipeline, segment that wants logits.
            hidden: where the states of its layers go, from row ``first`` on; None if nowhere.

        Returns:
            The token of each row and its score, 0 where there is no pipeline.
        """
        pointers = flags = layers = states = entries = ffi.NULL
        count = hidden_rows = width = mask_bytes = 0
        if masks:
            same_length(range(rows), masks)
            mask_bytes = min((len(mask) for mask in masks if mask is not None), default=0)
            pointers = [
                ffi.NULL if mask is None else ffi.from_buffer(_BYTES, mask) for mask in masks
            ]
        if keeps:
            same_length(pipelines, keeps)
            flags = bytes(keeps)
        if planted:
            same_length(pipelines, planted)
            entries = _planted(planted)
        if hidden is not None:
            layers, states = hidden.layers, hidden.pointer
            count, hidden_rows, width = len(layers), hidden.rows, hidden.width
        room = logits.rows, logits.width, count, hidden_rows, first, width, mask_bytes
        sizes = [(len(words), len(pipelines), rows, *room)]
        given = ffi.from_buffer(_INTS, words), ffi.from_buffer(_PIPELINES, pipelines)
        tokens, scores = ffi.new(_INTS, rows), ffi.new(_FLOATS, rows)
        out = logits.pointer, layers, states, tokens, scores
        self.run("decide", at(model), at(store), sizes, *given, entries, flags, pointers, *out)
        return ffi.unpack(tokens, rows), ffi.unpack(scores, rows)

    def draft(
        self,
        model: int,
        store: int,
        words: array[int],
        vocabulary: int,
        pipelines: Sequence[int],
        limits: Sequence[DraftBudget],
        planted: Sequence[Planted | None] = (),
        masks: Mapping[int, AllowedAfter] = NO_MASKS,
        mask_bytes: int = 0,
        states: Array | None = None,
        before: Sequence[int] = (),
        sublayers: Sequence[int] = (),
    ) -> list[DraftNodes]:
        """Run the segments in ``words``, see ``forward``, and go on from those that want logits.

        Args:
            vocabulary: the model's, or the number of its likely rows, which drafts then come from.
            pipelines, limits, planted, before: of each segment that drafts; ``before`` the position
                of its first drafted token in the target's sequence, none where that is the number
                of the segment's tokens. Page tables reach to the end of the draft.
            masks: by the number of a draft, what returns the tokens that may follow drafted ids,
                None for all; what it raises is raised here.
            mask_bytes: of the shortest mask.
            states: fp32 [rows, width], those that rows begin with, or of heads [drafts, width].
            sublayers: those that are run; none for all.

        Returns:
            What was drafted; less than asked for where a pipeline leaves nothing to draw.
        """
        same_length(pipelines, limits)
        if planted:
            same_length(pipelines, planted)
        if before:
            same_length(limits, before)
        count, most = len(limits), max([limit.nodes for limit in limits], default=0)
        within("mask_bytes", mask_bytes, 0, LARGEST_INT)
        packed = [_packed(limit) for limit in limits]
        within("a draft's length", most, 0, LARGEST_INT)
        size, (rows, width) = count * most, (0, 0) if states is None else states.shape[:2]
        whole, chances = ffi.new(_INTS, 3 * size + count), ffi.new(_FLOATS, 2 * size)
        given = ffi.from_buffer(_INTS, words), ffi.from_buffer(_PIPELINES, array("Q", pipelines))
        entries = _planted(planted) if planted else ffi.NULL
        places = [*before] if before else ffi.NULL
        begin = ffi.NULL if states is None else floats(states)
        parts = [*sublayers] if sublayers else ffi.NULL
        asking, flags, ask = None, ffi.NULL, ffi.NULL
        if masks:
            asking, flags = MaskCalls(masks, mask_bytes), bytes([i in masks for i in range(count)])
            ask = ffi.callback(_ASK_MASK, asking.pointer)
        sizes = [(len(words), count, most, mask_bytes, rows, width, len(sublayers), vocabulary)]
        how = entries, packed, places, begin, parts, flags, ask
        self.run("draft", at(model), at(store), sizes, *given, *how, whole, chances)
        if asking is not None:
            asking.check()
        ints, ratios = ffi.unpack(whole, 3 * size + count), ffi.unpack(chances, 2 * size)
        drafts = []
        for draft, num_nodes in enumerate(ints[3 * size :]):
            a = draft * most
            b, c = a + size, a + 2 * size
            one, two, three = (slice(i, i + num_nodes) for i in (a, b, c))
            nodes = ints[one], ints[two], ints[three], ratios[one], ratios[two]
            drafts.append(DraftNodes(*nodes))
        return drafts

    def logprobs(self, asked: Sequence[Asked]) -> list[Measured]:
        """Return what ``logprobs.measure`` does, of all rows in one call."""
        rows: list[Any] = []
        tokens: list[int] = []
        likeliest: list[int] = []
        width = asked[0].z.shape[1] if asked else 0
        for z, numbers, ids, count in asked:
            same_length(numbers, ids)
            first = ffi.cast("float *", expect(z, (len(z), width), np.float32))
            rows += [first + width * within("a row", row, 0, len(z) - 1) for row in numbers]
            tokens += ids
            most = width if count == ALL else min(count, width)
            likeliest += [within("count", most, 0, width)] * len(ids)
        sizes = len(rows), len(rows), sum(likeliest), sum(likeliest)
        kinds = _FLOATS, _INTS, _INTS, _FLOATS
        out = [ffi.new(kind, size) for kind, size in zip(kinds, sizes, strict=True)]
        self.run("logprobs", rows, len(rows), width, tokens, likeliest, *out)
        own, ranks, top, values = map(ffi.unpack, out, sizes)
        places = itertools.pairwise([0, *itertools.accumulate(likeliest)])
        found = zip(own, ranks, places, strict=True)
        return [(value, rank, top[a:b], values[a:b]) for value, rank, (a, b) in found]

    def read(self, memory: NDArray[np.uint8]) -> None:
        """Read ``memory`` [a multiple of 128 KiB] once, with the threads of a step."""
        self.run("read", at(memory.ctypes.data), memory.nbytes)

    def multiply(self, kind: str, pieces: int) -> int:
        """Do products of one of ``PEAKS`` in registers, with a step's threads; return how many."""
        return self.made("int64_t", "peak", PEAKS.index(kind), pieces)
