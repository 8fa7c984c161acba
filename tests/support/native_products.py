"""Products of a native head with rows, of matrices in every form."""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from outrider.checkpoints.coded import Coded
from outrider.checkpoints.quantize import Codes, Floats, Matrix, Quantized
from outrider.native.checks import free_with
from outrider.native.interface import Config
from outrider.native.library import Library

PAGE = 16


def parts(q: Quantized) -> tuple[Codes, Floats, Codes | None, int, int]:
    return q.codes, q.scales, q.zeros, q.bits, q.group


class Products:
    """A model without layers to run: logits are products of a head and normalised rows.

    Every row is a sequence of its own.
    """

    def __init__(
        self,
        library: Library,
        head: Matrix,
        table: Floats | None,
        size: float = 1,
        coarse: bool = False,
    ) -> None:
        self.shape = out, width = int(head.shape[0]), int(head.shape[1])
        self.library, self.table = library, table
        config = Config(
            layers=1, hidden=width, inner=1, heads=1, kv_heads=1, head_dim=2,
            vocabulary=out, max_length=64, norm_eps=1e-12, scale=1, embedding_scale=1,
            residual_scale=1, logits_scale=1, coarse=coarse,
        )  # fmt: skip
        self.model = library.new_model(config, table)
        library.set_vector(self.model, 0, "final", np.full(width, size, np.float32))
        if isinstance(head, Coded):
            library.set_coded(self.model, 0, "head", head, None)
        elif isinstance(head, Quantized):
            library.set_quantized(self.model, 0, "head", *parts(head), None)
        else:
            library.set_matrix(self.model, 0, "head", head, None)
        self.store = library.new_store(self.model, 64, PAGE)
        free_with(self, library.free, "store", self.store)
        free_with(self, library.free, "model", self.model)

    def __call__(self, rows: list[int], wanted: int | None = None) -> Floats:
        """Products with the head, or with its likely rows where ``wanted`` is their number."""
        logits = np.empty((len(rows), wanted or self.shape[0]), np.float32)
        kept = np.empty((0, len(rows), self.shape[1]), np.float32)
        words = array(
            "i", (w for page, row in enumerate(rows) for w in (1, 0, 0, 1, 1, 0, 1, 0, row, page))
        )
        self.library.forward(self.model, self.store, words, [], [], logits, kept)
        return logits

    def likely(self, size: int, chosen: dict[int, int]) -> None:
        """Copy rows of the head, by place, to likely ones."""
        self.library.set_likely(self.model, size, [*chosen], [*chosen.values()])

    def looked_up(self, rows: list[int]) -> Floats:
        logits = np.empty((0, self.shape[0]), np.float32)
        kept = np.empty((1, len(rows), self.shape[1]), np.float32)
        words = array(
            "i", (w for page, row in enumerate(rows) for w in (1, 0, 0, 1, 0, 0, 1, 0, row, page))
        )
        self.library.forward(self.model, self.store, words, [], [-1], logits, kept)
        return kept[0]


def noise(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def normed(table: Floats) -> NDArray[np.float64]:
    wide = table.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(-1, keepdims=True))
