"""The training loop that all trainers share, from the order of samples to exact resumption."""

from __future__ import annotations

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from tqdm import tqdm

from ..base.fields import readable
from ..base.kept import part_of, read_kept, write_kept
from ..errors import ConfigError, TrainingError, shown
from .curves import CURVES, add_to_curves, cut_curves
from .muon import Muon
from .samples import Sample, Samples, batches

RUN, STATE = "run.json", "state.pt"
LAST_RATE = 0.05
"""Share of the learning rate that the cosine ends at."""
JUDGED = 32
"""Held-out samples that acceptance is judged on."""
JUDGEMENTS = 40
SAVE_SECONDS = 120.0
MOST = 1e9
"""Of any setting."""


@dataclass(frozen=True)
class Plan:
    """The settings of a training; a value out of its range raises ConfigError.

    Args:
        epochs: passes over the samples, unless ``steps`` or ``minutes`` are given. Minutes become
            steps once, by the time that a step takes.
        rate: the peak learning rate, of AdamW and of Muon, whose updates are scaled to AdamW's.
        batch: tokens of the target's answers in a batch, for each process.
        accumulate: batches of a step.
        warmup: share of the steps in which the learning rate rises.
        clip: largest norm of the gradients.
        decay: weight decay of Muon's matrices.
        average: decay of the running average of the weights.
        judge_every: fewest steps between two judgements of acceptance on held-out samples, of
            which there are about ``JUDGEMENTS`` at most.
        patience: judgements without a better one after which training stops, 0 for never.
        bf16: whether matrices are multiplied in bf16 (autocast); None for: on a GPU.
    """

    epochs: float = 3.0
    steps: int | None = None
    minutes: float | None = None
    rate: float = 1e-3
    batch: int = 2048
    accumulate: int = 1
    warmup: float = 0.03
    clip: float = 1.0
    decay: float = 0.3
    average: float = 0.99
    seed: int = 0
    judge_every: int = 50
    patience: int = 8
    bf16: bool | None = None

    def __post_init__(self) -> None:
        least: dict[str, float] = {
            "epochs": 0.001, "rate": 1e-9, "batch": 1, "accumulate": 1, "warmup": 0, "clip": 1e-6,
            "decay": 0, "average": 0, "seed": 0, "judge_every": 1, "patience": 0,
        }  # fmt: skip
        if self.steps is not None:
            least["steps"] = 1
        if self.minutes is not None:
            least["minutes"] = 0.01
        for name, low in least.items():
            value = getattr(self, name)
            if not low <= value <= MOST:  # false for NaN
                raise ConfigError(f"{name} is {shown(value)}; give {low:g} to {MOST:,.0f}.")
        if self.average >= 1 or self.warmup >= 1:
            raise ConfigError("average and warmup are shares below 1; give less.")

    def share(self, step: int) -> float:
        """Return the share of the learning rate at a step: a linear start, then a cosine."""
        assert self.steps is not None
        start = max(1, round(self.warmup * self.steps))
        if step < start:
            return (step + 1) / start
        done = (step - start) / max(1, self.steps - start)
        return LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * done)) / 2


class Learned(NamedTuple):
    """The result of a batch: the mean loss, and the tokens of the target's answers in it."""

    loss: float
    tokens: int


class Judged(NamedTuple):
    """Acceptance lengths forecast on held-out samples: at temperature 0, and at 1 as coupled."""

    acceptance_length: float
    coupled_length: float


class Task(ABC):
    """A module to train, its loss, and how its acceptance is judged."""

    module: nn.Module

    @abstractmethod
    def learn(self, batch: Sequence[Sample]) -> Learned:
        """Add a batch's gradients to those of the module."""

    def rehearse(self, batch: Sequence[Sample]) -> None:
        """Do what ``learn`` does in the middle of a training, to be timed beforehand."""
        self.learn(batch)

    @abstractmethod
    def judge(self, samples: Sequence[Sample]) -> Judged:
        """Return the acceptance lengths forecast on samples."""


