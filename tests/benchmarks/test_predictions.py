"""``python -m benchmarks advise``: what its summary says of predictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import application
from benchmarks.advise import summary


def cell(predicted: float, speedup: float, drafter: str = "model") -> dict[str, Any]:
    return {
        "drafter": drafter, "temperature": 0.0, "batch_size": 2, "num_speculative_tokens": 4,
        "predicted": predicted, "speedup": speedup, "error": predicted / speedup - 1,
        "emitted_per_step": [2.0, 1.9], "drafted_per_step": [4.0, 4.0],
        "step_over_plain": [2.0, 2.1],
    }  # fmt: skip


def test_the_summary_counts_errors_and_sides() -> None:
    cells = [cell(1.5, 1.25), cell(0.9, 1.0), cell(0.8, 0.5), cell(1.2, 0.8), cell(1.05, 0.95)]
    found = summary(cells)
    assert (found["cells"], found["losing"]) == (5, 3)
    assert found["median_error"] == pytest.approx(0.2)
    assert found["median_bias"] == pytest.approx(0.2)
    assert (found["clear_cells"], found["right_cells"]) == (3, 2)  # 1.2 for 0.8 is wrong


def test_reports_of_several_runs_are_put_together(tmp_path: Path) -> None:
    files = []
    for drafter in ("model", "suffix"):
        files += ["--join", str(tmp_path / drafter)]
        cells = [cell(1.5, 1.25, drafter), cell(1.2, 0.8, drafter)]
        (tmp_path / drafter).write_text(json.dumps({"cells": cells}), encoding="utf-8")
    out = tmp_path / "all.json"
    done = CliRunner().invoke(application("advise"), ["advise", *files, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "| model | 0 | 2 | 4 | 1.50 | 1.25 | +20% | 2.00, 1.90 |" in done.stdout
    assert "suffix at T = 0: 2 cells, 1 of them slower" in done.stdout
    assert "all: 4 cells, 2 of them slower than plain decoding: median error 35.0%" in done.stdout
    assert "in 2 of 4 cells beyond 10 %" in done.stdout
    assert json.loads(out.read_text(encoding="utf-8"))["summary"]["cells"] == 4
