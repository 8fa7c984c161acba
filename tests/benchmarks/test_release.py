"""``python -m benchmarks release``: its table, its picture, and that it goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from typer.testing import CliRunner, Result

from benchmarks import release
from benchmarks.__main__ import application
from benchmarks.peers.pairs import Pair, find_pair
from benchmarks.portfolio.cells import AUTO
from benchmarks.portfolio.clock import Decoded
from benchmarks.portfolio.clock import speed as measured_speed
from benchmarks.release import Cell, Found

SMALL = ("--models", "pocket", "--rounds", 1, "--tokens", 6, "--temperatures", "0.8")
PNG = b"\x89PNG\r\n\x1a\n"


def run(out: Path, *args: object) -> Result:
    words = ["release", "--out", str(out), *map(str, (*SMALL, *args))]
    return CliRunner().invoke(application("release"), words)


def test_a_table_of_the_pocket_pair(tmp_path: Path) -> None:
    out = tmp_path / "release.json"
    done = run(out, "--requests", "1,3")
    assert done.exit_code == 0, done.output
    report = json.loads(out.read_text(encoding="utf-8"))
    alone, three = report["cells"]["pocket/0.8/1"], report["cells"]["pocket/0.8/3"]
    for cell in (alone, three):
        assert cell["different"] == 0
        assert len(cell["plain"]) == len(cell["auto"]) == 1
        assert min(*cell["plain"], *cell["auto"]) > 0
    assert (alone["compared"], three["compared"]) == (4, 6)  # full batches, four or more
    assert {"cpu", "date", "threads"} <= report["machine"].keys()
    assert report["command"].startswith("python -m benchmarks release --models pocket --requests ")
    said = out.with_suffix(".md").read_text(encoding="utf-8")
    assert done.stdout == said
    assert f"| pocket | 0.8 | 3 | {three['plain'][0]:.1f} | {three['auto'][0]:.1f} | " in said
    assert "| 6 | 0 |" in said
    assert report["command"] in said
    assert alone["date"] in said
    assert out.with_suffix(".png").read_bytes().startswith(PNG)


def found(cell: Cell, *_: object) -> Found:
    plain, auto = [10.0, 20.0, 40.0], [20.0, 30.0, 40.0]
    return Found(*cell, plain, auto, 10, 15, compared=12, date="2026-11-30")


def test_it_goes_on_cell_by_cell(tmp_path: Path) -> None:
    out = tmp_path / "release.json"
    asked = list[str]()

    def interrupted(cell: Cell, *_: object) -> Found:
        asked.append(cell.name)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return found(cell)

    with patch.object(release, "measure", interrupted):
        assert run(out, "--requests", "1,2,4,8").exit_code == 130
        assert len(json.loads(out.read_text())["cells"]) == 2
        assert run(out, "--requests", "1,2,4,8").exit_code == 0
    third = "pocket/0.8/4"
    assert asked == ["pocket/0.8/1", "pocket/0.8/2", third, third, "pocket/0.8/8"]
    with patch.object(release, "measure", None):  # there is nothing left to measure
        done = run(out, "--requests", "2,4")
    rows = [line for line in done.stdout.splitlines() if line.startswith("| pocket")]
    assert rows == [f"| pocket | 0.8 | {n} | 20.0 | 30.0 | 1.50 | 2.50 | 12 | 0 |" for n in (2, 4)]


def test_an_output_that_differs_fails_the_release(tmp_path: Path) -> None:
    def fault(llm: Any, *args: Any) -> Decoded:
        done = measured_speed(llm, *args)
        if llm.drafter.name == "auto":
            done.outputs[1][-1] ^= 1
        return done

    out = tmp_path / "release.json"
    with patch.object(release, "speed", fault):
        done = run(out, "--requests", "2")
    assert done.exit_code == 1
    assert "1 outputs differ from plain decoding" in done.stderr
    assert json.loads(out.read_text())["cells"]["pocket/0.8/2"]["different"] == 1
    assert "| 4 | 1 |" in out.with_suffix(".md").read_text()


def test_nothing_drafted_has_no_acceptance() -> None:
    row = Found("a", 0.0, 32, [1.0] * 7, [1.0] * 7, compared=224).row()
    assert row == ["a", "0", "32", "1.0", "1.0", "1.00 [1.00 1.00]", "", "224", "0"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--out", "/no/such/folder/p.json"), "whose folder is not there; make it"),
        (("--out", "p.txt"), "give a file that ends in .json"),
        (("--requests", "0"), "--requests has a number below 1"),
        (("--requests", "a"), "--requests is 'a'; give comma-separated numbers"),
        (("--temperatures", "-1"), "--temperatures one below 0"),
        (("--models", "/no/such/model"), "/no/such/model"),
    ],
)
def test_wrong_requests_are_a_sentence(args: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = run(tmp_path / "release.json", *args)
    assert done.exit_code in (1, 2)
    assert said in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    "text", ["", "[]", '{"settings": {}}', '{"settings": 7, "cells": {"a": {"b": 1}}}']
)
def test_another_file_is_left_alone(text: str, tmp_path: Path) -> None:
    out = tmp_path / "release.json"
    out.write_text(text)
    done = run(out)
    assert done.exit_code == 2
    assert "which holds no such table; give another." in " ".join(done.stderr.split())
    assert out.read_text() == text


def test_other_settings_need_another_file(tmp_path: Path) -> None:
    out = tmp_path / "release.json"
    with patch.object(release, "measure", found):
        assert run(out, "--requests", "1").exit_code == 0
        done = run(out, "--requests", "1", "--tokens", 7)
    assert done.exit_code == 2
    assert "was measured with other settings" in " ".join(done.stderr.split())


def test_a_drafter_that_is_named_joins_auto(tmp_path: Path) -> None:
    pair = find_pair("pocket")
    assert release.Engines(pair, 8)._auto == AUTO
    other = release.Engines(Pair("a", pair.target, tmp_path, pair.prompts, 4), 8)
    assert other._auto == f"auto+{tmp_path}"
