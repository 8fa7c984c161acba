"""The noise: published vectors, committed bits, its distribution, and its blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from outrider.base.types import Row
from outrider.plugins.common.gumbel import gumbel_of_rows
from outrider.sampling import noise, shared_noise
from outrider.sampling.noise import gumbel, gumbel_of_words
from outrider.sampling.philox import philox
from outrider.sampling.seeds import SEED_STREAM, fresh_seed, request_seed
from outrider.sampling.shared_noise import SharedNoise

CPU = "cpu"
ONES = 2**32 - 1


def same_bits(a: NDArray[np.float32], b: NDArray[np.float32] | torch.Tensor) -> bool:
    other = b.numpy() if isinstance(b, torch.Tensor) else b
    assert a.dtype == other.dtype == np.float32
    return a.shape == other.shape and bool((a.view(np.int32) == other.view(np.int32)).all())


def gumbel_torch(
    seeds: list[int], samples: list[int], positions: list[int], size: int, device: torch.device,
    stream: noise.Streams = noise.SHARED_STREAM,
) -> torch.Tensor:  # fmt: skip
    """The noise by torch, also on a CPU."""
    rows = noise.row_words(seeds, samples, positions, stream).view(np.int64)
    return gumbel_of_rows(torch.from_numpy(rows).to(device), size)


def word_set() -> NDArray[np.uint64]:
    """Words at both ends, around each power of two from both ends, where g is 0, and random."""
    rng = np.random.default_rng(0)
    near = np.arange(-3, 4)
    powers = (2 ** np.arange(2, 32)[:, None] + near).ravel()
    zero = int(2**32 * (1 - np.exp(-1))) + np.arange(-40_000, 40_000) * 97
    low = (2.0 ** rng.uniform(0, 32, 100_000)).astype(np.int64)
    parts = [np.arange(20_000), powers, low, zero, rng.integers(0, 2**32, 200_000)]
    return np.concatenate([*parts, *(ONES - part for part in parts)]).astype(np.uint64)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # kat_vectors of Random123 (Salmon et al.)
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((ONES,) * 4, (ONES,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: str
) -> None:
    assert " ".join(f"{int(word):08x}" for word in philox(counter, key)) == expected


def test_philox_broadcasts_and_leaves_its_input_alone() -> None:
    rng = np.random.default_rng(3)
    counter = [rng.integers(0, 2**32, 50, dtype=np.uint64) for _ in range(4)]
    key = [rng.integers(0, 2**32, 50, dtype=np.uint64) for _ in range(2)]
    before = [word.copy() for word in (*counter, *key)]
    got = np.stack(philox((counter[0], counter[1], counter[2], counter[3]), (key[0], key[1])))
    assert all((a == b).all() for a, b in zip(before, (*counter, *key), strict=True))
    for i in range(50):
        c, k = [int(word[i]) for word in counter], [int(word[i]) for word in key]
        assert got[:, i].tolist() == list(philox((c[0], c[1], c[2], c[3]), (k[0], k[1])))
    for wide in range(6):  # any one word may be the only array
        words = [int(word[0]) for word in before]
        mixed = [before[j] if j == wide else words[j] for j in range(6)]
        got = np.stack(philox((mixed[0], mixed[1], mixed[2], mixed[3]), (mixed[4], mixed[5])))
        words[wide] = int(before[wide][7])
        alone = philox((words[0], words[1], words[2], words[3]), (words[4], words[5]))
        assert got[:, 7].tolist() == list(alone)


def test_where_the_words_come_from() -> None:
    seed, sample, position, stream = 0x0123456789ABCDEF, 5, 77, 9
    got = noise.words([seed], [sample], [position], 11, stream)
    for token in range(11):
        counter = (position, token // 4, sample, stream)
        assert got[0, token] == philox(counter, (0x89ABCDEF, 0x01234567))[token % 4]


GOLDEN = [  # seed, sample, position, token id, stream, bits of g
    (0, 0, 0, 0, 0, 0x3F2CC259),
    (0, 0, 0, 1, 0, 0xBF40EB1B),
    (0, 0, 0, 2, 0, 0xBE9249CA),
    (0, 0, 0, 3, 0, 0x3D946D1A),
    (0, 0, 1, 0, 0, 0xBFA3658A),
    (1, 0, 0, 0, 0, 0xBF4AF6B1),
    (0, 1, 0, 0, 0, 0x3EA33013),
    (0, 0, 0, 0, 1, 0x3FCFD894),
    (1234, 0, 17, 8191, 0, 0x3C917F32),
    (9007199254740991, 3, 4095, 50256, 0, 0xBE8B5F4F),
    (18446744073709551615, 4294967295, 4294967295, 128255, 0, 0x3FC4AA5E),
    (81985529216486895, 2, 1000000, 151935, 4294967295, 0x3F0191B2),
]


@pytest.mark.parametrize(("seed", "sample", "position", "token", "stream", "bits"), GOLDEN)
def test_golden_bits(
    seed: int, sample: int, position: int, token: int, stream: int, bits: int
) -> None:
    drawn = gumbel([seed], [sample], [position], token + 1, stream)
    assert f"{drawn.view(np.uint32)[0, token]:#010x}" == f"{bits:#010x}"
    drawn_torch = gumbel_torch([seed], [sample], [position], token + 1, CPU, stream)
    assert same_bits(drawn, drawn_torch)


def test_golden_bits_of_words() -> None:
    words = [0, 1, 255, 2**31 - 1, 2**31, 2714937127, ONES - 127, ONES]
    expected = [
        0x41B6FDA9,
        0x41AE33B3,
        0x41851993,
        0x3EBBA795,
        0x3EBBA795,
        0x00000000,
        0xC033F049,
        0xC033F049,
    ]
    got = gumbel_of_words(np.array(words, np.uint64)).view(np.uint32)
    assert [f"{g:#010x}" for g in got] == [f"{g:#010x}" for g in expected]


def test_torch_has_the_bits_of_numpy() -> None:
    words = word_set()
    assert same_bits(
        gumbel_of_words(words), gumbel_of_words(torch.from_numpy(words.view("i8")), torch)
    )
    rng = np.random.default_rng(1)
    seeds = [0, 2**64 - 1, 2**63, *(int(s) for s in rng.integers(0, 2**63, 5))]
    samples = [0, ONES, 2**31, 1, 2, 3, 4, 5]
    positions = [0, ONES, 2**31, 7, 7, 8, 9, 100_000]
    for size in (1, 2, 3, 4, 5, 1023, 20_001, 70_000):  # the last is above NumPy's chunk
        a = gumbel(seeds, samples, positions, size, 3)
        b = gumbel_torch(seeds, samples, positions, size, CPU, 3)
        assert same_bits(a, b)
        assert a.flags.c_contiguous
        assert b.is_contiguous()


def test_torch_on_the_gpu_has_the_bits_of_numpy() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    gpu = torch.device("cuda")
    words = word_set()
    got = gumbel_of_words(torch.from_numpy(words.view("i8")).to(gpu), torch)
    assert same_bits(gumbel_of_words(words), got.cpu())
    where = [2**64 - 1, 5], [0, ONES], [ONES, 0]
    assert same_bits(gumbel(*where, 10_001), gumbel_torch(*where, 10_001, gpu).cpu())


def test_rows_and_vocabulary_sizes_do_not_matter() -> None:
    seeds, samples, positions = [4, 5, 4, 2**40], [0, 0, 1, 7], [9, 9, 9, 10]
    full = gumbel(seeds, samples, positions, 4099)
    assert same_bits(full[:, :1001].copy(), gumbel(seeds, samples, positions, 1001))
    for i in range(4):
        alone = gumbel(seeds[i : i + 1], samples[i : i + 1], positions[i : i + 1], 4099)
        assert same_bits(full[i : i + 1].copy(), alone)
    assert gumbel([], [], [], 7).shape == (0, 7)
    assert gumbel_torch([], [], [], 7, CPU).shape == (0, 7)


def test_accuracy() -> None:
    words = word_set()
    w = np.minimum(((words + 0.5) * 2.0**-32).astype(np.float32), np.float32(1 - 2**-24))
    exact = -np.log(-np.log1p(-w.astype(np.float64)))
    got = gumbel_of_words(words)
    error = np.abs(got - exact)
    large = np.abs(exact) >= 0.5
    assert (error[large] / np.spacing(np.abs(exact[large]).astype(np.float32))).max() < 2
    assert error[~large].max() < 1e-7
    assert got.min() == got[words == ONES][0] > -2.82
    assert got.max() == got[words == 0][0] < 22.88


def chi_square_limit(freedom: int) -> float:
    """Exceeded once in 10^6: Wilson and Hilferty's approximation, 4.753 its normal quantile."""
    return float(freedom * (1 - 2 / (9 * freedom) + 4.753 * np.sqrt(2 / (9 * freedom))) ** 3)


