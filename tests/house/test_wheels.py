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
SAID = 'outrider-{tag}.whl is consistent with\nthe following platform tag: "{found}".'
"""What auditwheel says, in the lines that it breaks."""


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for auditwheel: finds every wheel fit."""
    monkeypatch.setattr(wheels, "check_detection", lambda wheel: None)
    program = tmp_path / "python"
    program.touch(0o755)
    says(program, "manylinux_2_27_x86_64")
    return program


def says(program: Path, found: str) -> None:
    """Have auditwheel's stand-in find a tag."""
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{SAID.format(tag=TAG, found=found)}\nEND\n")


def wheel(folder: Path, sets: tuple[str, ...]) -> Path:
    """A wheel with libraries of these sets."""
    file = folder / "outrider-0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for name in sets:
            archive.writestr(f"outrider/native/outrider_{name}.so", "x")
    return file


def test_a_wheel_has_every_set(tmp_path: Path, python: Path) -> None:
    assert wheels.SETS == SETS
    wheels.check(python, wheel(tmp_path, ISAS), "x86_64")
    for wrong in (ISAS[1:], (*ISAS, "sse2")):
        with pytest.raises(wheels.Failed, match="has the sets"):
            wheels.check(python, wheel(tmp_path, wrong), "x86_64")


def test_a_wheel_is_small(tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "MOST_BYTES", 100)
    with pytest.raises(wheels.Failed, match="more than 100"):
        wheels.check(python, wheel(tmp_path, ISAS), "x86_64")


def test_a_wheel_runs_where_its_tag_says(tmp_path: Path, python: Path) -> None:
    says(python, TAG)
    wheels.check(python, wheel(tmp_path, ISAS), "x86_64")
    for found in ("manylinux_2_29_x86_64", "manylinux_2_28_aarch64", "linux_x86_64"):
        says(python, found)
        with pytest.raises(wheels.Failed, match="auditwheel reports that"):
            wheels.check(python, wheel(tmp_path, ISAS), "x86_64")


def test_a_step_that_fails_is_shown() -> None:
    with pytest.raises(wheels.Failed, match="ended with 3:\nwhy"):
        wheels.call(sys.executable, "-c", "print('why'); raise SystemExit(3)")
