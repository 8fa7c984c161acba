"""The target's states that are kept as it answers are those that a training would compute."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch

from outrider import LLM
from outrider.checkpoints.files import read_header
from outrider.errors import ConfigError, TrainingError
from outrider.models.native import NativeTransformer
from outrider.models.native_output import NativeOutput
from outrider.models.rows import Segment
from outrider.native import choice as native
from outrider.training.data import DataOptions, make_data
from outrider.training.forecast import data_bytes
from outrider.training.plan import Plan
from outrider.training.prompts import read_prompts
from outrider.training.run_heads import HeadOptions, train_head
from outrider.training.samples import DataFolder, Sample
from outrider.training.states import BF16, HeldStates, kept_layers, state_bytes
from outrider.training.targets import open_target
from outrider.training.teacher import Lesson, Teacher
from tests.support.exactness import FAMILY_OPTIONS
from tests.support.tiny import build_checkpoint

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native step is off")
CONTEXT, COUNT = 96, 70


def prompts(file: Path) -> Path:
    """Write more prompts than are answered at a time; some share a beginning, some go on."""
    ask = {"role": "user", "content": "the quick brown fox"}
    lines = [{"prompt": f"the lazy dog jumps over the quick brown fox, {n}"} for n in range(COUNT)]
    turns = [{"messages": [ask, {"role": "user", "content": str(n)}]} for n in range(6)]
    file.write_text("\n".join(json.dumps(line) for line in [*lines, *turns]))
    return file


@pytest.fixture(scope="module")
def target(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that often ends an answer, and whose template knows assistants."""
    folder = tmp_path_factory.mktemp("target") / "llama"
    copytree(tiny_llama, folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ '<|user|>' if m['role'] == 'user' else '<|model|>' }}"
        "{{ m['content'] }}{% endfor %}<|model|>"
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(90)]}))
    return folder


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> DataOptions:
    file = prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")
    return DataOptions(prompts=file, context=CONTEXT, max_tokens=12, states=True)


@pytest.fixture(scope="module")
def data(
    options: DataOptions, target: Path, tmp_path_factory: pytest.TempPathFactory
) -> DataFolder:
    folder = tmp_path_factory.mktemp("data")
    return make_data(str(target), folder, options, lambda *_, **__: None, print)


def lessons_equal(one: Lesson, other: Lesson) -> bool:
    """Return whether lessons are the same, but for the state of the last token, which none uses."""
    columns = ("tokens", "rows", "ids", "log_p", "best")
    same = all(torch.equal(getattr(one, name), getattr(other, name)) for name in columns)
    return same and torch.equal(one.hidden[:, :-1], other.hidden[:, :-1])


def test_lessons_of_kept_states_are_those_computed(data: DataFolder, target: Path) -> None:
    """Of single prompts and dialogues, beside others and drafts, bit for bit."""
    model = open_target(target, data).model
    layers, ids = kept_layers(model.hidden_layers), np.arange(0, 300, 3)
    computing = Teacher(model, CONTEXT, layers, ids)
    reading = Teacher(model, CONTEXT, layers, ids, stored=True)
    samples = data.read(states=True)
    everything = [*samples.train, *samples.held_out]
    assert len(everything) >= COUNT + 6
    answers = [(np.diff(each.said.astype(int)) > 0).sum() for each in everything]
    assert sum(answers) > COUNT + 6  # some dialogues went on
    for each in everything:
        assert each.states is not None
        assert lessons_equal(computing.teach(each), reading.teach(each))


def test_a_head_becomes_the_same(data: DataFolder, target: Path, tmp_path: Path) -> None:
    """Bit for bit, from answers with states and from the same without; Medusa's, too."""
    bare = tmp_path / "bare"
    copytree(data.folder, bare)
    told = json.loads((bare / "data.json").read_text())
    for shard in told["shards"]:
        del shard["states"]
    (bare / "data.json").write_text(json.dumps(told))
    plan = Plan(steps=3, batch=64, judge_every=3)
    for kind in ("eagle3", "medusa"):
        weights = []
        for source in (data, DataFolder.opened(bare)):
            out = tmp_path / f"{kind}-{source.folder.name}"
            train_head(kind, target, source, None, out, plan, HeadOptions(depth=2))
            weights.append((out / "model.safetensors").read_bytes())
        assert weights[0] == weights[1]


def test_states_of_others_are_refused(data: DataFolder, target: Path, tmp_path: Path) -> None:
    for changed in ({"seed": 5}, {"hidden_size": 64}):
        other = build_checkpoint(tmp_path / str(len(changed)), "llama", vocab_size=320, **changed)
        model = open_target(other, data).model
        layers = kept_layers(model.hidden_layers)
        teacher = Teacher(model, CONTEXT, layers, None, stored=True)
        with pytest.raises(TrainingError, match=r"differ from the target's by .*; give the target"):
            teacher.teach(data.read(states=True).train[0])


