"""Rows of a head that are copied for drafts: the head's bits, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from outrider.errors import ModelError
from outrider.native import choice as native
from tests.support.native_products import Products, noise
from tests.support.native_steps import HERE, step
from tests.support.quantised import quantised

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native step is off")

OUT, WIDTH, ROWS = 70, 96, [0, 1, 2, 3, 4]


def head(kind: str) -> Any:
    """A matrix of a kind, with groups of 32 inputs and with as many as it has."""
    if kind == "float32":
        return noise(OUT, WIDTH)
    bits, group, zeros = {"int4": (4, 32, True), "int8": (8, WIDTH, False)}[kind]
    return quantised(OUT, WIDTH, bits, group, zeros, 3)


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("kind", ["float32", "int4", "int8"])
def test_copied_rows_say_what_the_head_says(isa: str, kind: str) -> None:
    """Also where a place is given to another row, and one that nobody filled says nothing."""
    product = Products(step(isa), head(kind), noise(OUT, WIDTH, seed=1))
    whole = product(ROWS)
    chosen = dict(enumerate([3, 69, 16, 0, 17, *range(30, 45)]))
    product.likely(23, chosen)
    assert np.array_equal(product(ROWS, 23)[:, :20], whole[:, [*chosen.values()]])
    later = {0: 50, 18: 3, 7: 69}
    product.likely(23, later)
    chosen |= later
    assert np.array_equal(product(ROWS, 23)[:, :20], whole[:, [*chosen.values()]])
    assert np.array_equal(product(ROWS), whole)


@pytest.mark.parametrize(
    ("size", "places", "ids", "said"),
    [
        (0, [], [], "none, or are no fewer"),
        (OUT, [0], [0], "none, or are no fewer"),
        (-16, [0], [0], "none, or are no fewer"),
        (16, [16], [0], "no such row"),
        (16, [-1], [0], "no such row"),
        (16, [0], [OUT], "no such row"),
        (16, [0], [-1], "no such row"),
        (16, [0], [2**31], "not of 32 bits"),
        (16, [0, 1], [5], "do not belong together"),
        (2**40, [0], [0], "size"),
    ],
)
def test_what_is_no_row_or_place_is_refused(
    size: int, places: list[int], ids: list[int], said: str
) -> None:
    library = native.library()
    assert library is not None
    product = Products(library, head("int8"), noise(OUT, WIDTH, seed=1))
    with pytest.raises(ModelError, match=said):
        library.set_likely(product.model, size, places, ids)
    with pytest.raises(ModelError, match="another shape"):
        product(ROWS, 16)  # there are none yet


def test_the_number_of_copied_rows_stays() -> None:
    library = native.library()
    assert library is not None
    product = Products(library, head("float32"), noise(OUT, WIDTH, seed=1))
    before = library.weight_bytes(product.model, None)
    product.likely(16, {0: 1})
    assert library.weight_bytes(product.model, None) == before + 16 * WIDTH * 4
    with pytest.raises(ModelError, match="stay as many"):
        product.likely(32, {0: 1})
