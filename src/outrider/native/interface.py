"""The C interface as ctypes knows it: structures, constants and functions of src/*.cpp."""

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from .checks import Fields, Whole
from .rates import Rates

ABI = 22
"""The answer of the library's ``outrider_abi``; it changes with this file."""

MARGINS = (0.5, 1.5, 3.0)
"""Where the bins of the margin begin, after the first."""

SUFFIX_DEPTH = 64
"""Tokens of a context in suffix decoding, and so of a draft, at most."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
MATRICES = {
    "qkv": 0, "output": 1, "gate_up": 2, "down": 3, "head": 4, "embedding": 5, "fuse": 6,
    "draft": 7,
}  # fmt: skip
VECTORS = {"input": 0, "mlp": 1, "final": 2, "q": 3, "k": 4, "state": 5, "fuse": 6}
EMBEDDED, PAIRED, HEADS = range(3)
"""What rows enter a model with, see ``Input`` of src/model.hpp."""
TABLES = 2
"""Rotary tables that a model may have."""

_Pointer, _Text = ctypes.c_void_p, ctypes.c_char_p
ASK_MASK = ctypes.CFUNCTYPE(
    _Pointer, ctypes.c_int32, ctypes.POINTER(ctypes.c_int32), ctypes.c_int32
)
"""``AskMask`` of src/draft.cpp: the address of a mask by draft, path and the path's length."""


class Config(Fields):
    """The sizes of a model; the layout is that of src/model.hpp."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("dtype", "layers", "hidden", "inner", "heads")),
        *((name, ctypes.c_int32) for name in ("kv_heads", "head_dim", "vocabulary", "max_length")),
        *((name, ctypes.c_int32) for name in ("embeddings", "input", "fused", "fused_norms")),
        *((name, ctypes.c_int32) for name in ("state_normed", "output_normed", "blocks", "coarse")),
        *((name, ctypes.c_float) for name in ("norm_eps", "scale", "embedding_scale")),
        *((name, ctypes.c_float) for name in ("residual_scale", "logits_scale")),
    )


class Choices:
    """The only nodes that a draft may have: each is the path of draws that leads to it.

    Args:
        paths: of ranks, 0 for the highest draw; with a path come all that it begins with.
    """

    def __init__(self, paths: Iterable[Sequence[int]]) -> None:
        self.numbers = {path: n for n, path in enumerate(sorted(map(tuple, paths)))}
        self.depth = max(map(len, self.numbers))
        self.branches = 1 + max(path[-1] for path in self.numbers)
        words = array("i", [len(self.numbers)])
        for path in self.numbers:
            words.extend((self.numbers.get(path[:-1], -1), path[-1]))
        self._words = words
        self.pointer = words.buffer_info()[0]

    def __len__(self) -> int:
        return len(self.numbers)


class DraftLimits(NamedTuple):
    """Limits of one draft: ``depth`` tokens deep, of ``nodes`` nodes or fewer.

    At each level the rows of up to ``width`` nodes are run, each of which has up to ``branches``
    children. By ``rates``, None for 1 throughout, a node survives if it and all before it are
    accepted. One whose chance of that is below ``least`` is not run; below ``worth`` it is left
    out. Of ``choices``, None for all, those are made that the other limits allow.
    """

    depth: int
    nodes: int
    width: int = 1
    branches: int = 1
    least: float = 0.0
    worth: float = 0.0
    rates: Rates | None = None
    choices: Choices | None = None


class DraftNodes(NamedTuple):
    """The nodes drafted for one sequence, parents before their children.

    ``margins`` are the gaps of log q + g of each node to the next candidate, ``survivals`` the
    chances, by the rates, that a node and all before it are accepted. ``runs`` are the places
    behind the committed tokens at which nodes of a tree have keys and values, -1 where they have
    none. ``logits`` are the processed logits that the nodes were drawn from, fp32
    [nodes, vocabulary], where they were asked for.
    """

    tokens: list[int]
    parents: list[int]
    runs: Sequence[int] = ()
    margins: Sequence[float] = ()
    survivals: Sequence[float] = ()
    logits: torch.Tensor | None = None


class Followed(NamedTuple):
    """The nodes of a draft by suffix decoding, parents first.

    ``counts`` are how often a node's token followed at its place, ``rests`` how often others did.
    """

    tokens: list[int]
    parents: list[int]
    counts: list[int]
    rests: list[int]


class Planted(NamedTuple):
    """Logits that a sequence's rows have instead of those that the model computes.

    Entry by entry, ``ids`` int64 [n, m] have the logits ``z`` fp32 [n, m] and every other id has
    ``rest`` fp32 [n]; ids past the vocabulary are left out. The first entry decides the token at
    position ``first``, and the last those of all positions from its own on.
    """

    ids: torch.Tensor
    z: torch.Tensor
    rest: torch.Tensor
    first: int


class Options(Fields):
    """A request's options in its pipeline; the layout is that of src/pipeline.hpp."""

    _fields_ = (
        ("seed", ctypes.c_uint64),
        ("presence", ctypes.c_double),
        *((name, ctypes.c_float) for name in ("temperature", "frequency", "repetition", "min_p")),
        ("top_p", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("top_k", "vocabulary", "sample", "prompt_length")),
        *((name, ctypes.c_int32) for name in ("min_tokens", "penalises")),
    )


