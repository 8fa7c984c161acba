"""What callers get: requests as they are collected from events, and their outputs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from .errors import NumericalError
from .types import Counts, Drafted, Event, Logprobs, Origin, Request


@dataclass(frozen=True)
class CompletionOutput:
    """One sample: ``finish_reason`` is "stop", "length" or "error"; ``origins`` run with the ids.

    ``seed`` with the sample's ``index`` repeats it: ask for ``n > index`` samples of that seed.
    ``logprobs`` run with the ids, and ``cumulative_logprob`` is their sum over the sampled tokens;
    both are None unless asked for. ``stop_reason`` is the stop string or the stop token's id that
    ended the sample, None where EOS or a limit did.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    seed: int
    origins: list[Origin]
    logprobs: list[Logprobs] | None = None
    cumulative_logprob: float | None = None
    stop_reason: int | str | None = None


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
    """One sample so far, collected from events; ``accepted`` runs with ``drafts``."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    drafts: list[Drafted] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def take(self, event: Event) -> None:
        """Add what one event brings."""
        self.text += event.text
        if event.drafted is not None:
            self.drafts.append(event.drafted)
            self.accepted.append(0)
        if event.token_id is not None:
            self.token_ids.append(event.token_id)
            self.origins.append(event.origin)
            if event.origin is Origin.ACCEPTED:
                self.accepted[-1] += 1
            if event.logprobs is not None:
                self.logprobs.append(event.logprobs)
        if event.finish_reason is not None:
            self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason

    def output(self, index: int, request: Request) -> CompletionOutput:
        """The sample as the caller sees it."""
        listed = total = None
        if request.params.logprobs is not None:
            listed = self.logprobs
            pairs = zip(listed, self.token_ids, strict=True)
            total = sum(found[token].logprob for found, token in pairs)
        return CompletionOutput(
            index,
            self.text,
            self.token_ids,
            self.finish_reason or "",
            request.seed,
            self.origins,
            listed,
            total,
            self.stop_reason,
        )


@dataclass
class Pending:
    """A request under way, collected from events.

    ``prompt`` is its text, None where ids were given; ``start`` and ``end`` are seconds on
    ``time.perf_counter``, and ``queued`` how many the last of its samples waited.
    """

    prompt: str | None
    request: Request
    start: float = field(default_factory=time.perf_counter)
    first: float | None = None
    end: float = 0.0
    samples: list[Sample] = field(init=False)
    counts: Counts = field(default_factory=Counts)
    error: str | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    cached_tokens: int = 0
    queued: float | None = None

    def __post_init__(self) -> None:
        self.samples = [Sample() for _ in range(self.request.params.n)]

    def take(self, event: Event) -> None:
        """Add what one event brings."""
        self.end = time.perf_counter()
        self.samples[event.sample_index].take(event)
        if event.token_id is not None and self.first is None:
            self.first = self.end
        if event.start is not None:
            if event.sample_index == 0:  # one prompt, however many samples
                self.cached_tokens = event.start.cached_tokens
            self.queued = max(0.0, event.start.scheduled - self.start)
        if event.finish_reason is not None:
            self.error = self.error or event.error
        if event.counts is not None:
            self.counts.add(event.counts)
        self.prompt_logprobs = self.prompt_logprobs or event.prompt_logprobs

    @property
    def done(self) -> bool:
        """Whether every sample has ended."""
        return all(s.finish_reason for s in self.samples)

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token; None before it."""
        return None if self.first is None else self.first - self.start

    def output(self) -> RequestOutput:
        """The request as the caller sees it, as far as it has come."""
        tokens, counts = sum(len(s.token_ids) for s in self.samples), self.counts
        metrics = RequestMetrics(
            tokens_per_second=tokens / (self.end - self.start),
            ttft=self.ttft or 0.0,
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
