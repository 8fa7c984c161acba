"""What an index of a lookup takes is what the engine sets aside for it."""

from __future__ import annotations

import ctypes
import gc
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from outrider.base.config import EngineConfig
from outrider.drafters.base import DrafterContext
from outrider.drafters.ngram import NgramSpec
from outrider.drafters.ngram_index import NgramIndex
from outrider.drafters.suffix import SuffixSpec
from outrider.drafters.suffix_index import new_index
from outrider.native.choice import library

ROOM = 1000
PAGE = 16


def texts(room: int) -> dict[str, list[int]]:
    """Texts longer than an index: of two words, of many, and with repeated parts."""
    rng = random.Random(0)
    found = {str(n): [rng.randrange(n) for _ in range(2 * room)] for n in (2, 50_000)}
    once = found["50000"][:200]
    changed = [rng.randrange(200) if rng.random() < 0.03 else i for i in [*range(200)] * 10]
    return {**found, "again": [once[i] for i in changed]}


def most(used: Callable[[], int], make: Callable[[int], Any], room: int = ROOM) -> dict[str, float]:
    """Return the bytes by token that an index takes at most, for each text."""
    found, kept = {}, []  # what is freed is not always given back
    for name, text in texts(room).items():
        gc.collect()  # garbage of other tests would be freed on the way
        before, worst = used(), 0.0
        kept.append(index := make(room))
        for end in range(100, len(text), 100):
            index.extend(text[:end] if isinstance(index, NgramIndex) else text[end - 100 : end])
            if end >= room // 2:
                worst = max(worst, (used() - before) / min(end, room))
        found[name] = worst
    return found


def traced(make: Callable[[int], Any], room: int = ROOM) -> dict[str, float]:
    """Return the same for an index in Python."""
    tracemalloc.start()
    try:
        return most(lambda: tracemalloc.get_traced_memory()[0], make, room)
    finally:
        tracemalloc.stop()


def declared(spec: SuffixSpec | NgramSpec) -> float:
    """Return the bytes by token that a drafter says it needs."""

    class Model:
        trees = True

    model: Any = Model()
    context = DrafterContext(model, None, EngineConfig(page_size=PAGE), 64)
    return spec.needs(context).page_bytes / PAGE


class Mallinfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [("numbers", ctypes.c_size_t * 10)]


@pytest.mark.skipif(library() is None, reason="needs the C++ index")
def test_an_index_in_cpp_takes_what_is_declared() -> None:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("needs glibc 2.33")
    libc.mallinfo2.restype = Mallinfo

    def used() -> int:
        numbers = libc.mallinfo2().numbers
        return int(numbers[4] + numbers[7])  # hblkhd, mapped, and uordblks, in arenas

    found = most(used, new_index)
    assert 0.7 * declared(SuffixSpec()) < max(found.values()) <= declared(SuffixSpec()), found


def test_an_index_in_python_takes_what_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_NATIVE_ISA", "off")
    found = traced(new_index, ROOM // 4)
    assert 0.7 * declared(SuffixSpec()) < max(found.values()) <= declared(SuffixSpec()), found


def test_an_index_of_ngrams_takes_what_is_declared() -> None:
    found = traced(lambda room: NgramIndex(2, 4, room))
    assert 0.7 * declared(NgramSpec()) < max(found.values()) <= declared(NgramSpec()), found
