"""Turns events into outputs: text, the states of running requests, and public results."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tokenizers import AddedToken

from ..base.types import Counts, Drafted, Event, Logprob, Logprobs, Origin, Request
from ..engine.scheduler import unexpected
from ..text.codec import TextCodec
from ..text.detokenize import Detokenizer
from ..text.intersection import Spelling, spelling_of
from ..text.places import Places


@dataclass(frozen=True)
class CompletionOutput:
    """One sample of a request; ``origins`` and ``logprobs`` are parallel to ``token_ids``.

    ``finish_reason`` is "stop", "length" or "error", None while the sample runs. ``stop_reason`` is
    the stop string or the stop token's id that ended it, None where EOS or a limit did.
    ``seed`` with ``index`` reproduces the sample: ask for ``n > index`` samples of that seed.
    ``cumulative_logprob`` is the sum over the sampled tokens; it and ``logprobs`` are None unless
    asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    seed: int
    origins: list[Origin]
    logprobs: list[Logprobs] | None = None
    cumulative_logprob: float | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Return whether the sample has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestMetrics:
    """Times and counts of a request, its samples together.

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
    """A prompt and its samples; ``prompt`` is None if token ids were given.

    ``num_cached_tokens`` counts the prompt's tokens that the prefix cache held. ``prompt_logprobs``
    are parallel to the prompt's ids if asked for, None for the first.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics
    prompt_logprobs: list[Logprobs | None] | None = None


@dataclass
class SampleState:
    """One sample so far, collected from events."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    drafts: list[Drafted] = field(default_factory=list)

    def take(self, events: Sequence[Event]) -> None:
        """Add the events of a step, or some of them, in order."""
        first, last = events[0], events[-1]
        _, _, tokens, texts, origins, _, _, _, logprobs, *_ = zip(*events, strict=True)
        self.text += "".join(texts)
        if first.drafted is not None:
            self.drafts.append(first.drafted)
        if last.token_id is not None:
            self.token_ids += tokens
            self.origins += origins
            if last.logprobs is not None:
                self.logprobs += logprobs
        if last.finish_reason is not None:
            self.finish_reason, self.stop_reason = last.finish_reason, last.stop_reason

    def output(self, index: int, request: Request) -> CompletionOutput:
        """Return the sample as the caller sees it."""
        logprobs = total = None
        if request.params.logprobs is not None:
            logprobs = self.logprobs
            pairs = zip(logprobs, self.token_ids, strict=True)
            total = sum(each[token].logprob for each, token in pairs)
        return CompletionOutput(
            index, self.text, self.token_ids, self.finish_reason, request.seed, self.origins,
            logprobs, total, self.stop_reason,
        )  # fmt: skip


class OutputProcessor:
    """Writes the text of tokens, for every request of a model; without a ``codec`` it is empty."""

    def __init__(self, codec: TextCodec | None) -> None:
        self.tokenizer = codec.backend if codec else None
        self._words: dict[int, str] = {}

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included; empty for a model without text."""
        if self.tokenizer is None:
            return ""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def word(self, id: int) -> str:
        """Return the text of a single token, with U+FFFD for parts of characters."""
        if id not in self._words:
            self._words[id] = self.bytes_of(id).decode(errors="replace")
        return self._words[id]

    def piece(self, id: int) -> str:
        """Return a token as the tokenizer's vocabulary spells it, such as ``Ġthe``."""
        return (self.tokenizer and self.tokenizer.id_to_token(id)) or ""

    def bytes_of(self, id: int) -> bytes:
        """Return the bytes that a token stands for, which may be a part of a character."""
        added = self._added.get(id)
        if added is not None:
            return added.content.encode(errors="replace")
        if self._spelling is None:
            return self.decode([id]).encode(errors="replace")
        return self._spelling.bytes_of(self.piece(id))

    def places(self, request: Request, start: int) -> Callable[[int], int]:
        """Return a function that takes an output's tokens and returns their positions in the text.

        The output begins at ``start``.
        """
        places, shown = Places(self.writer(request), start), self.shown(request)
        return lambda id: places.add(id, shown(id))

    def shown(self, request: Request) -> Callable[[int], bytes]:
        """Return a function from a token to its bytes in a request's text, which may hide it."""
        skip = request.params.skip_special_tokens

        def shown(id: int) -> bytes:
            hidden = skip and id in self._added and self._added[id].special
            return b"" if hidden else self.bytes_of(id)

        return shown

    def writer(self, request: Request) -> Detokenizer:
        """Return a detokenizer for a sample of a request; its text includes stop strings."""
        ids, skip = request.prompt_token_ids, request.params.skip_special_tokens
        return Detokenizer(self.tokenizer, ids, (), skip_special=skip)

    @cached_property
    def _spelling(self) -> Spelling | None:
        return spelling_of(self.tokenizer) if self.tokenizer else None

    @cached_property
    def _added(self) -> dict[int, AddedToken]:
        return self.tokenizer.get_added_tokens_decoder() if self.tokenizer else {}

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """The texts of the tokenizer's special tokens, and their ids."""
        return {token.content: id for id, token in self._added.items() if token.special}

    def words(self, logprobs: Logprobs) -> Logprobs:
        """Return log probabilities with the text of each token."""
        return {i: Logprob(p.logprob, p.rank, self.word(i)) for i, p in logprobs.items()}


