"""Snapshots of states: the longest known beginning, and a bounded room."""

import numpy as np

from outrider.cache.snapshots import Snapshots


def test_the_longest_beginning_is_found_and_the_oldest_go() -> None:
    kept, keys = Snapshots(3 * 40), [bytes([n]) for n in range(6)]
    assert kept.longest(keys) == 0
    states = {n: np.full(10, n, np.float32) for n in range(6)}
    for n in (1, 3, 4):
        kept.put(keys[n], states[n])
    assert kept.longest(keys) == 5
    assert kept.longest(keys[:4]) == 4
    assert kept.longest(keys[:1]) == 0
    assert kept.get(keys[1]) is states[1]  # it counts as used
    kept.put(keys[1], states[5])  # what is known stays
    assert kept.get(keys[1]) is states[1]
    kept.put(keys[5], states[5])
    assert (kept.longest(keys), len(kept), kept.bytes) == (6, 3, 120)
    assert kept.longest(keys[:5]) == 5
    assert kept.longest(keys[:4]) == 2  # the third page's went


def test_what_finds_no_room_is_not_kept() -> None:
    kept = Snapshots(39)
    kept.put(b"a", np.zeros(10, np.float32))
    assert (len(kept), kept.bytes) == (0, 0)
