"""The CPUs that a drafter gets for itself."""

from __future__ import annotations

import os

import pytest

from outrider.base.cpus import listed, parse_cpus, placement
from outrider.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "cpus", "shown"),
    [
        ("3", {3}, "3"),
        ("8-11", {8, 9, 10, 11}, "8-11"),
        ("4, 6-7,5", {4, 5, 6, 7}, "4-7"),
        ("0,2-2,9", {0, 2, 9}, "0,2,9"),
    ],
)
def test_lists_of_cpus(text: str, cpus: set[int], shown: str) -> None:
    assert parse_cpus(text) == cpus
    assert listed(cpus) == shown


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-2", "1,,2", "1.5", "70000", "1-99999", 3])
def test_what_is_no_list_is_refused(text: object) -> None:
    with pytest.raises(ConfigError, match="give numbers and ranges of CPUs"):
        parse_cpus(text)


def test_the_target_gets_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 4, 5}, raising=False)
    assert placement("4-5") == ({0, 1}, {4, 5})
    with pytest.raises(ConfigError, match="names CPU 2, but this process may use 0-1,4-5"):
        placement("1-2")
    with pytest.raises(ConfigError, match="leave at least one to the target"):
        placement("0,1,4-5")
    monkeypatch.delattr(os, "sched_getaffinity")
    with pytest.raises(ConfigError, match="this system has no call for"):
        placement("4")
