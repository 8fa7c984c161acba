"""The engine's requests of one call: the options that its prompts share are read once."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, replace
from typing import Any

from ..outputs import RequestState
from ..types import SamplingParams, Speculation
from .errors import Refusal
from .protocol import Generation
from .service import Service
from .texts import SURE_TEXT

MAX_CHARS_PER_TOKEN = 16
"""More than a token has, on average, of any text that is expected."""
MOST_REPEATED = 1 << 23
"""Bytes that a call's options may take in the engine, which holds a copy for each prompt."""
ID_BYTES = 8
MOST_LISTED = 1 << 18
"""Tokens that an answer may list besides its text: log probabilities, echoed prompts."""


@dataclass
class RequestMaker:
    """Makes the requests of one call; ``make`` reads the options that they share.

    Args:
        service: the engine and the limits.
        body: of the call.
        salt: separates its cached prefix from others.
        more: values for ``SamplingParams`` besides the body's.
        speculation: drafter and draft length of the call.
        params: sampling options by the most tokens that may follow a prompt.
        listed: tokens that the answer lists besides its text so far.
    """

    service: Service
    body: Generation
    salt: str
    more: dict[str, Any]
    speculation: Speculation
    params: dict[int, SamplingParams] = field(default_factory=dict)
    listed: int = 0

    @staticmethod
    async def make(
        service: Service, body: Generation, salt: str, prompts: int, **more: Any
    ) -> RequestMaker:
        """Return the maker of a call with ``prompts`` prompts.

        Raises:
            RequestError: an option does not fit the engine, or all are too large to be repeated
                for each prompt.
        """
        inputs = service.llm.inputs
        chats = body.max_completion_tokens is not None
        inputs.check_max_tokens(body.limit, "max_completion_tokens" if chats else "max_tokens")
        inputs.check_priority(body.priority)
        speculation = await _speculation(service, body)
        ids = (body.allowed_token_ids, body.stop_token_ids, speculation.prediction)
        size = ID_BYTES * sum(len(listed or ()) for listed in ids)
        size += sum(len(str(part)) for part in (body.form() or {}).values())
        if prompts > 1 and prompts * size > MOST_REPEATED:
            raise Refusal(
                f"the options have {size} bytes, which {prompts} prompts repeat; at most "
                f"{MOST_REPEATED} bytes are taken. Send fewer prompts in one call.", "prompt",
            )  # fmt: skip
        return RequestMaker(service, body, salt, more, speculation)

    def start(self, ids: list[int], text: str | None = None) -> RequestState:
        """Return the state of the request for one prompt, whose text is None where it is not known.

        Raises:
            OutriderError: it cannot be served.
        """
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

        Raises:
            Refusal: the answer would list too much.
        """
        body = self.body
        room = room if body.limit is None else min(room, body.limit)
        if room not in self.params:
            self.params[room] = body.sampling(room, self.service.settings.defaults, **self.more)
        params = self.params[room]
        echoed = body.return_token_ids or bool(getattr(body, "echo", False))
        listed = prompt * (echoed + _entries(params.prompt_logprobs))
        each = _entries(params.logprobs)
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


def _entries(logprobs: int | None) -> int:
    """Return how many tokens are listed for each position."""
    return 0 if logprobs is None else logprobs + 1


async def _speculation(service: Service, body: Generation) -> Speculation:
    """Return how to draft for a call."""
    inputs, options = service.llm.inputs, body.speculation
    expected: tuple[int, ...] = ()
    if body.prediction is not None:
        # No output is longer, and every step searches the whole prediction.
        most = inputs.max_model_len
        text = body.prediction.text[: most * MAX_CHARS_PER_TOKEN]
        text = text.encode(errors="replace")[:SURE_TEXT].decode(errors="ignore")
        ids = await service.texts.ids(text, special=False)
        # A tokenizer may know ids that the model lacks, which no output has.
        expected = tuple(id for id in ids[:most] if id < inputs.vocab_size)
    if options is None:
        return Speculation(prediction=expected)
    return Speculation(options.enabled, options.drafter, options.num_speculative_tokens, expected)
