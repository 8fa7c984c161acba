"""The loop: exact resumption, and what ends it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from outrider.errors import ConfigError, ModelError, TrainingError
from outrider.training.curves import CURVES, last_step
from outrider.training.loop import RUN, STATE, Judged, Learned, Task, Training
from outrider.training.plan import Plan
from outrider.training.samples import Sample, Samples
from tests.support.disks import no_file_above

PLAN = Plan(steps=60, batch=8, rate=0.05, average=0.5, decay=0.01, judge_every=5, patience=0)


class Killed(Exception):
    pass


class Toy(Task):
    """Learns which id follows an id; ``dies`` after so many batches."""

    def __init__(self, dies: int | None = None) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16))
        self.left = dies

    def learn(self, batch: Sequence[Sample]) -> Learned:
        if self.left is not None:
            if not self.left:
                raise Killed
            self.left -= 1
        ids = torch.stack([torch.from_numpy(s.tokens).long() for s in batch])
        loss = nn.functional.cross_entropy(
            self.module(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
        )
        loss.backward()
        return Learned(loss.item(), ids.numel())

    def judge(self, samples: Sequence[Sample]) -> Judged:
        ids = torch.stack([torch.from_numpy(s.tokens).long() for s in samples])
        right = (self.module(ids[:, :-1]).argmax(-1) == ids[:, 1:]).float().mean().item()
        return Judged(1 + right, 1 + right)


def samples(count: int = 200) -> Samples:
    made = []
    for number in range(count):
        start = number % 16
        tokens = np.array([(start + 3 * i) % 16 for i in range(4)], np.int32)
        made.append(Sample(tokens, np.ones(4, np.bool_), number))
    return Samples(made)


def weights(task: Toy, training: Training) -> list[torch.Tensor]:
    return [*task.module.state_dict().values(), *training.average.values.values()]


def test_killed_three_times_it_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Toy()
    first = Training(whole, samples(), PLAN, tmp_path / "whole", {"of": 1})
    judged = first.run()
    assert judged.acceptance_length > 1.9
    monkeypatch.setattr("outrider.training.loop.SAVE_SECONDS", 0.0)
    draw = random.Random(0)
    for _ in range(3):
        task = Toy(dies=draw.randrange(3, 12))
        with pytest.raises(Killed):
            Training(task, samples(), PLAN, tmp_path / "parts", {"of": 1}).run()
    last = Toy()
    training = Training(last, samples(), PLAN, tmp_path / "parts", {"of": 1})
    assert 0 < training.step < 60
    assert training.run() == judged
    for a, b in zip(weights(whole, first), weights(last, training), strict=True):
        assert torch.equal(a, b)
    tables = [
        [line.split(",")[0:1] + line.split(",")[2:] for line in text.splitlines()]
        for text in ((tmp_path / name / CURVES).read_text() for name in ("whole", "parts"))
    ]
    assert tables[0] == tables[1]
    assert len(tables[0]) == 1 + 60 // 5


def test_a_finished_training_is_not_repeated(tmp_path: Path) -> None:
    Training(Toy(), samples(), PLAN, tmp_path, {}).run()
    task = Toy(dies=0)
    training = Training(task, samples(), PLAN, tmp_path, {})
    assert training.run().acceptance_length > 1.9


def test_another_training_is_refused(tmp_path: Path) -> None:
    Training(Toy(), samples(), PLAN, tmp_path, {"target": "a"})
    for plan, about, what in (
        (Plan(**{**vars(PLAN), "steps": 61}), {"target": "a"}, "steps is 60, not 61"),
        (PLAN, {"target": "b"}, "target is 'a', not 'b'"),
    ):
        with pytest.raises(ConfigError, match=what):
            Training(Toy(), samples(), plan, tmp_path, about)


def changed(folder: Path, **values: Any) -> None:
    state = torch.load(folder / STATE, weights_only=True)
    torch.save({**state, **values}, folder / STATE)


def flipped(folder: Path) -> None:
    state = torch.load(folder / STATE, weights_only=True)
    octets = bytearray((folder / STATE).read_bytes())
    octets[octets.index(state["module"]["1.weight"].numpy().tobytes())] ^= 1
    (folder / STATE).write_bytes(octets)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": lambda folder: (folder / STATE).write_bytes((folder / STATE).read_bytes()[:-9]),
    "empty": lambda folder: (folder / STATE).write_bytes(b""),
    "flipped": flipped,
    "of another shape": lambda folder: changed(folder, module={"1.bias": torch.zeros(9)}),
    "of another step": lambda folder: changed(folder, step=3),
    "without an average": lambda folder: changed(folder, average={}),
    "without optimisers": lambda folder: changed(folder, optimisers=[]),
    "no plan": lambda folder: (folder / RUN).write_text("[1]"),
    "no steps": lambda folder: (folder / RUN).write_text('{"about": {}, "plan": {}}'),
    "not JSON": lambda folder: (folder / RUN).write_bytes(b"\xff"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_told(what: str, tmp_path: Path) -> None:
    plan = Plan(steps=2, batch=8)
    Training(Toy(), samples(), plan, tmp_path, {}).run()
    DAMAGE[what](tmp_path)
    with pytest.raises(ModelError, match=r"damaged.*give a new folder"):
        Training(Toy(), samples(), plan, tmp_path, {})


def test_nothing_to_learn_is_told(tmp_path: Path) -> None:
    all_said = samples()
    silent = [sample._replace(said=np.zeros(4, np.bool_)) for sample in all_said.train]
    for some in ([*silent, *all_said.held_out], all_said.train):
        with pytest.raises(ConfigError, match="too few"):
            Training(Toy(), Samples(some), PLAN, tmp_path, {})


def test_weights_that_are_not_finite_are_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.training.loop.SAVE_SECONDS", 0.0)
    training = Training(Toy(), samples(), PLAN, tmp_path, {})
    step = training.optimisers.step

    def bad(rate: float) -> None:
        step(rate)
        if training.step == 7:
            training.task.module[1].bias.data[0] = float("inf")

    monkeypatch.setattr(training.optimisers, "step", bad)
    with pytest.raises(TrainingError, match=r"a weight is not finite at step 8; .*last good"):
        training.run()
    assert torch.load(tmp_path / STATE, weights_only=True)["step"] == 7


def test_a_loss_that_is_not_finite_ends_it_with_the_last_good_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.training.loop.SAVE_SECONDS", 0.0)
    task = Toy()
    learn = task.learn
    batches = 0

    def bad(batch: Sequence[Sample]) -> Learned:
        nonlocal batches
        batches += 1
        learned = learn(batch)
        return learned._replace(loss=float("nan")) if batches == 8 else learned

    task.learn = bad
    with pytest.raises(TrainingError, match=r"not finite at step 8; .*last good state"):
        Training(task, samples(), PLAN, tmp_path, {}).run()
    state = torch.load(tmp_path / STATE, weights_only=True)
    assert state["step"] == 7
    assert all(value.isfinite().all() for value in state["module"].values())


def test_a_full_disk_leaves_the_last_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.training.loop.SAVE_SECONDS", 0.0)
    with pytest.raises(Killed):
        Training(Toy(dies=5), samples(), PLAN, tmp_path, {}).run()
    before = {file.name for file in tmp_path.iterdir()}
    file = tmp_path / STATE
    with (
        no_file_above(file.stat().st_size // 2),
        pytest.raises(OSError, match=f"File too large: '{file}'"),
    ):
        Training(Toy(), samples(), PLAN, tmp_path, {}).run()
    assert {file.name for file in tmp_path.iterdir()} == before
    assert Training(Toy(), samples(), PLAN, tmp_path, {}).step == 5


@pytest.mark.parametrize("cut", ["10,0.1,3", "10,0.1,320,0.05,1.2,1.9,1", "5,b,c,d,e,f,g"])
def test_a_line_of_the_curves_that_was_cut_comes_again(
    cut: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.training.loop.SAVE_SECONDS", 0.0)
    with pytest.raises(Killed):
        Training(Toy(dies=9), samples(), PLAN, tmp_path, {}).run()
    file = tmp_path / CURVES
    whole = file.read_text()
    assert whole.count("\n") == 2
    file.write_text(whole + cut)
    Training(Toy(), samples(), PLAN, tmp_path, {})
    assert file.read_text() == whole
    file.write_text(whole[:9])
    Training(Toy(), samples(), PLAN, tmp_path, {})
    assert file.read_text() == whole.splitlines()[0] + "\n"


def test_it_stops_when_nothing_gets_better(tmp_path: Path) -> None:
    task = Toy()
    plan = Plan(steps=400, batch=8, rate=0.05, average=0.5, judge_every=5, patience=3)
    training = Training(task, samples(), plan, tmp_path, {})
    assert training.run().acceptance_length == 2.0
    assert training.step < 200


def test_one_that_stops_early_ends_with_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [1.5, 1.7, 1.6, 1.6, 1.7]  # the last one is of what is kept
    seen: list[list[torch.Tensor]] = []

    def judge(task: Toy, samples: Sequence[Sample]) -> Judged:
        seen.append([value.clone() for value in task.module.state_dict().values()])
        return Judged(said[len(seen) - 1], 1.0)

    monkeypatch.setattr(Toy, "judge", judge)
    plan = Plan(steps=400, batch=8, rate=0.05, average=0.5, judge_every=10, patience=2)
    training = Training(Toy(), samples(), plan, tmp_path, {})
    assert training.run().acceptance_length == 1.7
    assert training.step == last_step(tmp_path / CURVES) == 4 * 10
    for a, b in zip(seen[1], seen[4], strict=True):
        assert torch.equal(a, b)
    again = Training(Toy(), samples(), plan, tmp_path, {})
    for a, b in zip(seen[1], again.average.values.values(), strict=True):
        assert torch.equal(a, b)


def test_minutes_become_steps_once(tmp_path: Path) -> None:
    plan = Plan(minutes=0.02, batch=8)
    training = Training(toy := Toy(), samples(), plan, tmp_path, {})
    steps = training.plan.steps
    assert steps >= 1
    for name, value in Toy().module.named_parameters():
        assert torch.equal(toy.module.get_parameter(name), value)
    assert Training(Toy(), samples(), plan, tmp_path, {}).plan.steps == steps


@pytest.mark.parametrize(
    ("name", "value"),
    [("epochs", 0), ("rate", float("nan")), ("batch", 0), ("steps", 0), ("minutes", -1),
     ("average", 1.0), ("judge_every", 0), ("clip", 0), ("accumulate", 2**31)],
)  # fmt: skip
def test_a_plan_out_of_range_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        Plan(**{name: value})
