"""``/v1/completions``."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ..outputs import RequestState, SampleState
from ..types import SAMPLE, Logprobs, grouped_by
from .answer import completion_logprobs, prompt_logprobs, step_of
from .api_call import ApiCall, merged
from .errors import Refusal
from .protocol import CompletionRequest


def end_of(logprobs: dict[str, Any] | None, start: int) -> int:
    """Return where the text of a part's tokens ends."""
    if logprobs is None or not logprobs["tokens"]:
        return start
    return int(logprobs["text_offset"][-1]) + len(logprobs["tokens"][-1])


class Completion(ApiCall[CompletionRequest]):
    """A completion call: its prompts, and the form of their outputs."""

    prefix = "cmpl"
    chunk_kind = "text_completion"

    async def prepare(self) -> None:
        body = self.body
        if body.best_of not in (None, body.n):
            raise Refusal(f"best_of is {body.best_of}; give n samples and choose.", "best_of")
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
            await asyncio.sleep(0)  # other calls go on while many are tokenised
            ids = await self.service.texts.ids(prompt, body.add_special_tokens)
            kept = self.truncated(ids)
            text = prompt if isinstance(prompt, str) and kept is ids else None
            if body.echo and text is None:
                text = self.service.llm.inputs.outputs.decode(kept)
            self.states.append(self.start(kept, text))
        body.prompt = ""  # it may be long, and is not needed any more
        self.lease.add_tokens(sum(len(s.request.prompt_token_ids) for s in self.states))

    def build(self) -> dict[str, Any]:
        pairs = [(state, sample) for state in self.states for sample in state.samples]
        choices = [self._choice(i, *pair, None) for i, pair in enumerate(pairs)]
        return {
            **self.head(self.chunk_kind), "choices": choices, "usage": self.usage(),
            **self.figures(),
        }  # fmt: skip

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's ``usage``, without the token that an echo alone computes."""
        usage = super().usage()
        if self.body.limit == 0:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        body = self.body
        ends: dict[int, int] = {}  # by choice: samples may be ahead of the stream
        async for i, events in merged(self.runs()):
            state = self.states[i]
            for j, new in grouped_by(events, SAMPLE).items():
                number = i * body.n + j
                before = ends.get(number)
                choice = self._choice(number, state, SampleState.of(new), before)
                ends[number] = end_of(choice["logprobs"], before or 0)
                if body.return_speculation:
                    choice["speculation"] = step_of(new, self.service.llm.inputs.outputs.decode)
                yield self.chunk(choice)

    def _choice(
        self, number: int, state: RequestState, part: SampleState, before: int | None
    ) -> dict[str, Any]:
        """Return a choice, or a step's part of it.

        Args:
            number: of the choice.
            state: of its request.
            part: all of the sample, or its events of one step.
            before: where the text of the part's first token begins; None for the first part,
                which the prompt may come with.
        """
        body, first = self.body, before is None
        if body.limit == 0:
            part = SampleState(finish_reason=part.finish_reason, stop_reason=part.stop_reason)
        text, ids, logprobs = part.text, part.token_ids, list[Logprobs | None](part.logprobs)
        if body.echo and first:
            text, ids = (state.prompt or "") + text, [*state.request.prompt_token_ids, *ids]
            logprobs = [*(state.prompt_logprobs or []), *logprobs]
        shown, decode = None, self.service.llm.inputs.outputs.decode
        if body.logprobs is not None and len(logprobs) == len(ids):
            shown = completion_logprobs(logprobs, ids, before or 0, decode)
        choice: dict[str, Any] = {
            "index": number, "text": text, "logprobs": shown,
            "finish_reason": part.finish_reason, "stop_reason": part.stop_reason,
        }  # fmt: skip
        if body.prompt_logprobs is not None and first:
            choice["prompt_logprobs"] = prompt_logprobs(state.prompt_logprobs)
        if body.return_token_ids:
            choice["token_ids"] = part.token_ids
            if first:
                choice["prompt_token_ids"] = list(state.request.prompt_token_ids)
        return choice
