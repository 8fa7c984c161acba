"""The C interface as ctypes knows it: structures, constants and functions of src/*.cpp."""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch

ABI = 8
"""What the library's ``outrider_abi`` answers; it changes with this file."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
MATRICES = {"qkv": 0, "output": 1, "gate_up": 2, "down": 3, "head": 4, "embedding": 5}
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


class Options(ctypes.Structure):
    """What of a request's options a law has; the layout is that of src/law.hpp."""

    _fields_ = (
        ("seed", ctypes.c_uint64),
        ("presence", ctypes.c_double),
        *((name, ctypes.c_float) for name in ("temperature", "frequency", "repetition", "min_p")),
        ("top_p", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("top_k", "vocabulary", "sample", "prompt_length")),
        *((name, ctypes.c_int32) for name in ("min_tokens", "penalises")),
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


FUNCTIONS: dict[str, tuple[object, list[object]]] = {
    "abi": (_Int, []),
    "cpu": (_Int, []),
    "spent": (_Long, []),
    "start": (_Int, [_Int]),
    "model": (_Pointer, [ctypes.POINTER(Config), _Pointer]),
    "model_free": (None, [_Pointer]),
    "matrix": (_Text, [_Pointer, _Int, _Int, _Pointer, _Int, _Pointer, _Int, _Int, _Pointer]),
    "quantized": (
        _Text,
        [_Pointer, _Int, _Int, ctypes.POINTER(QuantizedData), _Pointer, _Int, _Int, _Pointer],
    ),
    "vector": (_Text, [_Pointer, _Int, _Int, _Pointer, _Long]),
    "layer": (_Text, [_Pointer, _Int, _Int, _Int]),
    "check": (_Text, [_Pointer]),
    "shared": (_Long, [_Pointer, _Pointer]),
    "page_bytes": (_Long, [_Pointer, _Int]),
    "store": (_Pointer, [_Pointer, _Int, _Int]),
    "store_free": (None, [_Pointer]),
    "harmed": (_Int, [_Pointer]),
    "move": (_Text, [_Pointer, _Pointer, _Pointer, _Int]),
    "forward": (
        _Text,
        [_Pointer, _Pointer, _Pointer, _Long, *[_Pointer, _Int] * 2, *[_Pointer, _Int, _Int] * 2],
    ),
    "law": (
        _Pointer,
        [ctypes.POINTER(Options), _Pointer, _Pointer, _Int, _Pointer, _Int, _Int],
    ),
    "law_free": (None, [_Pointer]),
    "law_count": (_Text, [_Pointer, _Pointer, _Int]),
    "law_apply": (_Text, [_Pointer, _Pointer, _Int, _Int, _Int, _Pointer, _Long, _Int]),
    "draw": (_Text, [_Pointer, _Int, _Long, _Int, *[_Pointer] * 4]),
    "decide": (_Text, [*[_Pointer] * 3, _Long, _Pointer, _Int, *[_Pointer] * 3, _Int]),
    "draft": (
        _Text,
        [*[_Pointer] * 3, _Long, *[_Pointer] * 2, _Int, _Int, *[_Pointer] * 2],
    ),
    "logprobs": (_Text, [_Pointer, *[_Int] * 3, _Pointer, _Pointer, _Int, *[_Pointer] * 4]),
    "read": (_Text, [_Pointer, _Long]),
    "noise": (None, [ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32, _Long, _Pointer]),
}
