"""Reads answers in OpenAI's layout; nothing in them is trusted: errors are ``EndpointError``."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from ...base.outside.text import well_formed
from ...errors import EndpointError, shown

NAMED_TOKENS = 5  # tokens with log probabilities, the most that OpenAI's completions allow
PARTIAL_TEXT = re.compile(r".*\ufffd.*|bytes:(\\x[0-9a-fA-F]{2})+", re.DOTALL)
"""How servers write a token that is part of a character; a token may be written both ways."""
SPECIAL_TEXT = re.compile(r"<[^<>]*>|\[[A-Z_]+\]")
"""Names of tokens without text: a token that ends an answer is not shown."""
NOT_OPENAI = "{} answers with something that is not OpenAI's ({}); is it the right address?"
SUM_ROUNDING = 0.01  # by how much rounded probabilities may sum to more than 1


@dataclass(frozen=True)
class Token:
    """A token: its text, and its id if the server reports that."""

    text: str
    id: int | None = None

    @property
    def partial(self) -> bool:
        """True if the token is part of a character, so that its text does not identify it."""
        return PARTIAL_TEXT.fullmatch(self.text) is not None

    @property
    def clear(self) -> bool:
        """True if the token can be identified: it has text, and an id or a text of its own."""
        if SPECIAL_TEXT.fullmatch(self.text) or self.text == "":
            return False
        return self.id is not None or not self.partial

    def same(self, other: Token) -> bool:
        """Return whether two tokens are the same, by id if both have one."""
        if self.id is not None and other.id is not None:
            return self.id == other.id
        return self.clear and other.clear and self.text == other.text


@dataclass(frozen=True)
class Law:
    """The likeliest next tokens, the likeliest first, and their probabilities."""

    tokens: tuple[Token, ...]
    p: tuple[float, ...]

    def tells(self, token: Token) -> bool:
        """Return whether the token could be identified here, by its id or by a text of its own."""
        by_id = token.id is not None and all(own.id is not None for own in self.tokens)
        return by_id or not token.partial

    def rank(self, token: Token) -> int | None:
        """Return the token's index; None if it is not among the identifiable named ones."""
        same = (i for i, own in enumerate(self.tokens) if own.clear and own.same(token))
        return next(same, None)


@dataclass(frozen=True)
class EndpointCompletion:
    """An answer; what the server does not report is None. ``law`` is that of the first token."""

    text: str
    finish_reason: str | None = None
    tokens: tuple[Token, ...] | None = None
    law: Law | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    prompt_ids: tuple[int, ...] | None = None
    logprobs: tuple[float | None, ...] = ()


def law_of(pairs: list[tuple[Token, Any]]) -> Law:
    """Return the law of tokens and their log probabilities. Raises ValueError: they are invalid."""
    named = []
    for token, value in pairs:
        if type(value) not in (int, float) or not value <= SUM_ROUNDING:
            raise ValueError(f"a log probability is {shown(value)}")
        named.append((token, math.exp(min(value, 0.0))))
    named = sorted(named, key=lambda pair: -pair[1])[:NAMED_TOKENS]
    if not named or named[0][1] == 0:
        raise ValueError("log probabilities name no token")
    total = math.fsum(p for _, p in named)
    if total > 1 + SUM_ROUNDING:
        raise ValueError(f"probabilities sum to {total:.3g}")
    scale = max(total, 1.0)
    return Law(tuple(token for token, _ in named), tuple(p / scale for _, p in named))


def parsed(body: bytes) -> Any:
    """Return the JSON of a body. Raises ValueError: it is not JSON."""
    try:
        return json.loads(body, strict=False)  # errors quote lines as they are
    except (ValueError, RecursionError, MemoryError):
        raise ValueError(f"{shown(body[:80])} is not JSON") from None


