"""The engine's requests of one call: what its prompts share is made once."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

from ..errors import shown
from ..params import DEFAULT_MAX_TOKENS
from ..types import Request, SamplingParams, Speculation
from .generate import SURE_TEXT, Service
from .protocol import Generation, Refusal

LETTERS = 16
"""More than a token has, on average, of any text that is expected."""
MOST_REPEATED = 1 << 23
"""Bytes that a call's options may take in the engine, which holds them for each prompt anew."""
ID_BYTES = 8
MOST_LISTED = 1 << 18
"""Tokens that an answer may list beside its text: log probabilities, echoed prompts."""


class Maker:
    """Makes the requests of one call; ``make`` prepares what they share.

    Args:
        service: the engine and the limits.
        body: what the call asks for.
        salt: keeps its cached prefix from others.
        more: goes to ``SamplingParams``.
        speculation: what the call wants of drafting.
    """

    def __init__(
        self,
        service: Service,
        body: Generation,
        salt: str,
        more: dict[str, Any],
        speculation: Speculation,
    ) -> None:
        self._service = service
        self._body = body
        self._salt = salt
        self._more = more
        self._speculation = speculation
        self._params: dict[int, SamplingParams] = {}  # by the most that may follow a prompt
        self._listed = 0

    @staticmethod
    async def make(
        service: Service, body: Generation, salt: str, prompts: int, **more: Any
    ) -> Maker:
        """The maker of a call with so many prompts.

        Raises:
            Refusal: an option does not fit the engine, or all are too large to be repeated for
                each prompt.
        """
        _check(service, body)
        speculation = await _speculation(service, body)
        ids = (body.allowed_token_ids, body.stop_token_ids, speculation.prediction)
        size = ID_BYTES * sum(len(listed or ()) for listed in ids)
        size += sum(len(str(part)) for part in (body.form() or {}).values())
        if prompts > 1 and prompts * size > MOST_REPEATED:
            raise Refusal(
                f"the options have {size} bytes, which {prompts} prompts repeat; at most "
                f"{MOST_REPEATED} bytes are taken. Send fewer prompts in one call.", "prompt",
            )  # fmt: skip
        return Maker(service, body, salt, more, speculation)

    def request(self, ids: list[int]) -> Request:
        """The request for one prompt.

        Raises:
            OutriderError: it cannot be served.
        """
        llm, body = self._service.llm, self._body
        room = llm.intake.max_model_len - len(ids)
        if body.limit is None and llm.ready is not None:
            room = min(room, max(1, llm.ready.num_tokens - len(ids)))
        if room < 1:
            raise Refusal(
                f"the prompt has {len(ids)} tokens, which leaves no room in a context of "
                f"{llm.intake.max_model_len}; shorten it.", "prompt",
            )  # fmt: skip
        params = self._sampling(room, len(ids))
        request, _ = llm.request(ids, params, uuid.uuid4().hex)
        return replace(
            request, speculation=self._speculation, priority=body.priority, cache_salt=self._salt
        )

    def _sampling(self, room: int, prompt: int) -> SamplingParams:
        """How to sample behind a prompt of so many tokens.

        Raises:
            Refusal: the answer would list too much.
        """
        body = self._body
        room = room if body.limit is None else min(room, body.limit)
        if room not in self._params:
            given = body.sampling(room, self._service.settings.defaults, **self._more)
            self._params[room] = given
        params = self._params[room]
        echoed = body.return_token_ids or bool(getattr(body, "echo", False))
        listed = prompt * (echoed + _entries(params.prompt_logprobs))
        each = _entries(params.logprobs)
        left = MOST_LISTED - self._listed - params.n * listed
        most = params.max_tokens or room
        if body.limit is None and each and left > 0:
            most = max(1, min(most, left // (params.n * each)))
            params = replace(params, max_tokens=most)
        self._listed += params.n * (listed + most * each)
        if self._listed > MOST_LISTED:
            raise Refusal(
                f"log probabilities and echoed prompts would list {self._listed} tokens; at most "
                f"{MOST_LISTED} are listed. Ask for fewer tokens, samples or alternatives.",
                "logprobs" if each else None,
            )
        return params


def _check(service: Service, body: Generation) -> None:
    """Refuse options that do not fit the engine, before anything is tokenised.

    Raises:
        Refusal: one does not.
    """
    context = service.llm.intake.max_model_len
    if (body.limit or 0) > max(context, DEFAULT_MAX_TOKENS):
        chats = body.max_completion_tokens is not None
        name = "max_completion_tokens" if chats else "max_tokens"
        raise Refusal(
            f"{name} is {shown(body.limit)}, but the context of this model is {context} tokens; "
            "give at most that.", name,
        )  # fmt: skip
    if body.priority and service.llm.config.scheduling_policy != "priority":
        raise Refusal(
            f"priority is {body.priority}, but priority scheduling is not enabled; give 0, or "
            "start the server with --scheduling-policy priority.", "priority",
        )  # fmt: skip


def _entries(logprobs: int | None) -> int:
    """How many tokens are listed for each position."""
    return 0 if logprobs is None else logprobs + 1


async def _speculation(service: Service, body: Generation) -> Speculation:
    """What a call wants of drafting."""
    given = body.speculation
    expected: tuple[int, ...] = ()
    if body.prediction is not None:
        # No output is longer; what an output does not reach costs every step that looks for it.
        most = service.llm.intake.max_model_len
        text = body.prediction.text[: most * LETTERS].encode(errors="replace")[:SURE_TEXT]
        ids = await service.ids(text.decode(errors="ignore"), special=False)
        # A tokenizer may know ids that the model lacks, which no output has.
        known = service.llm.intake.vocab_size
        expected = tuple(id for id in ids[:most] if id < known)
    if given is None:
        return Speculation(prediction=expected)
    return Speculation(given.enabled, given.drafter, given.num_speculative_tokens, expected)
