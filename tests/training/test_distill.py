"""Small drafters: what they begin as, how they learn, and that they serve as they were trained."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider import LLM, SamplingParams
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.checkpoints.extras import extras_of
from outrider.checkpoints.files import Files
from outrider.engine.build import load_target
from outrider.errors import ConfigError, TrainingError
from outrider.models.native import NativeTransformer
from outrider.native import choice as native
from outrider.training import parity
from outrider.training.distill import DistillTask, chained
from outrider.training.drafter_files import made_of, read_drafter
from outrider.training.loop import Learned
from outrider.training.lora import add_low_rank, merged_weights
from outrider.training.losses import LOSSES, Likeliest
from outrider.training.plan import Plan
from outrider.training.run_distill import DistillOptions, train_drafter
from outrider.training.samples import DataFolder, Sample
from outrider.training.teacher import Teacher
from tests.support.commands import outrider
from tests.support.ggufs import SIZES, Kind, byte_level, convert
from tests.support.loading import native_model
from tests.support.taught import CONTEXT, data_of, measure_little, random_samples
from tests.support.tiny import MakeCheckpoint

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native step is off")
LENGTH = 24
PLAN = Plan(steps=6, batch=64, judge_every=3)


def samples(count: int, vocabulary: int = 300) -> list[Sample]:
    return random_samples(count, LENGTH, high=vocabulary)


@pytest.fixture(scope="module")
def target(tiny_llama: Path) -> NativeTransformer:
    return native_model(native.library(), tiny_llama, "float32", CONTEXT)


@pytest.fixture(scope="module")
def data(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> DataFolder:
    return data_of(samples(60), tiny_llama, tmp_path_factory.mktemp("data"))


def task_of(module: torch.nn.Module, target: NativeTransformer, **options: Any) -> DistillTask:
    options = {"loss": LOSSES["forward-kl"], "heat": 1.0, "own": 0.0, **options}
    return DistillTask(
        module, Teacher(target, CONTEXT, (), None), target.shape.vocab_size, depth=4, seed=0,
        **options,
    )  # fmt: skip


def test_the_whole_target_is_where_a_drafter_begins(
    tiny_llama: Path, target: NativeTransformer
) -> None:
    """With all layers and neurons it says what the target does."""
    small = made_of(open_checkpoint(tiny_llama), (0, 1), 10_000)
    task = task_of(small.module, target)
    # Of 15 drafts of 4 tokens, 3 end with the text after 3, 2 and 1 of them.
    assert task.judge(samples(3)).acceptance_length == pytest.approx(1 + (12 * 4 + 6) / 15)
    lesson = Teacher(target, CONTEXT, (), None).teach(samples(1)[0])
    said = task.says(lesson)
    assert said.same.all()
    assert said.accepted.min() > 0.999


def test_layers_are_named_from_either_end_and_the_strongest_neurons_stay(tiny_llama: Path) -> None:
    checkpoint = open_checkpoint(tiny_llama)
    whole = AutoModelForCausalLM.from_pretrained(tiny_llama).model.layers[1].state_dict()
    module = made_of(checkpoint, (-1,), 16).module
    weights = dict(module.named_parameters())
    assert torch.equal(
        weights["model.layers.0.self_attn.q_proj.weight"], whole["self_attn.q_proj.weight"]
    )
    gate, up, down = (whole[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    strength = (gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)).tolist()
    best = sorted(sorted(range(48), key=lambda i: -strength[i])[:16])
    assert torch.equal(weights["model.layers.0.mlp.gate_proj.weight"], gate[best])
    assert torch.equal(weights["model.layers.0.mlp.down_proj.weight"], down[:, best])
    for layers in ((), (2,), (-3,)):
        with pytest.raises(ConfigError, match="layers are"):
            made_of(checkpoint, layers, None)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("heat", [1.0, 0.7])
def test_gradients_are_those_of_one_graph(
    loss: str, heat: float, tiny_llama: Path, target: NativeTransformer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    module = made_of(open_checkpoint(tiny_llama), (0,), None).module
    task = task_of(module, target, loss=LOSSES[loss], heat=heat)
    monkeypatch.setattr(task, "_rows", 4)
    batch = samples(3)
    learned = task.learn(batch)
    found = {name: p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()
    total = torch.zeros(())
    for sample in batch:
        lesson = Teacher(target, CONTEXT, (), None).teach(sample)
        logits = module(lesson.tokens[None]).logits[0, lesson.rows]
        log_p = lesson.log_p.float()
        log_p = log_p if heat == 1 else (log_p / heat).log_softmax(-1)
        p = Likeliest(lesson.ids.long(), log_p)
        total = total + LOSSES[loss](p, (logits / heat).log_softmax(-1)).sum()
    (total / learned.tokens).backward()
    assert learned.tokens == 3 * 15
    assert learned.loss == pytest.approx(total.item() / learned.tokens, rel=1e-4)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=2e-3, atol=1e-5)


def test_acceptance_is_that_of_each_draft() -> None:
    rows = torch.tensor([3, 4, 5, 8, 9])
    chances = torch.tensor([1.0, 0.5, 1.0, 0.0, 1.0])
    by_row = dict(zip(rows.tolist(), chances.tolist(), strict=True))
    expected = 0.0
    for row in by_row:
        standing = 1.0
        for further in range(3):
            standing *= by_row.get(row + further, 0.0)
            expected += standing
    assert chained(rows, chances, 3) == pytest.approx(expected)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # without and with biases
def test_merged_changes_say_the_same(
    family: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source = make_checkpoint(tmp_path / family, family)
    module = made_of(open_checkpoint(source), (0, 1), None).module
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    ids = torch.arange(3, 40)[None]
    plain = module(ids).logits
    add_low_rank(module, 4, 8.0, 0)
    assert torch.equal(module(ids).logits, plain)
    assert dict(merged_weights(module)).keys() == before.keys()
    draw = torch.Generator().manual_seed(1)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            assert name.endswith((".up", ".down"))
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1)
    changed = module(ids).logits
    assert not torch.allclose(changed, plain, atol=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        assert (module(ids).logits.float() - changed).abs().mean() < 0.05 * changed.abs().mean()
    again = made_of(open_checkpoint(source), (0, 1), None).module
    again.load_state_dict(dict(merged_weights(module)), strict=False)
    torch.testing.assert_close(again(ids).logits, changed, rtol=1e-4, atol=1e-4)


def test_a_drafter_writes_answers_itself(tiny_llama: Path, target: NativeTransformer) -> None:
    module = made_of(open_checkpoint(tiny_llama), (0,), None).module
    task = task_of(module, target, heat=0.01, own=1.0)
    sample = samples(1)[0]
    own = task.written(sample, 5)
    assert own.tokens[:9].tolist() == sample.tokens[:9].tolist()
    assert own.said.tolist() == [False] * 9 + [True] * (len(own.tokens) - 9)
    with torch.no_grad():
        likeliest = module(torch.from_numpy(own.tokens)[None].long()).logits[0].argmax(-1)
    assert own.tokens[9:].tolist() == likeliest[8:-1].tolist()
    assert task.learn([sample]).tokens == len(own.tokens) - 9
    mixed = task_of(module, target, own=0.5)._mixed(samples(40))
    pairs = zip(mixed, samples(40), strict=True)
    changed = sum(not np.array_equal(a.tokens, b.tokens) for a, b in pairs)
    assert 10 < changed < 30


OPTIONS = {
    "whole": DistillOptions(loss="hybrid", layers=(0,)),
    "lora": DistillOptions(rank=4, own=0.3, temperature=0.8),
}


def said(target: Path, drafter: Path | None, heat: float) -> list[Any]:
    llm = LLM(target, drafter, num_speculative_tokens=3, dtype="float32")
    params = SamplingParams(temperature=heat, seed=1, max_tokens=20, ignore_eos=True)
    return [o.outputs[0].token_ids for o in llm.generate(["the quick", "fox"], params)]


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_trained_drafter_serves(
    kind: str, data: DataFolder, tiny_llama: Path, tmp_path: Path
) -> None:
    out = tmp_path / "drafter"
    judged = train_drafter(tiny_llama, data, None, out, PLAN, OPTIONS[kind]).judged
    for heat in (0.0, 1.0):
        assert said(tiny_llama, out, heat) == said(tiny_llama, None, heat)
    assert train_drafter(tiny_llama, data, None, out, PLAN, OPTIONS[kind]).judged == judged
    again = train_drafter(tiny_llama, data, out, tmp_path / "more", PLAN, OPTIONS[kind])
    assert again.judged.acceptance_length >= 1


def test_what_is_saved_says_by_the_engine_what_it_says_in_transformers(
    data: DataFolder, tiny_llama: Path, tmp_path: Path
) -> None:
    out = tmp_path / "drafter"
    train_drafter(tiny_llama, data, None, out, PLAN, OPTIONS["lora"])
    llm = LLM(out, None, dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    output = llm.generate(["the quick"], params)[0]
    module = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokens = torch.tensor([[*output.prompt_token_ids, *output.outputs[0].token_ids]])
    with torch.no_grad():
        logits = module(tokens).logits[0, len(output.prompt_token_ids) - 1 : -1]
    chosen = logits.gather(-1, tokens[0, len(output.prompt_token_ids) :, None])[:, 0]
    assert (logits.max(-1).values - chosen).max() < 1e-3


@pytest.mark.parametrize("kind", OPTIONS)
def test_killed_three_times_it_ends_with_the_same_bits(
    kind: str, data: DataFolder, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(Exception):
        pass

    train_drafter(tiny_llama, data, None, tmp_path / "whole", PLAN, OPTIONS[kind])
    monkeypatch.setattr("outrider.training.loop.SAVE_SECONDS", 0.0)
    learn, draw = DistillTask.learn, random.Random(0)
    for _ in range(3):
        left = draw.randrange(1, 3)

        def dying(self: DistillTask, batch: Sequence[Sample]) -> Learned:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return learn(self, batch)

        monkeypatch.setattr(DistillTask, "learn", dying)
        with pytest.raises(Killed):
            train_drafter(tiny_llama, data, None, tmp_path / "parts", PLAN, OPTIONS[kind])
    monkeypatch.setattr(DistillTask, "learn", learn)
    train_drafter(tiny_llama, data, None, tmp_path / "parts", PLAN, OPTIONS[kind])
    a, b = (tmp_path / name / "model.safetensors" for name in ("whole", "parts"))
    assert a.read_bytes() == b.read_bytes()


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_fall_and_more_is_accepted(
    loss: str, tiny_llama: Path, target: NativeTransformer
) -> None:
    module = made_of(open_checkpoint(tiny_llama), (0,), None).module
    task, batch = task_of(module, target, loss=LOSSES[loss]), samples(4)
    before, losses = task.judge(batch), []
    optimiser = torch.optim.Adam(module.parameters(), 3e-3)
    for _ in range(25):
        losses.append(task.learn(batch).loss)
        optimiser.step()
        module.zero_grad()
    assert losses[-1] < losses[0] - 0.1
    assert task.judge(batch).coupled_length > before.coupled_length + 0.1


@torch.no_grad()
def test_a_gguf_drafter_is_one_to_begin_with(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    folder = make_checkpoint(
        tmp_path / "qwen2", "qwen2", tokenizer=True, tie_word_embeddings=True, **SIZES
    )
    file, plain = convert(folder, tmp_path / "drafter.gguf", Kind.Q8_0, byte_level())
    ids = torch.arange(3, 40)[None]
    found = read_drafter(file, Files(folder)).module(ids).logits
    expected = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_vocabulary_may_be_rounded_otherwise(
    make_checkpoint: MakeCheckpoint, tiny_drafter: Path, tmp_path: Path
) -> None:
    """The target has embeddings of ids that its tokenizer lacks, and the drafter none of them."""
    padded = make_checkpoint(tmp_path / "padded", "llama", tokenizer=True, vocab_size=384)
    folder = data_of(samples(60), padded, tmp_path / "data", 384)
    out = tmp_path / "drafter"
    train_drafter(padded, folder, tiny_drafter, out, PLAN, DistillOptions(temperature=0.5))
    assert open_checkpoint(out).shape.vocab_size == 320
    for heat in (0.0, 1.0):
        assert said(padded, out, heat) == said(padded, None, heat)


def test_what_cannot_be_trained_is_refused(
    make_checkpoint: MakeCheckpoint, data: DataFolder, tiny_llama: Path, tmp_path: Path
) -> None:
    gemma = make_checkpoint(tmp_path / "gemma2", "gemma2", head_dim=8)
    with pytest.raises(ConfigError, match=r"'gemma2' model.*\(--from\)"):
        made_of(open_checkpoint(gemma), (0,), None)
    other = make_checkpoint(tmp_path / "other", "llama", vocab_size=64)
    with pytest.raises(ConfigError, match="has 64; give the target that the data is of"):
        train_drafter(other, data, None, tmp_path / "out", PLAN, DistillOptions())
    for wrong in ({"loss": "kl"}, {"own": 1.5}, {"rank": -1}, {"alpha": 0.0},
                  {"temperature": float("nan")}):  # fmt: skip
        with pytest.raises(ConfigError):
            DistillOptions(**wrong)


def test_a_drafter_that_serves_otherwise_is_refused(
    data: DataFolder, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(checkpoint: Any, config: Any) -> Any:
        return load_target(open_checkpoint(tiny_llama), config)

    monkeypatch.setattr(parity, "load_target", wrong)
    with pytest.raises(TrainingError, match="the same as in training in"):
        train_drafter(tiny_llama, data, None, tmp_path / "out", PLAN, DistillOptions(layers=(0,)))


def test_what_is_measured_stands_in_config_and_card(
    data: DataFolder, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "drafter"
    options = replace(OPTIONS["lora"], layers=(-1,))
    found = train_drafter(tiny_llama, data, None, out, PLAN, options).served
    measured = extras_of(out).measured
    assert [(each.use, each.temperature) for each in measured] == [
        ("held out", 0.0), ("held out", 1.0),
    ]  # fmt: skip
    assert [[*each.by_position] for each in measured] == [each.by_position for each in found]
    assert {each.data for each in measured} == {"held-out prompts of its data"}
    card = (out / "README.md").read_text()
    assert f"# Small model for {tiny_llama.name}\n" in card
    assert "| started from | new, of the target's layers -1 |" in card
    assert ", LoRA of rank 4, 30% own answers |" in card
    assert f"| held out | 0 | {found[0].acceptance_length:.2f} |" in card
    assert "train export" not in card  # that is for heads
    measure_little(monkeypatch)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"the lazy dog {n}"}) for n in range(3)))
    words = ("train", "measure", out, "--prompts", f"code={prompts}", "--max-tokens", 12)
    done = outrider(*words)
    assert done.exit_code == 2
    assert "is a small model, which names no target; give --target" in done.stderr
    done = outrider(*words, "--target", tiny_llama, "--json")
    assert done.exit_code == 0, done.output
    extras = extras_of(out)
    assert json.loads(done.stdout) == extras.to_json()
    assert [each.use for each in extras.measured] == ["held out", "held out", "code", "code"]
    assert f"{extras.lengths['code']} for code" in (out / "README.md").read_text()
    facts = json.loads(outrider("drafters", "check", tiny_llama, "--drafter", out, "--json").stdout)
    said = {fact["what"]: fact["drafter"] for fact in facts["facts"]}
    assert said["tokens for code"] == f"{extras.lengths['code']} recommended"
    assert said["measured, code"] == extras.measured[-1].said()
    # What is trained further is measured anew.
    train_drafter(tiny_llama, data, out, tmp_path / "more", PLAN, DistillOptions())
    assert {each.use for each in extras_of(tmp_path / "more").measured} == {"held out"}
    assert f"| started from | {out}" in (tmp_path / "more" / "README.md").read_text()


def test_the_commands(
    data: DataFolder, tiny_llama: Path, tiny_drafter: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    out = tmp_path / "drafter"
    words = ("--data", data.folder, "--out", out, "--steps", 2, "--batch", 64, "--layers", "-1")
    done = outrider("train", "distill", tiny_llama, *words, "--lora", 2, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["acceptance_length"] >= 1
    assert said(tiny_llama, out, 1.0) == said(tiny_llama, None, 1.0)
    done = outrider("train", "distill", tiny_llama, *words, "--from", tiny_drafter)
    assert "has a training whose begin is None" in done.output
    measure_little(monkeypatch)
    lines = [json.dumps({"prompt": f"{n} the lazy dog jumps {n % 7}"}) for n in range(160)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(lines))
    adapted = tmp_path / "adapted"
    other = copytree(tiny_drafter, tmp_path / "other")
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|user|>", "<|person|>"))
    words = ("--prompts", prompts, "--out", adapted)
    done = outrider("train", "adapt", "--target", tiny_llama, "--drafter", other, *words)
    assert "another tokenizer" in done.output.replace("\n", " ")
    assert not adapted.exists()
    words = ("--prompts", prompts, "--out", adapted, "--epochs", 1, "--max-tokens", 8)
    names = ("--target", tiny_llama, "--drafter", tiny_drafter)
    done = outrider("train", "adapt", *names, *words, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["kind"] == "model"
    assert report["verdict"]["why"]
    assert said(tiny_llama, adapted / "drafter", 1.0) == said(tiny_llama, None, 1.0)
    measured = extras_of(adapted / "drafter").measured
    assert {each.use for each in measured} == {"held out", "domain", "general"}
