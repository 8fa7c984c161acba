"""``/v1/completions``."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ..base.types import SAMPLE, grouped_by
from ..frontend.outputs import RequestState, SampleState
from .answer import CompletionLogprobs, nulls, prompt_logprobs, step_of, stop_of
from .api_call import ApiCall, merged
from .errors import Refusal
from .protocol import CompletionRequest
from .record import of_text


class Completion(ApiCall[CompletionRequest]):
    """A completion call: its prompts, and the form of their outputs."""

    prefix = "cmpl"
    chunk_kind = "text_completion"

    async def prepare(self) -> None:
        body = self.body
        if body.best_of not in (None, body.n):
            raise Refusal(
                f"best_of is {body.best_of}; request n samples and choose one.", "best_of"
            )
        if body.limit == 0 and not body.echo:
            raise Refusal("max_tokens is 0; give 1 or more.", "max_tokens")
        more: dict[str, Any] = {"logprobs": body.logprobs}
        if body.limit == 0:
            more["max_tokens"] = 1  # not shown: the call asks for the prompt only
        if body.echo and body.logprobs is not None:
            more["prompt_logprobs"] = body.logprobs
        prompts = body.prompts()
        self.lease = self.service.admit(body.n * len(prompts))
        await self.read_options(len(prompts), **more)
        for prompt in prompts:
            await asyncio.sleep(0)  # lets other calls run while many are tokenised
            ids = await self.service.texts.ids(prompt, body.add_special_tokens)
            kept = self.truncated(ids)
            text = prompt if isinstance(prompt, str) and kept is ids else None
            if self.recorder is not None:
                # An echo alone is no answer.
                self.asked.append(of_text(None if body.limit == 0 else text))
            if body.echo and text is None:
                text = self.service.llm.inputs.outputs.decode(kept)
            self.states.append(self.start(kept, text))
        body.prompt = ""  # it may be long, and is not needed any more
        self.lease.add_tokens(sum(len(s.request.prompt_token_ids) for s in self.states))

    def build(self) -> dict[str, Any]:
        pairs = [(state, sample) for state in self.states for sample in state.samples]
        choices = [
            {**nulls("completion choice"), **_Choice(self, number, state).part(sample)}
            for number, (state, sample) in enumerate(pairs)
        ]
        return {
            **self.head(self.chunk_kind), **nulls("answer"), "choices": choices,
            "usage": self.usage(), **self.figures(),
        }  # fmt: skip

    def usage(self, output: int | None = None) -> dict[str, Any]:
        """Return OpenAI's ``usage``; a call that only echoes its prompt counts no output token."""
        return super().usage(0 if self.body.limit == 0 else output)

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        choices: dict[int, _Choice] = {}
        async for i, events in merged(self.runs()):
            for j, new in grouped_by(events, SAMPLE).items():
                number = i * self.body.n + j
                if number not in choices:
                    choices[number] = _Choice(self, number, self.states[i])
                part = SampleState()
                part.take(new)
                shown = choices[number].part(part)
                if self.body.return_speculation:
                    shown["speculation"] = step_of(new, self.service.llm.inputs.outputs.decode)
                yield self.chunk(shown, len(part.token_ids))


class _Choice:
    """One choice, complete or in parts of a stream; the first part has the prompt's fields."""

    def __init__(self, call: Completion, number: int, state: RequestState) -> None:
        self.body, self.number, self.state = call.body, number, state
        self.begun = False
        self.end = 0  # characters of the parts so far
        self.logprobs: CompletionLogprobs | None = None
        if self.body.logprobs is not None:
            echo = (state.prompt or "", state.prompt_logprobs) if self.body.echo else ()
            outputs, by_id = call.service.llm.inputs.outputs, self.body.return_tokens_as_token_ids
            self.logprobs = CompletionLogprobs(outputs, state.request, by_id, *echo)

    def part(self, part: SampleState) -> dict[str, Any]:
        """Return a complete choice, or the part of a step."""
        body, state = self.body, self.state
        if body.limit == 0:
            part = SampleState(finish_reason=part.finish_reason, stop_reason=part.stop_reason)
        text = part.text if self.begun or not body.echo else (state.prompt or "") + part.text
        self.end += len(text)
        listed = None if self.logprobs is None else self.logprobs.listed(part, self.end)
        choice: dict[str, Any] = {
            "index": self.number, "text": text, "logprobs": listed,
            "finish_reason": part.finish_reason, **stop_of(part),
        }  # fmt: skip
        if body.prompt_logprobs is not None and not self.begun:
            choice["prompt_logprobs"] = prompt_logprobs(state.prompt_logprobs)
        if body.return_token_ids:
            choice["token_ids"] = part.token_ids
            if not self.begun:
                choice["prompt_token_ids"] = list(state.request.prompt_token_ids)
        self.begun = True
        return choice
