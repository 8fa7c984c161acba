"""Training of the pocket pair, at tiny sizes: it learns, resumes where it was, and drafts."""

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider import LLM, SamplingParams
from outrider.pocket import PATH
from outrider.pocket.build import save
from outrider.pocket.corpus import Corpus, Module, encode, train_tokenizer
from outrider.pocket.evaluate import held_out_loss, prompts_of, teacher_forced
from outrider.pocket.lattice import round_matrices
from outrider.pocket.train import TrainingPlan, batches, distillation_loss, optimise, text_loss

PLAN = TrainingPlan(
    tokens=40 * 256, muon_rate=0.04, adam_rate=0.04, phases=((0.5, 32), (0.5, 64)), step_tokens=256
)
TEXT = "".join(f"def add_{n}(a, b):\n    return a + b + {n}\n\n\n" for n in range(120))


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer([TEXT])


@cache
def corpus() -> Corpus:
    data = encode(tokenizer(), [Module("a.py", TEXT)])
    return replace(data, held_out=[data.train[0][:500]], held_out_bytes=1000)


def model(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(layers)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer()), hidden_size=32, intermediate_size=48, head_dim=16,
            num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1,
            max_position_embeddings=128, tie_word_embeddings=True, bos_token_id=None,
            eos_token_id=0, pad_token_id=1, dtype="float32",
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    trained = model(2)
    folder = tmp_path_factory.mktemp("target")
    optimise(trained, text_loss(trained), corpus(), PLAN, folder / "target.pt", "target")
    losses = [float(line.split()[2]) for line in (folder / "target.log").read_text().splitlines()]
    assert losses[-1] < losses[0] - 1
    return trained


def test_rates_rise_and_fall() -> None:
    plan = replace(PLAN, tokens=1000 * 256)
    assert plan.steps == 1000
    assert plan.rate(0) == 0.01
    assert plan.rate(99) == plan.rate(400) == 1
    assert plan.rate(700) == pytest.approx(0.05 + 0.95 / 2)
    assert plan.rate(1000) == pytest.approx(0.05)


def test_batches_follow_the_phases_and_go_on_where_they_were() -> None:
    all_of_them = [*batches(corpus(), PLAN, 0)]
    assert [batch.shape for batch in all_of_them] == [(8, 32)] * 20 + [(4, 64)] * 20
    for start in (1, 20, 33):
        rest = [*batches(corpus(), PLAN, start)]
        assert len(rest) == len(all_of_them) - start
        assert all(map(np.array_equal, rest, all_of_them[start:]))


def test_a_target_learns(target: LlamaForCausalLM) -> None:
    untrained, trained = (held_out_loss(each, corpus()) for each in (model(2), target))
    assert trained[0] < untrained[0] - 1
    assert trained[1] == pytest.approx(trained[0] * 499 / 1000)


class Stopped(Exception):
    pass


def test_a_resumed_training_is_the_uninterrupted_one(
    target: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends in the last 40 % of a distillation, where losses are at two temperatures in turn."""

    def distil(name: str, stop: int | None = None) -> dict[str, Any]:
        drafter = model(1)
        loss = distillation_loss(drafter, target)

        def until(ids: torch.Tensor, step: int, done: float) -> torch.Tensor:
            if step == stop:
                raise Stopped
            return loss(ids, step, done)

        optimise(drafter, until, corpus(), PLAN, tmp_path / f"{name}.pt", name)
        return drafter.state_dict()

    whole = distil("whole")
    hours: Iterator[int] = itertools.count(0, 3600)
    monkeypatch.setattr("time.monotonic", lambda: next(hours))  # each step saves its state
    with pytest.raises(Stopped):
        distil("parts", 27)
    assert torch.load(tmp_path / "parts.pt", weights_only=True)["step"] == 27
    parts = distil("parts")
    assert all(torch.equal(parts[name], weight) for name, weight in whole.items())


def test_what_was_trained_loads_and_drafts(target: LlamaForCausalLM, tmp_path: Path) -> None:
    drafter = model(1)
    before = teacher_forced(target, drafter, corpus())
    optimise(
        drafter,
        distillation_loss(drafter, target),
        corpus(),
        PLAN,
        tmp_path / "drafter.pt",
        "drafter",
    )
    after = teacher_forced(target, drafter, corpus())
    assert all(after[name] > before[name] for name in before)
    save(target, tokenizer(), tmp_path / "model")
    save(drafter, tokenizer(), tmp_path / "model" / "drafter")
    llm = LLM(tmp_path / "model", drafter="model", num_speculative_tokens=4, memory=2**24)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (said,) = llm.generate(["def add_7(a, b):\n"], params)
    assert len(said.outputs[0].token_ids) == 40
    assert 0 < llm.engine.counts.accepted <= llm.engine.counts.drafted


def test_prompts_are_whole_lines_and_always_the_same() -> None:
    modules = [Module("a.py", TEXT)]
    found = prompts_of(modules, tokenizer(), 5)
    assert len({*found}) == 5
    assert prompts_of(modules, tokenizer(), 3) == found[:3]
    for prompt in found:
        assert prompt.startswith("def ")
        assert prompt.endswith("\n")
        assert prompt in TEXT
        assert 64 <= len(tokenizer()(prompt)["input_ids"]) < 192


def test_rounded_matrices_are_near_and_deflate_to_half() -> None:
    torch.manual_seed(0)
    rounded = torch.nn.Linear(256, 512)
    torch.nn.init.normal_(rounded.weight, std=0.02)
    before, bias = rounded.weight.detach().clone(), rounded.bias.detach().clone()
    round_matrices(rounded)
    narrow = rounded.weight.detach().to(torch.bfloat16)
    assert torch.equal(narrow.float(), rounded.weight)
    assert torch.equal(bias, rounded.bias)
    assert (rounded.weight - before).std() < 0.03 * before.std()
    raw = narrow.view(torch.uint8).numpy().tobytes()
    assert len(zlib.compress(raw)) < 0.5 * len(raw)


def test_bundled_weights_are_rounded() -> None:
    for file in (PATH / "model.safetensors", PATH / "drafter" / "model.safetensors"):
        raw = file.read_bytes()[-2_000_000:]
        assert len(zlib.compress(raw)) < 0.5 * len(raw)
