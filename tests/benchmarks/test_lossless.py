"""``python -m benchmarks lossless``: its page is that of its files, and real servers repeat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import install, lossless
from benchmarks.__main__ import application
from benchmarks.lossless import COLUMNS, ENGINES, FAULT, RESULTS, entries, measured, verdicts
from tests.support.lossless_section import PAGE, written
from tests.support.lossy import Faults, toy

TOO_SMALL = {"fault-shared-noise"}
"""Seen by ``outrider verify --fault``, which reads logits; the page says that this misses it."""


def run(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(application("lossless"), ["lossless", *words])
    return done.exit_code, done.stdout, done.stderr


def test_the_page_says_what_the_files_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == written()


def test_every_file_is_of_an_engine_and_small() -> None:
    for file in RESULTS.glob("*.json"):
        assert file.stem in ENGINES
        assert file.stat().st_size < 50_000
    assert {entry["engine"] for entry in entries(RESULTS)} == {
        f.stem for f in RESULTS.glob("*.json")
    }


def test_second_runs_gave_the_same_verdicts() -> None:
    published = {entry["engine"]: entry for entry in entries(RESULTS)}
    second = entries(RESULTS / "again")
    assert second
    for entry in second:
        assert verdicts(entry) == verdicts(published[entry["engine"]])


def test_a_fault_is_caught_at_temperature_above_0() -> None:
    faults = [entry for entry in entries(RESULTS) if entry["engine"].startswith(FAULT)]
    assert faults
    told = {e["engine"]: dict(zip(COLUMNS, verdicts(e), strict=True))["T > 0"] for e in faults}
    assert {name for name, verdict in told.items() if verdict != "fails"} <= TOO_SMALL


def test_an_engine_is_audited_and_one_that_is_absent_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lossless, "LAWS", ("temperature 1",))
    engines = (
        lossless.Engine("a", str, "toy drafts", "", lambda: toy(Faults(reseeds=True)), toy),
        lossless.Engine("b", str, "", absent="it drafts nothing"),
    )
    monkeypatch.setattr(lossless, "ENGINES", {engine.name: engine for engine in engines})
    code, said, _ = run("--samples", "64", "--out", str(tmp_path))
    assert code == 0
    assert "| a |  | toy drafts | holds | holds | fails | holds |" in said
    assert "- a, per seed, fails: seed, as plain: 16 of 16 answers wrong" in said
    assert "- b was not run: it drafts nothing." in said
    report: dict[str, Any] = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert report["command"] == "python -m benchmarks lossless a --samples 64"


def test_bad_usage_is_a_sentence(tmp_path: Path) -> None:
    code, _, err = run("nobody")
    assert code == 2
    assert "there is no engine 'nobody'; known: outrider," in " ".join(err.split())
    code, _, err = run("outrider", "--out", str(tmp_path / "none"))
    assert code == 2
    assert "is no folder" in err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["outrider", "llama.cpp"])
def test_real_servers_give_the_published_verdicts_again(name: str) -> None:
    if (peer := ENGINES[name].peer) and (why := install.missing(peer)):
        pytest.skip(why)
    published = next(entry for entry in entries(RESULTS) if entry["engine"] == name)
    assert verdicts(measured(ENGINES[name], published["samples"])) == verdicts(published)


@pytest.mark.slow
def test_a_real_fault_fails_every_column() -> None:
    assert verdicts(measured(ENGINES["fault-accept-always"], 128)) == ["fails"] * len(COLUMNS)