class QuantizedData(Fields):
    """A quantised matrix; the layout is that of src/weights.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "zeros")),
        *((name, ctypes.c_int32) for name in ("bits", "group", "groups")),
    )


def _long(name: str) -> Whole:
    return Whole(name, ctypes.c_int64)


_MATRIX = (_Pointer, Whole("rows"), Whole("columns"), _Pointer)
_WORDS = (_Pointer, _Pointer, _Pointer, _long("words"))

FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "abi": (ctypes.c_int, []),
    "cpu": (ctypes.c_int, []),
    "spent": (ctypes.c_int64, []),
    "start": (ctypes.c_int, [Whole("threads")]),
    "model": (_Text, [ctypes.POINTER(Config), _Pointer, _Pointer]),
    "model_free": (None, [_Pointer]),
    "matrix": (
        _Text,
        [_Pointer, Whole("layer"), Whole("kind"), _Pointer, Whole("dtype"), *_MATRIX],
    ),
    "quantized": (
        _Text,
        [_Pointer, Whole("layer"), Whole("kind"), ctypes.POINTER(QuantizedData), *_MATRIX],
    ),
    "vector": (_Text, [_Pointer, Whole("layer"), Whole("kind"), _Pointer, _long("length")]),
    "rotary": (
        _Text,
        [_Pointer, Whole("table"), _Pointer, _Pointer, Whole("length"), Whole("width")],
    ),
    "layer": (_Text, [_Pointer, Whole("layer"), Whole("window"), Whole("table")]),
    "check": (_Text, [_Pointer]),
    "shared": (ctypes.c_int64, [_Pointer, _Pointer]),
    "weights": (ctypes.c_int64, [_Pointer, _Pointer]),
    "page_bytes": (_Text, [_Pointer, Whole("page_size"), _Pointer]),
    "ids": (_Text, [_Pointer, _Pointer, Whole("vocabulary"), _Pointer, Whole("ids")]),
    "borrow": (_Text, [_Pointer, _Pointer]),
    "fuse": (
        _Text,
        [
            *(_Pointer, _Pointer, Whole("layers"), Whole("rows"), Whole("target width")),
            *(_Pointer, Whole("states"), _Pointer, _Pointer, Whole("room"), Whole("width")),
        ],
    ),
    "store": (_Text, [_Pointer, Whole("pages"), Whole("page_size"), _Pointer]),
    "store_free": (None, [_Pointer]),
    "harmed": (ctypes.c_int, [_Pointer]),
    "move": (_Text, [_Pointer, _Pointer, _Pointer, Whole("entries")]),
    "forward": (
        _Text,
        [
            *(*_WORDS, _Pointer, _Pointer, Whole("sublayers"), _Pointer, Whole("hidden states")),
            *(_Pointer, Whole("rows of logits"), Whole("vocabulary")),
            *(_Pointer, Whole("rows"), Whole("width")),
        ],
    ),
    "pipeline": (
        _Text,
        [
            *(ctypes.POINTER(Options), _Pointer, _Pointer, Whole("ends")),
            *(_Pointer, Whole("biases"), Whole("prompt"), _Pointer),
        ],
    ),
    "pipeline_free": (None, [_Pointer]),
    "pipeline_count": (_Text, [_Pointer, _Pointer, Whole("tokens")]),
    "pipeline_apply": (
        _Text,
        [
            *(_Pointer, _Pointer, Whole("rows"), Whole("vocabulary"), Whole("output")),
            *(_Pointer, _long("paths"), Whole("late_only")),
        ],
    ),
    "draw": (_Text, [_Pointer, Whole("rows"), _long("stride"), Whole("width"), *[_Pointer] * 4]),
    "decide": (_Text, [_Pointer] * 13),
    "draft": (_Text, [*[_Pointer] * 11, ASK_MASK, *[_Pointer] * 2]),
    "logprobs": (
        _Text,
        [
            *(_Pointer, Whole("rows"), Whole("tokens"), Whole("vocabulary"), _Pointer, _Pointer),
            *(Whole("count"), *[_Pointer] * 4),
        ],
    ),
    "suffix": (_Text, [Whole("room"), _Pointer]),
    "suffix_free": (None, [_Pointer]),
    "suffix_extend": (_Text, [_Pointer, _Pointer, Whole("tokens"), Whole("ends")]),
    "suffix_drop": (_Text, [_Pointer, _long("places"), _Pointer]),
    "suffix_draft": (_Text, [*[_Pointer] * 2, Whole("depth"), Whole("nodes"), *[_Pointer] * 2]),
    "read": (_Text, [_Pointer, _long("bytes")]),
    "peak": (_Text, [Whole("kind"), Whole("pieces"), _Pointer]),
    "noise": (
        None,
        [
            *(Whole("seed", ctypes.c_uint64), Whole("position", ctypes.c_uint32)),
            *(Whole("sample", ctypes.c_uint32), _long("count"), _Pointer),
        ],
    ),
}
"""Types of results and arguments by function; those that return a text can fail."""
