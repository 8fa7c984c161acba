"""A lone target searches in spare time for what it can leave out, and ``auto`` has it then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams, Speculation
from outrider.engine import spare_skips
from outrider.engine.engine import Engine
from outrider.engine.spare_skips import read_skips
from outrider.native import choice as native
from tests.support.skipping import LAYERS, planted_target, useless

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native step is off")
SEED = 5
PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted_target(tmp_path_factory.mktemp("skips") / "target", SEED)


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of the search's result, in a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "kept.json"
    monkeypatch.setattr("outrider.engine.build.skips_file", lambda key: file)
    return file


def opened(target: Path, **options: Any) -> LLM:
    return LLM(target, memory=2**25, **options)


def idle(engine: Engine) -> None:
    assert engine.later is not None
    for _ in engine.later:
        pass


def tokens(llm: LLM, drafter: str | None = None) -> list[list[int]]:
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=24, ignore_eos=True)
    speculation = Speculation(drafter=drafter, num_speculative_tokens=3) if drafter else None
    outputs = llm.generate(PROMPTS, params, speculation=speculation)
    return [output.outputs[0].token_ids for output in outputs]


def test_what_pays_is_kept_and_drafts_from_the_next_start_on(target: Path, kept: Path) -> None:
    first = opened(target)
    assert "layerskip" not in first.engine.drafting.drafters
    plain = tokens(first)
    idle(first.engine)
    runs = read_skips(kept)
    assert runs
    left_out = {*range(2 * LAYERS)} - {*runs}
    assert len(left_out & useless(SEED)) > len(left_out) / 2
    second = opened(target)
    assert "layerskip" in second.engine.menu.portfolio
    assert tokens(second) == plain
    assert tokens(second, "layerskip") == plain
    assert second.engine.counts.accepted > 0


def test_what_does_not_pay_is_not_searched_for_again(
    target: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.write_text('{"sublayers": []}')
    monkeypatch.setattr(spare_skips, "searched", None)
    llm = opened(target)
    idle(llm.engine)
    assert "layerskip" not in llm.engine.drafting.drafters


@pytest.mark.parametrize("drafter", ["none", "ngram", "auto+layerskip"])
def test_only_lone_targets_under_auto_search(target: Path, kept: Path, drafter: str) -> None:
    llm = opened(target, drafter=drafter)
    if llm.engine.later is not None:
        idle(llm.engine)
    assert not kept.exists()


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"sublayers": 3}', '{"sublayers": [2, 1]}', '{"sublayers": [true]}',
             '{"sublayers": [0, 9999]}', '{"sublayers": ' + "[" * 100_000],
)  # fmt: skip
def test_a_damaged_file_is_no_set(target: Path, kept: Path, text: str) -> None:
    kept.write_text(text)
    assert "layerskip" not in opened(target).engine.drafting.drafters


def test_the_file_holds_what_is_read(kept: Path) -> None:
    kept.write_text(json.dumps({"sublayers": [0, 1, 5]}))
    assert read_skips(kept) == (0, 1, 5)