def test_other_layers_are_computed(
    data: DataFolder, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = open_target(target, data).model
    samples = data.read(states=True)
    lacking = samples.train[0]._replace(states=HeldStates({1: np.zeros((1, 32), BF16)}))
    lesson = Teacher(model, CONTEXT, (0,), None, stored=True).teach(lacking)
    assert "are of layers 1; 0 are read, and so computed anew" in capsys.readouterr().err
    assert lessons_equal(lesson, Teacher(model, CONTEXT, (0,), None).teach(lacking))


def test_files_of_states_are_checked(data: DataFolder, tmp_path: Path) -> None:
    file = data.shards[0].states_file(data.shards[0].states[0].layer)
    for name, harm in (
        ("gone", Path.unlink),
        ("changed", lambda file: file.write_bytes(file.read_bytes()[:-1] + b"?")),
    ):
        folder = tmp_path / name
        copytree(data.folder, folder)
        harm(folder / file)
        damaged = DataFolder.opened(folder)
        with pytest.raises(ConfigError, match=f"{file} is missing or was changed; write the data"):
            damaged.read(states=True)
        assert damaged.read().train  # without states they are not looked at


def test_samples_without_states_lie_between_others(tmp_path: Path, data: DataFolder) -> None:
    rows = np.arange(15, dtype=np.float32).reshape(5, 3)
    tokens, said = np.arange(6, dtype=np.int32), np.arange(6) > 2
    samples = [
        Sample(tokens, said, 0),
        Sample(tokens, said, 1, HeldStates({1: rows.astype(BF16), 4: rows})),
        Sample(tokens[:4], said[:4], 2),
    ]
    written = DataFolder(tmp_path, data.about, ())
    written.add(samples, 0, 3)
    again = DataFolder.opened(tmp_path).read(states=True)
    first, second, third = sorted([*again.train, *again.held_out], key=lambda s: s.prompt)
    assert first.states is None
    assert third.states is None
    assert second.states is not None
    for layer, type in ((1, BF16), (4, np.dtype(np.float32))):
        read = second.states.read(layer, 6)
        assert read.dtype == type
        assert (read[:5].astype(np.float32) == rows).all()
        assert not read[5].any()
    header = read_header(tmp_path / written.shards[0].states_file(4))
    assert header["hidden"].shape == (16, 3)


def test_states_take_no_more_than_was_forecast(data: DataFolder, options: DataOptions) -> None:
    assert options.prompts is not None
    items = read_prompts(options.prompts, False, print)
    shard = data.shards[0]
    layers = [each.layer for each in shard.states]
    size = sum((data.folder / shard.states_file(layer)).stat().st_size for layer in layers)
    state = state_bytes(layers, 32)
    most = data_bytes(items, 12, CONTEXT, state) - data_bytes(items, 12, CONTEXT)
    assert 0.3 < size / most <= 1.1


def test_states_are_of_native_targets(
    options: DataOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_llama: Path
) -> None:
    monkeypatch.setattr("outrider.training.data.is_native", lambda *_: False)
    with pytest.raises(ConfigError, match=r"is not run by the native step.*leave out --states"):
        make_data(str(tiny_llama), tmp_path, options, lambda *_, **__: None, print)


@pytest.mark.parametrize("kind", ["granite", "gemma2", "lfm2", "qwen3_5_text", "falcon_h1"])
def test_logits_follow_from_the_last_state(kind: str, tmp_path: Path) -> None:
    """Scaled and capped as the target's own are, whatever its layers keep."""
    folder = build_checkpoint(tmp_path / "t", kind, **FAMILY_OPTIONS.get(kind, {}))
    model = LLM(folder, None).engine.model
    assert isinstance(model, NativeTransformer)
    last, tokens = model.hidden_layers - 1, [3, 1, 4, 1, 5, 9, 2, 6]
    segment = Segment(tokens, 0, range(1), len(tokens), len(tokens))
    output = model.run([segment], model.new_store(1, 16), [last])
    found = NativeOutput(model).logits(output.hidden[last])
    assert np.allclose(found, output.logits, rtol=1e-5, atol=1e-5)


def test_states_can_be_asked_for_later(
    tiny_llama: Path, options: DataOptions, tmp_path: Path
) -> None:
    """A folder of answers without them goes on with them, and both kinds train."""
    quiet = lambda *_, **__: None  # noqa: E731
    make_data(str(tiny_llama), tmp_path, replace(options, states=False), quiet, print)
    again = make_data(str(tiny_llama), tmp_path, options, quiet, print)
    assert not any(each.states for each in again.shards)
