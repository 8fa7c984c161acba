"""What travels between the floors: sampling options, drafts and counts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.base.types import (
    Counts,
    Draft,
    DraftNodes,
    Origin,
    Request,
    SamplingParams,
    SequenceState,
)
from outrider.errors import ConfigError, shown


def test_the_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert (params.n, params.max_tokens, params.min_tokens) == (1, 16, 0)
    assert (params.seed, params.ignore_eos) == (None, False)
    assert not params.greedy
    with pytest.raises(AttributeError):
        params.n = 2  # type: ignore[misc]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "values", "remedy"),
    [
        (
            "temperature",
            [NAN, "1", None, True, -0.1, INF, -1, 10**400],
            r"give 0 \(greedy\) or a number above 0, at most 1000000",
        ),
        (
            "top_k",
            [1.5, "1", None, True, -2, 2**31, 10**4000],
            "give 1 to 2147483647, or 0 to keep every token",
        ),
        ("top_p", [NAN, "1", None, 0, 0.0, -0.1, 1.1], "give a number above 0 and at most 1"),
        ("min_p", [NAN, "1", None, -0.1, 1.1], r"give a number from 0 \(off\) to 1"),
        ("seed", [-1, 2**64, 1.5, "x", True], r"give a whole number from 0 to 2\^64 - 1, or None"),
        ("n", [1.5, None, "2", True, 0, -1, 129], "give 1 to 128 samples"),
        ("max_tokens", [0, -1, 1.5, "9", True, 2**31], "give 1 to 2147483647, or None"),
        ("min_tokens", [1.5, None, True, -1, 2**31], "give 0 to 2147483647"),
        ("min_tokens", [17], r"give at most max_tokens \(16\)"),
        (
            "stop",
            ["", [""], ["a", 3], ["x"] * 65, 5],
            "give at most 64 strings of 1 to 1000 characters",
        ),
        (
            "stop_token_ids",
            [[-1], [1.5], ["a"], [True], [2**31]],
            "give token ids, 0 to 2147483647",
        ),
        ("ignore_eos", [None, 1, "yes"], "give True or False"),
    ],
)
def test_bad_values_are_refused(name: str, values: list[Any], remedy: str) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=f"SamplingParams: {name} is .*; {remedy}") as caught:
            SamplingParams(**{name: value})
        assert shown(value) in str(caught.value)
        assert len(str(caught.value)) < 250
        assert str(caught.value).endswith(".")


def test_good_values_at_their_ends() -> None:
    SamplingParams(temperature=0, top_k=-1, top_p=1, min_p=1, seed=0, n=128, max_tokens=1)
    SamplingParams(seed=2**64 - 1, max_tokens=None, min_tokens=10**6, stop=["x"] * 64)
    assert SamplingParams(max_tokens=3, min_tokens=3).min_tokens == 3
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams().stop == SamplingParams().stop_token_ids == ()
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy


def test_end_tokens() -> None:
    def ends(**params: Any) -> frozenset[int]:
        return Request("a", (1,), SamplingParams(**params), 0, frozenset({2, 3})).end_token_ids

    assert ends() == {2, 3}
    assert ends(stop_token_ids=[5]) == {2, 3, 5}
    assert ends(ignore_eos=True) == set()
    assert ends(ignore_eos=True, stop_token_ids=[3]) == {3}


def test_origins_are_json() -> None:
    assert json.dumps([Origin.ACCEPTED, Origin.BONUS, Origin.PLAIN]) == (
        '["accepted", "bonus", "plain"]'
    )


def test_drafts() -> None:
    draft = Draft.chains([[4, 5, 6], [], [7]])
    assert [nodes.parents for nodes in draft] == [[-1, 0, 1], [], [-1]]
    assert [nodes.depth for nodes in draft] == [3, 0, 1]
    tree = DraftNodes([1, 2, 3, 4, 5], [-1, -1, 0, 2, 1])
    assert tree.depth == 3


def test_a_sequence_counts_its_output() -> None:
    request = Request("a", (1, 2, 3), SamplingParams(), 0)
    sequence = SequenceState("a/0", request, 0, text=None, pipeline=None, tokens=[1, 2, 3, 9])  # type: ignore[arg-type]
    assert (sequence.prompt_length, sequence.num_output) == (3, 1)


def test_counts_and_their_ratios() -> None:
    counts = Counts()
    assert counts.acceptance_rate is None
    assert counts.acceptance_length is None
    assert counts.acceptance_by_position == []
    counts.record(0, 0, 0, 1)  # a step without a draft
    assert (counts.steps, counts.drafts, counts.emitted) == (1, 0, 1)
    counts.record(3, 3, 2, 3)
    counts.record(2, 5, 2, 3)  # a tree: five nodes, two deep
    counts.record(3, 3, 0, 1)
    assert (counts.steps, counts.drafts, counts.drafted, counts.nodes) == (4, 3, 8, 11)
    assert (counts.accepted, counts.emitted) == (4, 8)
    assert counts.drafted_by_position == [3, 3, 2]
    assert counts.accepted_by_position == [2, 2, 0]
    assert counts.acceptance_rate == 0.5
    assert counts.acceptance_length == 1 + 4 / 3
    assert counts.acceptance_by_position == [2 / 3, 2 / 3, 0]


def test_counts_add_up() -> None:
    long, short, total = Counts(), Counts(), Counts()
    long.record(4, 4, 3, 4)
    short.record(1, 1, 1, 2)
    for counts in (short, long, Counts()):
        total.add(counts)
    assert (total.steps, total.drafts, total.drafted, total.accepted) == (2, 2, 5, 4)
    assert (total.nodes, total.emitted) == (5, 6)
    assert total.drafted_by_position == [2, 1, 1, 1]
    assert total.accepted_by_position == [2, 1, 1, 0]
    assert short.drafted_by_position == [1]
