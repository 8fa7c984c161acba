"""What a run gives away token by token: times, origins, counts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import NumericalError
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
        """When the last token came."""
        return max(s.last for s in self.samples)

    @property
    def tokens(self) -> int:
        """Output tokens."""
        return sum(len(s.token_ids) for s in self.samples)

    @property
    def decode_tokens(self) -> int:
        """N - 1, added up: tokens after each sample's first."""
        return self.tokens - len(self.samples)

    @property
    def decode_seconds(self) -> float:
        """T(N) - T(1): from the batch's first token to its last."""
        return self.end - min(s.first for s in self.samples)


def run(llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Batch:
    """Continue ``prompts`` (token ids, one sample each) together, watching the clock."""
    samples = [Sample() for _ in prompts]
    start = time.perf_counter()
    for event in llm.stream(list(prompts), list(params)):
        samples[event.prompt_index].take(event)
    for sample in samples:
        if sample.error is not None:
            raise NumericalError(f"a prompt failed: {sample.error}")
    return Batch(start, samples)
