"""The C interface: constants and structures of src/outrider.h, and what calls give and take."""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base.types import DraftBudget as DraftBudget
from ..base.types import DraftNodes as DraftNodes
from ..checkpoints import dtypes
from ._interface import ROTARY_TABLES, ffi
from ._interface import SUFFIX_DEPTH as SUFFIX_DEPTH
from .checks import CFields
from .rates import MARGINS as MARGINS

TABLES: int = ROTARY_TABLES
"""Rotary tables that a model may have."""


def _kinds(enumeration: str) -> dict[str, int]:
    """Return the numbers of an enumeration, in order, by the names behind their common prefix."""
    names: dict[int, str] = ffi.typeof(f"enum {enumeration}").elements
    return {names[number].partition("_")[2].lower(): number for number in sorted(names)}


DTYPES = {dtypes.DTYPES[name]: number for name, number in _kinds("Dtype").items()}
MATRICES, VECTORS = _kinds("MatrixKind"), _kinds("VectorKind")
MIXERS = _kinds("MixerKind")
"""The numbers of what mixes tokens, by its name in an ``Architecture``."""
GATES = {"silu": 0, "gelu_pytorch_tanh": 1, "relu2": 2, "clamped": 3}
"""The numbers of ``enum ActivationKind``, by the names in configs."""
MLPS, ROUTERS = _kinds("MlpKind"), _kinds("RouterKind")
"""The numbers of what stands behind a mixer, and of how a mixture's router weighs experts."""
PEAKS = tuple(_kinds("PeakKind"))
"""Kinds of products: digits are what activations become beside few-bit codes."""
EMBEDDED, PAIRED, JOINED, HEADS, BLOCK = sorted(_kinds("InputKind").values())


class Config(CFields):
    """The sizes of a model."""


class Options(CFields):
    """A request's options in its pipeline."""


class QuantizedData(CFields):
    """A quantised matrix."""


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
        self.pointer = ffi.from_buffer("int32_t[]", words)

    def __len__(self) -> int:
        return len(self.numbers)


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

    ids: NDArray[np.int64]
    z: NDArray[np.float32]
    rest: NDArray[np.float32]
    first: int
