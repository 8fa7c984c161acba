"""What callers get: requests as they are collected from events, and their outputs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from .errors import NumericalError
from .types import Counts, Event, Logprobs, Origin, Request


@dataclass(frozen=True)
class CompletionOutput:
    """One sample: ``finish_reason`` is "stop", "length" or "error"; ``origins`` run with the ids.

    ``seed`` with the sample's ``index`` repeats it: ask for ``n > index`` samples of that seed.
    ``logprobs`` run with the ids, and ``cumulative_logprob`` is their sum over the sampled tokens;
    both are None unless asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    seed: int
    origins: list[Origin]
    logprobs: list[Logprobs] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """How a request went, its samples together.

    ``tokens_per_second`` is output tokens over the time from the call to the last token, ``ttft``
    the seconds to the first token; the rest is defined at ``Counts``.
    """

    tokens_per_second: float
    ttft: float
    steps: int
    drafted: int
    accepted: int
    acceptance_rate: float | None
    acceptance_length: float | None
    acceptance_by_position: list[float]


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and what was made of it; ``prompt`` is None where ids were given.

    ``prompt_logprobs`` run with the prompt's ids if asked for, None for the first.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[Logprobs | None] | None = None


@dataclass
class Sample:
    """One sample, collected from events."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: str = ""

    def output(self, index: int, request: Request) -> CompletionOutput:
        """The sample as the caller sees it."""
        listed = total = None
        if request.params.logprobs is not None:
            listed = self.logprobs
            pairs = zip(listed, self.token_ids, strict=True)
            total = sum(found[token].logprob for found, token in pairs)
        return CompletionOutput(
            index,
            "".join(self.text),
            self.token_ids,
            self.finish_reason,
            request.seed,
            self.origins,
            listed,
            total,
        )


@dataclass
class Pending:
    """A request under way, collected from events."""

    prompt: str | None
    request: Request
    start: float
    samples: list[Sample]
    counts: Counts = field(default_factory=Counts)
    first: float = 0.0
    end: float = 0.0
    error: str | None = None
    prompt_logprobs: list[Logprobs | None] | None = None

    def take(self, event: Event) -> None:
        self.end = time.perf_counter()
        sample = self.samples[event.sample_index]
        sample.text.append(event.text)
        if event.token_id is not None:
            self.first = self.first or self.end
            sample.token_ids.append(event.token_id)
            sample.origins.append(event.origin)
            if event.logprobs is not None:
                sample.logprobs.append(event.logprobs)
            self.prompt_logprobs = self.prompt_logprobs or event.prompt_logprobs
        if event.finish_reason is not None:
            sample.finish_reason = event.finish_reason
            self.error = self.error or event.error
        if event.counts is not None:
            self.counts.add(event.counts)

    @property
    def done(self) -> bool:
        return all(s.finish_reason for s in self.samples)

    def output(self) -> RequestOutput:
        tokens, counts = sum(len(s.token_ids) for s in self.samples), self.counts
        metrics = RequestMetrics(
            tokens_per_second=tokens / (self.end - self.start),
            ttft=max(0.0, self.first - self.start),
            steps=counts.steps,
            drafted=counts.drafted,
            accepted=counts.accepted,
            acceptance_rate=counts.acceptance_rate,
            acceptance_length=counts.acceptance_length,
            acceptance_by_position=counts.acceptance_by_position,
        )
        outputs = [s.output(i, self.request) for i, s in enumerate(self.samples)]
        ids = list(self.request.prompt_token_ids)
        return RequestOutput(self.prompt, ids, outputs, metrics, self.prompt_logprobs)


class GenerationError(NumericalError):
    """Some requests of a call failed; ``outputs`` holds every request's, the good ones whole."""

    def __init__(self, message: str, outputs: list[RequestOutput]) -> None:
        super().__init__(message)
        self.outputs = outputs
