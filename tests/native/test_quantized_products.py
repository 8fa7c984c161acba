"""Quantised matrices in the native step: exact up to rounding, the same bits in any company."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from outrider.checkpoints.dtypes import FLOAT32, Array
from outrider.checkpoints.quantize import Matrix, Quantized
from outrider.checkpoints.weights import LayerWeights, Loader, Mlp
from outrider.errors import ModelError
from outrider.models import native as models_native
from outrider.models.base import Output
from outrider.models.native import NativeTransformer
from outrider.models.rows import Segment
from outrider.native import choice as native
from outrider.native.library import Library
from tests.support.loading import native_model
from tests.support.native_products import PAGE, Products, noise, normed, parts
from tests.support.native_steps import FUSED, HERE, step

MakeCheckpoint = Callable[..., Path]
Recipe = Callable[[Matrix], Matrix]

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native step is off")


def quantized(matrix: Array, bits: int, group: int, zeros: bool = False) -> Quantized:
    """``matrix`` [out, in] rounded to a grid; scales are fp16 numbers, which pack exactly."""
    out, width = matrix.shape
    groups = -(-width // group)
    padded = np.zeros((out, groups * group), np.float32)
    # The same codes from a model in fp32 and one in bf16.
    padded[:, :width] = matrix.astype(ml_dtypes.bfloat16)
    parts = padded.reshape(out, groups, group)
    top, middle = (1 << bits) - 1, 1 << (bits - 1)
    if zeros:
        low, high = np.minimum(parts.min(-1), 0), np.maximum(parts.max(-1), 0)
        scales = np.maximum((high - low) / top, 1e-6).astype(np.float16).astype(np.float32)
        offset = np.clip(np.rint(-low / scales), 0, top)
    else:
        scales = (np.abs(parts).max(-1) / (middle - 1)).astype(np.float16).astype(np.float32)
        offset = np.full_like(scales, middle)
    codes = np.rint(parts / np.maximum(scales, 1e-9)[..., None]) + offset[..., None]
    codes = np.clip(codes, 0, top).reshape(out, -1)[:, :width]
    return Quantized(
        codes.astype(np.uint8),
        scales,
        offset.astype(np.uint8) if zeros else None,
        bits,
        group,
    )


SHAPES = [
    # bits, outputs, inputs, group, zeros
    (8, 48, 256, 128, False),
    (8, 45, 200, 128, True),  # a short last group, outputs that fill no unit
    (8, 130, 300, 300, False),  # per channel
    (4, 64, 256, 32, True),
    (4, 70, 100, 32, False),
    (4, 41, 72, 24, True),  # a group that is no whole block
    (4, 90, 512, 200, True),  # several blocks a group, the last one short
    (4, 64, 192, 64, False),
    (8, 41, 37, 1, False),
]


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize(("bits", "out", "width", "group", "zeros"), SHAPES)
def test_a_product_is_that_of_the_dequantised_matrix(
    isa: str, coarse: bool, bits: int, out: int, width: int, group: int, zeros: bool
) -> None:
    head = quantized(noise(out, width), bits, group, zeros)
    table = noise(out, width, seed=1)
    table[3] *= np.logspace(-3, 3, width, dtype=np.float32)  # few large among many small
    table[5, : width // 2] = 0
    table[7] *= 1e15
    found = Products(step(isa), head, table, 1, coarse)(list(range(41)))
    x, weights = normed(table[:41]), head.dequantized(np.dtype(np.float64))
    # A digit is off by half a unit at most, of a block's largest over 32512, or over 127.
    blocks = np.abs(x).max(-1, keepdims=True) / (127 if coarse else 32512) / 2
    bound = blocks * np.abs(weights).sum(-1) + 4e-6 * (np.abs(x) @ np.abs(weights).T) + 1e-6
    assert (np.abs(found - x @ weights.T) <= bound).all()


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize(
    ("bits", "group", "zeros"), [(8, 128, True), (4, 32, False), (4, 64, True)]
)
def test_a_row_has_the_same_bits_in_any_company(
    isa: str, coarse: bool, bits: int, group: int, zeros: bool
) -> None:
    head, table = quantized(noise(150, 160), bits, group, zeros), noise(150, 160, seed=1)
    product = Products(step(isa), head, table, 1, coarse)
    expected = np.concatenate([product([row]) for row in range(40)])
    for count in range(2, 41):
        assert np.array_equal(product(list(range(count))), expected[:count]), count


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_sums_are_exact(isa: str, coarse: bool, bits: int) -> None:
    """Sums of the largest codes and digits fit where they are kept, whichever the sign."""
    out, width, top = 32, 256, (1 << bits) - 1
    head = Quantized(
        np.full((out, width), top, np.uint8), np.ones((out, 2), np.float32),
        np.zeros((out, 2), np.uint8), bits, 128,
    )  # fmt: skip
    table = np.ones((32, width), np.float32)
    table[1::2] = -1
    for count in (1, 2, 3, 7, 9):
        found = Products(step(isa), head, table, 1, coarse)(list(range(count)))
        expected = table[:count, :1] * (top * width)
        assert np.allclose(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("isa", [isa for isa in HERE if isa in FUSED[1:]])
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize(("bits", "out", "width", "group", "zeros"), SHAPES)
def test_every_set_gives_the_same_bits(
    isa: str, coarse: bool, bits: int, out: int, width: int, group: int, zeros: bool
) -> None:  # fmt: skip
    """Integer sums are exact, and those of fp32 are fused and in order; "portable" fuses none."""
    head, table = quantized(noise(out, width), bits, group, zeros), noise(out, width, seed=1)
    for count in (1, 4, 33):
        rows = list(range(count))
        expected = Products(step(FUSED[0]), head, table, 1, coarse)(rows)
        assert np.array_equal(Products(step(isa), head, table, 1, coarse)(rows), expected)


@pytest.mark.parametrize("isa", HERE)
def test_what_is_no_number_stays_in_its_row(isa: str) -> None:
    head, table = quantized(noise(64, 256), 4, 64), noise(64, 256, seed=1)
    table[6] = 0
    expected = Products(step(isa), head, table)(list(range(12)))
    assert not np.isnan(expected).any()
    assert not expected[6].any()
    broken = table.copy()
    broken[2, 9] = float("nan")
    broken[4, 200] = float("inf")
    found = Products(step(isa), head, broken)(list(range(12)))
    for row in range(12):
        if row in (2, 4):
            assert np.isnan(found[row]).all()
        else:
            assert np.array_equal(found[row], expected[row])


@pytest.mark.parametrize("isa", HERE)
def test_size_is_not_lost(isa: str) -> None:
    """Powers of two go through a product untouched, up to where activations count as zeros."""
    head, table = quantized(noise(64, 256), 8, 64, True), noise(64, 256, seed=1)
    head = replace(
        head,
        scales=head.scales
        * np.tile(np.float32(2) ** np.arange(-16, 0)[:, None], (4, 4)).astype(np.float32),
    )
    rows = list(range(5))
    expected = Products(step(isa), head, table)(rows)
    for power in (-90, -40, 40, 90):
        found = Products(step(isa), head, table, 2.0**power)(rows)
        assert np.array_equal(found, expected * np.float32(2.0**power))
    assert not Products(step(isa), head, table, 2.0**-115)(rows).any()


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("bits", [4, 8])
def test_tied_embeddings_are_rows_of_the_head(isa: str, bits: int) -> None:
    head, rows = quantized(noise(41, 72), bits, 24, True), list(range(41))
    tied = Products(step(isa), head, None)
    assert np.array_equal(tied.looked_up(rows), head.dequantized(FLOAT32))
    apart = Products(step(isa), head, head.dequantized(FLOAT32))
    assert np.array_equal(tied(rows), apart(rows))
    plain = noise(41, 72)
    whole = Products(step(isa), plain, None)
    assert np.array_equal(whole.looked_up(rows), plain)
    assert np.array_equal(whole(rows), Products(step(isa), plain, plain)(rows))


def quantized_loader(monkeypatch: pytest.MonkeyPatch, recipe: dict[str, Recipe]) -> None:
    """Have models load their matrices as ``recipe`` makes them, by kind."""

    class Stub(Loader):
        def layer(
            self, index: int, inputs: int | None = None, normed: bool = True
        ) -> LayerWeights[Matrix, Array]:
            weights = super().layer(index)
            assert isinstance(weights.mlp, Mlp)
            made = {kind: recipe[kind] for kind in ("qkv", "output", "gate_up", "down")}
            mlp = replace(
                weights.mlp,
                gate_up=made["gate_up"](weights.mlp.gate_up),
                down=made["down"](weights.mlp.down),
            )
            return replace(
                weights,
                qkv=made["qkv"](weights.qkv),
                output=made["output"](weights.output),
                mlp=mlp,
            )

        def head(self, embedding: Matrix) -> Matrix:
            return recipe["head"](super().head(embedding))

    monkeypatch.setattr(models_native, "Loader", Stub)


RECIPES: dict[str, Recipe] = {
    "qkv": lambda m: quantized(m, 4, 32, True),
    "output": lambda m: quantized(m, 8, 128),
    "gate_up": lambda m: quantized(m, 4, 64),
    "down": lambda m: quantized(m, 8, m.shape[1], True),
    "head": lambda m: quantized(m, 8, 32),
}


def dequantized(recipe: Recipe) -> Recipe:
    def make(matrix: Matrix) -> Matrix:
        out = recipe(matrix)
        return out.dequantized(matrix.dtype) if isinstance(out, Quantized) else out

    return make


def whole(model: NativeTransformer, ids: list[int]) -> Output:
    store = model.new_store(5, PAGE)
    return model.run([Segment(ids, 0, [1, 2, 3, 4], len(ids), len(ids))], store)


def ids_of(length: int) -> list[int]:
    return np.random.default_rng(2).integers(128, size=length).tolist()


@pytest.fixture(scope="module")
def folder(make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("quantized"),
        "llama",
        hidden_size=72,
        head_dim=24,
        intermediate_size=100,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("isa", HERE)
def test_a_model_of_quantised_matrices(
    isa: str, dtype: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixed freely with others: also where only every second kind is quantised."""
    for kinds in (list(RECIPES), ["qkv", "gate_up"], ["output", "down", "head"]):
        mixed: dict[str, Recipe] = {
            kind: RECIPES[kind] if kind in kinds else np.ascontiguousarray for kind in RECIPES
        }
        quantized_loader(monkeypatch, mixed)
        model = native_model(step(isa), folder, dtype, 256)
        quantized_loader(monkeypatch, {kind: dequantized(mixed[kind]) for kind in mixed})
        reference = native_model(step(isa), folder, "float32", 256)
        logits = whole(model, ids_of(50)).logits
        expected = whole(reference, ids_of(50)).logits
        assert logits is not None
        assert expected is not None
        if dtype == "float32":
            assert np.abs(logits - expected).max() < 5e-3  # of a spread of about 3
        else:
            assert ((logits - expected) ** 2).mean() ** 0.5 < 0.1
        for size in (1, 5, 8, 17):
            store, parts = model.new_store(6, PAGE), []
            for start in range(0, 50, size):
                chunk = ids_of(50)[start : start + size]
                out = model.run([Segment(chunk, start, [5, 2, 4, 1], len(chunk), 50)], store)
                assert out.logits is not None
                parts.append(out.logits)
            assert np.array_equal(np.concatenate(parts), logits), size


