"""The bundled heads draft for the bundled target, and change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider import LLM, SamplingParams, pocket
from outrider.base.config import BUNDLED
from outrider.checkpoints.heads import read_head
from outrider.drafters.registry import find_drafter
from outrider.native import choice as native

KINDS = ("eagle3", "medusa")
LEAST = {"eagle3": 2.5, "medusa": 1.3}
"""Tokens a step at temperature 0 on a few prompts; the cards say what they reach on all."""
MOST_BYTES = 10_000_000


@pytest.mark.parametrize("kind", KINDS)
def test_a_bundled_head_says_what_it_is(kind: str) -> None:
    head = read_head(BUNDLED / kind)
    assert head is not None
    assert head.kind == kind
    assert head.verifier == "pocket"
    assert "code" in {each.use for each in head.extras.measured}
    assert "Apache-2.0" in (BUNDLED / kind / "README.md").read_text(encoding="utf-8")
    assert find_drafter(kind, Path(BUNDLED)).folder == BUNDLED / kind


def test_they_are_small() -> None:
    files = [file for kind in KINDS for file in (BUNDLED / kind).iterdir()]
    assert sum(file.stat().st_size for file in files) < MOST_BYTES


@pytest.mark.skipif(native.library() is None, reason="the native step is off")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heat", [0.0, 0.8])
def test_they_change_nothing_and_are_accepted(kind: str, heat: float) -> None:
    params = SamplingParams(temperature=heat, seed=7, max_tokens=48, ignore_eos=True)
    prompts = pocket.prompts()[:3]
    plain = LLM("pocket", drafter=None).generate(prompts, params)
    drafted = LLM("pocket", drafter=kind, num_speculative_tokens=3).generate(prompts, params)
    for one, other in zip(plain, drafted, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
    if not heat:
        lengths = [each.metrics.acceptance_length for each in drafted]
        assert sum(lengths) / len(lengths) > LEAST[kind]
