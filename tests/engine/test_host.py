"""The engine's Python does not grow: bytecodes of a step, by drafter and batch size.

Times of a step are measured by ``python -m benchmarks host``; here a clock ticks once each time it
is read, so that the engine chooses the same on every machine.
"""

from __future__ import annotations

import itertools
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from benchmarks.host import modes_of
from outrider import LLM, SamplingParams, pocket
from outrider.base.types import Speculation
from outrider.engine.engine import Engine
from outrider.native.choice import library

pytestmark = [
    pytest.mark.skipif(
        sys.version_info[:2] != (3, 11), reason="the limits are bytecodes of Python 3.11"
    ),
    pytest.mark.skipif(library() is None, reason="the limits are of the native step"),
]

# By mode: limits for a step of 1 and of 8 sequences.
LIMITS = {
    "plain": (2_600, 12_800),
    "ngram": (3_400, 17_700),
    "suffix": (3_500, 17_600),
    "prediction": (4_600, 27_300),
    "model": (5_300, 26_000),
    "model+suffix": (7_000, 35_400),
    "auto": (6_100, 31_200),
}
MOST, LEAST = 1.1, 0.6
"""Shares of a limit; below the least the table is to be lowered."""
BATCHES = (1, 8)
LENGTH = 4
TICK = 1e-4
WARM_UPS = 12
"""Calls before it counts, which are enough for what auto looks at in its first steps alone."""
PROMPTS = [text[:60] for text in pocket.prompts()[: max(BATCHES)]]
PARAMS = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


def bytecodes_per_step(work: Callable[[], object]) -> float:
    """Return the bytecodes that ``work`` executes, all in all, by step of an engine."""
    bytecodes = steps = 0

    def executed(_: FrameType, event: str, __: Any) -> Any:
        nonlocal bytecodes
        bytecodes += event == "opcode"
        return executed

    def called(frame: FrameType, _: str, __: Any) -> Any:
        nonlocal steps
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        steps += frame.f_code is Engine.step.__code__
        return executed

    before = sys.gettrace()
    sys.settrace(called)
    try:
        work()
    finally:
        sys.settrace(before)
    return bytecodes / steps


@pytest.fixture(scope="module")
def pair(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose drafter is the same in int8, and so is right more often than not."""
    folder = shutil.copytree(tiny_llama, tmp_path_factory.mktemp("pairs") / "pair")
    shutil.copytree(tiny_llama, folder / "drafter")
    return folder


@pytest.fixture(scope="module")
def expected(pair: Path) -> list[Speculation]:
    """What each prompt's output is predicted to be: what it is."""
    outputs = LLM(pair, None, max_num_seqs=8).generate(PROMPTS, PARAMS)
    return [Speculation(prediction=tuple(each.outputs[0].token_ids)) for each in outputs]


def test_the_limits_are_of_every_mode(pair: Path) -> None:
    assert LIMITS.keys() == modes_of(str(pair)).keys()


@pytest.mark.parametrize("mode", LIMITS)
def test_a_step_executes_no_more_bytecodes_than_its_limit(
    mode: str,
    pair: Path,
    expected: list[Speculation],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no costs that another test has kept
    monkeypatch.setattr(time, "perf_counter", itertools.count(0.0, TICK).__next__)
    llm = LLM(
        pair,
        modes_of(str(pair))[mode],
        num_speculative_tokens=LENGTH,
        max_num_seqs=max(BATCHES),
        enable_prefix_caching=False,
    )

    def decode(batch: int) -> None:
        wishes = expected[:batch] if mode == "prediction" else None
        llm.generate(PROMPTS[:batch], PARAMS, speculation=wishes)

    for batch, limit in zip(BATCHES, LIMITS[mode], strict=True):
        for _ in range(WARM_UPS):
            decode(batch)
        found = bytecodes_per_step(lambda batch=batch: decode(batch))
        said = f"a step of {batch} by {mode} executes {found:.0f} bytecodes, limit {limit}"
        assert found <= MOST * limit, said
        assert found >= LEAST * limit, f"{said}; lower the limit"
