"""Allocates the pages of the KV cache: counts and keys only, no tensors.

A page's key is a digest of its tokens and of the key before it, so it identifies all tokens up to
the page's end. A row's keys and values do not depend on the other rows of its forward, so a page
that is found holds the bits that would be computed.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, MutableSequence, Sequence
from hashlib import blake2b
from itertools import takewhile

import numpy as np

NULL_PAGE = 0  # Page 0 is never handed out: padding rows write there and nobody reads it


class PagePool:
    """Fixed-size pages, handed out one by one and counted by reference.

    A page that has a key can be found by it, even when nobody holds it, until it is reused; pages
    freed longest ago are reused first. ``num_pages``, 2 or more, include the null page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2 or page_size < 1:
            raise ValueError("a pool needs two pages or more, of one token or more")
        self.num_pages, self.page_size = num_pages, page_size
        self._references = [0] * num_pages
        self._used = bytearray(num_pages)  # 0: held by nobody, without a key
        self._used[NULL_PAGE] = 1
        self.num_blank = num_pages - 1
        """Pages that nobody holds and nobody can find."""
        self._idle: OrderedDict[int, None] = OrderedDict()  # the others, oldest first
        self._keys: dict[int, bytes] = {}
        self._pages: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return self.num_blank + len(self._idle)

    @property
    def num_usable(self) -> int:
        """Pages that could ever be handed out."""
        return self.num_pages - 1

    def pages_for(self, tokens: int) -> int:
        """Return the pages that ``tokens`` tokens need."""
        return -(-tokens // self.page_size)

    def grow(self, table: MutableSequence[int], tokens: int) -> bool:
        """Lengthen a page table until it covers ``tokens`` tokens; False if too few pages are free.

        It prefers the page after the table's last one: a run of pages is read without a gather.
        """
        missing = self.pages_for(tokens) - len(table)
        if missing > self.num_free:
            return False
        for _ in range(missing):
            page = table[-1] + 1 if table else self._widest_start()
            if page >= self.num_pages or self._used[page]:
                if not self.num_blank:  # what was freed longest ago becomes blank
                    oldest, _ = self._idle.popitem(last=False)
                    del self._pages[self._keys.pop(oldest)]
                    self._make_blank(oldest)
                page = self._used.find(0)
            self._used[page] = 1
            self.num_blank -= 1
            self._references[page] = 1
            table.append(page)
        return True

    def _make_blank(self, page: int) -> None:
        self._used[page] = 0
        self.num_blank += 1

    def _widest_start(self) -> int:
        """Return the blank page where a new table is least likely to meet another."""
        held = np.flatnonzero(np.frombuffer(self._used, np.uint8))
        gaps = np.diff(held, append=self.num_pages)
        place = int(gaps.argmax())
        start, widest = int(held[place]), int(gaps[place])
        # The middle of a gap, so that the table before it and this one can both grow.
        return start + (1 if start == NULL_PAGE else max(1, widest // 2))

    def truncate(self, table: MutableSequence[int], tokens: int) -> None:
        """Give back the pages of ``table`` beyond those that ``tokens`` tokens need."""
        keep = self.pages_for(tokens)
        while len(table) > keep:
            self._drop(table.pop())

    def name(self, page: int, key: bytes) -> None:
        """Give a held page the key ``key``, unless the page has a key or the key a page already."""
        if not self._references[page]:
            raise ValueError("a free page cannot be named")
        if key not in self._pages and page not in self._keys:
            self._keys[page] = key
            self._pages[key] = page

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Return the pages of the first keys, up to the first unknown key."""
        return [self._pages[key] for key in takewhile(self._pages.__contains__, keys)]

    def num_idle(self, pages: Iterable[int]) -> int:
        """Return how many of ``pages`` nobody holds."""
        return sum(not self._references[page] for page in pages)

    def share(self, pages: Iterable[int]) -> list[int]:
        """Add a reference to ``pages``, found by key or held already; return them as a table."""
        table = list(pages)
        if not all(self._used[page] for page in table):
            raise ValueError("a blank page cannot be shared")
        for page in table:
            self._idle.pop(page, None)
            self._references[page] += 1
        return table

    def free(self, table: MutableSequence[int]) -> None:
        """Free every page of ``table``, the last one first, and empty it."""
        self.truncate(table, 0)

    def _drop(self, page: int) -> None:
        if self._references[page] < 1 or page == NULL_PAGE:
            raise ValueError(f"page {page} was given back more often than it was taken")
        self._references[page] -= 1
        if not self._references[page]:
            if page in self._keys:
                self._idle[page] = None
            else:
                self._make_blank(page)


def extend_keys(keys: list[bytes], tokens: Sequence[int], pages: int, size: int, salt: str) -> None:
    """Extend ``keys`` to the first ``pages`` of ``tokens``; different salts share no page."""
    for page in range(len(keys), pages):
        before = keys[-1] if keys else _digest(salt.encode())
        held = array("q", tokens[page * size : (page + 1) * size])
        keys.append(_digest(before + held.tobytes()))


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=16).digest()
