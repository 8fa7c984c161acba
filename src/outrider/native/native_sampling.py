"""The logits pipeline and the shared noise in C++: one call for all rows."""

import math
from collections.abc import Sequence

from ..base.types import Row
from ..sampling.logprobs import Measure, measure
from ..sampling.philox import WORD
from ..sampling.pipeline import Logits, RequestPipeline, SequencePipeline
from ..sampling.shared_noise import SharedNoise
from .checks import free_with
from .choice import library
from .interface import Options
from .library import Library

OFF = 1.0
"""Stands for no min_p, whose logarithm is never above 0."""


class NativePipeline(SequencePipeline):
    """A sequence's pipeline whose bans, biases, penalties, temperature and truncation run in C++.

    Grammars, bad words of several tokens and custom processors come first, as in any pipeline.
    """

    def __init__(self, request: RequestPipeline, sample: int, step: Library) -> None:
        super().__init__(request)
        params = request.params
        least = 0 if self.has_grammar else params.min_tokens  # a grammar's masks enforce it
        self.vocab_size = request.vocab_size
        self._late = bool(params.logits_processors)
        # Raw logits may need no processing at all.
        self._changes = (
            not (params.greedy or (params.temperature, params.top_p, params.min_p) == (1, 1, 0))
            or params.penalises
            or params.top_k > 0
            or least > 0
            or bool(params.logit_bias)
            or request.banned is not None
        )
        self._step = step
        self._known = len(self._prompt)
        options = Options(
            seed=request.request.seed,
            presence=params.presence_penalty,
            temperature=0 if params.greedy else params.temperature,
            frequency=params.frequency_penalty,
            repetition=params.repetition_penalty,
            min_p=math.log(params.min_p) if params.min_p > 0 else OFF,
            top_p=params.top_p,
            top_k=min(max(0, params.top_k), request.vocab_size),
            vocabulary=request.vocab_size,
            sample=sample,
            prompt_length=len(self._prompt),
            min_tokens=least,
            penalises=params.penalises,
        )
        self.handle = step.new_pipeline(
            options,
            request.banned,
            request.ends if least else (),
            params.logit_bias or {},
            self._prompt if params.penalises else (),
        )
        free_with(self, step.free, "pipeline", self.handle)
        if not request.bad_words and not params.logits_processors:
            self.native_handle = self.handle

    def know(self, tokens: list[int]) -> None:
        """Take in what was committed since the last call; ``tokens`` are prompt and output."""
        if self.penalises and len(tokens) > self._known:
            self._step.count(self.handle, tokens[self._known :])
            self._known = len(tokens)

    def apply(self, logits: Logits, tokens: list[int], paths: list[list[int]]) -> Logits:
        """Process logits as ``SequencePipeline.apply`` does; they must be contiguous."""
        self._constrain(logits, tokens, paths)
        if not self._changes and not self._late:
            return logits
        if self._late:
            self._ban_and_bias(logits, tokens, paths)
            self._process(logits, tokens, paths)
        self.know(tokens)
        output = len(tokens) - len(self._prompt)
        self._step.apply_pipeline(self.handle, logits, output, paths, self._late)
        return logits


class NativeNoise(SharedNoise):
    """The shared noise, drawn where a token could win by it and never kept."""

    def __init__(self, vocab_size: int, step: Library) -> None:
        super().__init__(vocab_size)
        self._step = step

    def draw(self, z: Logits, rows: Sequence[Row]) -> tuple[list[int], list[float]]:
        keys = [(r.seed & WORD, r.seed >> 32, r.position, r.sample_index) for r in rows]
        return self._step.draw(z, keys, [r.greedy for r in rows])


def measurer() -> Measure:
    """Return the function that measures log probabilities."""
    step = library()
    return measure if step is None else step.logprobs


def sequence_pipeline(request: RequestPipeline, sample: int = 0) -> SequencePipeline:
    """Return the pipeline of a request's sample, native where there is a library."""
    step = library()
    return SequencePipeline(request) if step is None else NativePipeline(request, sample, step)


def shared_noise(vocab_size: int) -> SharedNoise:
    """Return the shared noise of an engine, native where there is a library."""
    step = library()
    return SharedNoise(vocab_size) if step is None else NativeNoise(vocab_size, step)