def test_workers_change_no_bits(
    folder: Path, make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library of its own has a pool of its own, of three workers."""
    wide = make_checkpoint(
        tmp_path / "wide", "llama", hidden_size=256, intermediate_size=512, vocab_size=2048
    )
    quantized_loader(monkeypatch, RECIPES)
    alone = step(HERE[-1])
    file = native._file(alone.isa)
    assert file is not None
    several = Library(alone.isa, Path(shutil.copy(file, tmp_path / "copy.so")))
    several.sets()
    assert several.start(3) == 3
    model = native_model(alone, wide, "bfloat16", 256)
    shared = native_model(several, wide, "bfloat16", 256)
    for length in (1, 7, 40):
        expected = whole(model, ids_of(length)).logits
        for _ in range(3):
            found = whole(shared, ids_of(length)).logits
            assert found is not None
            assert expected is not None
            assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda q: replace(q, codes=q.codes + 9), "more bits"),
        (lambda q: replace(q, zeros=np.full(q.scales.shape, 16, np.uint8)), "more bits"),
        (lambda q: replace(q, scales=q.scales * float("inf")), "not finite"),
        (lambda q: replace(q, scales=q.scales[:, :1]), "cannot read an array"),
        (lambda q: replace(q, scales=q.scales.astype(np.float64)), "cannot read an array"),
        (lambda q: replace(q, codes=q.codes.astype(np.int32)), "cannot read an array"),
        (lambda q: replace(q, zeros=q.codes), "cannot read an array"),
        (lambda q: replace(q, bits=3), "bits other than 4 and 8"),
        (lambda q: quantized(noise(8, 72), 4, 24), "another shape"),
        (lambda q: replace(q, group=0, scales=noise(64, 72)), "groups of no inputs"),
    ],
)
def test_what_does_not_fit_is_refused(
    change: Callable[[Quantized], Quantized], sentence: str
) -> None:
    right = quantized(noise(64, 72), 4, 24)
    found = native.library()
    assert found is not None
    product = Products(found, right, None)
    with pytest.raises(ModelError, match=sentence):
        found.set_quantized(product.model, 0, "head", *parts(change(right)), None)
    with pytest.raises(ModelError, match="no such matrix"):
        found.set_quantized(product.model, 1, "qkv", *parts(right), None)
