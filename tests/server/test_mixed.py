"""The benchmark of mixed load: its requests, and two short windows of it."""

from __future__ import annotations

import asyncio
from itertools import islice

import pytest
from forked import Served

from benchmarks.mixed import LONGEST, SHORTEST, TEMPERATURES, figures, make_calls, measure
from outrider.errors import OutriderError


def test_both_sides_make_the_same_calls_of_every_kind() -> None:
    calls, same, other = (list(islice(make_calls(seed), 64)) for seed in ("0 1", "0 1", "0 2"))
    assert calls == same
    assert calls != other
    assert {call.path for call in calls} == {"/v1/completions", "/v1/chat/completions"}
    bodies = [call.body for call in calls]
    assert {body["temperature"] for body in bodies} == {*TEMPERATURES}
    assert {body["stream"] for body in bodies} == {True, False}
    assert {"response_format" in body for body in bodies} == {True, False}
    assert all(SHORTEST <= body["max_tokens"] <= LONGEST for body in bodies)


def test_the_ratio_is_of_pairs() -> None:
    report = figures({"on": [2.0, 8.0, 6.0], "off": [1.0, 2.0, 2.0]})
    assert (report["ratio"], report["interval"]) == (3.0, None)
    assert report["tokens_per_second"] == {"on": 6.0, "off": 2.0}
    assert report["pairs"][1] == {"on": 8.0, "off": 2.0}


def test_two_short_windows() -> None:
    with Served("--drafter", "auto") as server:
        found = asyncio.run(measure(server.url, 4, 0.8, 1, 0, warm_up=0.2))
    assert [len(values) for values in found.values()] == [1, 1]
    assert all(value > 0 for values in found.values() for value in values)


def test_a_call_that_fails_ends_it() -> None:
    with pytest.raises(OutriderError, match="a call failed"):
        asyncio.run(measure("http://127.0.0.1:9", 1, 0.2, 1, 0, warm_up=0.1))
