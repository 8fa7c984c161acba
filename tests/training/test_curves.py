"""Pictures of curves are drawn without a warning, however busy the machine is."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.base.plots import Series, line_chart
from outrider.training.curves import COLUMNS, CURVES, PICTURE, add_to_curves, draw_curves


def test_a_slow_machine_draws_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """matplotlib looks at the clock while it finds a place for a legend; here an hour goes by."""
    for step in (1, 2):
        add_to_curves(tmp_path / CURVES, [step] * len(COLUMNS))
    pictures = []
    for pace in (0, 3600):
        clock = SimpleNamespace(perf_counter=count(step=pace).__next__)
        monkeypatch.setattr("matplotlib.legend.time", clock)
        draw_curves(tmp_path)
        chart = line_chart("title", "x", "y", [Series("a", (1, 2), (3, 4))])
        pictures.append(((tmp_path / PICTURE).read_bytes(), chart))
        assert next(clock.perf_counter.__self__) >= 3 * pace  # it was looked at
    assert pictures[0] == pictures[1]