def test_the_noise_draws_the_law() -> None:
    z = np.array([0.0, -1.0, 2.0, 0.5, -3.0, 1.0, 0.2, -0.7, 1.5, -2.0], np.float32)
    distribution = np.exp(z.astype(np.float64)) / np.exp(z.astype(np.float64)).sum()
    n = 50_000
    tokens = (z + gumbel([1] * n, [0] * n, range(n), len(z))).argmax(1)
    counts = np.bincount(tokens, minlength=len(z))
    # False alarm 1e-6 over seeds, and the seed is fixed.
    assert ((counts - n * distribution) ** 2 / (n * distribution)).sum() < chi_square_limit(
        len(z) - 1
    )


@pytest.mark.parametrize("axis", ["position", "sample", "seed", "stream"])
def test_neighbours_are_independent(axis: str) -> None:
    # Tokens of a uniform distribution over 8 ids, at neighbours on one axis of the noise, must be
    # independent; and the noise of one id must not be correlated. False alarm 1e-6 each.
    n = 20_000
    start = np.arange(n) * 2
    here = {"seed": [8] * n, "sample": [0] * n, "position": start.tolist(), "stream": 0}
    there = dict(here)
    if axis == "position":
        there["position"] = (start + 1).tolist()
    else:
        there[axis] = 1 if axis == "stream" else [9 if axis == "seed" else 1] * n
    a, b = (
        gumbel(at["seed"], at["sample"], at["position"], 8, at["stream"])  # type: ignore[arg-type]
        for at in (here, there)
    )
    table = np.zeros((8, 8))
    np.add.at(table, (a.argmax(1), b.argmax(1)), 1)
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / n
    assert ((table - expected) ** 2 / expected).sum() < chi_square_limit(49)
    correlation = np.corrcoef(a[:, 0], b[:, 0])[0, 1]
    assert abs(correlation) < 4.9 / np.sqrt(n)


