"""Prompt lookup against a search that anyone can read."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from outrider.base.types import (
    DraftBudget,
    Request,
    SamplingParams,
    Scheduled,
    SequenceState,
)
from outrider.drafters.base import Drafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.ngram_index import NgramIndex
from outrider.errors import ConfigError
from outrider.sampling.shared_noise import SharedNoise


def search(tokens: Sequence[int], min_n: int, max_n: int, window: int, length: int) -> list[int]:
    """The most recent place where the longest tail stood before, within the window."""
    last = len(tokens) - 1
    for n in range(max_n, min_n - 1, -1):
        tail = list(tokens[len(tokens) - n :])
        if n > len(tokens):
            continue
        for end in range(last - 1, max(n - 2, last - 1 - window), -1):
            if list(tokens[end + 1 - n : end + 1]) == tail:
                text = list(tokens)
                for i in range(length):
                    text.append(text[end + 1 + i])
                return text[len(tokens) :]
    return []


def fresh(
    tokens: Sequence[int], length: int, min_n: int = 2, max_n: int = 4, window: int = 1000
) -> list[int]:
    index = NgramIndex(min_n, max_n, window)
    index.extend(tokens)
    return index.propose(tokens, length)


def test_the_longest_match_comes_first() -> None:
    # [2, 3] came last with 9 behind it, but [1, 2, 3] with 4.
    assert fresh([1, 2, 3, 4, 5, 2, 3, 9, 1, 2, 3], 2) == [4, 5]
    assert fresh([1, 2, 3, 4, 5, 2, 3, 9, 1, 2, 3], 2, max_n=2) == [9, 1]


def test_the_most_recent_occurrence_counts() -> None:
    assert fresh([1, 2, 7, 1, 2, 8, 1, 2], 1) == [8]


def test_a_loop_goes_on_into_the_draft() -> None:
    assert fresh([5, 5, 5], 4) == [5, 5, 5, 5]
    assert fresh([9, 1, 2, 3, 1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]


def test_nothing_is_drafted_without_a_match() -> None:
    assert fresh([], 3) == []
    assert fresh([1], 3) == []
    assert fresh([1, 2, 3, 4], 3) == []
    assert fresh([1, 2, 3, 2], 3, min_n=2) == []
    assert fresh([1, 2, 3, 2], 3, min_n=1) == [3, 2, 3]
    assert fresh([1, 2, 1, 2], 0) == []


def test_what_left_the_window_is_forgotten() -> None:
    tokens = [1, 2, *range(10, 20), 1, 2]
    assert fresh(tokens, 1, window=12) == [10]
    assert fresh(tokens, 1, window=11) == []


@pytest.mark.parametrize("seed", range(12))
def test_it_is_the_search(seed: int) -> None:
    draw = random.Random(seed)
    alphabet, window = draw.choice([2, 3, 5]), draw.choice([3, 10, 25, 1000])
    min_n = draw.randint(1, 3)
    max_n = min_n + draw.randrange(4)
    index = NgramIndex(min_n, max_n, window)
    tokens: list[int] = []
    while len(tokens) < 250:
        # Steps of one, blocks, and now and then more than a window at once.
        for _ in range(draw.choice([1, 1, 2, 5, 30])):
            tokens.append(draw.randrange(alphabet))
        index.extend(tokens)
        expected = search(tokens, min_n, max_n, window, 6)
        assert index.propose(tokens, 6) == expected
        assert fresh(tokens, 6, min_n, max_n, window) == expected


@pytest.mark.parametrize("step", [1, 7, 40, 90])
def test_entries_are_bounded(step: int) -> None:
    index, draw, tokens = NgramIndex(2, 4, 50), random.Random(0), []
    while len(tokens) < 2000:
        tokens += [draw.randrange(10_000) for _ in range(step)]
        index.extend(tokens)
        assert len(index._ends) <= 50 * 3


def test_extending_twice_changes_nothing() -> None:
    tokens = [1, 2, 3, 1, 2]
    index = NgramIndex(2, 3, 100)
    index.extend(tokens)
    index.extend(tokens)
    assert index.propose(tokens, 2) == [3, 1]


def item(id: str, tokens: list[int], length: int, samples: bool = True) -> Scheduled:
    request = Request(id, tuple(tokens), SamplingParams(), 0)
    sequence = SequenceState(f"{id}/0", request, 0, text=None, pipeline=None, tokens=tokens)  # type: ignore[arg-type]
    return Scheduled(sequence, len(tokens) - 1, 1, samples, "ngram", DraftBudget(length, length))


def test_the_drafter_keeps_its_sequences_apart() -> None:
    noise = SharedNoise(8)
    drafter: Drafter = NgramDrafter(5)
    assert (drafter.name, drafter.max_length, drafter.max_nodes) == ("ngram", 5, 5)
    batch = [
        item("a", [1, 2, 3, 1, 2], 3),
        item("b", [4, 4, 4], 2),
        item("c", [1, 2, 3, 1, 2], 0, samples=False),
        item("d", [1, 2, 3], 4),
    ]
    draft = drafter.propose(batch, [i.budget for i in batch], noise)
    assert [nodes.tokens for nodes in draft] == [[3, 1, 2], [4, 4], [], []]
    assert [nodes.parents for nodes in draft] == [[-1, 0, 1], [-1, 0], [], []]
    for i in batch:
        i.sequence.tokens += [2, 3]
    two = [DraftBudget(2, 2)]
    assert drafter.propose(batch[:1], two, noise)[0].tokens == [1, 2]
    drafter.release("a/0", ended=True)
    drafter.release("a/0", ended=True)  # unknown by now: no error
    assert drafter.propose(batch[:1], two, noise)[0].tokens == [1, 2]


@pytest.mark.parametrize("sizes", [(0, 4, 10), (3, 2, 10), (2, 4, 0)])
def test_sizes_out_of_order_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match=r"ngram sizes are .* give 1 <= min_n <= max_n"):
        NgramDrafter(4, *sizes)
