"""Which pages of the KV cache belong to whom: counting only, no tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, MutableSequence

NULL_PAGE = 0
"""Page 0 belongs to nobody: padding rows write there and nobody reads it."""


class PagePool:
    """Fixed-size pages, handed out one by one and counted by reference.

    Args:
        num_pages: pages in all, the null page included; 2 or more.
        page_size: tokens a page holds.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2 or page_size < 1:
            raise ValueError("a pool needs two pages or more, of one token or more")
        self.num_pages = num_pages
        self.page_size = page_size
        self._references = [0] * num_pages
        self._free = set(range(1, num_pages))

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Pages that could ever be handed out."""
        return self.num_pages - 1

    def pages_for(self, tokens: int) -> int:
        """Pages that ``tokens`` tokens need."""
        return -(-tokens // self.page_size)

    def grow(self, table: MutableSequence[int], tokens: int) -> bool:
        """Lengthen a page table in place until it covers ``tokens`` tokens.

        Takes the page after the table's last one where it is free: neighbours in a run can be
        read without being gathered. Returns False, having taken nothing, when pages run out.
        """
        missing = self.pages_for(tokens) - len(table)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            page = table[-1] + 1 if table else self._widest_start()
            if page not in self._free:
                page = min(self._free)
            self._free.remove(page)
            self._references[page] = 1
            table.append(page)
        return True

    def _widest_start(self) -> int:
        """A free page with room behind it: where a new table is least likely to meet another."""
        held = [NULL_PAGE, *(i for i, count in enumerate(self._references) if count)]
        gaps = zip(held, [*held[1:], self.num_pages], strict=True)
        widest, at = max((end - start, -start) for start, end in gaps)
        # The middle of a gap behind somebody's pages, so that both can go on growing.
        return -at + (1 if -at == NULL_PAGE else max(1, widest // 2))

    def truncate(self, table: MutableSequence[int], tokens: int) -> None:
        """Give back the pages of ``table`` beyond those that ``tokens`` tokens need."""
        keep = self.pages_for(tokens)
        while len(table) > keep:
            self._drop(table.pop())

    def share(self, pages: Iterable[int]) -> list[int]:
        """Hold ``pages`` once more and return them as a table of its own."""
        table = list(pages)
        if any(not self._references[page] for page in table):
            raise ValueError("a free page cannot be shared")
        for page in table:
            self._references[page] += 1
        return table

    def free(self, table: MutableSequence[int]) -> None:
        """Give back every page of ``table`` and empty it."""
        self.truncate(table, 0)

    def _drop(self, page: int) -> None:
        if self._references[page] < 1 or page == NULL_PAGE:
            raise ValueError(f"page {page} was given back more often than it was taken")
        self._references[page] -= 1
        if not self._references[page]:
            self._free.add(page)

    def check(self, tables: Iterable[MutableSequence[int]]) -> None:
        """Assert that ``tables`` are all the tables there are and that nothing leaked."""
        counted = Counter(page for table in tables for page in table)
        for page in range(1, self.num_pages):
            assert counted[page] == self._references[page], (
                f"page {page} stands in {counted[page]} tables and is counted "
                f"{self._references[page]} times"
            )
            assert (page in self._free) == (not counted[page])
        assert NULL_PAGE not in counted
        assert NULL_PAGE not in self._free
