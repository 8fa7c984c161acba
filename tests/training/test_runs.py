"""Whole trainings of tiny heads: from prompts to a drafter that serves."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.base.alone import LOCK, alone
from outrider.base.config import LONGEST_DRAFT
from outrider.checkpoints.heads import read_head
from outrider.errors import ConfigError, TrainingError
from outrider.native import choice as native
from outrider.training import parity, run_heads, served
from outrider.training.adapt import AdaptOptions, adapt
from outrider.training.curves import CURVES, PICTURE
from outrider.training.data import DataOptions, make_data
from outrider.training.loop import STATE
from outrider.training.measure import LENGTHS
from outrider.training.plan import Plan
from outrider.training.run_distill import DistillOptions, train_drafter
from outrider.training.run_heads import WORK, HeadOptions, train_head
from outrider.training.samples import DataFolder
from outrider.training.states import usual_layers
from tests.support.commands import outrider
from tests.support.taught import measure_little

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native step is off")
PLAN = Plan(steps=12, batch=64, judge_every=6)
OPTIONS = HeadOptions(depth=3, layers=(0, 1, 1))


def write_prompts(file: Path, count: int) -> Path:
    lines = [json.dumps({"prompt": f"{n} the lazy dog jumps {n % 7}"}) for n in range(count)]
    file.write_text("\n".join(lines))
    return file


@pytest.fixture(scope="module")
def data(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> DataFolder:
    folder = tmp_path_factory.mktemp("data")
    options = DataOptions(
        prompts=write_prompts(folder / "prompts.jsonl", 60), context=64, max_tokens=24
    )
    return make_data(str(tiny_llama), folder / "data", options, lambda *_, **__: None, print)


def said(target: Path, drafter: Path | None, heat: float) -> list[Any]:
    llm = LLM(target, drafter, num_speculative_tokens=3, dtype="float32")
    params = SamplingParams(temperature=heat, seed=1, max_tokens=20, ignore_eos=True)
    return [o.outputs[0].token_ids for o in llm.generate(["the quick", "fox"], params)]


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "medusa"])
def test_a_trained_head_serves(
    kind: str, data: DataFolder, tiny_llama: Path, tmp_path: Path
) -> None:
    out = tmp_path / "head"
    judged, found = train_head(kind, tiny_llama, data, None, out, PLAN, OPTIONS)
    assert [each.temperature for each in found] == [0.0, 1.0]
    assert all(each.acceptance_length >= 1 for each in found)
    assert 1 <= judged.acceptance_length <= 4
    assert (out / run_heads.WORK / CURVES).read_text().count("\n") == 3
    assert (out / run_heads.WORK / PICTURE).read_bytes()[1:4] == b"PNG"
    for heat in (0.0, 1.0):
        assert said(tiny_llama, out, heat) == said(tiny_llama, None, heat)
    # It goes on with what was trained, and ends at once.
    assert train_head(kind, tiny_llama, data, None, out, PLAN, OPTIONS).judged == judged
    # A head that was trained is one to begin with.
    again = train_head(kind, tiny_llama, data, out, tmp_path / "more", PLAN, OPTIONS)
    assert again.judged.acceptance_length >= 1


def test_new_heads_take_different_layers() -> None:
    """As ``speculators`` wants it; -1 is the embedding."""
    for count in range(2, 40):
        layers = usual_layers(count)
        assert len({*layers}) == 3
        assert -1 <= min(layers) <= max(layers) < count


def test_training_makes_it_better(data: DataFolder, tiny_llama: Path, tmp_path: Path) -> None:
    few, many = (
        train_head(
            "eagle3", tiny_llama, data, None, tmp_path / str(steps),
            Plan(steps=steps, batch=256, rate=1e-2, judge_every=100), OPTIONS,
        ).judged
        for steps in (1, 30)
    )  # fmt: skip
    assert many.coupled_length > few.coupled_length + 0.02


def test_what_was_not_trained_yet_is_begun_anew(
    data: DataFolder, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that ended before its plan was written leaves nothing to another one."""

    def killed(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_heads, "Training", killed)
    drawn = []
    for seed in (0, 1, 0):
        plan = replace(PLAN, seed=seed)
        with pytest.raises(KeyboardInterrupt):
            train_head("eagle3", tiny_llama, data, None, tmp_path, plan, OPTIONS)
        drawn.append((tmp_path / WORK / run_heads.BEGUN / "model.safetensors").read_bytes())
    assert drawn[0] == drawn[2] != drawn[1]


def test_drafts_may_be_longer_than_is_usual(
    data: DataFolder, tiny_llama: Path, tmp_path: Path
) -> None:
    options = replace(OPTIONS, depth=LONGEST_DRAFT + 1)
    plan = Plan(steps=1, batch=64)
    trained = train_head("medusa", tiny_llama, data, None, tmp_path, plan, options)
    assert len(trained.served) == 2