def completions(body: bytes, where: str) -> list[EndpointCompletion]:
    """Return the choices of an answer of ``/v1/completions`` by index, or raise EndpointError."""
    try:
        answer = _dict(parsed(body), "the answer")
        choices = answer.get("choices")
        if not isinstance(choices, list) or not choices:
            raise ValueError("it has no choices")
        usage = answer.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        members = [_dict(choice, "a choice") for choice in choices]
        if len(members) > 1:
            for place in (choice.get("index") for choice in members):
                if type(place) is not int:
                    raise ValueError(f"a choice's index is {shown(place)}")
            members.sort(key=itemgetter("index"))
        return [_choice(choice, usage) for choice in members]
    except (ValueError, OverflowError) as error:  # also a number beyond float64
        raise EndpointError(NOT_OPENAI.format(where, error)) from None


def _choice(choice: dict[str, Any], usage: dict[str, Any]) -> EndpointCompletion:
    text, reason = choice.get("text"), choice.get("finish_reason")
    if not isinstance(text, str):
        raise ValueError(f"a choice's text is {shown(text)}")
    ids = _ids(choice.get("token_ids"))
    tokens, law, values = _logprobs(choice.get("logprobs"), ids)
    prompt, output = (usage.get(name) for name in ("prompt_tokens", "completion_tokens"))
    return EndpointCompletion(
        well_formed(text), reason if isinstance(reason, str) else None, tokens, law,
        prompt if type(prompt) is int else None, output if type(output) is int else None,
        _ids(choice.get("prompt_token_ids")), values,
    )  # fmt: skip


def message(body: bytes, where: str) -> tuple[str, str | None]:
    """Return text and finish reason of a chat's answer, or raise as ``completions`` does."""
    try:
        choice = parsed(body)["choices"][0]
        text, reason = choice["message"]["content"], choice.get("finish_reason")
        if not isinstance(text, str):
            raise ValueError(f"a message's content is {shown(text)}")
        return well_formed(text), reason if isinstance(reason, str) else None
    except (LookupError, TypeError, AttributeError):
        raise EndpointError(NOT_OPENAI.format(where, "it has no message")) from None
    except (ValueError, OverflowError) as error:  # also a number beyond float64
        raise EndpointError(NOT_OPENAI.format(where, error)) from None


def _dict(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {shown(value)}")
    return value


def _ids(value: Any) -> tuple[int, ...] | None:
    """Return token ids; None if the value is something else."""
    if not isinstance(value, list) or not all(type(one) is int and one >= 0 for one in value):
        return None
    return tuple(value)


def _logprobs(
    logprobs: Any, ids: tuple[int, ...] | None
) -> tuple[tuple[Token, ...] | None, Law | None, tuple[float | None, ...]]:
    """Return the tokens, the law of the first, and log probabilities; None if not reported."""
    if logprobs is None:
        return None, None, ()
    logprobs = _dict(logprobs, "logprobs")
    if isinstance(logprobs.get("content"), list):  # the form of chats, which llama.cpp uses
        entries = [_dict(entry, "a log probability") for entry in logprobs["content"]]
        tokens = tuple(_token(entry.get("token"), entry.get("id")) for entry in entries)
        values = [entry.get("logprob") for entry in entries]
        tops = entries[0].get("top_logprobs") if entries else None
        first = [_dict(entry, "a log probability") for entry in tops or []]
        pairs = [(_token(top.get("token"), top.get("id")), top.get("logprob")) for top in first]
    else:
        texts, tops = logprobs.get("tokens"), logprobs.get("top_logprobs")
        if not isinstance(texts, list):
            raise ValueError(f"logprobs.tokens is {shown(texts)}")
        whole = ids if ids is not None and len(ids) == len(texts) else (None,) * len(texts)
        tokens = tuple(_token(text, id) for text, id in zip(texts, whole, strict=True))
        told = logprobs.get("token_logprobs")
        values = told if isinstance(told, list) and len(told) == len(texts) else []
        top = tops[0] if isinstance(tops, list) and tops else None
        pairs = [(_token(text, None), p) for text, p in _dict(top or {}, "top_logprobs").items()]
    numbers = tuple(float(v) if isinstance(v, int | float) else None for v in values)
    return tokens, law_of(pairs) if pairs else None, numbers


def _token(text: Any, id: Any) -> Token:
    if not isinstance(text, str):
        raise ValueError(f"a token is {shown(text)}")
    return Token(well_formed(text), id if type(id) is int else None)