class RequestState:
    """A request under way: writes the text of its events and collects them.

    ``started`` and ``ended`` are on ``time.perf_counter``, ``queued`` the seconds that the last of
    its samples waited, ``cached_tokens`` those of the prompt that the prefix cache held.
    """

    def __init__(
        self, outputs: OutputProcessor, request: Request, prompt: str | None, index: int
    ) -> None:
        params = request.params
        self.request, self.prompt, self.index = request, prompt, index
        self.samples = [SampleState() for _ in range(params.n)]
        self.counts = Counts()
        self.error: str | None = None
        self.broken = False
        """True if the frontend must end the request, which the engine would continue."""
        self.prompt_logprobs: list[Logprobs | None] | None = None
        self.cached_tokens = 0
        self.queued: float | None = None
        self.started = self.ended = time.perf_counter()
        self._first: float | None = None
        self._outputs = outputs
        self._texts: list[Detokenizer] | None = None
        if outputs.tokenizer is not None and not params.stop:  # else the engine writes the text
            self._texts = [outputs.writer(request) for _ in self.samples]

    def take(self, event: Event) -> Event:
        """Add one event; return it with its text, if that can be written, and the index."""
        try:
            text, reason, error = self._text(event), event.finish_reason, event.error
        except Exception as problem:  # in its text: the other requests go on
            self.broken = True
            text, reason, error = event.text, "error", unexpected(problem)
        # Not by _replace, which takes twice as long.
        id, sample, token, _, origin, _, _, *more, stop, _ = event
        whole = id, sample, token, text, origin, reason, error, *more, stop, self.index
        return self.collect([Event._make(whole)])[0]

    def collect(self, events: Sequence[Event]) -> Sequence[Event]:
        """Add events of one sample and step; return them with the texts of log probabilities."""
        if events[0].logprobs or events[0].prompt_logprobs:
            events = [self._with_words(event) for event in events]
        first, last = events[0], events[-1]
        self.ended = time.perf_counter()
        self.samples[first.sample_index].take(events)
        if self._first is None and first.token_id is not None:
            self._first = self.ended
        if first.start is not None:
            if first.sample_index == 0:  # one prompt, however many samples
                self.cached_tokens = first.start.cached_tokens
            self.queued = max(0.0, first.start.scheduled - self.started)
            self.prompt_logprobs = self.prompt_logprobs or first.prompt_logprobs
        if last.finish_reason is not None:
            self.error = self.error or last.error
        if last.counts is not None:
            self.counts.add(last.counts)
        return events

    def write(self) -> None:
        """Write the texts of all samples, whose events were collected.

        Writing a text at once costs less than token by token between forward passes, which evict
        the detokenizer from the CPU's caches.
        """
        for writer, sample in zip(self._texts or (), self.samples, strict=False):
            ids = sample.token_ids
            shown = ids[:-1] if self._hides(sample.finish_reason) else ids
            try:
                sample.text = "".join([writer.push(id)[0] for id in shown]) + writer.flush()
            except Exception as problem:  # the other requests have theirs
                sample.finish_reason, self.error = "error", unexpected(problem)

    def _text(self, event: Event) -> str:
        """Return the text that an event adds."""
        if self._texts is None:
            return event.text
        writer, token, reason = self._texts[event.sample_index], event.token_id, event.finish_reason
        text = "" if token is None or self._hides(reason) else writer.push(token)[0]
        return text if reason is None else text + writer.flush()

    def _hides(self, reason: str | None) -> bool:
        """Return True if the token that ended a sample with ``reason`` has no text."""
        return reason == "stop" and not self.request.params.include_stop_str_in_output

    def _with_words(self, event: Event) -> Event:
        """Return an event with the texts of its log probabilities."""
        if self._outputs.tokenizer is None:
            return event
        words = self._outputs.words
        prompt = event.prompt_logprobs and [p and words(p) for p in event.prompt_logprobs]
        own = event.logprobs and words(event.logprobs)
        return event._replace(logprobs=own, prompt_logprobs=prompt)

    @property
    def done(self) -> bool:
        """True when every sample has ended."""
        return all(s.finish_reason for s in self.samples)

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token; None before it."""
        return None if self._first is None else self._first - self.started

    def output(self) -> RequestOutput:
        """Return the request so far, as the caller sees it."""
        request, c, seconds = self.request, self.counts, self.ended - self.started
        tokens = sum(len(s.token_ids) for s in self.samples)
        metrics = RequestMetrics(
            tokens / seconds if seconds else 0.0, self.ttft or 0.0, c.steps, c.drafted, c.accepted,
            c.acceptance_rate, c.acceptance_length, c.acceptance_by_position,
        )  # fmt: skip
        outputs = [s.output(i, request) for i, s in enumerate(self.samples)]
        return RequestOutput(
            request.id, self.prompt, list(request.prompt_token_ids), outputs, self.done,
            self.cached_tokens, metrics, self.prompt_logprobs,
        )  # fmt: skip
