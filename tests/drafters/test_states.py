"""The ring of states that heads have not read yet."""

from __future__ import annotations

import random

import numpy as np
import pytest

from outrider.drafters.states import StateRing


@pytest.mark.parametrize("seed", range(6))
def test_a_ring_returns_what_was_written_last_and_knows_what_is_gone(seed: int) -> None:
    rng = random.Random(seed)
    ring = StateRing(rng.choice([5, 17, 64]), 1)
    kept: dict[str, dict[int, int]] = {}
    order: list[tuple[str, int, int]] = []
    for number in range(600):
        name = rng.choice("abc")
        known = kept.setdefault(name, {})
        if rng.random() < 0.03:
            ring.release(name)
            known.clear()
        end = max(known, default=-1) + 1
        start = max(0, end - rng.choice([0, 0, 0, 1, 4]) + rng.choice([0, 0, 0, 0, 9]))
        count = rng.randint(1, min(5, ring.room))
        for place in [p for p in known if p >= start]:
            del known[place]
        rows = ring.append(name, start, count)
        assert len({*rows}) == count
        for place, row in enumerate(rows):
            ring.states[row] = value = number * 10 + place
            known[start + place] = value
            order.append((name, start + place, value))
        there = set(order[-ring.room :])
        stop = start + count - rng.randrange(count)
        first = ring.first_known(name, stop)
        expected = stop
        while expected and (name, expected - 1, known.get(expected - 1)) in there:
            expected -= 1
        assert first == expected
        wanted = [known[place] for place in range(first, stop)]
        assert ring.read(name, first, stop).flatten().tolist() == wanted
        if rng.random() < 0.2:
            ring.forget(name, first)
            assert ring.first_known(name, stop) == first
    assert all(len(runs) <= ring.room + 1 for runs in ring._runs.values())
    assert np.isfinite(ring.states).all()