@pytest.mark.parametrize(
    ("seed", "sample", "position", "size", "stream"),
    [
        (-1, 0, 0, 8, 0),
        (2**64, 0, 0, 8, 0),
        (0, -1, 0, 8, 0),
        (0, 2**32, 0, 8, 0),
        (0, 0, -1, 8, 0),
        (0, 0, 2**32, 8, 0),
        (0, 0, 0, 0, 0),
        (0, 0, 0, 8, 2**32),
    ],
)
def test_numbers_out_of_range(
    seed: int, sample: int, position: int, size: int, stream: int
) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        gumbel([seed], [sample], [position], size, stream)
    with pytest.raises(ValueError, match="must be at least"):
        gumbel_torch([seed], [sample], [position], size, CPU, stream)


def test_unequal_lengths() -> None:
    with pytest.raises(ValueError, match=r"came with|zip"):
        gumbel([1, 2], [0, 0], [5], 8)


def rows_of(
    shared: SharedNoise, keys: list[tuple[str, int, int]], positions: list[int]
) -> torch.Tensor:
    places = zip(keys, positions, strict=True)
    return shared.of([Row(*key, position, False, 0) for key, position in places])


def expected_rows(
    keys: list[tuple[str, int, int]], positions: list[int], size: int
) -> NDArray[np.float32]:
    return gumbel([seed for _, seed, _ in keys], [sample for *_, sample in keys], positions, size)


