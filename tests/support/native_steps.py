"""The native libraries that can be tried here."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.base.types import Request, SamplingParams, SequenceState
from outrider.models.native import NativeTransformer
from outrider.native import choice as native
from outrider.native.library import Library
from outrider.native.native_sampling import NativePipeline
from outrider.sampling.pipeline import RequestPipeline
from outrider.text.detokenize import Detokenizer

HERE = tuple(sorted(native.available(), key=native.fastest().__eq__))
"""The instruction sets that were built and that this CPU runs, the fastest one last."""
FUSED = native.ISAS[1:]
"""Those of this architecture that fuse products and sums: all but "portable"."""


def native_noise(
    step: Library, seed: int, position: int, sample: int, count: int
) -> NDArray[np.float32]:
    """The noise of ids below ``count`` at a position, by C++."""
    return np.array(step.noise(seed, position, sample, count), np.float32)


def step(isa: str) -> Library:
    found = native.open_library(isa)
    assert found is not None
    if found.isa != isa:
        pytest.skip(f"{isa} was not built")
    return found


def sequence_of(model: NativeTransformer, number: int, **options: Any) -> SequenceState:
    """A sequence of random tokens, the same for the same number."""
    rng = random.Random(number)
    tokens = [rng.randrange(4, model.shape.vocab_size) for _ in range(rng.randint(2, 30))]
    request = Request(f"{number}", tuple(tokens), SamplingParams(**options), 77 + number)
    pipeline = RequestPipeline(request, model.shape.vocab_size)
    native = NativePipeline(pipeline, 0, model.library)
    return SequenceState(f"{number}", request, 0, Detokenizer(None, (), ()), native, tokens)
