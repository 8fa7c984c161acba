"""One forward for any mix of rows: a row's logits do not depend on which rows went with it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from outrider.models import transformer
from outrider.models.base import Output
from outrider.models.kv_store import KVStore
from outrider.models.native import NativeTransformer
from outrider.models.rows import Segment
from outrider.models.tensors import as_array
from outrider.models.tiles import LANES, TILE, build_rows
from outrider.models.torch_weights import bf16_kernels
from outrider.models.transformer import Transformer, row_unit
from outrider.native.choice import library
from outrider.sampling.pipeline import Logits
from tests.support.loading import native_model, torch_model

CPU = "cpu"
PAGE = 8
LENGTH = 150
MakeCheckpoint = Callable[..., Path]


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "gemma2": {
        "head_dim": 16,
        "sliding_window": 24,
        "layer_types": ["full_attention", "sliding_attention"],
        "attn_logit_softcapping": 1.5,
    },
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 24, "sliding_window": 70, "use_sliding_window": True},
}  # fmt: skip


# Odd sizes: nothing is a multiple of a vector's width.
NATIVE: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "mistral": {"head_dim": 24, "sliding_window": 70, "hidden_size": 40, "intermediate_size": 52},
}
# Of keys and values in codes: several heads and groups of a head, and scores with a cap.
CODED: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 80, "num_attention_heads": 6},
    "gemma2": FAMILIES["gemma2"] | {"head_dim": 256, "tie_word_embeddings": False},
}
OPTIONS = {"torch": FAMILIES, "native": NATIVE, "coded": CODED}
Paths: TypeAlias = Transformer | NativeTransformer


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(("torch", "float32", f), id=f"torch-float32-{f}") for f in FAMILIES),
        *(
            pytest.param(("native", dtype, f), id=f"native-{dtype}-{f}", marks=pytest.mark.engine)
            for dtype in ("float32", "bfloat16")
            for f in NATIVE
        ),
        *(
            pytest.param(("coded", dtype, f), id=f"coded-{dtype}-{f}", marks=pytest.mark.engine)
            for dtype, f in zip(("bfloat16", "float32"), CODED, strict=True)
        ),
    ],
)
def model(
    request: pytest.FixtureRequest,
    make_checkpoint: MakeCheckpoint,
    tmp_path_factory: pytest.TempPathFactory,
) -> Paths:
    path, dtype, family = request.param
    options = OPTIONS[path][family]
    folder = make_checkpoint(tmp_path_factory.mktemp("rows"), family, **options)
    return open_path(path, folder, dtype)


def open_path(path: str, folder: Path, dtype: str = "float32") -> Paths:
    if path == "torch":
        return torch_model(folder, dtype, CPU, 640)
    step = library()
    if step is None:
        pytest.skip("the native step is off")
    return native_model(step, folder, dtype, 640, coded_cache=path == "coded")


@pytest.fixture(scope="module")
def low(make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    folder = make_checkpoint(tmp_path_factory.mktemp("low"), "qwen3", head_dim=16)
    return torch_model(folder, "bfloat16", CPU, 256)


def ids_of(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(128) for _ in range(length)]


def embedding_of(model: Paths) -> NDArray[Any]:
    if isinstance(model, Transformer):
        return as_array(model.weights.embedding)
    assert model.embedding is not None
    return model.embedding


class Cache:
    """A store and the page tables that a test makes by hand."""

    def __init__(self, model: Paths, num_pages: int = 80) -> None:
        self.model = model
        self.store = model.new_store(num_pages, PAGE)

    def forward(self, *segments: Segment, hidden: Sequence[int] = ()) -> Output:
        return self.model.run(segments, self.store, hidden)

    def logits(self, *segments: Segment) -> Logits:
        logits = self.forward(*segments).logits
        assert logits is not None
        assert logits.shape[0] == sum(s.logits for s in segments)
        return logits


def chunk(ids: Sequence[int], start: int, stop: int, pages: Sequence[int]) -> Segment:
    return Segment(ids[start:stop], start, pages, stop - start, len(ids))


def in_chunks(
    model: Paths, ids: Sequence[int], sizes: Sequence[int], pages: Sequence[int]
) -> Logits:
    cache, start, parts = Cache(model), 0, []
    for size in sizes:
        parts.append(cache.logits(chunk(ids, start, start + size, pages)))
        start += size
    assert start == len(ids)
    return np.concatenate(parts)


RUN = list(range(1, 33))
SHUFFLED = random.Random(5).sample(range(1, 64), 32)


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return ids_of(LENGTH)


@pytest.fixture(scope="module")
def single(model: Paths, ids: list[int]) -> Logits:
    """Logits of one-row-at-a-time decoding."""
    return in_chunks(model, ids, [1] * LENGTH, RUN)


@pytest.mark.parametrize(
    "sizes",
    [
        [LENGTH],
        [TILE] * 18 + [6],
        [5] * 30,
        [1, 2, 3, 60, 63, 1, 20],
        [LANES, LANES, LENGTH - 2 * LANES],
        [100, 1, 1, 1, 40, 7],
    ],
)
def test_chunks_are_bit_equal(
    sizes: list[int], model: Paths, ids: list[int], single: Logits
) -> None:
    assert np.array_equal(in_chunks(model, ids, sizes, RUN), single)


def test_long_contexts_are_bit_equal(model: Paths) -> None:
    """Kernels sum in another order over many lanes, masked ones counted: beyond 256, beyond 512."""
    ids, pages = ids_of(600, 4), list(range(1, 76))
    single = in_chunks(model, ids, [1] * 600, pages)
    for sizes in ([600], [37] * 16 + [8], [3] * 200):
        assert np.array_equal(in_chunks(model, ids, sizes, pages), single)


def test_a_tree_across_stretches_is_bit_equal(model: Paths) -> None:
    """64 blocks of keys, here of 8 tokens each, are summed apart from the next."""
    ids, pages = ids_of(520, 6), list(range(1, 67))
    single = in_chunks(model, ids, [520], pages)
    cache = Cache(model)
    cache.forward(Segment(ids[:508], 0, pages, 0, 520))
    nodes, parents = [ids[509] ^ 1, *ids[509:517]], [-1, -1, *range(1, 8)]
    tree = cache.logits(Segment(ids[508:509], 508, pages, 10, 520, nodes, parents))
    assert np.array_equal(tree[[0, *range(2, 10)]], single[508:517])


def test_shuffled_pages_are_bit_equal(model: Paths, ids: list[int], single: Logits) -> None:
    assert np.array_equal(in_chunks(model, ids, [1] * LENGTH, SHUFFLED), single)
    assert np.array_equal(in_chunks(model, ids, [70, 80], SHUFFLED), single)
    # A run that ends at the last page of the store cannot be read past its end.
    assert np.array_equal(in_chunks(model, ids, [77, 73], list(range(61, 80))), single)


def test_mixed_batches_are_bit_equal(model: Paths, ids: list[int], single: Logits) -> None:
    other, third = ids_of(90, 1), ids_of(40, 2)
    pages = [RUN[:20], list(range(60, 40, -1)), [30, 25, 32, 27, 36, 35, 38]]
    alone = [single, in_chunks(model, other, [90], RUN), in_chunks(model, third, [40], RUN)]
    cache, at, draw = Cache(model), [0, 0, 0], random.Random(3)
    everything = [ids, other, third]
    while any(at[i] < len(everything[i]) for i in range(3)):
        order = draw.sample(range(3), draw.randint(1, 3))
        order = [i for i in order if at[i] < len(everything[i])]
        segments = []
        for i in order:
            stop = min(len(everything[i]), at[i] + draw.choice([1, 1, 2, 9, 30]))
            segments.append(chunk(everything[i], at[i], stop, pages[i]))
        if not segments:
            continue
        logits = cache.logits(*segments)
        for i, segment in zip(order, segments, strict=True):
            stop = at[i] + len(segment.tokens)
            assert np.array_equal(logits[: len(segment.tokens)], alone[i][at[i] : stop])
            logits = logits[len(segment.tokens) :]
            at[i] = stop


@pytest.mark.parametrize(
    ("prefix", "pages"), [(1, RUN), (12, SHUFFLED), (61, RUN), (100, SHUFFLED)], ids=lambda p: ""
)
@pytest.mark.parametrize(
    "parents",
    [
        [-1, 0, 1, 2],
        [-1, -1, -1],
        [-1, 0, 0, 1, 1, 2, -1, 6, 7],
        [-1, -1, 0, 1, 0, 4, 5, 6, 7, 8, 9, 10, 2],
        [-1, 0, -1, 2, 3, 0, 5, -1, 7, 7, 7, 4],
    ],
    ids=["chain", "siblings", "bushy", "deep", "ragged"],
)
def test_tree_rows_are_bit_equal_to_chains(
    parents: list[int], prefix: int, pages: list[int], model: Paths, ids: list[int]
) -> None:
    nodes = ids_of(len(parents), 7)
    known = ids[:prefix]
    cache = Cache(model)
    if prefix > 1:
        cache.forward(Segment(known[:-1], 0, pages, 0, prefix))
    # Two other sequences go through the same forward, one before and one behind the tree.
    free = [p for p in range(1, 64) if p not in pages]
    neighbour = Segment(ids_of(19, 8), 0, free[:4], 2, 19)
    tree = Segment(known[-1:], prefix - 1, pages, 1 + len(nodes), prefix, nodes, parents)
    behind = Segment(ids_of(3, 9), 0, free[4:6], 1, 3)
    together = cache.logits(neighbour, tree, behind)
    logits = together[2:-1]
    alone = Cache(model).logits(neighbour), Cache(model).logits(behind)
    assert np.array_equal(together[:2], alone[0])
    assert np.array_equal(together[-1:], alone[1])
    for node in range(-1, len(nodes)):
        path, above = [], node
        while above >= 0:
            path.append(nodes[above])
            above = parents[above]
        chain = [*known, *reversed(path)]
        expected = in_chunks(model, chain, [len(chain)], RUN)[-1]
        assert np.array_equal(logits[1 + node], expected)


def test_a_tree_behind_several_committed_rows(model: Paths, ids: list[int]) -> None:
    cache = Cache(model)
    cache.forward(Segment(ids[:50], 0, SHUFFLED, 0, 50))
    tree = Segment(ids[50:70], 50, SHUFFLED, 4, 50, [3, 4, 5], [-1, -1, 0])
    logits = cache.logits(tree)
    for row, tail in enumerate([[], [3], [4], [3, 5]]):
        chain = [*ids[:70], *tail]
        assert np.array_equal(logits[row], in_chunks(model, chain, [len(chain)], RUN)[-1])


def test_accepted_nodes_are_gathered(model: Paths, ids: list[int]) -> None:
    """After moving an accepted path's entries the sequence goes on as if it were a chain."""
    cache, known, nodes = Cache(model), ids[:20], [9, 8, 7, 6]
    cache.forward(Segment(known[:-1], 0, SHUFFLED, 0, 20))
    cache.forward(Segment(known[-1:], 19, SHUFFLED, 5, 20, nodes, [-1, -1, 1, 2]))
    slots = [SHUFFLED[p // PAGE] * PAGE + p % PAGE for p in range(20, 24)]
    cache.store.move(slots[1:4], slots[0:3])
    logits = cache.logits(Segment([5], 23, SHUFFLED, 1, 20))
    chain = [*known, 8, 7, 6, 5]
    assert np.array_equal(logits, in_chunks(model, chain, [len(chain)], RUN)[-1:])


def test_rows_that_want_no_logits(model: Paths, ids: list[int], single: Logits) -> None:
    cache = Cache(model)
    first = cache.forward(Segment(ids[:9], 0, RUN, 0, LENGTH))
    assert first.logits is None
    logits = cache.logits(
        Segment(ids[9:30], 9, RUN, 3, LENGTH), Segment(ids[:20], 0, [60, 62, 61], 0, 20)
    )
    assert np.array_equal(logits, single[27:30])
    output = cache.forward(Segment(ids[30:37], 30, RUN, 1, LENGTH))
    assert output.hidden == {}
    assert output.logits is not None
    assert np.array_equal(output.logits, single[36:37])


def test_hidden_rows_are_the_rows_asked(model: Paths, ids: list[int]) -> None:
    hidden = Cache(model).forward(chunk(ids, 0, 13, RUN), hidden=(-1, 0, 1)).hidden
    assert set(hidden) == {-1, 0, 1}
    assert {tuple(h.shape) for h in hidden.values()} == {(13, model.shape.hidden_size)}
    embedded = embedding_of(model)[ids[:13]].astype(np.float32) * model.shape.embedding_scale
    assert np.array_equal(hidden[-1], embedded)
    again = Cache(model)
    again.forward(chunk(ids, 0, 6, RUN))
    rest = again.forward(chunk(ids, 6, 13, RUN), hidden=(1,)).hidden
    assert np.array_equal(rest[1], hidden[1][6:])


def test_the_lengths_of_a_prompt_reach_dynamic_rope() -> None:
    segment = Segment([1, 2, 3], 4, [1, 2], 3, 6, [5, 6, 7], [-1, -1, 0])
    rows = build_rows([segment], PAGE, 64, torch.device(CPU))
    assert rows.lengths == [6, 6, 7, 8, 8, 9, 1, 1]
    assert rows.positions.tolist() == [4, 5, 6, 7, 7, 8, 0, 0]
    assert rows.slots.tolist() == [12, 13, 14, 15, 16, 17, 0, 0]


@pytest.mark.engine
@pytest.mark.parametrize(
    "kind",
    [("torch", "float32"), ("native", "float32"), ("native", "bfloat16"), ("coded", "float32")],
    ids="-".join,
)
def test_rows_that_are_no_numbers_harm_nobody(
    kind: tuple[str, str], make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """A token of NaN spoils its own sequence from there on, in later forwards too."""
    model = open_path(kind[0], make_checkpoint(tmp_path, "llama"), kind[1])
    poison = 77
    good = [t for t in ids_of(60) if t != poison]
    whole = in_chunks(model, good, [len(good)], RUN)
    embedding_of(model)[poison] = float("nan")
    cache = Cache(model)
    bad = [*good[:5], poison, *good[6:20]]
    # Their pages are a run, so each reads the other's slots, masked.
    one = Segment(good[:20], 0, [1, 2, 3], 20, 60)
    two = Segment(bad[:8], 0, [4, 5, 6], 8, 20)
    logits = cache.logits(one, two)
    assert np.array_equal(logits[:20], whole[:20])
    assert np.array_equal(logits[20:25], whole[:5])
    assert np.isnan(logits[25:]).all()
    later = cache.logits(Segment(bad[8:20], 8, [4, 5, 6], 3, 20), chunk(good, 20, 23, [1, 2, 3]))
    assert np.isnan(later[:3]).all()
    assert np.array_equal(later[3:], whole[20:23])
    # A tree: what hangs on the bad node is spoilt, its siblings are not.
    tree = Segment(good[23:24], 23, [1, 2, 3, 7], 4, 60, [poison, 5, 6], [-1, -1, 0])
    assert np.isnan(cache.logits(tree)).all(-1).tolist() == [False, True, False, True]
    assert np.array_equal(cache.logits(chunk(good, 24, 27, [1, 2, 3, 7])), whole[24:27])
    # Whoever is given the pages next starts clean.
    after = cache.logits(chunk(good, 0, len(good), [4, 5, 6, *range(10, 18)]))
    assert np.array_equal(after, whole)
    assert not cache.store.any_harmed


def test_low_precision_rows(low: Transformer) -> None:
    ids = ids_of(100)
    single = in_chunks(low, ids, [1] * 100, RUN)
    for sizes in ([100], [8] * 12 + [4], [3] * 33 + [1]):
        np.testing.assert_allclose(in_chunks(low, ids, sizes, RUN), single, atol=0.25, rtol=0.05)


def test_rows_are_padded_where_their_number_changes_the_bits(
    low: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    alike = transformer.linear

    def unlike(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return alike(x, weight, bias) * (1.5 if x.shape[0] == 3 else 1)

    monkeypatch.setattr(transformer, "linear", unlike)
    assert row_unit(low.weights) == TILE


@pytest.mark.skipif(not bf16_kernels(), reason="measured for oneDNN's bf16 kernels")
def test_rows_of_bf16_need_no_padding(low: Transformer) -> None:
    assert row_unit(low.weights) == 1
    rows = build_rows([chunk([1, 2, 3], 0, 3, RUN)], PAGE, 8 * PAGE, torch.device(CPU), low._unit)
    assert len(rows.tokens) == 3


def test_store_move() -> None:
    store = KVStore(2, 3, 4, 5, PAGE, torch.float32, torch.device(CPU))
    assert store.num_slots == 40
    before = [torch.randn_like(layer) for layer in store.layers]
    for layer, values in zip(store.layers, before, strict=True):
        assert layer.shape == (6, 40, 4)
        layer.copy_(values)
    store.move([9, 10, 12], [8, 9, 10])  # overlapping: all are read before any is written
    for layer, values in zip(store.layers, before, strict=True):
        expected = values.clone()
        expected[:, [8, 9, 10]] = values[:, [9, 10, 12]]
        assert np.array_equal(layer, expected)
    used = sum(layer.numel() * layer.element_size() for layer in store.layers)
    assert used == 5 * 2 * 2 * 3 * 4 * PAGE * 4
