"""The known drafters of a model: which are named, and what is forecast of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.ops.planning.catalogue import find_device, find_shape
from outrider.ops.planning.suggest import (
    FREE,
    ON_DISK,
    PUBLISHED,
    KnownModel,
    Suggestion,
    entry_for,
    suggest,
    this_machine,
)

HERE = find_device("xeon-8480")


def known(name: str, bits: float = 4.5) -> KnownModel:
    return KnownModel(name, (name,), find_shape(name), bits)


def by_name(model: KnownModel, *near: KnownModel) -> dict[str, Suggestion]:
    return {each.drafter: each for each in suggest(model, near, HERE)}


def test_heads_siblings_and_free_methods_are_named() -> None:
    found = by_name(known("qwen3-8b"))
    assert {"Qwen/Qwen3-0.6B", "RedHatAI/Qwen3-8B-speculator.eagle3"} <= found.keys()
    assert {each.found for each in found.values()} == {PUBLISHED, FREE}
    head = found["AngelSlim/Qwen3-8B_eagle3"]
    assert head.command == "outrider bench qwen3-8b --drafter AngelSlim/Qwen3-8B_eagle3"
    assert head.speedup
    assert head.speedup.evidence == "modelled"
    assert head.acceptance
    assert head.acceptance.evidence == "assumed"
    block = found["RedHatAI/Qwen3-8B-speculator.dflash"]
    assert (block.served, block.speedup) == (True, None)
    assert block.command == "outrider bench qwen3-8b --drafter RedHatAI/Qwen3-8B-speculator.dflash"


def test_what_is_on_disk_comes_first_and_once() -> None:
    small = known("qwen2.5-coder-0.5b")._replace(path="/models/small one.gguf")
    first, *others = suggest(known("qwen2.5-coder-7b"), [small], HERE)
    assert (first.found, first.drafter) == (ON_DISK, small.path)
    assert first.command
    assert "'/models/small one.gguf'" in first.command
    assert "Qwen/Qwen2.5-Coder-0.5B-Instruct" not in {each.drafter for each in others}
    assert "Qwen/Qwen2.5-Coder-1.5B-Instruct" in {each.drafter for each in others}


def test_a_smaller_drafter_is_forecast_to_win_more() -> None:
    large = known("qwen2.5-72b")
    small, middle = (
        found.speedup.value
        for name in ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-14B-Instruct")
        if (found := by_name(large)[name]).speedup
    )
    assert small > middle


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("Qwen2.5 Coder 1.5B Instruct", "qwen2.5-coder-1.5b"),
        ("Qwen2.5 1.5B Instruct", "qwen2.5-1.5b"),
        ("qwen2-1.5b-instruct-q8_0.gguf", "qwen2-1.5b"),
    ],
)
def test_names_tell_models_of_the_same_sizes_apart(name: str, entry: str) -> None:
    shape = replace(find_shape("qwen2.5-1.5b"), tied=False)  # a file may have the head again
    assert entry_for(KnownModel("model.gguf", (name,), shape)) == entry
    assert entry_for(KnownModel("model.gguf", (name,), replace(shape, layers=27))) is None


def test_layerskip_has_no_forecast_for_small_models() -> None:
    assert by_name(known("smollm2-135m"))["layerskip"].speedup is None
    assert by_name(known("qwen3-8b"))["layerskip"].speedup


def test_this_machine_reads_and_computes() -> None:
    here, plain = this_machine("avx512vnni"), this_machine("portable")
    assert here.bandwidth > 0
    assert here.flops["int4"] > here.flops["fp32"] > 0
    assert plain.flops["int4"] == plain.flops["fp32"]
