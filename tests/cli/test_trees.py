"""The benchmark of trees and chains, on a tiny pair."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import application
from benchmarks.trees import Shape, best, parents_of
from outrider.base.trees import depths
from outrider.cli.common import shapes
from outrider.errors import ConfigError


def test_chains_and_trees_of_forwards() -> None:
    assert parents_of(4, tree=False) == [-1, 0, 1, 2]
    assert parents_of(5, tree=True) == [-1, -1, -1, 0, 0]
    assert depths(parents_of(16, tree=True)) == [1] * 3 + [2] * 9 + [3] * 4


def test_trees_are_read_from_text() -> None:
    assert shapes("6:3,8:4") == [(6, 3), (8, 4)]
    for wrong in ("6", "4:4", "x:2", "6:0", ""):
        with pytest.raises(ConfigError, match="more nodes than depth"):
            shapes(wrong)


def test_the_best_are_picked_on_odd_rounds_and_compared_on_even_ones() -> None:
    speeds = {
        Shape(2): [8.0, 4.0, 8.0, 4.0],
        Shape(4): [10.0, 2.0, 10.0, 2.0],
        Shape(3, 6): [6.0, 9.0, 6.0, 9.0],
        Shape(4, 8): [99.0, 1.0, 99.0, 1.0],
    }
    found = best(speeds)
    assert (found["best_chain"]["depth"], found["best_tree"]["nodes"]) == (2, 6)
    assert found["ratio"] == 0.75


def test_the_report_on_a_tiny_pair(tiny_llama: Path, tiny_drafter: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_llama, tmp_path / "pair")
    shutil.copytree(tiny_drafter, folder / "drafter")
    prompts, file = tmp_path / "prompts.json", tmp_path / "trees.json"
    prompts.write_text(json.dumps(["def greet(name):", "for word in ("]))
    arguments = (
        prompts, "--model", folder, "--contexts", "5,250", "--nodes", "1,8", "--lengths", "1,2",
        "--trees", "4:2,4:3", "--temperature", "0,1", "--tokens", "6", "--rounds", "2",
        "--json", file,
    )  # fmt: skip
    done = CliRunner().invoke(application("trees"), ["trees", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    assert done.stdout.count("\n| --- |") == 2
    assert "T = 1: the best tree (4 nodes, " in done.stdout
    report = json.loads(file.read_text())
    places = [(row["context"], row["nodes"]) for row in report["forwards"]]
    assert places == [(5, 1), (5, 8), (250, 1), (250, 8)]
    assert all(row["chain_ms"] > 0 < row["tree_ms"] for row in report["forwards"])
    assert [each["temperature"] for each in report["decoding"]] == [0, 1]
    for each in report["decoding"]:
        shapes = [(d["depth"], d["nodes"]) for d in each["drafts"]]
        assert shapes == [(1, 0), (2, 0), (2, 4), (3, 4)]
        assert all(1 <= d["acceptance_length"] <= d["depth"] + 1 for d in each["drafts"])
