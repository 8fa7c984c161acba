"""Objects of the native step while calls are in them, and what its functions let out."""

from __future__ import annotations

import os
import re
import sys

import pytest

from outrider.native import choice as native
from outrider.native._interface import PARAMETERS
from tests.support import REPOSITORY
from tests.support.forked import run_program

SOURCES = REPOSITORY / "src/outrider/native/src"

pytestmark = pytest.mark.skipif(
    native.library() is None or sys.platform != "linux", reason="needs the native step and Linux"
)


def test_processes_come_through() -> None:
    """Each hazard stands in native_hazards.py."""
    hazards = ["exits", "released", "forks", "apart", "memory", "threads"]
    command = [sys.executable, "-m", "tests.support.native_hazards", *hazards]
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = run_program(command, timeout=300, cwd=REPOSITORY, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "unharmed\n" * len(hazards)


def test_no_function_lets_an_exception_out() -> None:
    """Functions of the interface are guarded, or throw nothing."""
    functions = {
        match[1]: match[0]
        for file in SOURCES.glob("*.cpp")
        for match in re.finditer(r"^\w[\w:* ]* (outrider_\w+)\([^{]*\{.*?\}$", file.read_text(),
                                 re.DOTALL | re.MULTILINE)
    }  # fmt: skip
    assert functions.keys() == {f"outrider_{name}" for name in PARAMETERS}
    for name, source in functions.items():
        head, _, body = source.partition("{")
        assert "noexcept" in head or re.search(r"\b(guarded|with)\(", body), name
