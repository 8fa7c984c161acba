"""The training loop that all trainers share, from the order of samples to exact resumption."""

from __future__ import annotations

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

import torch
from accelerate import Accelerator
from torch import nn
from tqdm import tqdm

from ..base.fields import readable
from ..base.kept import part_of, read_kept, write_kept
from ..errors import ConfigError, TrainingError, shown
from .curves import CURVES, add_to_curves, cut_curves
from .optimisers import Average, Optimisers, copied, trained
from .plan import Plan
from .precision import gains_from_bf16
from .samples import Sample, Samples, batches

RUN, STATE = "run.json", "state.pt"
JUDGED = 32
"""Held-out samples that acceptance is judged on."""
JUDGEMENTS = 40
"""Approximate upper bound on the judgements of a training."""
SAVE_SECONDS = 120.0


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


class Training:
    """One training in a folder; after an interruption it resumes bit-identically.

    ``about`` says what is trained on what; a folder is resumed only with the same.
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
        self.finest = copied(self.average.values)
        """The averages that were judged best; a training that stops early ends with them."""
        with self.accelerator.main_process_first():  # the others read what it has written
            self.plan = self._settled(plan, {"about": about, "plan": asdict(plan)})
            self._load()

    def _settled(self, plan: Plan, said: dict[str, Any]) -> Plan:
        """Return the plan with its number of steps and its precision, decided once and kept."""
        file = self.folder / RUN
        said = json.loads(json.dumps(said))
        if file.exists():
            with readable(f"{file} is damaged", "give a new folder."):
                kept = read_kept(file)
                parts = {part: dict(kept[part]) for part in said}
                steps = int(kept["steps"])
                bf16 = bool(kept.get("bf16", parts["plan"]["bf16"]))  # older files lack it
            for part, values in said.items():
                theirs = parts[part]
                for name in sorted({*values, *theirs}):
                    if values.get(name) != theirs.get(name):
                        raise ConfigError(
                            f"{self.folder} has a training whose {name} is "
                            f"{shown(theirs.get(name))}, not {shown(values.get(name))}; give the "
                            "same to go on, or a new folder."
                        )
            return replace(plan, steps=steps, bf16=bf16)
        if plan.bf16 is None:
            plan = replace(plan, bf16=gains_from_bf16(self.accelerator.device.type))
        steps = plan.steps or self._num_steps(plan)
        write_kept(file, {**said, "steps": steps, "bf16": plan.bf16})
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
        """Return the seconds of a step on one batch, which leaves all parameters unchanged."""
        module = self.task.module
        begin = time.perf_counter()
        with self._computing(plan):
            self.task.rehearse(batch)
        Optimisers(module, plan).step(0.0)  # a rate of 0 changes nothing
        module.zero_grad()
        return time.perf_counter() - begin

    def run(self) -> Judged:
        """Train to the end; return the forecast acceptance of the averaged parameters.

        Module and average are then in main memory.
        """
        try:
            return self._run()
        finally:
            self.task.module.cpu()
            self.average.values = {n: value.cpu() for n, value in self.average.values.items()}

    def _run(self) -> Judged:
        plan, module = self.plan, self.task.module
        assert plan.steps is not None
        if self.step >= plan.steps or self._is_stuck():
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
                    if judged.acceptance_length > self.best:
                        self.best, self.since = judged.acceptance_length, 0
                        self.finest = copied(self.average.values)
                    else:
                        self.since += 1
                    if self._is_stuck():
                        self.average.values, last = self.finest, True
                        judged = self._judge()
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

    def _is_stuck(self) -> bool:
        """True if acceptance has not become better for ``patience`` judgements."""
        return 0 < self.plan.patience <= self.since

    def _batches(self) -> Iterator[list[list[Sample]]]:
        """Yield this process's batches of each step from the present one on.

        If an epoch ends with fewer batches than processes, these are left out.
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
        """Make tensors on the training's device, and compute products in the plan's precision."""
        device = self.accelerator.device
        with device, torch.autocast(device.type, torch.bfloat16, plan.bf16 is True):
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
            "finest": self.finest, "optimisers": self.optimisers.state_dict(), "step": self.step,
            "seconds": self.seconds, "tokens": self.tokens, "best": self.best,
            "since": self.since,
        }  # fmt: skip
        with part_of(self.folder / STATE) as part, part.open("wb") as opened:
            try:
                torch.save(state, opened)
            except RuntimeError as error:  # torch's writer hides the system's error
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
            for values in (self.average.values, state["average"], state["finest"], state["module"])
        )
        if theirs != 3 * [own] or not 0 <= state["step"] <= (self.plan.steps or 0):
            raise ValueError("its weights or steps are others")
        self.task.module.load_state_dict(state["module"], strict=False)
        self.optimisers.load_state_dict(state["optimisers"])
        self.average.values, self.finest = state["average"], state["finest"]
        for name in ("step", "seconds", "tokens", "best", "since"):
            setattr(self, name, state[name])


def on_cpu() -> bool:
    """Return whether accelerate is to use the CPU: there is no GPU."""
    return not torch.cuda.is_available()
