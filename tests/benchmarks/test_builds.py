"""The benchmark of two builds: its table, and what it refuses."""

import random
from dataclasses import fields
from math import log

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import application
from benchmarks.answers import differing
from benchmarks.answers_worker import options_of
from benchmarks.builds import report_lines
from outrider import SamplingParams, pocket


def test_a_build_that_is_twice_as_fast():
    """Each cell, each pair and all together say 2, with an interval around it."""
    logs = [log(2) + change for change in (-0.01, 0.01, -0.01, 0.01)]
    starts = [{("plain", 1): value, ("ngram", 8): value} for value in logs]
    lines = report_lines({"pocket": starts, "planted": starts})
    named = [line.split("|")[1].strip() for line in lines[2:]]
    both = ["plain, batch 1", "ngram, batch 8"]
    assert named == [
        *(f"pocket, {cell}" for cell in both), "pocket",
        *(f"planted, {cell}" for cell in both), "planted", "together",
    ]  # fmt: skip
    assert all(line.split("|")[2].strip().startswith("2.000 [1.9") for line in lines[2:])


def test_answers_that_differ_are_named():
    """One token that differs is told, with the request that it belongs to."""
    made = [
        {"engine": "plain", "request": i, "options": f"o{i}", "outputs": [["text", [1, 2]]]}
        for i in range(3)
    ]
    other = [*made[:2], made[2] | {"outputs": [["text", [1, 3]]]}]
    assert differing(made, made) == []
    assert differing(made, other) == ["plain, request 2: o2"]


def test_random_options_are_valid_and_cover_all():
    """Every kind of option occurs, and none is refused."""
    rng = random.Random(0)
    seen = set()
    for _ in range(300):
        options = options_of(rng, 4096)
        SamplingParams(**options)
        seen |= options.keys()
    rest = {"skip_special_tokens", "logits_processors"}
    assert seen == {field.name for field in fields(SamplingParams)} - rest


@pytest.mark.parametrize("name", ["builds", "answers"])
def test_folders_without_a_build(tmp_path, name):
    """A folder without the package is refused in a sentence."""
    result = CliRunner().invoke(application(name), [name, str(tmp_path), str(tmp_path)])
    assert result.exit_code != 0
    assert "Traceback" not in result.output


@pytest.mark.parametrize("same", [True, False])
def test_folders_that_are_no_two_builds(tmp_path, same):
    """One folder twice, or one without the package, is refused in a sentence."""
    package = pocket.PATH.parents[2]
    other = package if same else tmp_path
    arguments = ["builds", str(package), str(other), "--starts", "2"]
    result = CliRunner().invoke(application("builds"), arguments)
    assert result.exit_code != 0
    assert "Traceback" not in result.output
    wanted = "give two folders" if same else "holds no package outrider"
    assert wanted in result.output
