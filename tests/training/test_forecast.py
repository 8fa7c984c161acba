"""What jobs are said to take, beside what they take; what clearly does not fit is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from outrider.bench.workload import Item
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.errors import MemoryBudgetError, ModelError, TrainingError
from outrider.native import choice as native
from outrider.training import forecast, needs, run_distill, run_heads
from outrider.training.data import DataOptions, make_data
from outrider.training.drafter_files import config_of
from outrider.training.eagle3 import Eagle3, rows_of
from outrider.training.forecast import Need, check, data_bytes, written
from outrider.training.head_files import NewHead, write_new_eagle3
from outrider.training.heads import HeadTask
from outrider.training.loop import Training
from outrider.training.lora import LowRank
from outrider.training.needs import Trainee, graph_bytes, lesson_bytes, made_bytes, rows_like
from outrider.training.plan import Plan
from outrider.training.run_distill import DistillOptions, train_drafter
from outrider.training.run_heads import WORK, HeadOptions, train_head
from outrider.training.samples import DataFolder, Samples
from outrider.training.teacher import Teacher
from tests.support.commands import outrider
from tests.support.disks import no_file_above
from tests.support.loading import native_model
from tests.support.taught import CONTEXT, data_of, random_samples
from tests.support.tiny import MakeCheckpoint

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native step is off")
PLAN = Plan(steps=2, batch=64, judge_every=2)
LENGTH = 40


@pytest.fixture(scope="module")
def wide(make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target wide enough that weights outweigh what files have beside them."""
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    return make_checkpoint(tmp_path_factory.mktemp("wide"), "llama", tokenizer=True, **sizes)


