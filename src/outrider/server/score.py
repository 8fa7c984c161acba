"""``/v1/score`` and ``/generative_scoring``: how likely labels are after prompts.

SGLang has the first path and vLLM the second. A label's probability is the target's own, without
sampling options: each label is appended to a prompt, whose last log probability is read.
"""

import asyncio
from math import exp
from typing import Annotated, Any, ClassVar

import numpy as np
from fastapi import Request as HttpRequest
from pydantic import Field

from ..base.types import check_vocabulary
from ..frontend.outputs import RequestState
from ..sampling.arrays import softmax
from .completions import Completion
from .errors import Refusal
from .protocol import REQUEST_ID, CompletionRequest, Wire, checked
from .service import Service
from .shapes import MOST_PROMPTS, IdLists, Ids, Texts, TokenId, Whole

MOST_SCORES = 1024
"""Most labels of all items together; each of them makes a prompt."""


class ScoreRequest(Wire):
    """The body of ``POST /v1/score``, SGLang's."""

    joined: ClassVar[bool] = True
    """True if texts of query and item are joined before they are tokenised."""

    query: str | Ids = ""
    items: str | Texts | IdLists
    label_token_ids: Annotated[
        list[TokenId], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)
    ]
    apply_softmax: bool = False
    item_first: bool = False
    add_special_tokens: bool = True
    model: str | None = None
    priority: Whole = 0
    request_id: str | None = Field(None, pattern=REQUEST_ID)

    def completion(self) -> CompletionRequest:
        """Return the completion that reads the prompts and generates nothing that is shown."""
        own = self.model_dump(include={"model", "priority", "request_id"}, exclude_none=True)
        fixed = {"prompt": "", "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        return checked(CompletionRequest, {**own, **fixed, "store": False})

    def pairs(self) -> list[tuple[str | list[int], str | list[int]]]:
        """Return the two parts of each item's prompt. Raises Refusal: none, too many or mixed."""
        items = [self.items] if isinstance(self.items, str) else self.items
        if not items:
            raise Refusal("items is empty; give 1 or more.", "items")
        count = len(items) * len(self.label_token_ids)
        if count > MOST_SCORES:
            raise Refusal(
                f"all items have {count} labels together; give at most {MOST_SCORES}.", "items"
            )
        if self.query and isinstance(self.query, str) is not isinstance(items[0], str):
            raise Refusal(
                "query and items differ in type; give only texts, or only token ids.", "query"
            )
        pairs = [(self.query or type(item)(), item) for item in items]
        return [(b, a) if self.item_first else (a, b) for a, b in pairs]


class ScoringRequest(ScoreRequest):
    """The body of ``POST /generative_scoring``, vLLM's."""

    joined: ClassVar[bool] = False

    apply_softmax: bool = True


class Score(Completion):
    """A call with a prompt for each pair of an item and a label, item by item."""

    prefix = "score"

    def __init__(self, service: Service, asked: ScoreRequest, http: HttpRequest) -> None:
        super().__init__(service, asked.completion(), http)
        self.wanted = asked

    async def prepare(self) -> None:
        wanted, inputs = self.wanted, self.service.llm.inputs
        name = "label_token_ids"
        check_vocabulary(name, wanted.label_token_ids, inputs.vocab_size, name)
        pairs = wanted.pairs()
        count = len(pairs) * len(wanted.label_token_ids)
        self.lease = self.service.admit(count)
        await self.read_options(count, prompt_logprobs=0)
        for number, pair in enumerate(pairs):
            await asyncio.sleep(0)  # lets other calls run while many are tokenised
            ids = await self._ids(*pair)
            if not ids:
                raise Refusal(
                    f"query and item {number} have no tokens; give at least one.", "items"
                )
            self.states += [self.start([*ids, label]) for label in wanted.label_token_ids]
        self.lease.add_tokens(sum(len(s.request.prompt_token_ids) for s in self.states))

    async def _ids(self, first: str | list[int], second: str | list[int]) -> list[int]:
        """Return the token ids of one prompt."""
        special, texts = self.wanted.add_special_tokens, self.service.texts
        if isinstance(first, str) and isinstance(second, str) and self.wanted.joined:
            return await texts.ids(first + second, special)
        return [*await texts.ids(first, special), *await texts.ids(second, False)]

    def build(self) -> dict[str, Any]:
        labels = self.wanted.label_token_ids
        firsts = range(0, len(self.states), len(labels))
        scores = [self._scores(labels, self.states[i : i + len(labels)]) for i in firsts]
        tokens = sum(len(self.states[i].request.prompt_token_ids) - 1 for i in firsts)
        usage = {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
        if isinstance(self.wanted, ScoringRequest):
            first = [own[0] for own in scores]  # vLLM returns only the first label's
            data = [{"index": i, "object": "score", "score": p} for i, p in enumerate(first)]
            return {**self.head("list"), "data": data, "usage": usage}
        return {**self.head("scoring"), "scores": scores, "usage": usage}

    def _scores(self, labels: list[int], states: list[RequestState]) -> list[float]:
        """Return the probability of each label after one item."""
        last = [(state.prompt_logprobs or [None])[-1] or {} for state in states]
        logs = [row[label].logprob for row, label in zip(last, labels, strict=True)]
        if not self.wanted.apply_softmax:
            return [exp(each) for each in logs]
        shares: list[float] = softmax(np.array(logs)).tolist()
        return shares
