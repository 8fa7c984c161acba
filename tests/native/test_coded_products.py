"""The codes of GGUF files in the native step: ggml's weights to the bit, exact products of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from numpy.typing import NDArray

from outrider.base.stored import StoredFile
from outrider.checkpoints.coded import Coded, CodedPart
from outrider.checkpoints.dtypes import FLOAT32
from outrider.checkpoints.formats.gguf_weights import CODED
from outrider.errors import ModelError
from outrider.native import choice as native
from tests.support.native_products import Products, noise, normed
from tests.support.native_steps import FUSED, HERE, step

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native step is off")

SCALES = {Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q6_K: (208,), Kind.MXFP4: ()}
SCALES |= dict.fromkeys((Kind.Q4_1, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K), (0, 2))
"""Where the fp16 numbers of a block stand; at its beginning in other types."""
BEGIN = 4


def stored(kind: Kind, out: int, width: int) -> np.ndarray:
    """Random blocks [out, bytes of a row]: every code and small scale, among them denormal ones."""
    inputs, size = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(kind)
    blocks = rng.integers(0, 256, (out, width // inputs, size), dtype=np.uint8)
    for at in SCALES.get(kind, (0,)):
        halves = (rng.standard_normal(blocks.shape[:2]) / 100).astype(np.float16)
        halves[0], halves[1] = 6e-8, -0.0
        blocks[..., at : at + 2] = halves.view(np.uint8).reshape(*blocks.shape[:2], 2)
    if kind == Kind.MXFP4:
        blocks[..., 0] = rng.integers(118, 128, blocks.shape[:2])
        blocks[0, :, 0], blocks[1, :, 0] = 0, 1
    return blocks.reshape(out, -1)


def coded(
    path: Path, kind: Kind, out: int, width: int, order: NDArray[np.int64] | None = None
) -> Coded:
    """A matrix of random codes in a file of its own."""
    rows = stored(kind, out, width)
    file = path / f"{kind.name}-{out}-{width}"
    file.write_bytes(bytes(BEGIN) + rows.tobytes())
    weights = dequantize(rows, kind)
    part = CodedPart(
        StoredFile.at(file), BEGIN, int(kind), kind.name, out, rows.shape[1], order, weights.astype
    )
    return Coded((part,), width)


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("kind", CODED, ids=lambda kind: kind.name)
def test_weights_are_ggmls_and_products_are_of_them(isa: str, kind: Kind, tmp_path: Path) -> None:
    out, width, rows = 70, 768, list(range(41))
    order = np.random.default_rng(0).permutation(out)
    head = coded(tmp_path, kind, out, width, order)
    weights = head.dequantized(FLOAT32)
    looked_up = Products(step(isa), head, None).looked_up(rows)
    assert np.array_equal(looked_up, weights[:41])
    table = noise(out, width, seed=1)
    table[3] *= np.logspace(-3, 3, width, dtype=np.float32)
    table[5, : width // 2] = 0
    x, exact = normed(table[:41]), weights.astype(np.float64)
    for coarse in (False, True):
        product = Products(step(isa), head, table, 1, coarse)
        found = product(rows)
        blocks = np.abs(x).max(-1, keepdims=True) / (127 if coarse else 32512) / 2
        # Codes and what they are lessened by may be far larger than their difference.
        size = np.abs(x).sum(-1, keepdims=True) * np.abs(exact).max(-1)
        bound = blocks * np.abs(exact).sum(-1) + 4e-6 * size + 1e-9
        assert (np.abs(found - x @ exact.T) <= bound).all()
        for count in (*range(1, 10), 17, 33):
            assert np.array_equal(product(rows[:count]), found[:count]), count


@pytest.mark.parametrize("isa", [isa for isa in HERE if isa in FUSED[1:]])
@pytest.mark.parametrize("kind", CODED, ids=lambda kind: kind.name)
def test_every_set_gives_the_same_bits(isa: str, kind: Kind, tmp_path: Path) -> None:
    head, table = coded(tmp_path, kind, 70, 512), noise(70, 512, seed=1)
    for coarse in (False, True):
        for count in (1, 4, 33):
            rows = list(range(count))
            expected = Products(step(FUSED[0]), head, table, 1, coarse)(rows)
            assert np.array_equal(Products(step(isa), head, table, 1, coarse)(rows), expected)


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("kind", CODED, ids=lambda kind: kind.name)
def test_copied_rows_say_what_the_head_says(isa: str, kind: Kind, tmp_path: Path) -> None:
    head = coded(tmp_path, kind, 70, 512)
    product = Products(step(isa), head, noise(70, 512, seed=1), 1, True)
    whole = product([0, 1, 2])
    chosen = dict(enumerate([69, 3, 16, 15, *range(20, 40)]))
    product.likely(24, chosen)
    assert np.array_equal(product([0, 1, 2], 24), whole[:, [*chosen.values()]])
    assert np.array_equal(product([0, 1, 2]), whole)


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("kind", CODED, ids=lambda kind: kind.name)
def test_the_largest_sums_are_exact(isa: str, kind: Kind, tmp_path: Path) -> None:
    """Sums of the largest codes and digits fit where they are kept, whichever the sign."""
    inputs, size = GGML_QUANT_SIZES[kind]
    block = np.full((32, 512 // inputs, size), 255, np.uint8)
    for at in SCALES.get(kind, (0,)):
        block[..., at : at + 2] = np.array([1, 60], np.uint8) * (at != 2) * (at != 82)
    if kind == Kind.MXFP4:
        block[..., 0] = 127
    file = tmp_path / "head"
    file.write_bytes(block.tobytes())
    weights = dequantize(block.reshape(32, -1), kind)
    width = block.nbytes // 32
    part = CodedPart(StoredFile.at(file), 0, int(kind), kind.name, 32, width, None, weights.astype)
    head = Coded((part,), 512)
    table = np.ones((32, 512), np.float32)
    table[1::2] = -1
    for coarse in (False, True):
        for count in (1, 2, 3, 7, 9):
            found = Products(step(isa), head, table, 1, coarse)(list(range(count)))
            expected = table[:count].astype(np.float64) @ weights.astype(np.float64).T
            assert np.allclose(found, expected, rtol=3e-6, atol=0)


@pytest.mark.parametrize("kinds", [(Kind.Q4_K, Kind.Q6_K), (Kind.Q5_0, Kind.Q5_0, Kind.Q8_0)])
def test_parts_of_several_types_are_one_matrix(kinds: tuple[Kind, ...], tmp_path: Path) -> None:
    each = [coded(tmp_path, kind, 48 + 16 * i, 256) for i, kind in enumerate(kinds)]
    head = Coded.stacked(each)
    assert head is not None
    table, library = noise(head.shape[0], 256, seed=1), native.library()
    assert library is not None
    whole = Products(library, head, table)
    alone = [Products(library, one, table[: one.shape[0]]) for one in each]
    for count in (1, 4, 20):
        rows = list(range(count))
        assert np.array_equal(whole(rows), np.concatenate([one(rows) for one in alone], -1))


def test_a_type_that_changes_within_a_unit_is_no_stack(tmp_path: Path) -> None:
    first, second = coded(tmp_path, Kind.Q4_K, 24, 256), coded(tmp_path, Kind.Q6_K, 24, 256)
    assert Coded.stacked([first, second]) is None
    assert Coded.stacked([first, first]) is not None


def part_of(matrix: Coded, **changes: object) -> Coded:
    return replace(matrix, parts=(replace(matrix.parts[0], **changes),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda m: part_of(m, begin=BEGIN + 144), "to the end"),
        (lambda m: part_of(m, begin=2**61), "to the end"),
        (lambda m: part_of(m, begin=2**63 - 1), "no such place"),
        (lambda m: part_of(m, begin=-1), "no such place"),
        (lambda m: part_of(m, kind=1), "no such type"),
        (lambda m: part_of(m, rows=47), "other rows|another shape"),
        (lambda m: part_of(m, order=np.arange(48) + 1), "no such row"),
        (lambda m: part_of(m, order=np.arange(47)), "cannot read an array"),
        (lambda m: replace(m, inputs=128), "another shape"),
        (lambda m: replace(m, parts=m.parts * 2), "another shape"),
    ],
)
def test_what_does_not_fit_is_refused(
    change: Callable[[Coded], Coded], sentence: str, tmp_path: Path
) -> None:
    right, library = coded(tmp_path, Kind.Q4_K, 48, 256), native.library()
    assert library is not None
    product = Products(library, right, None)
    with pytest.raises(ModelError, match=sentence):
        library.set_coded(product.model, 0, "head", change(right), None)
    with pytest.raises(ModelError, match="no such matrix"):
        library.set_coded(product.model, 1, "qkv", right, None)


def test_a_scale_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    head = coded(tmp_path, Kind.Q4_K, 48, 256)
    file = head.parts[0].file.path
    damaged = bytearray(file.read_bytes())
    damaged[BEGIN : BEGIN + 2] = b"\x00\x7e"
    file.write_bytes(damaged)
    head = replace(head, parts=(replace(head.parts[0], file=StoredFile.at(file)),))
    library = native.library()
    assert library is not None
    with pytest.raises(ModelError, match="not finite"):
        Products(library, head, None)
