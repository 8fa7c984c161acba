"""``outrider bench quality`` and ``outrider quantize``: what quantised weights cost."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from outrider import LLM, SamplingParams
from outrider.audit.faults import Fault
from outrider.audit.reference import transformers_model
from outrider.audit.verify import Audit, AuditSize
from outrider.base.config import Recipe
from outrider.bench.quality import compare, cut, interval, quality
from outrider.checkpoints.export import export
from outrider.checkpoints.tokenizers import read_codec
from outrider.cli import app
from outrider.errors import ConfigError
from outrider.sampling.arrays import log_sum_exp
from tests.support.exactness import planted_pair

TEXT = " ".join(f"def f{i}(fox): return the_dog[{i * i % 97}]\n" for i in range(400))


def outrider(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def oracle(folder: Path, recipe: Recipe | None, windows: list[list[int]]) -> Any:
    """Log distributions as transformers computes them: fp32 [windows, tokens - 1, vocabulary]."""
    model = transformers_model(folder, recipe)
    with torch.inference_mode():
        return model(torch.tensor(windows)).logits[:, :-1].log_softmax(-1)


def test_figures_are_those_of_transformers(tiny_llama: Path) -> None:
    recipe = Recipe.parse("int4")
    found = quality(tiny_llama, [TEXT], ["int4"], 9, "float32")
    windows = cut([TEXT], read_codec(tiny_llama), 256, 9)
    exact = oracle(tiny_llama, None, windows)
    few = oracle(tiny_llama, recipe, windows)
    after = torch.tensor(windows)[:, 1:, None]
    losses = [-distribution.gather(-1, after).mean().item() for distribution in (exact, few)]
    (run,) = found["runs"]
    assert found["windows"] == 9
    assert found["perplexity"] == pytest.approx(math.exp(losses[0]), rel=1e-4)
    assert run["perplexity"] == pytest.approx(math.exp(losses[1]), rel=1e-4)
    assert run["perplexity_loss"] == pytest.approx(math.exp(losses[1] - losses[0]) - 1, rel=1e-2)
    low, high = run["perplexity_loss_interval"]
    assert low < run["perplexity_loss"] < high
    same = (exact.argmax(-1) == few.argmax(-1)).float().mean().item()
    assert run["agreement"] == pytest.approx(same, abs=0.002)
    apart = (exact.exp() * (exact - few)).sum(-1).mean().item()
    assert run["divergence"] == pytest.approx(apart, rel=1e-2)


def test_more_bits_cost_less_and_a_saved_checkpoint_the_same(
    tiny_llama: Path, tmp_path: Path
) -> None:
    export(tiny_llama, tmp_path / "few", Recipe.parse("int4"))
    names = ["int8", "int4", str(tmp_path / "few")]
    int8, int4, saved = quality(tiny_llama, [TEXT], names, 8, "float32")["runs"]
    assert int8["divergence"] < int4["divergence"] / 10
    assert int8["agreement"] > int4["agreement"]
    assert int8["bits_per_weight"] > int4["bits_per_weight"] > 4.5
    assert {**saved, "quantization": "", "bits_per_weight": 0} == {
        **int4, "quantization": "", "bits_per_weight": 0,
    }  # fmt: skip


def test_intervals_are_those_of_a_mean() -> None:
    mean, (low, high) = interval([1.0, 2.0, 3.0, 4.0])
    assert mean == 2.5
    wide = 1.959964 * (5 / 3) ** 0.5 / 2
    assert (low, high) == (pytest.approx(2.5 - wide), pytest.approx(2.5 + wide))


def test_equal_laws_agree_and_do_not_diverge() -> None:
    z = np.random.default_rng(0).standard_normal((7, 11), np.float32)
    distribution = z - log_sum_exp(z)
    _, divergence, agreement = compare(distribution, distribution, list(range(8)))
    assert divergence == 0.0
    assert agreement == 1.0


def test_windows_are_spread_and_whole(tiny_llama: Path) -> None:
    codec = read_codec(tiny_llama)
    everything = cut([TEXT, TEXT], codec, 64, 10**6)
    assert {len(window) for window in everything} == {64}
    some = cut([TEXT, TEXT], codec, 64, 10)
    assert len(some) == 10
    assert all(window in everything for window in some)
    with pytest.raises(ConfigError, match=r"fills 0 windows of 64 tokens, and 8 are the least"):
        cut(["short"], codec, 64, 10)


def test_the_audit_takes_quantised_targets(tiny_llama: Path, tmp_path: Path) -> None:
    """Also saved ones: transformers is given the same weights."""
    export(tiny_llama, tmp_path / "few", Recipe.parse("int4"))
    size = AuditSize("tiny", 1, 8, 12, 1, (), 1, 1)
    weights: dict[Path, dict[str, str]] = {
        tiny_llama: {"quantization": "int4"},
        tmp_path / "few": {},
    }
    for folder, given in weights.items():
        audit = Audit(folder, None, ["fox"], size, 0, Fault("none"), lambda _: None, **given)
        check = audit.against_transformers()
        assert check.tested == 12
        assert check.passed


def test_the_commands_go_together(tiny_llama: Path, tmp_path: Path) -> None:
    few, text, report = tmp_path / "few", tmp_path / "text.txt", tmp_path / "report.json"
    text.write_text(TEXT, encoding="utf-8")
    done = outrider("quantize", tiny_llama, few, "--quantization", "int4-g64")
    assert done.exit_code == 0, done.output
    assert "bits per weight" in done.stderr
    short = ("--seed", 3, "--max-tokens", 12, "--dtype", "float32", "--ignore-eos")
    at_load = outrider(
        "generate", "fox", "--model", tiny_llama, *short, "--quantization", "int4-g64"
    )
    saved = outrider("generate", "fox", "--model", few, *short, "--drafter", "none")
    assert saved.stdout == at_load.stdout != ""
    done = outrider(
        "bench", "quality", tiny_llama, "--quantization", f"int8,{few}", "--text", text,
        "--windows", 8, "--out", report,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert [run["quantization"] for run in json.loads(report.read_text())["runs"]] == [
        "int8", str(few),
    ]  # fmt: skip
    assert "agreement" in done.stdout


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("quantize", "{model}", "{new}", "--quantization", "int3"), "quantization is 'int3'"),
        (("quantize", "{new}", "{new}2", "--quantization", "int4"), "is not a folder"),
        (("bench", "quality", "{model}", "--quantization", "fp8"), "quantization is 'fp8'"),
        (("bench", "--dtype", "float32", "quality", "{model}"), "--dtype comes before quality"),
        (("generate", "a", "--model", "{model}", "--quantization", "q4"), "quantization is 'q4'"),
        (
            ("generate", "a", "--model", "{model}", "--drafter-quantization", "x"),
            "quantization is 'x'",
        ),
    ],
)
def test_bad_usage_is_one_sentence(
    args: tuple[str, ...], sentence: str, tiny_llama: Path, tmp_path: Path
) -> None:
    done = outrider(*(a.format(model=tiny_llama, new=tmp_path / "new") for a in args))
    assert done.exit_code in (1, 2)
    assert sentence in " ".join(done.output.split())
    assert "Traceback" not in done.output


def test_a_drafter_follows_nothing(tmp_path: Path) -> None:
    """Unless told to: a quantised target's drafter keeps its own weights."""
    planted_pair(tmp_path)
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=60, ignore_eos=True)

    def drafted(**options: Any) -> tuple[int, list[int]]:
        fixed = {"drafter": "model", "num_speculative_tokens": 4}
        llm = LLM(tmp_path, dtype="float32", quantization="int8", **fixed, **options)
        said = llm.generate([[5, 9, 5]], params)[0].outputs[0].token_ids
        return llm.engine.counts.accepted, said

    plain, coarse = drafted(), drafted(drafter_quantization="int4-channel")
    assert plain[1] == coarse[1]
    assert plain[0] != coarse[0]


def test_options_of_bench_before_its_sub_command_are_refused() -> None:
    done = CliRunner().invoke(app, ["bench", "--rounds", "9", "quality"])
    assert done.exit_code == 2
    assert "--rounds comes before quality" in done.stderr
