"""The engine's limits: every bad value is refused in a sentence that says what to do."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.base import config
from outrider.base.config import EngineConfig, free_memory, parse_memory
from outrider.errors import (
    ConfigError,
    MemoryBudgetError,
    ModelError,
    NumericalError,
    OutriderError,
    RequestError,
    shown,
)


@pytest.mark.parametrize(
    ("target", "drafter", "found"),
    [
        (None, "auto", "auto"), ("int8", "auto", "auto-few"), ("int4-g32", "auto", "auto-few"),
        ("int8", "none", "none"), ("int4", "int8-a8", "int8-a8"), (None, "int4", "int4"),
    ],
)  # fmt: skip
def test_a_drafters_recipe_follows_the_target(target: str | None, drafter: str, found: str) -> None:
    made = EngineConfig(quantization=target, drafter_quantization=drafter)
    assert made.drafter_recipe == found


def test_what_the_engine_chooses_is_no_option() -> None:
    with pytest.raises(ConfigError, match="quantization is 'auto-few'"):
        EngineConfig(drafter_quantization="auto-few")


def test_the_defaults_are_good() -> None:
    made = EngineConfig()
    assert made.num_speculative_tokens is None
    assert made.max_draft_length == 8
    assert made.dtype == "auto"
    assert hash(made) == hash(EngineConfig())
    with pytest.raises(AttributeError):
        made.seed = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "values", "remedy"),
    [
        ("dtype", ["int8", "", None, 3], "give one of auto, float32, bfloat16, float16"),
        ("max_num_seqs", [0, -1, 1.5, "2", None, True, 2**31], "give 1 to 65536"),
        ("max_num_batched_tokens", [0, -1, 1.5, "2", None, 2**31], "give 1 to 131072"),
        ("page_size", [0, -1, 1.5, "2", None, 2**31 - 1, 2**32 + 16], "give 1 to 16384"),
        (
            "num_speculative_tokens",
            [0, -1, 1.5, "2", 2**31],
            "give 1 to 1024, or turn drafting off with drafter=None",
        ),
        ("max_model_len", [0, 1, -5, "many", 2.5, True, 10**4000], "give 2 to 16777216, or None"),
        ("drafter_window", [0, -1, True, 1.5, "8", 2**31], "give 1 to 16777216 tokens, or None"),
        ("suffix_store", [-1, True, 1.5, "8", None, 2**31], "give 0 to 16777216"),
        ("scheduling_policy", ["lifo", None, 3], "give one of fcfs, priority"),
        ("seed", [-1, 2**64, 1.5, "x", True], r"give a whole number from 0 to 2\^64 - 1"),
        (
            "memory",
            [
                0,
                -5,
                0.0,
                1.5,
                -0.5,
                "much",
                "",
                "2 TB",
                "-1GiB",
                True,
                [],
                float("nan"),
                float("inf"),
                "9" * 4000,
                "9" * 4000 + "GiB",
                2**63,
                10**5000,
            ],
            "give bytes .* or a share of free memory above 0.0 and at most 1.0",
        ),
    ],
)
def test_bad_values_are_refused(name: str, values: list[Any], remedy: str) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=f"{name} is .*; {remedy}") as caught:
            EngineConfig(**{name: value})
        assert shown(value) in str(caught.value)
        assert len(str(caught.value)) < 250
        assert str(caught.value).endswith(".")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (1, 1),
        (3_000_000, 3_000_000),
        ("4096", 4096),
        ("2GiB", 2 * 2**30),
        ("2gb", 2 * 10**9),
        (" 1.5 MiB ", 3 * 2**19),
        ("1.5g", 1_500_000_000),
        ("10k", 10_000),
        ("3 Ki", 3072),
    ],
)
def test_memory_in_bytes(value: int | str | None, expected: int | None) -> None:
    assert parse_memory(value) == expected
    assert EngineConfig(memory=value).memory == value


def test_memory_as_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "free_memory", lambda: 1000)
    assert parse_memory(0.25) == 250
    assert parse_memory("0.25") == 250
    assert parse_memory(1.0) == 1000
    assert parse_memory("1.0") == 1000
    assert parse_memory("0.0015k") == 1


@pytest.mark.parametrize("value", ["0", "0.0", "0GiB"])
def test_no_memory_at_all_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="memory is"):
        parse_memory(value)


def test_free_memory_is_some() -> None:
    assert 2**20 < free_memory() < 2**50


def test_the_models_length() -> None:
    assert EngineConfig().model_length(100) == 100
    assert EngineConfig(max_model_len=50).model_length(100) == 50
    assert EngineConfig(max_model_len=100).model_length(100) == 100
    assert EngineConfig(num_speculative_tokens=99).model_length(100) == 100


def test_what_depends_on_the_context_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"max_model_len is 101, but the model's context is 100 tokens; give at most that\.",
    ):
        EngineConfig(max_model_len=101).model_length(100)
    with pytest.raises(
        ConfigError,
        match=r"num_speculative_tokens is 50, which does not fit into the context of 50 tokens; "
        r"give 1 to 49\.",
    ):
        EngineConfig(max_model_len=50, num_speculative_tokens=50).model_length(100)


def test_one_tree_of_errors() -> None:
    for error in (ConfigError, ModelError, MemoryBudgetError, RequestError):
        assert issubclass(error, OutriderError)
    assert issubclass(ConfigError, ValueError)
    assert issubclass(RequestError, ValueError)
    assert issubclass(NumericalError, RequestError)
    assert not issubclass(ModelError, ValueError)
