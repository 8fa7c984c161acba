"""What few bits lose beside other engines: the figures, from made-up losses."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import install
from benchmarks.__main__ import application
from benchmarks.peers import known, losses
from benchmarks.peers.known import OWN, Peer

EXACT = [1.0, 2.0, 3.0]


def test_a_recipe_stands_beside_the_peer_of_its_size() -> None:
    told = {
        (OWN, "int8-a8"): [1.1, 2.1, 3.1],
        (OWN, "int4"): [1.5, 2.5, 3.5],
        ("a", "int8"): [1.2, 2.2, 3.2],
        ("b", "int8"): [1.3, 2.3, 3.3],
    }
    bits = dict(zip(told, (8.04, 4.5, 8.5, 8.07), strict=True))
    eight, four, *theirs = losses.rows(EXACT, told, bits)
    assert eight["perplexity_loss"] == pytest.approx([math.expm1(0.1)] * 3)
    assert eight["beside"] == "b int8"
    assert eight["more_than_beside"] == pytest.approx([math.expm1(-0.2)] * 3)
    assert four["beside"] is None
    assert all(row["beside"] is None for row in theirs)


def test_a_peers_losses_come_from_its_own_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its script is told the conversion, the windows and where to write."""
    monkeypatch.setenv(install.HOME_VARIABLE, str(tmp_path / "home"))
    runners = tmp_path / "runners"
    runners.mkdir()
    (runners / "said.py").write_text(
        "import json, sys\n"
        "folder, windows, out = sys.argv[1:]\n"
        "read = json.load(open(windows))\n"
        "json.dump([sum(w) + len(folder) * 0 for w in read], open(out, 'w'))\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(known, "FOLDER", tmp_path)
    monkeypatch.setitem(losses.READERS, "made-up", "said")
    peer = Peer("made-up", (sys.executable,))
    assert losses.their_losses(peer, "int8", [[1, 2], [3]], tmp_path) == [3.0, 3.0]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--windows", "7"), "--windows"), (("--peers", "vllm"), "'vllm'"),
        (("--quantization", "int5"), "int5"),
    ],
)  # fmt: skip
def test_what_is_asked_wrongly_is_said(args: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(application("losses"), ["losses", *args])
    assert done.exit_code == 2
    assert said in done.stderr


def test_ours_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without peers the table has our recipes, each with its loss and interval."""
    monkeypatch.setenv(install.HOME_VARIABLE, str(tmp_path))
    file = tmp_path / "losses.json"
    args = ["losses", "--quantization", "int4", "--windows", "8", "--json", str(file)]
    done = CliRunner().invoke(application("losses"), args)
    assert done.exit_code == 0, done.stderr
    assert "llama.cpp: skipped: not installed" in done.stderr
    (row,) = json.loads(file.read_text(encoding="utf-8"))["rows"]
    low, high = row["perplexity_loss"][1:]
    assert 0 < low < row["perplexity_loss"][0] < high
    assert f"{row['bits_per_weight']:.2f}" in done.stdout
