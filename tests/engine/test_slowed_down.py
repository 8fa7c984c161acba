"""A controller on a clock of its own: no instruction set decides what steps take."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams, pocket


def test_drafts_come_back_after_a_request_that_they_only_slowed_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lone model writes what does not repeat, its only draft meets other work, then a list comes.

    A look at the clock takes a time of its own, so that nothing else decides what steps take.
    """
    for file in pocket.PATH.iterdir():
        if file.is_file():
            (tmp_path / file.name).symlink_to(file)
    ticks, busy = count(), [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks) * 2e-4 + busy[0])
    llm = LLM(tmp_path, memory=2**27)
    decide = llm.engine.model.decide

    def slow_once(segments: Any, *others: Any) -> Any:
        if not busy[0] and any(segment.nodes for segment in segments):
            busy[0] = 0.1
        return decide(segments, *others)

    monkeypatch.setattr(llm.engine.model, "decide", slow_once)
    warm = SamplingParams(temperature=0.6, max_tokens=192, ignore_eos=True, seed=2)
    first = llm.generate([pocket.prompts()[0]], warm)[0].metrics
    assert busy[0]
    assert first.drafted < 8
    numbers = "".join(f"values.append({number})\n" for number in range(10)) * 12
    second = llm.generate([numbers], replace(warm, max_tokens=256))[0].metrics
    assert second.steps < 150
    assert second.accepted > 100
