"""The common part of completions and chats: the call, its requests, and the answer's frame."""

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Generic, TypeVar

from fastapi import Request as HttpRequest

from ..base.limits import BIAS, wrong_biases
from ..base.types import DEFAULT_SPECULATION, Counts, Event, SamplingParams, Speculation
from ..engine.worker.suspects import fingerprint
from ..errors import OutriderError, RequestError, shown
from ..frontend.outputs import RequestState, SampleState
from ..sampling.acceptance import NOT_FINITE
from ..sampling.logprobs import ALL
from .admission import Lease
from .answer import LARGEST_NUMBER, speculative_decoding
from .bodies import LONG_BODY
from .errors import Refusal, error_body
from .protocol import Generation, SpeculationOptions, StreamOptions
from .record import Record
from .service import Service
from .texts import SURE_TEXT

LONG_LIST = 1 << 9
"""An answer with more positions of log probabilities is built in a thread."""
MAX_CHARS_PER_TOKEN = 16
"""More characters than a token has, on average, in any prediction."""
MOST_REPEATED = 1 << 23
"""Bytes that a call's options may take in the engine, which holds a copy for each prompt."""
ID_BYTES = 8
MOST_LISTED = 1 << 18
"""Tokens that an answer may list besides its text: log probabilities, echoed prompts."""

Body = TypeVar("Body", bound=Generation)
T = TypeVar("T")