@pytest.fixture(scope="module")
def data(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> DataFolder:
    return data_of(random_samples(60, LENGTH), wide, tmp_path_factory.mktemp("data"))


class Seen(NamedTuple):
    """A training's forecast, and the training."""

    trainee: Trainee
    training: Training


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What trainings are forecast and begun."""
    found: list[Any] = []

    def noted(module: Any, name: str, make: Callable[..., Any]) -> None:
        def call(*args: Any) -> Any:
            found.append(make(*args))
            return found[-1]

        monkeypatch.setattr(module, name, call)

    noted(run_heads, "head_trainee", needs.head_trainee)
    noted(run_distill, "drafter_trainee", needs.drafter_trainee)
    for module in (run_heads, run_distill):
        noted(module, "Training", Training)
    return found


CASES = ["eagle3", "peagle", "medusa", "new", "low-rank"]


def trained(case: str, target: Path, data: DataFolder, out: Path) -> None:
    if case in ("new", "low-rank"):
        begin, rank = (None, 0) if case == "new" else (target, 4)
        train_drafter(target, data, begin, out, PLAN, DistillOptions(rank=rank))
    else:
        train_head(case, target, data, None, out, PLAN, HeadOptions(depth=3))


@pytest.mark.parametrize("case", CASES)
def test_a_training_takes_what_was_forecast(
    case: str, wide: Path, data: DataFolder, seen: list[Any], tmp_path: Path
) -> None:
    trained(case, wide, data, tmp_path)
    trainee, training = Seen(*seen)
    need = trainee.need(PLAN, 7)
    files = written(tmp_path / WORK) + (tmp_path / "model.safetensors").stat().st_size
    for picture in tmp_path.rglob("*.png"):
        files -= picture.stat().st_size
    assert need.files == pytest.approx(files, rel=0.1)
    state = (tmp_path / WORK / "state.pt").stat().st_size
    assert need.passing == pytest.approx(max(state, files - state), rel=0.1)
    module, states = training.task.module, training.optimisers.state_dict()
    average = sum(value.nbytes for value in training.average.values.values())
    assert need.memory["gradients and averages"] == 3 * average
    assert need.memory["weights"] == sum(
        each.nbytes for each in [*module.parameters(), *module.buffers()]
    )
    assert need.memory["optimisers"] == sum(
        value.nbytes
        for each in states for state in each["state"].values() for value in state.values()
    )  # fmt: skip
    assert need.memory["the target"] == 7
    checkpoint = (tmp_path / "model.safetensors").stat().st_size
    assert need.memory["the result"] == pytest.approx(checkpoint, rel=0.1)


def test_a_pass_keeps_what_was_forecast(wide: Path, data: DataFolder, seen: list[Any],
                                        tmp_path: Path) -> None:  # fmt: skip
    """The graph of a module without memory is as large as that of the module."""
    trained("eagle3", wide, data, tmp_path)
    trainee, training = Seen(*seen)
    module, task = training.task.module, training.task
    assert isinstance(module, Eagle3)
    assert isinstance(task, HeadTask)
    batch = data.read().train[:3]
    rows = rows_of([task._teacher.teach(each) for each in batch])
    like = rows_like(batch, CONTEXT, rows.fused.shape[1])
    assert (like.begins, like.firsts) == (rows.begins, rows.firsts)
    kept: dict[int, torch.UntypedStorage] = {}
    own = {each.untyped_storage().data_ptr() for each in [*module.parameters(), *module.buffers()]}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        said = [*module.unroll(rows, 3)]
    assert len(said) == 3
    expected = sum(storage.nbytes() for storage in kept.values())
    found = graph_bytes(trainee.module, lambda: [*trainee.module.unroll(like, 3)])
    assert found == pytest.approx(expected, rel=0.05)


def test_what_a_pass_makes_counts_once() -> None:
    """Views and what is computed in place make nothing; a low-rank layer makes its output once."""
    with torch.device("meta"):
        x = torch.empty(2, 5, 64)
        layer = LowRank(nn.Linear(64, 96), 4, 1.0, torch.Generator())
    assert made_bytes(lambda: (x.view(10, 64) + 1) * 2) == 2 * x.nbytes
    assert made_bytes(lambda: x.add_(1).mT) == 0
    assert made_bytes(lambda: layer(x)) == 4 * 10 * (96 + 4)


def test_the_targets_pass_and_learning_take_turns(
    wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, samples = open_checkpoint(wide), Samples(random_samples(40, LENGTH))
    parts = checkpoint, samples, config_of(checkpoint, wide), 4, CONTEXT
    monkeypatch.setattr(needs, "pass_bytes", lambda _: 0)
    learning = needs.drafter_trainee(*parts).batch
    for taken in (learning - 1, learning + 1):
        monkeypatch.setattr(needs, "pass_bytes", lambda _, taken=taken: taken)
        assert needs.drafter_trainee(*parts).batch == max(learning, taken)


def test_lessons_take_what_was_forecast(wide: Path) -> None:
    target = native_model(native.library(), wide, "float32", CONTEXT)
    for layers, ids in ((), None), ((0, 1), np.arange(100)):
        teacher = Teacher(target, CONTEXT, layers, ids)
        for each in random_samples(2, LENGTH):
            own = lesson_bytes(each, CONTEXT, len(layers), 128, 320 if ids is None else 100)
            assert own == teacher.teach(each).nbytes


def test_data_takes_no_more_than_was_forecast(tiny_llama: Path, tmp_path: Path) -> None:
    items = [Item(f"the quick brown fox {n}") for n in range(100)]
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps({"prompt": item.prompt}) + "\n" for item in items))
    options = DataOptions(prompts=file, context=CONTEXT, max_tokens=24)
    made = make_data(str(tiny_llama), tmp_path / "data", options, lambda *_: None, print)
    shards = sum((made.folder / shard.file).stat().st_size for shard in made.shards)
    assert 0.4 < shards / data_bytes(items, 24, CONTEXT) <= 1
    turns = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "y" * 999})
    assert data_bytes([Item(messages=turns)], 24, CONTEXT) < data_bytes(
        [Item(messages=turns * 2)], 24, 1000
    )


def test_what_is_there_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need = Need({"all": 100}, 10_000, 500)
    monkeypatch.setattr(forecast, "free_disk", lambda folder: 600)
    with pytest.raises(TrainingError, match=r"takes up to 10 kB of disk, and 1 kB are free at"):
        check("it", need, tmp_path / "new", "do less")
    (tmp_path / "file").write_bytes(b"x" * 10_000)
    assert check("it", need, tmp_path, "do less") == 0


def test_memory_beside_it_is_for_lessons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "free_memory", lambda: 1000)
    need = Need({"weights": 700, "a batch": 500}, 0)
    with pytest.raises(MemoryBudgetError, match="do less, or free memory"):
        check("it", need, tmp_path, "do less")
    assert check("it", need, tmp_path, "do less", loaded=250, spare=70) == 50
    assert check("it", need, tmp_path, "do less", loaded=900, spare=70) == 70


def test_what_does_not_fit_is_refused_before_it_starts(
    wide: Path, data: DataFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"a {n}"}) for n in range(30)))
    commands = {
        "data": (wide, "--prompts", prompts, "--json"),
        "eagle3": (wide, "--data", data.folder),
        "block": (wide, "--data", data.folder),
        "medusa": (wide, "--data", data.folder),
        "distill": (wide, "--data", data.folder, "--json"),
        "layerskip": (wide, "--data", data.folder, "--json"),
        "adapt": ("--target", wide, "--drafter", wide, "--prompts", prompts, "--json"),
    }
    full = {"free_disk": "of disk", "free_memory": "of memory"}
    for name, what in full.items():
        with monkeypatch.context() as patch:
            patch.setattr(forecast, name, lambda *_: 1)
            for command, words in commands.items():
                out = tmp_path / f"{name}-{command}.json"  # layerskip wants such a name
                done = outrider("train", command, *words, "--out", out)
                assert done.exit_code == 1, done.output
                assert done.stdout == ""
                last = done.stderr.strip().splitlines()[-1]
                assert last.startswith("error: ")
                assert what in last
                assert not out.exists()


def test_a_drafter_that_is_not_trained_is_refused_before_there_is_data(
    wide: Path, data: DataFolder, tiny_llama: Path, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    head, out, prompts = tmp_path / "head", tmp_path / "out", tmp_path / "p.jsonl"
    new = NewHead(str(tiny_llama), np.arange(64), (0, 1, 1), 3, 0)
    write_new_eagle3(head, open_checkpoint(tiny_llama), new)
    prompts.write_text("\n".join(json.dumps({"prompt": f"a {n}"}) for n in range(30)))
    done = outrider("train", "eagle3", wide, "--data", data.folder, "--from", head, "--out", out)
    assert "with a width of" in done.stderr
    assert not out.exists()
    other = make_checkpoint(tmp_path / "other", "gemma2", tokenizer=True, head_dim=8)
    for drafter, why in ((head, "with a width of"), (other, "small drafters of")):
        words = ("--target", wide, "--drafter", drafter, "--prompts", prompts, "--out", out)
        done = outrider("train", "adapt", *words)
        assert why in done.stderr
        assert not out.exists()


def test_a_checkpoint_that_a_full_disk_refused_is_written_later(
    wide: Path, data: DataFolder, tmp_path: Path
) -> None:
    trained("eagle3", wide, data, tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.unlink()
    with no_file_above(1000), pytest.raises(ModelError, match=r"cannot be written.*File too large"):
        trained("eagle3", wide, data, tmp_path)
    assert not file.exists()
    trained("eagle3", wide, data, tmp_path)
    assert file.read_bytes() == whole
