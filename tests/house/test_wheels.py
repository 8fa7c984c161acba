"""Wheels: what is checked of them, and that they have what the package looks for."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from deploy import wheels
from outrider.native.choice import SETS

ISAS = SETS["x86_64"]
TAG = "manylinux_2_28_x86_64"
FIT = f"echo 'is consistent with the following platform tag: \"{TAG}\".'"


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for auditwheel: finds every wheel fit."""
    monkeypatch.setattr(wheels, "check_detection", lambda wheel: None)
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{FIT}\n")
    program.chmod(0o755)
    return program


def wheel(folder: Path, sets: tuple[str, ...]) -> Path:
    """A wheel with libraries of these sets."""
    file = folder / "outrider-0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for name in sets:
            archive.writestr(f"outrider/native/outrider_{name}.so", "x")
    return file


def test_a_wheel_has_every_set(tmp_path: Path, python: Path) -> None:
    assert wheels.SETS == SETS
    wheels.check(python, wheel(tmp_path, ISAS), "x86_64", TAG)
    for wrong in (ISAS[1:], (*ISAS, "sse2")):
        with pytest.raises(wheels.Failed, match="has the sets"):
            wheels.check(python, wheel(tmp_path, wrong), "x86_64", TAG)


def test_a_wheel_is_small(tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "MOST_BYTES", 100)
    with pytest.raises(wheels.Failed, match="more than 100"):
        wheels.check(python, wheel(tmp_path, ISAS), "x86_64", TAG)


def test_a_wheel_runs_where_its_tag_says(tmp_path: Path, python: Path) -> None:
    python.write_text(python.read_text().replace("2_28", "2_36"))
    with pytest.raises(wheels.Failed, match="auditwheel does not find"):
        wheels.check(python, wheel(tmp_path, ISAS), "x86_64", TAG)


def test_a_step_that_fails_is_shown() -> None:
    with pytest.raises(wheels.Failed, match="ended with 3:\nwhy"):
        wheels.call(sys.executable, "-c", "print('why'); raise SystemExit(3)")
