"""The record of a run, token by token: times, origins, counts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import NumericalError
from ..input_processor import Prompt
from ..llm import LLM
from ..types import Counts, Event, Origin, SamplingParams


@dataclass
class Sample:
    """One sample as it comes; ``first`` and ``last`` are when its first and last token came, s.

    ``pieces`` are its text with the origin of the token that released it.
    """

    token_ids: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    pieces: list[tuple[str, Origin]] = field(default_factory=list)
    first: float = 0.0
    last: float = 0.0
    finish_reason: str | None = None
    error: str | None = None
    counts: Counts = field(default_factory=Counts)

    def take(self, event: Event) -> None:
        """Note one event, now."""
        if event.text:
            self.pieces.append((event.text, event.origin))
        if event.token_id is not None:
            self.last = time.perf_counter()
            self.first = self.first or self.last
            self.token_ids.append(event.token_id)
            self.origins.append(event.origin)
        self.finish_reason = event.finish_reason
        self.error = event.error
        self.counts = event.counts or self.counts

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)


@dataclass(frozen=True)
class Batch:
    """Samples that ran together, one a prompt, and when they were asked for."""

    start: float
    samples: list[Sample]

    @property
    def end(self) -> float:
        """The time of the last token."""
        return max(s.last for s in self.samples)

    @property
    def decode_tokens(self) -> int:
        """N - 1, added up: tokens after each sample's first."""
        return sum(len(sample.token_ids) - 1 for sample in self.samples)

    @property
    def decode_seconds(self) -> float:
        """T(N) - T(1): from the batch's first token to its last."""
        return self.end - min(s.first for s in self.samples)


def run(llm: LLM, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> Batch:
    """Continue ``prompts`` (one sample each) together, watching the clock."""
    samples = [Sample() for _ in prompts]
    start = time.perf_counter()
    for event in llm.stream(list(prompts), list(params)):
        samples[event.prompt_index].take(event)
    for sample in samples:
        if sample.error is not None:
            raise NumericalError(f"a prompt failed: {sample.error}")
    return Batch(start, samples)


@dataclass(frozen=True)
class Pass:
    """All prompts once, in batches one after the other."""

    batches: list[Batch]

    @property
    def samples(self) -> list[Sample]:
        return [sample for batch in self.batches for sample in batch.samples]

    @property
    def outputs(self) -> list[list[int]]:
        return [sample.token_ids for sample in self.samples]

    @property
    def seconds(self) -> float:
        """From each batch's call to its last token, added up."""
        return sum(batch.end - batch.start for batch in self.batches)

    @property
    def decode_tokens(self) -> int:
        return sum(batch.decode_tokens for batch in self.batches)

    @property
    def speed(self) -> float:
        """Decode speed, (N-1)/(T(N)-T(1)), in tokens a second."""
        return self.decode_tokens / sum(batch.decode_seconds for batch in self.batches)

    @property
    def end_to_end(self) -> float:
        """Tokens a second from the call on, the prompts' time included."""
        return sum(map(len, self.outputs)) / self.seconds

    @property
    def latency(self) -> float:
        """Seconds that a sequence waits for a token."""
        return sum(s.last - s.first for s in self.samples) / self.decode_tokens

    @property
    def ttft(self) -> float:
        """Seconds from the first batch's call to its first token."""
        return min(sample.first for sample in self.batches[0].samples) - self.batches[0].start

    @property
    def counts(self) -> Counts:
        total = Counts()
        for sample in self.samples:
            total.add(sample.counts)
        return total


def run_all(
    llm: LLM, prompts: Sequence[Prompt], params: Sequence[SamplingParams], size: int = 1
) -> Pass:
    """Continue all ``prompts``, ``size`` at a time."""
    starts = range(0, len(prompts), size)
    return Pass([run(llm, prompts[i : i + size], params[i : i + size]) for i in starts])
