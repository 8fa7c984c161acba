"""``/v1/completions``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from ..outputs import Pending
from ..types import Event, Logprobs, by_sample
from .answer import (
    completion_logprobs,
    prompt_logprobs,
    step_of,
)  # fmt: skip
from .generate import merged
from .making import Maker
from .protocol import CompletionRequest, Refusal
from .work import Work

KIND = "text_completion"


@dataclass(frozen=True)
class Part:
    """All of a sample, or what one step brought.

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
        """What the events of one step bring."""
        tokens = [(e.token_id, e.logprobs) for e in events if e.token_id is not None]
        found = [own for _, own in tokens if own is not None]
        text = "".join(e.text for e in events)
        last, ids = events[-1], [id for id, _ in tokens]
        return Part(text, ids, [*found], last.finish_reason, last.stop_reason, before)


def end_of(logprobs: dict[str, Any] | None, start: int) -> int:
    """Where the text of the tokens of a part ends."""
    if logprobs is None or not logprobs["tokens"]:
        return start
    return int(logprobs["text_offset"][-1]) + len(logprobs["tokens"][-1])


class Completion(Work[CompletionRequest]):
    """One call: its prompts, and how their outputs are shown."""

    prefix = "cmpl"

    async def prepare(self) -> None:
        """Read the prompts and make requests of them.

        Raises:
            OutriderError: one of them cannot be served.
        """
        body = self.body
        if body.best_of not in (None, body.n):
            raise Refusal(f"best_of is {body.best_of}; give n samples and choose.", "best_of")
        if body.limit == 0 and not body.echo:
            raise Refusal("max_tokens is 0; give 1 or more.", "max_tokens")
        wanted: dict[str, Any] = {"logprobs": body.logprobs}
        if body.limit == 0:
            wanted["max_tokens"] = 1  # which is not shown: the prompt is what was asked for
        if body.echo and body.logprobs is not None:
            wanted["prompt_logprobs"] = body.logprobs
        prompts = body.prompts()
        self.lease = self.service.admit(body.n * len(prompts))
        maker = await Maker.make(self.service, body, self.salt, len(prompts), **wanted)
        for prompt in prompts:
            await asyncio.sleep(0)  # other calls go on while many are tokenised
            ids = await self.service.ids(prompt, body.add_special_tokens)
            kept = self.truncated(ids)
            whole = prompt if isinstance(prompt, str) and kept is ids else None
            request = maker.request(kept)
            echoed = self.service.llm.intake.decode(kept) if body.echo and whole is None else whole
            self.answers.append(Pending(echoed, request))
        body.prompt = ""  # which may be long, and is not needed any more
        self.lease.add_tokens(sum(len(a.request.prompt_token_ids) for a in self.answers))

    async def whole(self) -> dict[str, Any]:
        """Run everything and show it at once."""
        timeout, lease = self.body.timeout, self.lease
        streams = [self.service.run(a, timeout, lease) for a in self.answers]
        async for _ in merged(streams):
            pass
        return await self.built()

    def build(self) -> dict[str, Any]:
        choices = []
        for i, answer in enumerate(self.answers):
            for j, sample in enumerate(answer.samples):
                part = Part(
                    sample.text, sample.token_ids, [*sample.logprobs], sample.finish_reason,
                    sample.stop_reason,
                )  # fmt: skip
                choices.append(self._choice(i * self.body.n + j, answer, part))
        return {
            **self.head(KIND), "choices": choices, "usage": self.usage(), **self.figures(),
        }  # fmt: skip

    def usage(self) -> dict[str, Any]:
        """Of an echo alone the one token that was computed is not told."""
        found = super().usage()
        if self.body.limit == 0:
            found |= {"completion_tokens": 0, "total_tokens": found["prompt_tokens"]}
        return found

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The same step by step."""
        body = self.body
        streams = [self.service.run(a, body.timeout, self.lease) for a in self.answers]
        ends: dict[int, int] = {}  # by choice: answers may be ahead of what is shown
        async for i, events in merged(streams):
            answer = self.answers[i]
            for j, new in by_sample(events).items():
                number = i * body.n + j
                part = Part.of(new, ends.get(number))
                choice = self._choice(number, answer, part)
                ends[number] = end_of(choice["logprobs"], part.before or 0)
                if body.return_speculation:
                    choice["speculation"] = step_of(new, self.service.llm.intake.decode)
                yield self.chunk(KIND, choice)
        if self.usage_asked:
            yield self.last_chunk(KIND)

    def _choice(self, number: int, answer: Pending, part: Part) -> dict[str, Any]:
        """A choice, or what a step brings to it."""
        body, first = self.body, part.before is None
        text, ids, found = part.text, part.ids, part.logprobs
        if body.limit == 0:
            text, ids, found = "", [], []
        own, offset = ids, part.before or 0
        if body.echo and first:
            text, ids = (answer.prompt or "") + text, [*answer.request.prompt_token_ids, *ids]
            found = [*(answer.prompt_logprobs or []), *found]
        shown = None
        if body.logprobs is not None and len(found) == len(ids):
            shown = completion_logprobs(found, ids, offset, self.service.llm.intake.decode)
        choice: dict[str, Any] = {
            "index": number, "text": text, "logprobs": shown,
            "finish_reason": part.finish_reason, "stop_reason": part.stop_reason,
        }  # fmt: skip
        if body.prompt_logprobs is not None and first:
            choice["prompt_logprobs"] = prompt_logprobs(answer.prompt_logprobs)
        if body.return_token_ids:
            choice["token_ids"] = own
            if first:
                choice["prompt_token_ids"] = list(answer.request.prompt_token_ids)
        return choice
