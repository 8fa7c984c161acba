"""``/v1/completions``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from ..types import Event, Logprobs, by_sample
from .answer import (
    Answer,
    Sample,
    completion_logprobs,
    prompt_logprobs,
    step_of,
    usage,
)  # fmt: skip
from .generate import merged
from .protocol import CompletionRequest, Refusal
from .work import Work

KIND = "text_completion"


class Completion(Work[CompletionRequest]):
    """One call: its prompts, and how their outputs are shown."""

    prefix = "cmpl"

    async def prepare(self) -> None:
        """Read the prompts and make requests of them.

        Raises:
            OutriderError: one of them cannot be served.
        """
        body = self.body
        if body.suffix:
            raise Refusal("suffix is not supported: no model here fills in.", "suffix")
        if body.max_tokens == 0 and not body.echo:
            raise Refusal("max_tokens is 0; give 1 or more.", "max_tokens")
        wanted: dict[str, Any] = {"logprobs": body.logprobs}
        if body.echo and body.logprobs is not None:
            wanted["prompt_logprobs"] = body.logprobs
        for prompt in body.prompts():
            ids = await self.service.ids(prompt)
            request = await self.service.request(body, ids, self.salt, **wanted)
            echoed = self.service.decode(ids, "prompt") if body.echo else ""
            self.answers.append(Answer(request, prompt if isinstance(prompt, str) else echoed))
        self.service.admit([a.request for a in self.answers])

    async def whole(self) -> dict[str, Any]:
        """Run everything and show it at once."""
        streams = [self.service.run(a, self.body.timeout) for a in self.answers]
        async for _ in merged(streams):
            pass
        choices = []
        for i, answer in enumerate(self.answers):
            for j, sample in enumerate(answer.samples):
                number = i * self.body.n + j
                choices.append(self._choice(number, answer, sample, 0, sample.finish_reason))
        return {
            **self.head(KIND), "choices": choices, "usage": usage(self.answers), **self.figures(),
        }  # fmt: skip

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The same step by step; the last chunk has figures, and usage where asked."""
        body = self.body
        streams = [self.service.run(a, body.timeout) for a in self.answers]
        async for i, events in merged(streams):
            answer = self.answers[i]
            for j, new in by_sample(events).items():
                sample = answer.samples[j]
                number, last = i * body.n + j, new[-1].finish_reason
                start = len(sample.ids) - sum(e.token_id is not None for e in new)
                choice = self._choice(number, answer, sample, start, last, new)
                yield {**self.head(KIND), "choices": [choice]}
        yield self.last_chunk(KIND)

    def _choice(
        self,
        number: int,
        answer: Answer,
        sample: Sample,
        start: int,
        finish_reason: str | None,
        events: list[Event] | None = None,
    ) -> dict[str, Any]:
        """A choice from its token ``start`` on: all of it, or what ``events`` bring."""
        body = self.body
        text = sample.text if events is None else "".join(e.text for e in events)
        ids, found = sample.ids[start:], list[Logprobs | None](sample.logprobs[start:])
        if body.max_tokens == 0:
            text, ids, found = "", [], []
        offset = len(answer.text or "") if body.echo else 0
        if events is not None:
            offset += len(sample.text) - len(text)
        if body.echo and start == 0:
            text, ids = (answer.text or "") + text, [*answer.request.prompt_token_ids, *ids]
            found, offset = [*(answer.prompt_logprobs or []), *found], 0
        shown = None
        if body.logprobs is not None and len(found) == len(ids):
            shown = completion_logprobs(found, ids, offset, self.service.llm.intake.decode)
        choice: dict[str, Any] = {
            "index": number, "text": text, "logprobs": shown, "finish_reason": finish_reason,
        }  # fmt: skip
        if body.prompt_logprobs is not None and start == 0:
            choice["prompt_logprobs"] = prompt_logprobs(answer.prompt_logprobs)
        if body.return_speculation and events is not None:
            choice["speculation"] = step_of(events, self.service.llm.intake.decode)
        if body.return_token_ids:
            choice["token_ids"] = sample.ids[start:]
            if start == 0:
                choice["prompt_token_ids"] = list(answer.request.prompt_token_ids)
        return choice
