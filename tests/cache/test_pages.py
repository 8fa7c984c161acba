"""The page pool: what is taken is given back once, and its own check sees when it is not."""

from __future__ import annotations

import random

import pytest

from outrider.cache.pages import NULL_PAGE, PagePool
from tests.support.pages import check_pool


def test_growing_covers_the_tokens() -> None:
    pool = PagePool(10, 4)
    table: list[int] = []
    for tokens, pages in [(0, 0), (1, 1), (4, 1), (5, 2), (3, 2), (12, 3)]:
        assert pool.grow(table, tokens)
        assert len(table) == pages
        assert pool.num_free == 9 - pages
    assert pool.num_usable == 9
    assert [pool.pages_for(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert NULL_PAGE not in table
    check_pool(pool, [table])


def test_a_table_grows_as_a_run() -> None:
    pool = PagePool(100, 1)
    first: list[int] = []
    second: list[int] = []
    for tokens in range(1, 30):
        assert pool.grow(first, tokens)
        assert pool.grow(second, tokens)
    for table in (first, second):
        assert table == list(range(table[0], table[0] + 29))
    pool.free(first)
    third: list[int] = []
    assert pool.grow(third, 20)
    assert third == list(range(third[0], third[0] + 20))
    check_pool(pool, [second, third])


def test_growth_goes_on_elsewhere_when_the_run_ends() -> None:
    pool = PagePool(6, 1)
    first: list[int] = []
    second: list[int] = []
    assert pool.grow(first, 1)
    assert pool.grow(second, 1)
    assert pool.grow(first, 4)
    assert sorted(first + second) == [1, 2, 3, 4, 5]
    check_pool(pool, [first, second])


def test_exhaustion_takes_nothing() -> None:
    pool = PagePool(4, 2)
    table = [*[]]
    assert pool.grow(table, 3)
    before = list(table)
    assert not pool.grow(table, 7)
    assert table == before
    assert pool.num_free == 1
    other: list[int] = []
    assert not pool.grow(other, 3)
    assert other == []
    assert pool.grow(table, 6)
    assert pool.num_free == 0
    check_pool(pool, [table])


def test_truncating_gives_back_the_tail() -> None:
    pool = PagePool(10, 4)
    table: list[int] = []
    pool.grow(table, 30)
    kept = table[:3]
    pool.truncate(table, 9)
    assert table == kept
    pool.truncate(table, 100)  # nothing beyond
    assert table == kept
    assert pool.num_free == 6
    pool.free(table)
    assert table == []
    assert pool.num_free == 9
    pool.free(table)
    check_pool(pool, [])


def test_shared_pages_live_until_the_last_holder_lets_go() -> None:
    pool = PagePool(6, 1)
    first: list[int] = []
    pool.grow(first, 3)
    second = pool.share(first[:2])
    assert second == first[:2]
    check_pool(pool, [first, second])
    pool.free(first)
    assert pool.num_free == 3
    check_pool(pool, [second])
    assert pool.grow(second, 4)
    check_pool(pool, [second])
    pool.free(second)
    assert pool.num_free == 5


def test_what_cannot_be_is_refused() -> None:
    pool = PagePool(5, 1)
    table: list[int] = []
    pool.grow(table, 2)
    stale = list(table)
    pool.free(table)
    with pytest.raises(ValueError, match="given back more often than it was taken"):
        pool.free(stale)
    with pytest.raises(ValueError, match="given back more often"):
        pool.free([NULL_PAGE])
    with pytest.raises(ValueError, match="a blank page cannot be shared"):
        pool.share([3])
    check_pool(pool, [])
    for pages, size in ((1, 4), (4, 0)):
        with pytest.raises(ValueError, match="two pages or more, of one token or more"):
            PagePool(pages, size)


def test_the_check_sees_leaks_and_strangers() -> None:
    pool = PagePool(5, 1)
    table: list[int] = []
    pool.grow(table, 2)
    wrong: list[list[list[int]]] = [[], [table, table], [[*table, 4]], [table, [NULL_PAGE]]]
    for tables in wrong:
        with pytest.raises(AssertionError):
            check_pool(pool, tables)
    check_pool(pool, [table])


@pytest.mark.parametrize("seed", range(8))
def test_random_operations_never_leak(seed: int) -> None:
    draw = random.Random(seed)
    pool = PagePool(draw.randint(2, 40), draw.randint(1, 5))
    tables: list[list[int]] = []
    for _ in range(400):
        table = draw.choice(tables) if tables else []
        before, free = list(table), pool.num_free
        match draw.randrange(5):
            case 0:
                tables.append([])
            case 1 | 2:
                tokens = draw.randrange(60)
                grown = pool.grow(table, tokens)
                need = max(0, pool.pages_for(tokens) - len(before))
                assert grown == (need <= free)
                assert table[: len(before)] == before
                assert len(table) == len(before) + need * grown
                if table and not any(table is t for t in tables):
                    tables.append(table)
            case 3:
                pool.truncate(table, draw.randrange(60))
                assert before[: len(table)] == table
            case 4 if table:
                if draw.random() < 0.5:
                    tables.append(pool.share(table[: draw.randint(1, len(table))]))
                else:
                    pool.free(table)
                    tables = [t for t in tables if t is not table]
        check_pool(pool, tables)
        assert pool.num_free == pool.num_usable - len({p for t in tables for p in t})