def test_a_head_that_serves_otherwise_is_refused(
    data: DataFolder, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = parity.served_logits
    monkeypatch.setattr(parity, "served_logits", lambda *args: -serve(*args))
    with pytest.raises(TrainingError, match="the same as in training in"):
        train_head("eagle3", tiny_llama, data, None, tmp_path / "head", PLAN, OPTIONS)


def test_what_does_not_fit_is_refused(
    data: DataFolder, tiny_llama: Path, tiny_drafter: Path, make_checkpoint: Any, tmp_path: Path
) -> None:
    other = make_checkpoint(tmp_path / "other", "llama")
    torch_runs = make_checkpoint(tmp_path / "torch", "gpt2", tokenizer=True, n_embd=32, n_head=4)
    with pytest.raises(ConfigError, match="not run by the native step"):
        train_head("eagle3", torch_runs, data, None, tmp_path / "d", PLAN, OPTIONS)
    with pytest.raises(ConfigError, match="of a target with 320 ids"):
        train_head("eagle3", other, data, None, tmp_path / "a", PLAN, OPTIONS)
    with pytest.raises(ConfigError, match="no head of kind eagle3"):
        train_head("eagle3", tiny_llama, data, tiny_drafter, tmp_path / "b", PLAN, OPTIONS)
    same = copytree(tiny_llama, tmp_path / "same")
    words = (same / "tokenizer.json").read_text().replace("<|user|>", "<|person|>")
    (same / "tokenizer.json").write_text(words)
    with pytest.raises(ConfigError, match=f"is of {tiny_llama}, which has another tokenizer"):
        train_head("eagle3", same, data, None, tmp_path / "c", PLAN, OPTIONS)
    # What --out names by mistake stays as it is.
    for out, what in ((same, "config.json"), (data.folder, "data.json")):
        before = sorted(out.iterdir())
        with pytest.raises(ConfigError, match=f"{what} of something else"):
            train_head("eagle3", tiny_llama, data, None, out, PLAN, OPTIONS)
        with pytest.raises(ConfigError, match=f"{what} of something else"):
            train_drafter(tiny_llama, data, None, out, PLAN, DistillOptions())
        assert sorted(out.iterdir()) == before
    for options in ({"loss": "none"}, {"depth": 0}, {"fading": 0.0}, {"share": 2.0}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            HeadOptions(**options)


@pytest.mark.parametrize("command", ["data", "eagle3", "distill"])
def test_a_folder_is_written_by_one_process(
    command: str, data: DataFolder, tiny_llama: Path, tmp_path: Path
) -> None:
    source = "--prompts" if command == "data" else "--data"
    words = "train", command, tiny_llama, source, data.folder, "--out", tmp_path / "out"
    held = tmp_path / "out" if command == "data" else tmp_path / "out" / WORK
    with alone(held):
        done = outrider(*words)
        assert [each.name for each in held.iterdir()] == [LOCK]
    assert done.exit_code == 2
    assert f"another process writes to {held}" in done.stderr
    assert not held.parent.exists() or command == "data"
    (tmp_path / "out").write_text("")
    done = outrider(*words)
    assert done.exit_code == 2
    assert f"{tmp_path / 'out'} is no folder; give a new one." in done.stderr


def test_calls_hold_their_folder_too(
    data: DataFolder, tiny_llama: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    given = AdaptOptions(data=DataOptions(prompts=tmp_path / "p.jsonl"), plan=PLAN)
    names = str(tiny_llama), str(tiny_drafter)
    calls: dict[Path, Callable[[], Any]] = {
        tmp_path / "a" / WORK: lambda: train_head(
            "eagle3", tiny_llama, data, None, tmp_path / "a", PLAN, OPTIONS
        ),
        tmp_path / "b" / WORK: lambda: train_drafter(
            tiny_llama, data, None, tmp_path / "b", PLAN, DistillOptions()
        ),
        tmp_path / "c": lambda: adapt(*names, tmp_path / "c", given, print),
    }
    for held, call in calls.items():
        with alone(held), pytest.raises(ConfigError, match=f"another process writes to {held}"):
            call()
        assert not held.exists()


def test_the_commands(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_little(monkeypatch)
    prompts = write_prompts(tmp_path / "p.jsonl", 160)
    done = outrider(
        "train", "data", tiny_llama, "--prompts", prompts, "--out", tmp_path / "data",
        "--context", 64, "--max-tokens", 24, "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["samples"] == 160
    head = tmp_path / "head"
    words = ("--data", tmp_path / "data", "--out", head, "--steps", 8, "--batch", 64, "--depth", 3)
    done = outrider("train", "eagle3", tiny_llama, *words, "--minutes", 1)
    assert done.exit_code == 2
    assert "--steps or --minutes" in done.output
    done = outrider("train", "eagle3", tiny_llama, *words)
    assert done.exit_code == 0, done.output
    assert said(tiny_llama, head, 0.0) == said(tiny_llama, None, 0.0)
    adapted = tmp_path / "adapted"
    words = ("--prompts", prompts, "--out", adapted, "--epochs", 1, "--max-tokens", 8)
    done = outrider("train", "adapt", "--target", tiny_llama, "--drafter", head, *words, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert [point["share"] for point in report["points"]][:3] == [0.0, 0.1, 0.3]
    assert report["verdict"]["why"]
    assert json.loads((adapted / "report.json").read_text()) == report
    page = (adapted / "report.html").read_text()
    assert "<svg" in page
    assert page.count("<td>yes</td>") == 1  # the training that the result is of
    assert said(tiny_llama, adapted / "drafter", 1.0) == said(tiny_llama, None, 1.0)
    measured = read_head(adapted / "drafter").extras.measured
    assert {each.use for each in measured} == {"held out", "domain", "general"}


def test_a_head_is_measured_and_exported(
    data: DataFolder, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card and the config say what was measured; what is exported drafts the same."""
    monkeypatch.setattr(served, "ROUNDS", 1)
    head, prompts = tmp_path / "head", write_prompts(tmp_path / "p.jsonl", 4)
    options = replace(OPTIONS, layout="safeailab")
    train_head("eagle3", tiny_llama, data, None, head, PLAN, options)
    card = (head / "README.md").read_text()
    assert "Licence: not chosen yet" in card
    assert data.about.prompts in card
    words = ("--target", tiny_llama, "--prompts", f"chat={prompts}", "--max-tokens", 12)
    done = outrider("train", "measure", head, *words, "--json")
    assert done.exit_code == 0, done.output
    extras = read_head(head).extras
    assert json.loads(done.stdout) == extras.to_json()
    assert extras.lengths["chat"] in LENGTHS
    assert read_head(head).proposed == extras.lengths["chat"]
    assert [(m.use, m.temperature) for m in extras.measured] == [
        ("held out", 0.0), ("held out", 1.0), ("chat", 0.0), ("chat", 1.0),
    ]  # fmt: skip
    assert all(m.by_position and m.digest for m in extras.measured)
    assert f"| chat | 0 | {extras.measured[2].acceptance_length:.2f} |" in (
        (head / "README.md").read_text()
    )
    first = tmp_path / "speculators"
    done = outrider("train", "export", head, first, "--target", tiny_llama)
    assert done.exit_code == 0, done.output
    done = outrider("train", "export", first, tmp_path / "back", "--layout", "safeailab")
    assert done.exit_code == 0, done.output
    for folder in (first, tmp_path / "back"):
        assert read_head(folder).extras == extras
        assert said(tiny_llama, folder, 1.0) == said(tiny_llama, head, 1.0)
    # What is trained further is measured anew, and a card with a licence stays as it is.
    card = (head / "README.md").read_text().replace("Licence: not chosen yet.", "Licence: MIT.")
    more = tmp_path / "more"
    more.mkdir()
    (more / "README.md").write_text(card)
    train_head("eagle3", tiny_llama, data, head, more, PLAN, OPTIONS)
    assert {each.use for each in read_head(more).extras.measured} == {"held out"}
    assert not read_head(more).extras.lengths
    assert (more / "README.md").read_text().partition("## Measured")[0] == (
        card.partition("## Measured")[0]
    )
    for bad in ("driving=p.jsonl", "chat"):
        assert outrider("train", "measure", head, "--prompts", bad).exit_code == 2


@pytest.mark.slow
def test_two_processes_are_one_that_adds_up_two_batches(
    data: DataFolder, tiny_llama: Path, tmp_path: Path
) -> None:
    words = [
        "-m", "outrider", "train", "eagle3", tiny_llama, "--data", data.folder, "--batch", 64,
        "--steps", 3, "--depth", 2,
    ]  # fmt: skip
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2]
    two = [*run, *words, "--out", tmp_path / "two"]
    one = [sys.executable, *words, "--out", tmp_path / "one", "--accumulate", 2]
    for command in (two, one):
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("training takes about") == 1
    first, other = (
        torch.load(tmp_path / name / WORK / STATE, weights_only=True)["module"]
        for name in ("two", "one")
    )
    for name, value in first.items():
        torch.testing.assert_close(value, other[name], rtol=1e-4, atol=1e-5)
    assert (tmp_path / "two" / WORK / CURVES).read_text().count("\n") == 2


def test_a_head_for_a_model_of_the_hub_names_it(
    data: DataFolder, tiny_llama: Path, tmp_path: Path
) -> None:
    """Not the folder of the cache, which means nothing on another machine."""
    target = tmp_path / "models--some--tiny-llama" / "snapshots" / "0a1b"
    shutil.copytree(tiny_llama, target)
    out = tmp_path / "head"
    train_head("medusa", target, data, None, out, Plan(steps=1, batch=16), OPTIONS)
    assert read_head(out).verifier == "some/tiny-llama"
    card = (out / "README.md").read_text()
    assert "base_model: some/tiny-llama\n" in card
    assert "# 3 Medusa heads for some/tiny-llama\n" in card
