"""``python -m benchmarks advise``: what its summary says of predictions."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.advise import markdown, summary


def cell(predicted: float, speedup: float) -> dict[str, Any]:
    return {
        "drafter": "model", "batch_size": 2, "num_speculative_tokens": 4, "predicted": predicted,
        "speedup": speedup, "error": predicted / speedup - 1,
    }  # fmt: skip


def test_the_summary_counts_errors_and_sides() -> None:
    cells = [cell(1.5, 1.25), cell(0.9, 1.0), cell(0.8, 0.5), cell(1.2, 0.8), cell(1.05, 0.95)]
    found = summary(cells)
    assert (found["cells"], found["losing"], found["clear_cells"]) == (5, 3, 3)
    assert found["median_error"] == pytest.approx(0.2)
    assert found["right_side"] == pytest.approx(2 / 3)  # 1.2 for 0.8 is on the wrong side
    assert summary([cell(1.0, 1.05)])["right_side"] is None
    text = "\n".join(markdown({"cells": cells, "summary": found}))
    assert "| model | 2 | 4 | 1.50 | 1.25 | +20% |" in text
    assert "on the right side of 1 in 67% of the 3 cells" in text
