"""Samples of random ids to train on, and adaptations that measure little."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from outrider.training import adapt, served
from outrider.training.samples import About, DataFolder, Sample

CONTEXT = 64


def random_samples(
    count: int, length: int, low: int = 3, high: int = 300, seed: int = 0
) -> list[Sample]:
    """Return samples of ids from ``low`` up to ``high``, in which nine tokens are the prompt."""
    draw = np.random.default_rng(seed)
    said = np.arange(length) >= 9
    return [
        Sample(draw.integers(low, high, length).astype(np.int32), said, n) for n in range(count)
    ]


def data_of(
    samples: Sequence[Sample], target: Path, folder: Path, vocab_size: int = 320
) -> DataFolder:
    """Return a folder of samples, one of each prompt, as if ``target`` had said them."""
    about = About(str(target), vocab_size, "", len(samples), (0.0,), 15, CONTEXT, 0)
    data = DataFolder(folder, about, ())
    data.add(samples, 0, len(samples))
    return data


def measure_little(monkeypatch: pytest.MonkeyPatch, tokens: int = 12) -> None:
    """Have ``adapt`` measure on four prompts, so many tokens of each, once."""
    monkeypatch.setattr(served, "ROUNDS", 1)
    monkeypatch.setattr(adapt, "MOST_PROMPTS", 4)
    monkeypatch.setattr(adapt, "MEASURED_TOKENS", tokens)