def test_shared_noise_is_the_noise_for_any_access() -> None:
    rng = np.random.default_rng(4)
    shared = SharedNoise(101)
    assert shared.block_size == 16
    for _ in range(60):
        n = int(rng.integers(0, 9))
        names = rng.integers(0, 4, n)
        # Sequence 3 changes its seed now and then, as an id that is used again does.
        keys = [(f"s{i}", int(i) if i < 3 else int(rng.integers(3, 5)), 0) for i in names]
        start = int(rng.integers(0, 100))
        positions = [start + int(rng.integers(0, 40)) for _ in range(n)]
        if rng.random() < 0.5:  # a chain of one sequence
            keys, positions = [("s1", 1, 0)] * n, list(range(start, start + n))
        assert same_bits(expected_rows(keys, positions, 101), rows_of(shared, keys, positions))
        if rng.random() < 0.1:
            shared.release("s1")


def test_blocks_are_drawn_once_together_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[int]] = []

    def counting(
        seeds: list[int], samples: list[int], positions: list[int], vocab_size: int
    ) -> NDArray[np.float32]:
        drawn.append(positions)
        return gumbel(seeds, samples, positions, vocab_size)

    monkeypatch.setattr(shared_noise, "gumbel", counting)
    shared = SharedNoise(64)
    a, b = ("a", 1, 0), ("b", 2, 0)
    rows_of(shared, [a, b, b], [3, 40, 40])
    assert drawn == [[*range(16), *range(32, 48)]]  # both sequences in one call
    first = rows_of(shared, [a, a], [3, 4])
    again = rows_of(shared, [a], [4])
    assert np.shares_memory(first, again)  # views of one block
    rows_of(shared, [a, b, a, a], [15, 47, 0, 0])
    assert len(drawn) == 1
    rows_of(shared, [a] * 40, list(range(40)))  # more blocks than are kept: 0 is there, 1 and 2 not
    assert drawn[1:] == [list(range(16, 48))]
    assert sum(len(kept) for kept in shared._kept.values()) == 3
    rows_of(shared, [a, a], [16, 47])
    assert len(drawn) == 2  # 1 and 2 were used last
    rows_of(shared, [a], [0])
    assert drawn[2:] == [list(range(16))]
    shared.release("a")
    shared.release("never seen")
    assert list(shared._kept) == ["b"]
    rows_of(shared, [a], [0])
    assert len(drawn) == 4


def test_blocks_at_the_ends() -> None:
    assert SharedNoise(8192).block_size == 16
    assert SharedNoise(32_000).block_size == 4
    assert SharedNoise(300_000).block_size == 1
    shared = SharedNoise(13_000)  # 10 positions: the last block of all is cut short
    last = [ONES - 1, ONES]
    key = ("a", 2**64 - 1, ONES)
    assert same_bits(expected_rows([key] * 2, last, 13_000), rows_of(shared, [key] * 2, last))
    assert rows_of(shared, [], []).shape == (0, 13_000)
    for position in (-1, 2**32):
        with pytest.raises(ValueError, match="position"):
            rows_of(shared, [key], [position])
    with pytest.raises(ValueError, match="seed"):
        rows_of(shared, [("b", -1, 0)], [0])


def test_request_seeds() -> None:
    engine = 0x0123456789ABCDEF
    index = 2**33 + 5
    counter = (5, 2, 0, SEED_STREAM)
    low, high, *_ = philox(counter, (0x89ABCDEF, 0x01234567))
    assert request_seed(engine, index) == int(low) + 2**32 * (int(high) % 2**21)
    assert [request_seed(0, i) for i in range(3)] == [
        7877853921660660,
        5507082292996348,
        7756614466724466,
    ]
    seeds = {request_seed(e, i) for e in range(20) for i in range(50)}
    assert len(seeds) == 1000
    assert 2**52 < max(seeds) < 2**53
    with pytest.raises(ValueError, match="engine seed"):
        request_seed(-1, 0)


def test_fresh_seeds() -> None:
    seeds = {fresh_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**53 for seed in seeds)