class Optimisers:
    """Muon for a module's inner matrices, AdamW for embeddings, output matrices and vectors."""

    def __init__(self, module: nn.Module, plan: Plan) -> None:
        inner: list[nn.Parameter] = []
        outer: list[nn.Parameter] = []
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                inside = parameter.ndim == 2 and "embed" not in name and "head" not in name
                (inner if inside else outer).append(parameter)
        self._all: list[torch.optim.Optimizer] = []
        if inner:
            self._all.append(Muon(inner, plan.rate, momentum=0.95, weight_decay=plan.decay))
        if outer:
            self._all.append(
                torch.optim.AdamW(outer, lr=plan.rate, betas=(0.9, 0.95), weight_decay=0.0)
            )

    def step(self, rate: float) -> None:
        """Update the parameters at a learning rate."""
        for each in self._all:
            for group in each.param_groups:
                group["lr"] = rate
            each.step()

    def state_dict(self) -> list[Any]:
        """Return the states of the optimisers."""
        return [each.state_dict() for each in self._all]

    def load_state_dict(self, states: list[Any]) -> None:
        """Set the states of the optimisers."""
        for each, state in zip(self._all, states, strict=True):
            each.load_state_dict(state)


class Average:
    """A running average (EMA) of a module's parameters, whose decay rises with the steps."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._module, self._decay = module, decay
        self.values = {name: value.clone() for name, value in trained(module).items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the parameters after a step."""
        decay = min(self._decay, (1 + step) / (10 + step))
        for name, value in trained(self._module).items():
            self.values[name].lerp_(value, 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Set the module to the average for the time of the context."""
        own = {name: value.clone() for name, value in trained(self._module).items()}
        self._module.load_state_dict(self.values, strict=False)
        try:
            yield
        finally:
            self._module.load_state_dict(own, strict=False)


class Training:
    """One training in a folder, which goes on where it was interrupted, to the bit.

    ``about`` says what is trained on what; a folder goes on only with the same.
    Raises ConfigError: the folder is another training's. TrainingError: the loss is not finite; the
    state that was saved before is kept.
    """

    def __init__(
        self, task: Task, samples: Samples, plan: Plan, folder: Path, about: dict[str, Any]
    ) -> None:
        self.task, self.samples, self.folder = task, samples, folder
        self.accelerator = Accelerator(cpu=on_cpu())
        task.module.to(self.accelerator.device)
        if not samples.said or not samples.held_out:
            count = len(samples.train) + len(samples.held_out)
            raise ConfigError(
                f"{count} samples, {samples.said} tokens to learn from and {len(samples.held_out)} "
                "samples held out are too few; write more (outrider train data)."
            )
        self.optimisers = Optimisers(task.module, plan)
        self.average = Average(task.module, plan.average)
        self.step, self.seconds, self.tokens = 0, 0.0, 0
        self.best, self.since = -math.inf, 0
        with self.accelerator.main_process_first():  # the others read what it has written
            self.plan = self._settled(plan, {"about": about, "plan": asdict(plan)})
            self._load()

    def _settled(self, plan: Plan, said: dict[str, Any]) -> Plan:
        """Return the plan with its number of steps, which is decided once and kept."""
        file = self.folder / RUN
        said = json.loads(json.dumps(said))
        if file.exists():
            with readable(f"{file} is damaged", "give a new folder."):
                kept = read_kept(file)
                parts, steps = {part: dict(kept[part]) for part in said}, int(kept["steps"])
            for part, values in said.items():
                theirs = parts[part]
                for name in sorted({*values, *theirs}):
                    if values.get(name) != theirs.get(name):
                        raise ConfigError(
                            f"{self.folder} has a training whose {name} is "
                            f"{shown(theirs.get(name))}, not {shown(values.get(name))}; give the "
                            "same to go on, or a new folder."
                        )
            return replace(plan, steps=steps)
        steps = plan.steps or self._num_steps(plan)
        write_kept(file, {**said, "steps": steps})
        return replace(plan, steps=steps)

    def _num_steps(self, plan: Plan) -> int:
        """Return a plan's number of steps; the first epoch takes longer than later ones."""
        per_step = plan.batch * plan.accumulate * int(self.accelerator.num_processes)
        epoch = self.samples.said / per_step
        if plan.minutes is None:
            return max(1, round(plan.epochs * epoch))
        warm, other = [*islice(cycle(batches(self.samples.train, plan.batch)), 2)]
        self._seconds(warm, plan)
        first, again = (self._seconds(other, plan) * plan.accumulate for _ in range(2))
        left = plan.minutes * 60 - epoch * first
        return max(1, int(epoch + left / again if left > 0 else plan.minutes * 60 / first))

    def _seconds(self, batch: Sequence[Sample], plan: Plan) -> float:
        """Return the time of a step of one batch, after which all parameters are as they were."""
        module = self.task.module
        begin = time.perf_counter()
        with self._computing(plan):
            self.task.rehearse(batch)
        Optimisers(module, plan).step(0.0)  # a rate of 0 changes nothing
        module.zero_grad()
        return time.perf_counter() - begin

    def run(self) -> Judged:
        """Train to the end; return the forecast acceptance of the averaged parameters.

        Module and average are in main memory then.
        """
        try:
            return self._run()
        finally:
            self.task.module.cpu()
            self.average.values = {n: value.cpu() for n, value in self.average.values.items()}

    def _run(self) -> Judged:
        plan, module = self.plan, self.task.module
        assert plan.steps is not None
        if self.step >= plan.steps or self._is_stuck:
            return self._judge()
        judged, every = Judged(math.nan, math.nan), max(plan.judge_every, plan.steps // JUDGEMENTS)
        saved = clock = time.monotonic()
        bar = tqdm(
            total=plan.steps, initial=self.step, desc="training", unit="step", leave=False,
            dynamic_ncols=True, disable=None if self.accelerator.is_main_process else True,
        )  # fmt: skip
        with bar:
            for micro in self._batches():
                loss = self._learn(micro)
                rate = plan.rate * plan.share(self.step)
                self.optimisers.step(rate)
                module.zero_grad()
                self.average.update(self.step)
                self.step += 1
                now = time.monotonic()
                self.seconds, clock = self.seconds + now - clock, now
                last = self.step == plan.steps
                if last or self.step % every == 0:
                    judged = self._judge()
                    clock = time.monotonic()
                    self._log(rate, loss, judged)
                    better = judged.acceptance_length > self.best
                    self.best = max(self.best, judged.acceptance_length)
                    self.since = 0 if better else self.since + 1
                    last = last or self._is_stuck
                bar.update()
                accepts = f", acceptance length {judged.acceptance_length:.2f}"
                known = not math.isnan(judged.acceptance_length)
                bar.set_postfix_str(f"loss {loss:.3f}{accepts if known else ''}", refresh=False)
                if last or now - saved > SAVE_SECONDS:
                    self._save()
                    saved = now
                if last:
                    break
        return judged

    @property
    def _is_stuck(self) -> bool:
        """True if acceptance has not become better for ``patience`` judgements."""
        return 0 < self.plan.patience <= self.since

    def _batches(self) -> Iterator[list[list[Sample]]]:
        """Yield this process's batches of each step from the present one on.

        Batches at the end of an epoch that are fewer than the processes are left out.
        """
        plan, world = self.plan, self.accelerator
        number = epoch = 0
        while True:
            order = batches(self.samples.epoch(plan.seed, epoch), plan.batch)
            while step := [*islice(order, plan.accumulate * world.num_processes)]:
                if len(step) < world.num_processes and number:
                    break
                if number >= self.step:
                    yield step[world.process_index :: world.num_processes]
                number += 1
            epoch += 1

    def _learn(self, micro: Sequence[Sequence[Sample]]) -> float:
        """Average a step's gradients over batches and processes, and clip them; return the loss."""
        module, total = self.task.module, 0.0
        for batch in micro:
            with self._computing(self.plan):
                learned = self.task.learn(batch)
            total += learned.loss / len(micro)
            self.tokens += learned.tokens
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        for gradient in gradients:
            gradient /= len(micro)
            if self.accelerator.num_processes > 1:
                gradient.copy_(self.accelerator.reduce(gradient, "mean"))
        norm = nn.utils.clip_grad_norm_(module.parameters(), self.plan.clip)
        if not (math.isfinite(total) and bool(torch.isfinite(norm))):
            raise self._diverged("the loss", self.step + 1)
        return total

    @contextmanager
    def _computing(self, plan: Plan) -> Iterator[None]:
        """Have tensors made on the training's device, and products computed as the plan says."""
        device = self.accelerator.device
        bf16 = device.type != "cpu" if plan.bf16 is None else plan.bf16
        with device, torch.autocast(device.type, torch.bfloat16, bf16):
            yield

    def _diverged(self, what: str, step: int) -> TrainingError:
        """Return the error of a loss or weight that is not finite."""
        file = self.folder / STATE
        kept = f"{file} has the last good state" if file.exists() else "nothing was saved yet"
        return TrainingError(
            f"{what} is not finite at step {step}; {kept}, lower the learning rate (--rate) in a "
            "new folder."
        )

    def _judge(self) -> Judged:
        """Return the forecast acceptance of the averaged parameters on held-out samples."""
        with self.average.applied(), torch.no_grad(), self.accelerator.device:
            return self.task.judge(self.samples.held_out[:JUDGED])

    def _log(self, rate: float, loss: float, judged: Judged) -> None:
        """Add a line to the curves."""
        if self.accelerator.is_main_process:
            figures = (f"{x:.6g}" for x in (rate, loss, *judged))
            row = self.step, f"{self.seconds:.1f}", self.tokens, *figures
            add_to_curves(self.folder / CURVES, row)

    def _save(self) -> None:
        """Save all that a later run needs to go on, whole or not at all."""
        if not all(bool(value.isfinite().all()) for value in self.average.values.values()):
            raise self._diverged("a weight", self.step)
        if not self.accelerator.is_main_process:
            return
        state: dict[str, Any] = {
            "module": trained(self.task.module), "average": self.average.values,
            "optimisers": self.optimisers.state_dict(), "step": self.step,
            "seconds": self.seconds, "tokens": self.tokens, "best": self.best,
            "since": self.since,
        }  # fmt: skip
        with part_of(self.folder / STATE) as part, part.open("wb") as opened:
            try:
                torch.save(state, opened)
            except RuntimeError as error:  # torch's writer hides what the system said
                raise error.__context__ or error from None

    def _load(self) -> None:
        """Go on from what was saved, if anything was."""
        file = self.folder / STATE
        if not file.exists():
            if self.accelerator.is_main_process:
                (self.folder / CURVES).unlink(missing_ok=True)
            return
        remedy = "remove it to begin again, or give a new folder."
        with readable(f"{file} is damaged, or another training's", remedy):
            with ZipFile(file) as archive:
                if archive.testzip() is not None:
                    raise ValueError("a checksum differs")
            state = torch.load(file, weights_only=True, map_location=self.accelerator.device)
            self._take(state)
        if self.accelerator.is_main_process:
            cut_curves(self.folder / CURVES, self.step)

    def _take(self, state: dict[str, Any]) -> None:
        """Go on from a state. Raises ValueError, LookupError, RuntimeError: it does not fit."""
        own, *theirs = (
            {name: value.shape for name, value in values.items()}
            for values in (self.average.values, state["average"], state["module"])
        )
        if theirs != [own, own]:
            raise ValueError("its weights are others")
        self.task.module.load_state_dict(state["module"], strict=False)
        self.optimisers.load_state_dict(state["optimisers"])
        self.average.values = state["average"]
        for name in ("step", "seconds", "tokens", "best", "since"):
            setattr(self, name, state[name])


def on_cpu() -> bool:
    """Return whether accelerate is to use the CPU: there is no GPU."""
    return not torch.cuda.is_available()


def trained(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a module that are trained, by name."""
    return {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}
