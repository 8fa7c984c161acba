"""Matrices of a checkpoint: quantised by a recipe, stacked, or some of their rows."""

import logging
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.config import Recipe
from ..errors import ConfigError, ModelError
from .coded import Coded
from .dtypes import FLOAT32, Array
from .formats.gguf_weights import GGUFTensors
from .formats.shared import Tensors, warn_once
from .quantize import Matrix, Quantized, quantize

logger = logging.getLogger("outrider")

Source = Tensors | GGUFTensors
"""Weights by the names of Hugging Face's models."""
STACKS = (("q", "k", "v"), ("gate", "up"))
"""Projections that are stacked into one product: all have one kind of codes, or are dequantised."""


def stays(source: Source, name: str) -> str | None:
    """Return the kind of codes that the matrix ``name`` keeps under a recipe; None for none.

    A matrix that is stacked with others keeps its codes only if all of them do, with codes of the
    same kind or from a GGUF file.
    """
    parts = re.fullmatch(r"(.+\.)(q|k|v|gate|up)(_proj\.weight)", name)
    if parts is None:
        return source.kept(name)
    (stack,) = (each for each in STACKS if parts[2] in each)
    kinds = {source.kept(f"{parts[1]}{part}{parts[3]}") for part in stack}
    if None in kinds or (len(kinds) > 1 and isinstance(source, Tensors)):
        return None
    return source.kept(name)


ROUTERS = r"gate|router|router\.layer|shared_expert_gate"
"""Names of modules that score experts, which no recipe quantises."""


def is_experts(name: str, shape: Sequence[int]) -> bool:
    """Return True if a tensor has the matrices of all experts of a layer."""
    return len(shape) == 3 and re.search(r"experts|block_sparse_moe", name) is not None


def check_left(source: Source, recipe: Recipe) -> None:
    """Refuse a recipe that would change no matrix; log the matrices that keep their codes."""
    warn_once(source.note)
    shapes = source.shapes().items()
    names = [n for n, shape in shapes if len(shape) == 2 or is_experts(n, shape)]
    names = [name for name in names if not re.fullmatch(rf".*\.({ROUTERS})\.weight", name)]
    counts = Counter(filter(None, (stays(source, name) for name in names)))
    what = ", ".join(f"{count} ({kind})" for kind, count in sorted(counts.items()))
    if counts.total() == len(names):
        raise ConfigError(
            f"quantization is {str(recipe)!r}, but the weights in {source.folder} are quantised "
            "already; leave it out, or give the checkpoint they were made from."
        )
    if counts:
        logger.warning(
            "%s: %s of %d matrices keep their codes; the others become %s.",
            source.folder, what, len(names), recipe,
        )  # fmt: skip


def quantized(
    source: Source, name: str, shape: tuple[int, int], recipe: Recipe
) -> Quantized | Coded:
    """Return the matrix ``name`` of ``shape`` (out, in), stored if it ``stays``, or by recipe."""
    matrix = source.matrix(name, shape, None)
    if not isinstance(matrix, np.ndarray):
        if stays(source, name):
            return matrix
        matrix = matrix.dequantized(FLOAT32)
    return by_recipe(source, name, matrix, recipe)


def by_recipe(source: Source, name: str, matrix: Array, recipe: Recipe) -> Quantized:
    """Return a matrix quantised by ``recipe``. Raises ModelError: it cannot be."""
    try:
        return quantize(matrix, recipe)
    except ValueError as error:
        what = f"tensor {name!r} cannot be quantised: {error}"
        raise ModelError(f"{source.folder}: {what}.") from None


def plain(matrix: Matrix, dtype: np.dtype[Any]) -> Array:
    """Return ``matrix`` as an array, dequantised to ``dtype`` if it is quantised."""
    return matrix if isinstance(matrix, np.ndarray) else matrix.dequantized(dtype)


def stacked(parts: list[Matrix], dtype: np.dtype[Any]) -> Matrix:
    """Return ``parts`` stacked, dequantised to ``dtype`` unless their codes fit together."""
    coded = [p for p in parts if isinstance(p, Coded)]
    together = Coded.stacked(coded) if len(coded) == len(parts) else None
    if together is not None:
        return together
    quantised = [p for p in parts if isinstance(p, Quantized)]
    if len(quantised) == len(parts) and len({(p.bits, p.group) for p in quantised}) == 1:
        return Quantized.stacked(quantised)
    return np.concatenate([plain(p, dtype) for p in parts])


def ranges(matrix: Matrix, parts: Sequence[range]) -> Matrix:
    """Return some rows of a matrix: those of ``parts``, in that order."""
    if isinstance(matrix, Coded):
        return matrix.ranges(parts)
    rows = numbers(parts)
    return matrix[rows] if isinstance(matrix, np.ndarray) else matrix.rows(rows)


def by_kind(groups: int, sizes: Sequence[int]) -> list[range]:
    """Return the rows of ``groups``, each with kinds of ``sizes``, ordered by kind."""
    whole = sum(sizes)
    return [
        range(group * whole + sum(sizes[:kind]), group * whole + sum(sizes[: kind + 1]))
        for kind in range(len(sizes))
        for group in range(groups)
    ]


def numbers(parts: Sequence[range]) -> NDArray[np.int64]:
    """Return the numbers in ``parts``, concatenated."""
    return np.concatenate([np.arange(part.start, part.stop) for part in parts])
