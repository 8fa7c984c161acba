"""The check that pages are where they are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, MutableSequence

from outrider.cache.pages import NULL_PAGE, PagePool
from outrider.engine.engine import Engine
from outrider.engine.scheduler import Scheduler


def check_pool(pool: PagePool, tables: Iterable[MutableSequence[int]]) -> None:
    """Assert that ``tables`` hold exactly the pages in use."""
    counted = Counter(page for table in tables for page in table)
    for page in range(1, pool.num_pages):
        assert counted[page] == pool._references[page], (
            f"page {page} stands in {counted[page]} tables and is counted "
            f"{pool._references[page]} times"
        )
        states = (not pool._used[page], page in pool._idle, counted[page] > 0)
        assert sum(states) == 1, f"page {page} is blank, idle, held: {states}"
        assert page not in pool._idle or page in pool._keys
    assert {page: key for key, page in pool._pages.items()} == pool._keys
    assert all(pool._used[page] for page in pool._keys)
    assert NULL_PAGE not in counted
    assert pool._used[NULL_PAGE]
    assert pool._used.count(0) == pool.num_blank


def check_pages(scheduler: Scheduler) -> None:
    """Assert that every page in use belongs to a sequence that waits or runs."""
    live = [*scheduler.running, *scheduler.waiting]
    check_pool(scheduler.pool, [s.pages for s in live])


def check_engine(engine: Engine) -> None:
    """Assert that every page in use belongs to a live sequence."""
    check_pages(engine.scheduler)