class ApiCall(ABC, Generic[Body]):
    """One call: its body, and the state of a request for each prompt.

    Attributes:
        prefix, chunk_kind: the beginning of its id, and the "object" of its chunks.
        error: the reason why its stream ended early.
        salt: separates its cached prefix from others.
        more: values for ``SamplingParams`` besides the body's.
        params: sampling options, keyed by the most tokens that may follow a prompt.
        listed: tokens that the answer lists besides its text so far.
        recorder, asked: where the call is recorded, and the record of each prompt.
    """

    prefix: str
    chunk_kind: str
    named_events = False
    """True if stream events have names; such a stream does not end with [DONE]."""

    def __init__(self, service: Service, body: Body, http: HttpRequest) -> None:
        if body.stream and body.prompt_logprobs is not None:
            raise Refusal(
                "prompt_logprobs are not available in a stream; leave out stream.",
                "prompt_logprobs",
            )
        service.check_model(body.model)
        self.service = service
        self.body = body
        self.salt = body.cache_salt or ""
        if len(service.settings.api_keys) > 1 and not service.settings.share_prefix_cache:
            self.salt = f"{http.state.key}\0{self.salt}"
        self.stream_options = body.stream_options or StreamOptions()
        self.more: dict[str, Any] = {}
        self.speculation = DEFAULT_SPECULATION
        self.params: dict[int, SamplingParams] = {}
        self.listed = 0
        self.id = f"{self.prefix}-{body.request_id or http.state.request_id}"
        self.error: str | None = None
        self.created = int(time.time())
        self.states: list[RequestState] = []
        self.shown_to_end = self.emitted = 0  # completed choices and sent tokens of a stream
        self.long: bool = http.state.body_bytes >= LONG_BODY
        self.lease = Lease(service.queue, 0)
        recorder = service.recorder
        stays_out = recorder is None or recorder.stopped or body.store is False
        self.recorder = None if stays_out else recorder
        self.asked: list[Record | None] = []

    @abstractmethod
    async def prepare(self) -> None:
        """Make the states of the call's requests."""

    @abstractmethod
    def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Run the call, and yield what its stream shows."""

    @abstractmethod
    def build(self) -> dict[str, Any]:
        """Return the whole answer, once every request has ended."""

    @property
    def samples(self) -> list[SampleState]:
        """The samples of all prompts."""
        return [sample for state in self.states for sample in state.samples]

    @property
    def lists_much(self) -> bool:
        """True when the answer lists so much besides its text that it takes long to make."""
        listed = sum(len(sample.logprobs) for sample in self.samples)
        return listed + sum(len(r.prompt_logprobs or ()) for r in self.states) > LONG_LIST

    def runs(self) -> list[AsyncGenerator[list[Event], None]]:
        """Return the runs of the call's requests, each of which yields the events of a step."""
        body = fingerprint(state.request for state in self.states)  # to find engine-killing calls
        limits = (self.body.timeout, self.service.settings.request_timeout)
        timeout = min((t for t in limits if t is not None), default=None)
        return [self._run(state, body, timeout) for state in self.states]

    async def _run(
        self, state: RequestState, body: str, timeout: float | None
    ) -> AsyncGenerator[list[Event], None]:
        """Run one request; its sequences leave the queue with their first tokens.

        Raises OutriderError: it cannot be served, or failed. Refusal: 408, it took too long.
        """
        service, request = self.service, state.request
        tokens, count = len(request.prompt_token_ids), request.params.n
        deadline = None if timeout is None else time.monotonic() + timeout
        service.metrics.begin(request)
        try:
            async with aclosing(service.llm.run(state, body)) as stream:
                while True:
                    left = None if deadline is None else max(0.0, deadline - time.monotonic())
                    try:
                        events = await asyncio.wait_for(anext(stream), left)
                    except StopAsyncIteration:
                        service.stats.add(state)
                        return
                    except TimeoutError:
                        raise Refusal(
                            f"the request took longer than {timeout:g} s; raise its timeout "
                            "or ask for fewer tokens.", status=408, code="timeout",
                        ) from None  # fmt: skip
                    started = sum(event.start is not None for event in events)
                    if started:
                        self.lease.give_back(started, tokens)
                        count, tokens = count - started, 0
                    if state.error is not None:
                        # Logits that are not finite are the model's fault, all else the options'.
                        status = 500 if state.error == NOT_FINITE else 400
                        raise Refusal(f"the request failed: {state.error}", status=status)
                    yield events
        finally:
            self.lease.give_back(count, tokens)
            service.metrics.end(request.id)

    async def read_options(self, prompts: int, **more: Any) -> None:
        """Read the options that all ``prompts`` prompts share; ``more`` overrides the body's.

        Raises RequestError: an option does not fit the engine, or they are too large to repeat.
        """
        body, inputs = self.body, self.service.llm.inputs
        chats = body.max_completion_tokens is not None
        inputs.check_max_tokens(body.limit, "max_completion_tokens" if chats else "max_tokens")
        inputs.check_priority(body.priority)
        if wrong := wrong_biases(body.logit_bias or {}, inputs.vocab_size):
            raise Refusal(
                f"logit_bias has {wrong}; {BIAS.remedy}, the ids below {inputs.vocab_size}.",
                "logit_bias",
            )
        self.more, self.speculation = more, await self._speculation()
        ids = (body.allowed_token_ids, body.stop_token_ids, self.speculation.prediction)
        size = ID_BYTES * sum(len(listed or ()) for listed in ids)
        size += sum(len(str(part)) for part in (body.form() or {}).values())
        if prompts > 1 and prompts * size > MOST_REPEATED:
            raise Refusal(
                f"the options have {size} bytes, repeated for {prompts} prompts; the limit is "
                f"{MOST_REPEATED} bytes in all. Send fewer prompts in one call.", "prompt",
            )  # fmt: skip

    async def _speculation(self) -> Speculation:
        """Return how to draft for the call."""
        inputs, options = self.service.llm.inputs, self.body.speculation or SpeculationOptions()
        expected: tuple[int, ...] = ()
        if self.body.prediction is not None:
            # No output is longer, and every step searches the whole prediction.
            most = inputs.max_model_len
            text = self.body.prediction.text[: most * MAX_CHARS_PER_TOKEN]
            text = text.encode(errors="replace")[:SURE_TEXT].decode(errors="ignore")
            ids = await self.service.texts.ids(text, special=False)
            # A tokenizer may know ids that the model lacks, which no output has.
            expected = tuple(id for id in ids[:most] if id < inputs.vocab_size)
        return Speculation(
            options.enabled, options.drafter, options.num_speculative_tokens, expected
        )

    def start(self, ids: list[int], text: str | None = None) -> RequestState:
        """Return the state of the request for one prompt; ``text`` is the prompt's, if known."""
        llm, body = self.service.llm, self.body
        room = llm.inputs.room_after(ids)
        if body.limit is None and llm.ready is not None:
            room = min(room, max(1, llm.ready.num_tokens - len(ids)))
        return llm.inputs.request(
            ids, self._sampling(room, len(ids)), uuid.uuid4().hex, speculation=self.speculation,
            priority=body.priority, cache_salt=self.salt, text=text,
        )  # fmt: skip

    def _sampling(self, room: int, prompt: int) -> SamplingParams:
        """Return the sampling options of a prompt with ``prompt`` tokens and ``room`` after it.

        Raises Refusal: the answer would list too much.
        """
        body = self.body
        room = room if body.limit is None else min(room, body.limit)
        if room not in self.params:
            self.params[room] = body.sampling(room, self.service.settings.defaults, **self.more)
        params = self.params[room]
        echoed = body.return_token_ids or bool(getattr(body, "echo", False))
        size = self.service.llm.inputs.vocab_size
        listed = prompt * (echoed + _entries(params.prompt_logprobs, size))
        each = _entries(params.logprobs, size)
        left = MOST_LISTED - self.listed - params.n * listed
        most = params.max_tokens or room
        if body.limit is None and each and left > 0:
            most = max(1, min(most, left // (params.n * each)))
            params = replace(params, max_tokens=most)
        self.listed += params.n * (listed + most * each)
        if self.listed > MOST_LISTED:
            raise Refusal(
                f"log probabilities and echoed prompts would list {self.listed} tokens; at most "
                f"{MOST_LISTED} are listed. Ask for fewer tokens, samples or alternatives.",
                "logprobs" if each else None,
            )
        return params

    def truncated(self, ids: list[int]) -> list[int]:
        """Return as many first or last tokens as ``truncate_prompt_tokens`` allows."""
        most, context = self.body.truncate_prompt_tokens, self.service.llm.inputs.max_model_len
        if most is None:
            return ids
        if most == 0 or not -1 <= most <= context:
            raise Refusal(
                f"truncate_prompt_tokens is {shown(most)}; give 1 to {context}, or -1 for "
                "all that the context holds.", "truncate_prompt_tokens",
            )  # fmt: skip
        if most == -1:
            most = max(1, context - max(1, self.body.limit or 1))
        if len(ids) <= most:
            return ids
        return ids[-most:] if self.body.truncation_side == "left" else ids[:most]

    def head(self, kind: str) -> dict[str, Any]:
        """Return the first fields of every answer and chunk of ``kind``."""
        return {
            "id": self.id, "object": kind, "created": self.created,
            "model": self.body.model or self.service.name,
            "system_fingerprint": self.service.settings.fingerprint,
        }  # fmt: skip

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token of any prompt; None before it."""
        return min((s.ttft for s in self.states if s.ttft is not None), default=None)

    def figures(self) -> dict[str, Any]:
        """Return seed, TTFT in ms and, for one sample only, vLLM's figures of speculation."""
        settings, seed = self.service.settings, self.states[0].request.seed
        first, samples, figures = self.ttft, self.samples, None
        if len(samples) == 1 and settings.detail != "none":
            figures = speculative_decoding(samples[0], settings.longest, settings.detail)
        return {
            "seed": seed if seed <= LARGEST_NUMBER else str(seed),
            "metrics": {
                "time_to_first_token_ms": None if first is None else 1000 * first,
                "speculative_decoding": figures,
            },
        }

    def usage(self, output: int | None = None) -> dict[str, Any]:
        """Return OpenAI's ``usage`` of the call, with ``output`` or else all output tokens."""
        prompt = sum(len(state.request.prompt_token_ids) for state in self.states)
        if output is None:
            output = sum(len(sample.token_ids) for sample in self.samples)
        how = self.speculation
        drafts_prediction = how.enabled and how.prediction and how.drafter in (None, "prediction")
        predicted = [state.counts for state in self.states if drafts_prediction]
        accepted = sum(counts.accepted for counts in predicted)
        cached = sum(state.cached_tokens for state in self.states)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(c.drafted for c in predicted) - accepted,
            },
        }

    def chunk(self, choice: dict[str, Any], emitted: int) -> dict[str, Any]:
        """Return a chunk with ``emitted`` tokens; the one that ends the last choice has figures."""
        chunk = {**self.head(self.chunk_kind), "choices": [choice]}
        self.emitted += emitted
        if self.stream_options.include_usage:
            continuous = self.stream_options.continuous_usage_stats
            chunk["usage"] = self.usage(self.emitted) if continuous else None
        if choice["finish_reason"]:
            self.shown_to_end += 1
            if self.shown_to_end == len(self.samples):
                chunk |= self.figures()
        return chunk

    def last_chunk(self) -> dict[str, Any]:
        """Return the chunk that ends a stream where the call asks for usage."""
        return {
            **self.head(self.chunk_kind), "choices": [], **self.figures(), "usage": self.usage(),
        }  # fmt: skip

    def told(self, error: RequestError) -> RequestError:
        """Return an error of the call, with the field names that its client uses."""
        return error

    def failed(self, error: OutriderError) -> Iterator[dict[str, Any]]:
        """Yield the last events of a stream that fails midway."""
        yield error_body(error)

    def record(self) -> None:
        """Record the prompts of the call, once it has been answered."""
        if self.recorder is None:
            return
        records = []
        for record, state in zip(self.asked, self.states, strict=True):
            if record is not None:
                answer = self.said(state.samples[0]) if self.recorder.how.answers else ""
                records.append({**record, "answer": answer} if answer else record)
        self.recorder.add(records)

    def said(self, sample: SampleState) -> str:
        """Return the text of a sample to record; empty if it is none."""
        return sample.text

    def facts(self) -> dict[str, Any]:
        """Return the fields of the call's line in the log and of its span; None where unknown."""
        body, samples, used = self.body, self.samples, self.usage()
        drafts = [draft for s in samples for draft in s.drafts]
        drafted, accepted = sum(d.depth for d in drafts), sum(d.accepted for d in drafts)
        counts = Counts(drafts=len(drafts), drafted=drafted, accepted=accepted)
        queued = [r.queued for r in self.states if r.queued is not None]
        return {
            "id": self.id, "model": body.model, "served_model": self.service.name,
            "prompt_tokens": used["prompt_tokens"], "completion_tokens": used["completion_tokens"],
            "finish_reasons": [s.finish_reason for s in samples if s.finish_reason] or None,
            "stream": body.stream, "n": body.n, "max_tokens": body.limit,
            "temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k,
            "frequency_penalty": body.frequency_penalty, "presence_penalty": body.presence_penalty,
            "queue_seconds": min(queued, default=None), "ttft_seconds": self.ttft,
            "drafted": drafted, "accepted": accepted,
            "acceptance_length": counts.acceptance_length, "error": self.error,
        }  # fmt: skip


def _entries(logprobs: int | None, vocab_size: int) -> int:
    """Return how many tokens are listed for each position."""
    return 0 if logprobs is None else vocab_size if logprobs == ALL else logprobs + 1


async def merged(streams: list[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Run all streams at once; yield each item as it arrives, with its stream's number."""
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue()

    async def pump(number: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async for item in stream:
                queue.put_nowait((number, item))
            queue.put_nowait(None)
        except BaseException as error:
            queue.put_nowait(error)
            raise

    tasks = [asyncio.ensure_future(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        for _ in tasks:  # each ends with None
            while (numbered := await queue.get()) is not None:
                if isinstance(numbered, BaseException):
                    raise numbered
                yield numbered
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
