"""The native libraries: which one serves this CPU, and its functions over ctypes."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from ..errors import ModelError
from . import __path__ as folders
from .threads import allowed_threads

logger = logging.getLogger("outrider")

ABI = 2
ISAS = ("portable", "avx2", "avx512", "avx512bf16", "amx")
"""Instruction sets, each with all that stand before it."""
VARIABLE = "OUTRIDER_NATIVE_ISA"

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
MATRICES = {"qkv": 0, "output": 1, "gate_up": 2, "down": 3, "head": 4}
VECTORS = {"input": 0, "mlp": 1, "final": 2, "q": 3, "k": 4, "cos": 5, "sin": 6}
TABLES = 2
"""Rotary tables that a model may have."""

_Pointer, _Int, _Text, _Long = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_int64


class Config(ctypes.Structure):
    """What a model is; the layout is that of src/model.hpp."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("dtype", "layers", "hidden", "inner", "heads")),
        *((name, ctypes.c_int32) for name in ("kv_heads", "head_dim", "vocabulary", "max_length")),
        *((name, ctypes.c_float) for name in ("norm_eps", "scale", "embedding_scale")),
        *((name, ctypes.c_float) for name in ("residual_scale", "logits_scale")),
    )


class QuantizedData(ctypes.Structure):
    """A quantised matrix; the layout is that of src/api.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "zeros")),
        *((name, ctypes.c_int32) for name in ("bits", "group")),
    )


class QuantizedMatrix(Protocol):
    """What ``models.quantize.Quantized`` is, as this side sees it."""

    @property
    def codes(self) -> torch.Tensor: ...
    @property
    def scales(self) -> torch.Tensor: ...
    @property
    def zeros(self) -> torch.Tensor | None: ...
    @property
    def bits(self) -> int: ...
    @property
    def group(self) -> int: ...


_FUNCTIONS: dict[str, tuple[object, list[object]]] = {
    "abi": (_Int, []),
    "cpu": (_Int, []),
    "start": (_Int, [_Int]),
    "model": (_Pointer, [ctypes.POINTER(Config), _Pointer]),
    "model_free": (None, [_Pointer]),
    "matrix": (_Text, [_Pointer, _Int, _Int, _Pointer, _Pointer, _Int, _Int]),
    "quantized": (
        _Text,
        [_Pointer, _Int, _Int, ctypes.POINTER(QuantizedData), _Pointer, _Int, _Int],
    ),
    "vector": (_Text, [_Pointer, _Int, _Int, _Pointer, _Long]),
    "layer": (_Text, [_Pointer, _Int, _Int, _Int]),
    "check": (_Text, [_Pointer]),
    "page_bytes": (_Long, [_Pointer, _Int]),
    "store": (_Pointer, [_Pointer, _Int, _Int]),
    "store_free": (None, [_Pointer]),
    "harmed": (_Int, [_Pointer]),
    "move": (_Text, [_Pointer, _Pointer, _Pointer, _Int]),
    "forward": (
        _Text,
        [_Pointer, _Pointer, _Pointer, _Long, *[_Pointer, _Int] * 4],
    ),
}


class Library:
    """One loaded library; its pool of threads starts with the first model.

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
            loaded.outrider_abi.restype = _Int
            if loaded.outrider_abi() != ABI:
                raise OSError(f"{file} was built from other sources; install Outrider again")
            for name, (result, arguments) in _FUNCTIONS.items():
                function = getattr(loaded, f"outrider_{name}")
                function.restype, function.argtypes = result, arguments
        except AttributeError as error:
            raise OSError(f"{file} was built from other sources ({error})") from None

    def level(self) -> int:
        """Which of ``ISAS`` this CPU can run, the last of them by number."""
        return int(self._c.outrider_cpu())

    def _done(self, wrong: bytes | None) -> None:
        if wrong is not None:
            raise ModelError(f"the native step refused its input: {wrong.decode()}.")

    def start(self, threads: int) -> int:
        """Start the pool, at the first call only; how many threads it has."""
        return int(self._c.outrider_start(threads))

    def new_model(self, config: Config, embedding: torch.Tensor | None) -> int:
        """A model without weights; ``embedding`` [vocabulary, hidden] must outlive it.

        None where embeddings are tied: tokens are looked up in the head.
        """
        if embedding is not None:
            dtype = next((d for d, number in DTYPES.items() if number == config.dtype), None)
            _expect(embedding, (config.vocabulary, config.hidden), dtype)
        made = self._c.outrider_model(
            ctypes.byref(config), None if embedding is None else embedding.data_ptr()
        )
        if not made:
            raise ModelError("the native step has no model of these sizes.")
        return int(made)

    def free_model(self, model: int) -> None:
        """Give a model's memory back."""
        self._c.outrider_model_free(model)

    def set_matrix(
        self, model: int, layer: int, kind: str, data: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """Pack ``data`` [out, in], in the model's dtype, with ``bias`` [out]."""
        _expect(data, tuple(data.shape), data.dtype if data.dtype in DTYPES else None)
        wide = _wide_bias(bias, data.shape[0])
        self._done(
            self._c.outrider_matrix(
                model,
                layer,
                MATRICES[kind],
                data.data_ptr(),
                None if wide is None else wide.data_ptr(),
                *data.shape,
            )
        )

    def set_quantized(
        self, model: int, layer: int, kind: str, data: QuantizedMatrix, bias: torch.Tensor | None
    ) -> None:
        """Pack ``data`` [out, in] in place of a matrix of the model's dtype, with ``bias`` [out].

        Scales are kept as fp16 times one power of two, which is exact for what was fp16 or bf16
        and within 2^28 of the largest.

        Raises:
            ModelError: shapes or dtypes do not fit together, a scale is not finite, or a code or
                zero has more bits than ``data.bits``.
        """
        out, width = data.codes.shape
        groups = -(-width // max(1, data.group))
        codes, scales = data.codes.contiguous(), data.scales.contiguous()
        zeros = None if data.zeros is None else data.zeros.contiguous()
        _expect(codes, (out, width), torch.uint8)
        _expect(scales, (out, groups), torch.float32)
        if zeros is not None:
            _expect(zeros, (out, groups), torch.uint8)
        wide = _wide_bias(bias, out)
        given = QuantizedData(
            codes=codes.data_ptr(),
            scales=scales.data_ptr(),
            zeros=None if zeros is None else zeros.data_ptr(),
            bits=data.bits,
            group=data.group,
        )
        self._done(
            self._c.outrider_quantized(
                model,
                layer,
                MATRICES[kind],
                ctypes.byref(given),
                None if wide is None else wide.data_ptr(),
                out,
                width,
            )
        )

    def set_vector(self, model: int, number: int, kind: str, data: torch.Tensor) -> None:
        """Keep ``data``: a norm's weight of layer ``number``, or a rotary table of that number."""
        wide = data.float().contiguous()
        self._done(
            self._c.outrider_vector(model, number, VECTORS[kind], wide.data_ptr(), wide.numel())
        )

    def set_layer(self, model: int, layer: int, window: int | None, table: int) -> None:
        """Say how many positions a layer's rows see, and which rotary table is theirs."""
        self._done(self._c.outrider_layer(model, layer, window or 0, table))

    def check(self, model: int) -> None:
        """Raise unless the model has all its weights."""
        self._done(self._c.outrider_check(model))

    def page_bytes(self, model: int, page_size: int) -> int:
        """Bytes of cache that a page takes."""
        return int(self._c.outrider_page_bytes(model, page_size))

    def new_store(self, model: int, pages: int, page_size: int) -> int:
        """An empty cache."""
        made = self._c.outrider_store(model, pages, page_size)
        if not made:
            raise ModelError(f"there is no memory for a cache of {pages} pages; give it fewer.")
        return int(made)

    def free_store(self, store: int) -> None:
        """Give a cache's memory back."""
        self._c.outrider_store_free(store)

    def num_harmed(self, store: int) -> int:
        """Slots whose row was not finite."""
        return int(self._c.outrider_harmed(store))

    def move(self, store: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy entries between slots, in every layer."""
        pairs = np.array([sources, targets], dtype=np.int32)
        first = pairs.ctypes.data
        self._done(self._c.outrider_move(store, first, first + pairs.strides[0], pairs.shape[1]))

    def forward(
        self,
        model: int,
        store: int,
        words: list[int],
        layers: Sequence[int],
        hidden: Sequence[int],
        logits: torch.Tensor,
        kept: torch.Tensor,
    ) -> None:
        """Run the segments in ``words`` (see src/api.cpp).

        ``logits`` fp32 [wanted rows, vocabulary] and ``kept`` fp32 [hidden, rows, width] are
        written.
        """
        flat = np.array(words, dtype=np.int32)
        which = np.array([*layers, *hidden], dtype=np.int32)
        first = which.ctypes.data
        self._done(
            self._c.outrider_forward(
                model,
                store,
                flat.ctypes.data,
                flat.size,
                first,
                len(layers),
                first + 4 * len(layers),
                len(hidden),
                logits.data_ptr(),
                logits.shape[0],
                kept.data_ptr(),
                kept.shape[1],
            )
        )


def _expect(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
    fits = tuple(tensor.shape) == shape and tensor.is_contiguous() and tensor.device.type == "cpu"
    if not fits or tensor.dtype != dtype:
        raise ModelError(f"the native step cannot read a tensor of {list(tensor.shape)}.")


def _wide_bias(bias: torch.Tensor | None, out: int) -> torch.Tensor | None:
    if bias is None:
        return None
    wide = bias.float().contiguous()
    _expect(wide, (out,), torch.float32)
    return wide


def _file(isa: str) -> Path | None:
    files = (Path(folder) / f"liboutrider_{isa}.so" for folder in folders)
    return next((file for file in files if file.is_file()), None)


def _find(isa: str) -> Library:
    found = _file(isa)
    if found is None:
        raise OSError("it was not built: there was no C++ compiler when Outrider was installed")
    return Library(isa, found)


@functools.lru_cache(len(ISAS))
def open_library(isa: str) -> Library | None:
    """The library for ``isa``, else the next lower one that is there; None and a line if none is.

    The pool of threads is started.
    """
    try:
        best = ISAS.index(isa)
        while best and _file(ISAS[best]) is None:
            best -= 1
        library = _find(ISAS[best])
        if library.level() < best:  # this also has the kernel grant what the library needs
            raise OSError(f"this CPU does not run {ISAS[best]}")
    except OSError as error:
        logger.warning("The native step is not used (%s); torch runs the models.", error)
        return None
    library.start(allowed_threads())
    return library


def library() -> Library | None:
    """The library of this process: the best that the CPU runs, or what ``VARIABLE`` says.

    None where it says "off", or there is none.

    Raises:
        ModelError: the variable names no instruction set, or one that this CPU lacks.
    """
    asked = os.environ.get(VARIABLE, "").strip().lower()
    if asked == "off":
        return None
    if asked and asked not in ISAS:
        raise ModelError(f"{VARIABLE} is {asked!r}; give one of {', '.join(ISAS)}, off.")
    level = _level()
    if asked and ISAS.index(asked) > level:
        raise ModelError(f"{VARIABLE} is {asked!r}, but this CPU runs {ISAS[level]} at most.")
    return open_library(asked or ISAS[level])


@functools.cache
def _level() -> int:
    try:
        return _find("portable").level()
    except OSError:
        return 0
