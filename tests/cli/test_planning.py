"""``outrider ops advise`` and ``outrider ops roi`` on the command line."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from outrider.bench import steps
from tests.support.commands import outrider


def test_advise_prints_writes_and_draws(tmp_path: Path) -> None:
    content, plot = tmp_path / "advice.json", tmp_path / "plot.svg"
    done = outrider(
        "ops", "advise", "llama-3.1-70b", "--drafter", "llama-3.2-1b", "--hardware", "h100",
        "--tensor-parallel", 4, "--concurrency", "1=0.5,16=0.5", "--tasks", "code=0.7,qa=0.3",
        "--price", 4, "--out", content, "--plot", plot,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("# llama-3.1-70b with llama-3.2-1b: use")
    found = json.loads(content.read_text(encoding="utf-8"))
    assert [each["batch"] for each in found["at"]] == [1, 16]
    assert "code 70%, qa 30%" in found["acceptance_source"]
    assert plot.read_text(encoding="utf-8").startswith("<svg")
    only = outrider("ops", "advise", "llama-3.1-8b", "--hardware", "h100", "--json")
    assert json.loads(only.stdout)["verdict"] == "use"


def test_advice_goes_into_roi(tmp_path: Path) -> None:
    advice, page, text = (tmp_path / name for name in ("a.json", "r.html", "r.md"))
    assert (
        outrider("ops", "advise", "llama-3.1-8b", "--hardware", "h100", "--out", advice).exit_code
        == 0
    )
    done = outrider(
        "ops", "roi", "--devices", 4, "--price", 4, "--advice", advice, "--html", page,
        "--markdown", text,
        "--start", "2026-12-01",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert text.read_text(encoding="utf-8") == done.stdout
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    found = json.loads(advice.read_text(encoding="utf-8"))["speedup"]["p50"]["value"]
    assert f"{found:.2f}x" in done.stdout


def test_acceptance_and_costs_are_measured_on_a_sample(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = tmp_path / "prompts.txt"
    sample.write_text("the quick fox\n\nthe lazy dog\n", encoding="utf-8")
    done = outrider(
        "ops", "advise", tiny_llama, "--drafter", tiny_llama, "--hardware", "h100",
        "--prompts", sample,
        "--num-speculative-tokens", 3, "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["acceptance"]["p50"]["evidence"] == "measured"
    assert found["acceptance"]["p50"]["value"] > 0.85  # the target as a drafter, of 8 bits
    assert "on 2 sample prompts" in found["acceptance_source"]
    few = partial(steps.profile, sizes=(1, 2), rounds=1, tokens=32)
    monkeypatch.setattr(steps, "profile", few)
    here = outrider(
        "ops", "advise", tiny_llama, "--drafter", tiny_llama, "--prompts", sample,
        "--num-speculative-tokens", 1,
        "--input-tokens", 8, "--output-tokens", 8, "--json",
    )  # fmt: skip
    assert here.exit_code == 0, here.output
    found = json.loads(here.stdout)
    assert found["decided_by"] == "the model"
    assert not any("costs are modelled" in note for note in found["notes"])
    sample.write_text("\n", encoding="utf-8")
    empty = outrider("ops", "advise", tiny_llama, "--prompts", sample)
    assert empty.exit_code == 2
    assert "has no prompts" in empty.output


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (("ops", "advise", "gpt-9"), "no model 'gpt-9'"),
        (("ops", "advise", "llama-3.1-8b", "--hardware", "abacus"), "no device 'abacus'"),
        (("ops", "advise", "llama-3.1-8b", "--acceptance", "1.4@5"), "from 0 to 1"),
        (("ops", "advise", "llama-3.1-8b", "--acceptance", "0.7@5"), "belongs to one drafter"),
        (("ops", "advise", "llama-3.1-8b", "--drafter", "mtp"), "name does not tell its costs"),
        (("ops", "advise", "llama-3.1-8b", "--price", "-1"), "price is -1"),
        (("ops", "advise", "llama-3.1-8b", "--concurrency", "many"), "--concurrency is 'many'"),
        (("ops", "advise", "llama-3.1-8b", "--tasks", "code=x"), "--tasks is 'code=x'"),
        (("ops", "advise", "llama-3.1-8b", "--plot", "x.svg"), "--plot needs --hardware"),
        (("ops", "roi", "--devices", "4", "--price", "4"), "one of --speedup and --advice"),
        (("ops", "roi", "--devices", "4", "--price", "4", "--speedup", "a"), "--speedup is 'a'"),
        (("ops", "roi", "--devices", "4", "--price", "-4", "--speedup", "2"), "price is -4"),
        (
            ("ops", "roi", "--devices", "4", "--price", "4", "--speedup", "2", "--start", "x"),
            "--start",
        ),
        (("ops", "roi", "--devices", "4", "--price", "4", "--advice", "no.json"), "cannot be read"),
    ],
)  # fmt: skip
def test_bad_input_is_told_in_a_sentence(
    args: tuple[str, ...], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = outrider(*args)
    assert done.exit_code == 2
    assert problem in " ".join(done.output.split())
    assert "Traceback" not in done.output


def test_a_hub_name_offline_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    done = outrider("ops", "advise", "nobody/knows-this-model")
    assert done.exit_code == 2
    assert "neither in a folder nor in the catalogue" in done.output
