"""``outrider deploy render`` with the output of ``outrider advise --json`` as its spec."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cli import app
from outrider.planning import Situation, advise
from outrider.planning.rules import LEAVE

NAMES = ("--target", "org/target", "--drafter", "org/drafter")
MIXED = Situation(
    "llama-3.1-70b", "llama-3.2-1b", "h100", 4, concurrency={1: 0.5, 128: 0.5}
)  # fmt: skip


def render(folder: Path, advice: Any, *flags: str) -> Any:
    file = folder / "advice.json"
    file.write_text(advice if isinstance(advice, str) else json.dumps(advice), "utf-8")
    return CliRunner().invoke(app, ["deploy", "render", str(file), *flags])


@pytest.fixture(scope="module")
def mixed() -> dict[str, Any]:
    return advise(MIXED).to_json()


def test_vllm_takes_the_lengths_by_batch_size(mixed: dict[str, Any], tmp_path: Path) -> None:
    done = render(tmp_path, mixed, "--engine", "vllm", *NAMES, "--tensor-parallel-size", "4")
    assert done.exit_code == 0, done.output
    words = done.stdout.split("--speculative-config '")[1].split("'")[0]
    config = json.loads(words)
    assert config["num_speculative_tokens_per_batch_size"] == mixed["schedule"]
    assert config["model"] == "org/drafter"
    assert config["num_speculative_tokens"] == max(k for _, _, k in mixed["schedule"])


def test_our_server_chooses_up_to_the_longest(mixed: dict[str, Any], tmp_path: Path) -> None:
    done = render(tmp_path, mixed, "--engine", "outrider", *NAMES, "--format", "config")
    assert done.exit_code == 0, done.output
    config = tomllib.loads(done.stdout)
    assert config["drafter"] == "auto+org/drafter"
    assert config["num_speculative_tokens"] == max(k for _, _, k in mixed["schedule"])


def test_an_engine_with_one_length_takes_that_of_the_median(
    mixed: dict[str, Any], tmp_path: Path
) -> None:
    done = render(tmp_path, mixed, "--engine", "llamacpp", *NAMES)
    assert done.exit_code == 0, done.output
    assert f"--spec-draft-n-max {mixed['k']}" in done.stdout


def test_a_head_stays_a_head(tmp_path: Path) -> None:
    advice = advise(Situation("llama-3.1-8b", "eagle3", "h100")).to_json()
    done = render(tmp_path, advice, "--engine", "vllm", *NAMES)
    assert done.exit_code == 0, done.output
    assert '"method": "eagle3"' in done.stdout
    suffix = advise(Situation("llama-3.1-8b", "suffix", "h100")).to_json()
    done = render(tmp_path, suffix, "--engine", "vllm", "--target", "org/target")
    assert '"method": "suffix"' in done.stdout


def test_an_advice_against_speculation_renders_none(mixed: dict[str, Any], tmp_path: Path) -> None:
    done = render(tmp_path, {**mixed, "verdict": LEAVE}, "--engine", "vllm", *NAMES)
    assert done.exit_code == 0, done.output
    assert "--speculative-config" not in done.stdout
    assert "Speculation is off" in done.stdout


@pytest.mark.parametrize(
    ("changes", "flags", "said"),
    [
        ({}, NAMES[:2], "--drafter"),
        ({}, NAMES[2:], "--target"),
        ({"drafter": "medusa"}, NAMES, "medusa"),
        ({"k": "5"}, NAMES, "no advice"),
        ({"schedule": [[1, 2]]}, NAMES, "no advice"),
        ({"schedule": [[2, 3, 4]]}, NAMES, "begin at batch size 1"),
        ({"schedule": None}, NAMES, "no advice"),
        ({"target": 3}, NAMES, "no advice"),
    ],
)
def test_what_is_no_advice_gets_a_sentence(
    mixed: dict[str, Any],
    changes: dict[str, Any],
    flags: tuple[str, ...],
    said: str,
    tmp_path: Path,
) -> None:
    done = render(tmp_path, {**mixed, **changes}, "--engine", "vllm", *flags)
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.stderr.split())


def test_a_broken_file_gets_a_sentence(tmp_path: Path) -> None:
    for text in ("{", '{"a": 1}', "[1"):
        done = render(tmp_path, text, "--engine", "vllm", *NAMES)
        assert done.exit_code == 2, text
        assert "Traceback" not in done.stderr
