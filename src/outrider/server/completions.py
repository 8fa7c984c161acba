"""``/v1/completions``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from ..outputs import RequestState
from ..types import Event, Logprobs, by_sample
from .answer import completion_logprobs, prompt_logprobs, step_of
from .api_call import ApiCall, merged
from .protocol import CompletionRequest, Refusal
from .requests import RequestMaker

KIND = "text_completion"


@dataclass(frozen=True)
class Part:
    """All of a sample, or the part of one step.

    ``before`` is where its first token's text begins, None in the first part, which the prompt may
    come with.
    """

    text: str
    ids: list[int]
    logprobs: list[Logprobs | None]
    finish_reason: str | None
    stop_reason: int | str | None
    before: int | None = None

    @staticmethod
    def of(events: list[Event], before: int | None) -> Part:
        """Return the part that the events of one step make."""
        tokens = [(e.token_id, e.logprobs) for e in events if e.token_id is not None]
        found = [own for _, own in tokens if own is not None]
        text = "".join(e.text for e in events)
        last, ids = events[-1], [id for id, _ in tokens]
        return Part(text, ids, [*found], last.finish_reason, last.stop_reason, before)


def end_of(logprobs: dict[str, Any] | None, start: int) -> int:
    """Return where the text of a part's tokens ends."""
    if logprobs is None or not logprobs["tokens"]:
        return start
    return int(logprobs["text_offset"][-1]) + len(logprobs["tokens"][-1])


class Completion(ApiCall[CompletionRequest]):
    """One call: its prompts, and the form of their outputs."""

    prefix = "cmpl"

    async def prepare(self) -> None:
        body = self.body
        if body.best_of not in (None, body.n):
            raise Refusal(f"best_of is {body.best_of}; give n samples and choose.", "best_of")
        if body.limit == 0 and not body.echo:
            raise Refusal("max_tokens is 0; give 1 or more.", "max_tokens")
        more: dict[str, Any] = {"logprobs": body.logprobs}
        if body.limit == 0:
            more["max_tokens"] = 1  # which is not shown: the prompt is what was asked for
        if body.echo and body.logprobs is not None:
            more["prompt_logprobs"] = body.logprobs
        prompts = body.prompts()
        self.lease = self.service.admit(body.n * len(prompts))
        maker = await RequestMaker.make(self.service, body, self.salt, len(prompts), **more)
        for prompt in prompts:
            await asyncio.sleep(0)  # other calls go on while many are tokenised
            ids = await self.service.texts.ids(prompt, body.add_special_tokens)
            kept = self.truncated(ids)
            text = prompt if isinstance(prompt, str) and kept is ids else None
            if body.echo and text is None:
                text = self.service.llm.inputs.outputs.decode(kept)
            self.states.append(maker.start(kept, text))
        body.prompt = ""  # which may be long, and is not needed any more
        self.lease.add_tokens(sum(len(s.request.prompt_token_ids) for s in self.states))

    def build(self) -> dict[str, Any]:
        choices = []
        for i, state in enumerate(self.states):
            for j, sample in enumerate(state.samples):
                part = Part(
                    sample.text, sample.token_ids, [*sample.logprobs], sample.finish_reason,
                    sample.stop_reason,
                )  # fmt: skip
                choices.append(self._choice(i * self.body.n + j, state, part))
        return {
            **self.head(KIND), "choices": choices, "usage": self.usage(), **self.figures(),
        }  # fmt: skip

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's ``usage``, without the token that an echo alone computes."""
        found = super().usage()
        if self.body.limit == 0:
            found |= {"completion_tokens": 0, "total_tokens": found["prompt_tokens"]}
        return found

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        body = self.body
        ends: dict[int, int] = {}  # by choice: answers may be ahead of what is shown
        async for i, events in merged(self.runs()):
            state = self.states[i]
            for j, new in by_sample(events).items():
                number = i * body.n + j
                part = Part.of(new, ends.get(number))
                choice = self._choice(number, state, part)
                ends[number] = end_of(choice["logprobs"], part.before or 0)
                if body.return_speculation:
                    choice["speculation"] = step_of(new, self.service.llm.inputs.outputs.decode)
                yield self.chunk(KIND, choice)
        if self.usage_asked:
            yield self.last_chunk(KIND)

    def _choice(self, number: int, state: RequestState, part: Part) -> dict[str, Any]:
        """Return a choice, or a step's part of it."""
        body, first = self.body, part.before is None
        text, ids, found = part.text, part.ids, part.logprobs
        if body.limit == 0:
            text, ids, found = "", [], []
        own, offset = ids, part.before or 0
        if body.echo and first:
            text, ids = (state.prompt or "") + text, [*state.request.prompt_token_ids, *ids]
            found = [*(state.prompt_logprobs or []), *found]
        shown = None
        if body.logprobs is not None and len(found) == len(ids):
            shown = completion_logprobs(found, ids, offset, self.service.llm.inputs.outputs.decode)
        choice: dict[str, Any] = {
            "index": number, "text": text, "logprobs": shown,
            "finish_reason": part.finish_reason, "stop_reason": part.stop_reason,
        }  # fmt: skip
        if body.prompt_logprobs is not None and first:
            choice["prompt_logprobs"] = prompt_logprobs(state.prompt_logprobs)
        if body.return_token_ids:
            choice["token_ids"] = own
            if first:
                choice["prompt_token_ids"] = list(state.request.prompt_token_ids)
        return choice
