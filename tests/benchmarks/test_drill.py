"""The drill's command: its cases, and what ``make drill`` asks of it."""

from __future__ import annotations

import re
import subprocess

from typer.testing import CliRunner

from benchmarks.__main__ import application
from benchmarks.drill.cases import GOOD, NOISE
from benchmarks.drill.panels import lines
from tests.support import REPOSITORY


def test_make_drills_a_weak_drafter_a_killed_server_and_the_panels() -> None:
    command = ["make", "-n", "drill"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    found = re.search(r"--cases (\S+)", done.stdout)
    assert found is not None
    cases = set(found[1].split(","))
    assert cases <= {*NOISE, *GOOD}
    assert cases >= {"weak", "killed", "panels"}


def test_an_unknown_case_is_refused() -> None:
    done = CliRunner().invoke(application("drill"), ["drill", "--cases", "weak,strong"])
    assert done.exit_code == 2
    assert "strong" in done.output


def test_all_lines_but_those_of_gpus_are_asked_for() -> None:
    assert len(lines()) > 30
    assert not [expression for _, expression in lines() if "gpu" in expression.lower()]
