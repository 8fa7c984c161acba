"""The settings of a training."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import ConfigError, shown

LAST_RATE = 0.05
"""Share of the learning rate that the cosine ends at."""
LEAST_MINUTES = 0.01
MOST = 1e9
"""Largest value of any setting."""


@dataclass(frozen=True)
class Plan:
    """The settings of a training; a value out of its range raises ConfigError.

    Args:
        epochs: passes over the samples, unless ``steps`` or ``minutes`` are given. Minutes are
        converted to steps once, by the measured time of a step.
        rate: the peak learning rate, of AdamW and of Muon, whose updates are scaled to AdamW's.
        batch: tokens of the target's answers in a batch, for each process.
        accumulate: batches of a step.
        warmup: share of the steps in which the learning rate rises.
        clip: largest norm of the gradients.
        decay: weight decay of Muon's matrices.
        average: decay of the running average of the weights.
        judge_every: fewest steps between two judgements of acceptance on held-out samples, of
            which there are about ``loop.JUDGEMENTS`` at most.
        patience: judgements without improvement after which training stops; 0 for never.
        bf16: whether matrices are multiplied in bf16 (autocast); None: if that is faster.
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
            least["minutes"] = LEAST_MINUTES
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
