"""``python -m benchmarks gpu``: its rehearsal on a CPU, and that faults of a device are seen."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks.__main__ import application
from benchmarks.gpu import command, decoding, draws
from benchmarks.gpu.checks import Check, End, Part, Processes, Result
from outrider.audit.ties import Difference
from outrider.base.types import Counts
from outrider.bench.record import run_all
from outrider.native.choice import VARIABLE
from outrider.plugins.common import draws as rule
from tests.support.exactness import planted_pair
from tests.support.forked import run_program

CHECKS = "tests.support.gpu_checks"


def wrong(parts: Iterator[Part]) -> list[str]:
    """Return the names of the parts where something is wrong."""
    return [part.name for part in parts if part.wrong]


def test_noise_of_the_device_is_the_cpus() -> None:
    parts = list(draws.noise("cpu"))
    assert wrong(iter(parts)) == []
    assert sum(part.figures["compared"] for part in parts) > 100_000


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("gumbel_of_words", ["corner words", "random words"]),
        ("words_at", [f"Philox, {size} ids" for size in (1003,)]),
        ("gumbel_of_tensors", [f"noise, {size} ids" for size in (1, 5, 1003)]),
    ],
)
def test_one_flipped_bit_of_noise_is_seen(name: str, seen: list[str]) -> None:
    right = getattr(draws, name)

    def fault(*args: Any) -> Any:
        numbers = right(*args)
        if isinstance(numbers, torch.Tensor) and (name != "words_at" or numbers.shape[1] > 1000):
            row = numbers if numbers.dim() == 1 else numbers[-1]
            place = -1 if name != "words_at" else 1002
            row.view(torch.int32 if row.dtype == torch.float32 else torch.int64)[place] ^= 1
        return numbers

    with patch.object(draws, name, fault):
        assert wrong(draws.noise("cpu")) == seen


def test_another_shape_or_nothing_is_not_equal() -> None:
    numbers = np.zeros(3, np.float32)
    assert draws.compared("a", numbers, numbers).wrong is None
    assert draws.compared("a", numbers[:2], numbers).wrong
    assert draws.compared("a", numbers.astype(np.float64), numbers).wrong
    assert draws.compared("a", numbers[:0], numbers[:0]).wrong
    signs = np.array([1, 1, -1], np.float32)
    assert "first number 2" in (draws.compared("a", numbers * signs, numbers).wrong or "")


def test_a_wrong_kernel_is_seen() -> None:
    def fault(*asked: Any) -> torch.Tensor:
        return rule.draw(*asked) ^ (asked[0].shape[1] > 1000)

    with patch.object(draws, "triton_draw", lambda device: rule.draw):
        parts = list(draws.kernel("cpu"))
    assert wrong(iter(parts)) == []
    assert all(part.figures["kernel_us"] > 0 < part.figures["torch_us"] for part in parts)
    with patch.object(draws, "triton_draw", lambda device: fault):
        assert wrong(draws.kernel("cpu")) == ["2 rows of 1027 ids"]


def test_a_wrong_rule_is_seen() -> None:
    assert wrong(draws.rule("cpu")) == []
    right, calls = rule.draw, list[int]()

    def fault(*asked: Any) -> torch.Tensor:
        calls.append(len(asked[0]))
        drawn = right(*asked)
        return drawn if calls.count(len(asked[0])) == 1 else drawn + 1  # the first is the CPU's

    with patch.object(rule, "draw", fault):
        assert len(wrong(draws.rule("cpu"))) == 2


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "off")


@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize("heat", [0.0, 0.8])
def test_an_unequal_token_is_seen(tmp_path: Path, heat: float) -> None:
    pair = planted_pair(tmp_path / "pair", "qwen3")

    def fault(llm: Any, prompts: Any, params: Any, size: int = 1) -> Any:
        done = run_all(llm, prompts, params, size)
        if llm.drafter.name == "suffix" and params[0].temperature == heat:
            done.outputs[2][-1] ^= 1
        return done

    with (
        patch.object(decoding, "DRAFTERS", ("suffix", "model")),
        patch.object(decoding, "run_all", fault),
    ):
        part = decoding._equal("a pair", pair, "float32", "cpu")
    assert "1 of 16 outputs differ, the first at position" in (part.wrong or "")


@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_drafters_leave_outputs_as_they_are(tmp_path: Path, dtype: str) -> None:
    pair = planted_pair(tmp_path / "pair", "llama")
    part = decoding._equal("a pair", pair, dtype, "cpu")
    assert part.wrong is None
    assert part.figures["outputs"] == 24
    accepted, _, made = part.figures["model"].split()
    assert 24 < int(accepted) < int(made)


def drafted(accepted: int) -> Counts:
    return Counts(drafts=1, accepted=accepted)


def test_ties_are_counted_and_other_differences_wrong() -> None:
    tie = Difference(7, (1, 2), 1e-6, 2e-6, True)
    part = decoding.judged("a", 8, [tie, tie], {"ngram": drafted(1)})
    assert part.wrong is None
    assert part.figures["ties"] == 2
    assert part.figures["widest_tie"] < part.figures["rounding"]
    other = Difference(7, (1, 2), 1e-3, 2e-6, False)
    assert "1 of 8" in (decoding.judged("a", 8, [tie, other], {"ngram": drafted(1)}).wrong or "")


def test_equality_without_drafts_shows_nothing() -> None:
    assert decoding.judged("a", 8, [], {"ngram": drafted(0), "model": drafted(2)}).wrong is None
    assert decoding.judged("a", 8, [], {"ngram": drafted(0)}).wrong == "no draft was accepted"


@pytest.mark.usefixtures("by_torch")
def test_decoding_has_a_share_of_the_bandwidth() -> None:
    copy, decoded = decoding.decode("cpu")
    assert copy.figures["gb_per_s"] > 0
    assert 0 < decoded.figures["share_of_copy"] < 1
    # All matrices of the shape, and the table, which is the head as well.
    assert decoded.figures["weights_mb"] == 1
    assert decoded.wrong is None
    with patch.object(decoding, "bandwidth", lambda device: 1.0):
        assert wrong(decoding.decode("cpu")) == ["1m"]


def result(name: str, seconds: float = 60.0) -> Result:
    return Processes([]).run(Check(name, f"{CHECKS}:{name}", 1), "cpu", seconds)


def test_a_check_has_a_process_of_its_own() -> None:
    done = result("passes")
    assert done.end == End("passed")
    assert [part.figures for part in done.parts] == [{"number": 1}, {"number": 2}]
    assert result("finds").end == End("failed", "b: 3 of 4 differ")
    assert result("skips").end == End("skipped", "Triton is not installed")
    broken = result("raises")
    assert broken.end == End("failed", "RuntimeError: an illegal memory access")
    assert len(broken.parts) == 1
    assert result("dies").end == End("failed", "its process ended with code 9")
    assert "no attribute 'none'" in result("none").end.reason


def test_a_check_ends_in_time() -> None:
    hung = result("hangs", 3.0)
    assert hung.end == End("failed", "did not end within 3 s")
    assert hung.seconds < 10
    long = result("goes_on", 4.0)
    assert long.end.verdict == "passed"
    assert long.end.reason.startswith("stopped after part ")
    assert long.seconds < 4


class Noted:
    """Notes the seconds of checks, and takes a part of them."""

    def __init__(self, takes: float) -> None:
        self.takes, self.now, self.given = takes, 0.0, list[float]()

    def run(self, check: Check, device: str, seconds: float) -> Result:
        self.given.append(seconds)
        self.now += self.takes * seconds
        return Result(check.name, End("passed"), seconds)


@pytest.mark.parametrize("takes", [1.0, 0.1])
def test_all_checks_together_end_in_time(takes: float) -> None:
    noted = Noted(takes)
    with patch.object(command, "monotonic", lambda: noted.now):
        done = list(command.run_all(command.CHECKS, "cpu", 225.0, noted))  # type: ignore[arg-type]
    assert [each.name for each in done] == [check.name for check in command.CHECKS]
    assert noted.now <= 225.001
    assert noted.given[-1] == pytest.approx(225 - sum(takes * each for each in noted.given[:-1]))


def run(monkeypatch: pytest.MonkeyPatch, names: list[str], *words: str) -> tuple[int, str]:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    checks = [Check(name, f"{CHECKS}:{name}", 1) for name in names]
    monkeypatch.setattr(command, "CHECKS", checks)
    monkeypatch.setattr(command, "IMPORTED", ())
    monkeypatch.setattr(command, "MACHINE", Check("machine", f"{CHECKS}:facts", 1))
    done = CliRunner().invoke(application("gpu"), ["gpu", *words])
    return done.exit_code, done.output


def test_one_failed_check_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "gpu.json"
    code, said = run(monkeypatch, ["raises", "passes"], "--device", "cpu", "--out", str(out))
    assert code == 1
    assert "raises: failed in 0 s (RuntimeError: an illegal memory access)" in said
    assert "passes: passed in" in said
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["rehearsal"] is True
    assert report["command"] == "python -m benchmarks gpu --device cpu --minutes 4"
    assert [each["verdict"] for each in report["checks"]] == ["failed", "passed"]
    assert {"gpu", "driver", "torch", "cuda", "triton", "date"} <= report["machine"].keys()


def test_what_is_skipped_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = run(monkeypatch, ["skips", "passes"], "--device", "cpu", "--json")
    assert code == 0
    assert json.loads(said)["checks"][0]["reason"] == "Triton is not installed"


def test_torch_is_asked_for_its_gpus() -> None:
    (part,) = command.torch_facts("cuda")
    assert part.figures["torch"] == torch.__version__
    assert len(part.figures["cuda"]) == torch.cuda.device_count()


def test_without_a_gpu_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = run(monkeypatch, ["passes"])
    assert code == 2
    assert said.startswith("error: torch 2.0 finds no CUDA device here; ")
    assert said.count("\n") == 1


@pytest.mark.slow
def test_the_rehearsal(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    words = ["-m", "benchmarks", "gpu", "--device", "cpu", "--out", str(out)]
    done = run_program([sys.executable, *words], timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text(encoding="utf-8"))
    verdicts = {each["name"]: each["verdict"] for each in report["checks"]}
    assert verdicts.pop("kernel") in ("passed", "skipped")  # where Triton is not installed
    assert set(verdicts.values()) == {"passed"}
