"""Checks of a server that drafts against the same server without drafts, which is called plain.

Plain is asked twice, alone and among other requests, before the server is judged: what plain itself
does not repeat says nothing about drafts.
"""

import math
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from . import pairs
from .answers import EndpointCompletion
from .behaviour import (
    FORMED_TOKENS,
    NAMED_SCHEMA,
    PATTERN,
    QUESTION,
    REGEXES,
    SCHEMA,
    SEEDED_TOKENS,
    TIE_NATS,
    valid,
)
from .distributions import AnswerContext, Laws, Prompt, draw_of
from .outcome import Result, Status, counted
from .source import AuditedServer, Breakdown, Given, RefusedRequest, together

T = TypeVar("T")
SEEDS_A_PROMPT = 2
LAW_TOKENS = 4  # tokens of an answer whose text is compared
LAW_PROMPTS = 2  # prompts of those answers
TRIED = 16  # plain's answers to each prompt, from which these prompts are chosen
SEEDS = 2**31
FORMED = 0  # the seed of the first sampled answer with a form


class Plain(Protocol):
    """A server that drafts nothing."""

    @property
    def name(self) -> str: ...

    async def complete(self, prompt: Given, tokens: int, **fields: Any) -> EndpointCompletion: ...

    async def chat(self, text: str, tokens: int, **fields: Any) -> tuple[str, str | None]: ...


async def in_turn(calls: Iterator[Awaitable[T]]) -> list[T]:
    """Return all results; each call waits for the one before, so that it runs alone."""
    return [await call for call in calls]


def repeats(alone: Sequence[object], crowd: Sequence[object]) -> str:
    """Return a sentence on how often plain repeats itself."""
    same = sum(one == two for one, two in zip(alone, crowd, strict=True))
    return f"plain repeats itself among others in {same} of {len(alone)}"


async def greedy(
    server: AuditedServer, plain: Plain, laws: Laws, prompts: Sequence[Prompt], length: int
) -> Result:  # fmt: skip
    """Check that greedy answers equal plain's, except for ties and what plain does not repeat."""

    def ask(source: Plain, prompt: Prompt) -> Awaitable[EndpointCompletion]:
        return source.complete(prompt.given, length, temperature=0.0, **server.telling)

    due = await in_turn(ask(plain, prompt) for prompt in prompts)
    again = await together(ask(plain, prompt) for prompt in prompts)
    said = await in_turn(ask(server, prompt) for prompt in prompts)
    steady = repeats([one.text for one in due], [one.text for one in again])
    wrong, ties, unsteady = [], [], 0
    for prompt, mine, first, second in zip(prompts, said, due, again, strict=True):
        if mine.text == first.text:
            continue
        if (gap := await _gap(laws, prompt, mine, first)) is not None and gap <= TIE_NATS:
            ties.append(gap)
        elif first.text != second.text:
            unsteady += 1
        else:
            told = "" if gap is None else f", likelier by {gap:.2g} nats"
            wrong.append(f"{mine.text!r} where plain says {first.text!r}{told} ({steady})")
    right = f"{len(prompts) - len(ties) - unsteady} answers of {length} tokens are plain's"
    if ties:
        right += f", {len(ties)} part at ties of {max(ties):.2g} nats at most"
    if unsteady:
        right += f", {unsteady} part where plain does not repeat itself"
    judged = len(prompts) - unsteady
    return counted("greedy, as plain", wrong, judged, "answers", f"{right}; {steady}")


async def _gap(
    laws: Laws, prompt: Prompt, mine: EndpointCompletion, due: EndpointCompletion
) -> float | None:
    """Return by how many nats plain prefers its token where answers diverge; None if unknown."""
    one, two = draw_of(prompt, mine).tokens, draw_of(prompt, due).tokens
    if mine.tokens is None or due.tokens is None:
        return None
    shared = zip(one, two, strict=False)
    at = next((i for i, (x, y) in enumerate(shared) if not x.same(y)), None)
    if at is None:
        return None
    context = AnswerContext(prompt, two[:at])
    await laws.fetch([context])
    law = laws.get(context)
    rank = None if law is None else law.rank(one[at])
    if law is None:
        return None
    return math.inf if rank is None else math.log(law.p[0] / law.p[rank])


async def seeds(
    server: AuditedServer, plain: Plain, prompts: Sequence[Prompt], rng: np.random.Generator
) -> Result:
    """Check whether a seed gives plain's answer, which the right law alone does not require."""
    name = "seed, as plain"
    asked = [(p, int(rng.integers(1, SEEDS))) for p in prompts for _ in range(SEEDS_A_PROMPT)]

    async def ask(source: Plain, prompt: Prompt, seed: int) -> str:
        fields = {"temperature": 1.0, "seed": seed}
        return (await source.complete(prompt.text, SEEDED_TOKENS, **fields)).text

    due = await in_turn(ask(plain, *one) for one in asked)
    again = await in_turn(ask(plain, *one) for one in asked)
    if due != again:
        return Result(name, Status.INCONCLUSIVE, "plain does not repeat its seeds", len(asked))
    by_prompt = zip(*(due[i::SEEDS_A_PROMPT] for i in range(SEEDS_A_PROMPT)), strict=True)
    if all(len(set(texts)) == 1 for texts in by_prompt):
        return Result(name, Status.INCONCLUSIVE, "seeds have no effect in plain", len(asked))
    said = await in_turn(ask(server, *one) for one in asked)
    wrong = [
        f"{mine!r} where plain says {other!r}"
        for mine, other in zip(said, due, strict=True)
        if mine != other
    ]
    found = counted(name, wrong, len(asked), "answers", "every seed gives plain's answer")
    return replace(found, status=Status.DIFFERS) if wrong else found


@dataclass(frozen=True)
class Form:
    """A form of answers, in one of the ways in which servers accept it."""

    name: str
    chat: bool
    fields: dict[str, Any]
    fits: Callable[[str], bool]

    async def ask(self, source: Plain, prompt: str, **fields: Any) -> tuple[str, str | None]:
        if self.chat:
            return await source.chat(prompt, FORMED_TOKENS, **fields, **self.fields)
        answer = await source.complete(prompt, FORMED_TOKENS, **fields, **self.fields)
        return answer.text, answer.finish_reason


def matches(text: str) -> bool:
    """Return whether a text matches ``PATTERN``."""
    return re.fullmatch(PATTERN, text) is not None


FORMS: dict[str, tuple[Form, ...]] = {
    "json_schema": (
        Form("response_format of chats", True, NAMED_SCHEMA, valid),
        Form("response_format", False, NAMED_SCHEMA, valid),
        Form("structured_outputs", False, {"structured_outputs": {"json": SCHEMA}}, valid),
        Form("json_schema", False, {"json_schema": SCHEMA}, valid),
    ),
    "regex": tuple(Form(next(iter(fields)), False, fields, matches) for fields in REGEXES),
}
"""For each form the ways to ask for it; the first one with an effect in plain is used."""


async def forms(server: AuditedServer, plain: Plain, prompts: Sequence[Prompt]) -> list[Result]:
    """Check that answers with a form have it, and are plain's at temperature 0."""
    return [await _form(server, plain, kind, prompts) for kind in FORMS]


async def _form(
    server: AuditedServer, plain: Plain, kind: str, prompts: Sequence[Prompt]
) -> Result:
    texts = [f"{QUESTION} {prompt.text}" for prompt in prompts]
    for form in FORMS[kind]:
        try:
            due = await in_turn(form.ask(plain, text, temperature=0.0) for text in texts)
        except (RefusedRequest, Breakdown):
            continue
        if any(form.fits(text) for text, _ in due):
            return await _formed(server, plain, f"{kind}, as plain", form, texts, due)
    return Result(f"{kind}, as plain", Status.NOT_OFFERED, "plain takes it by no known way")


async def _formed(
    server: AuditedServer, plain: Plain, name: str, form: Form, texts: Sequence[str],
    due: Sequence[tuple[str, str | None]],
) -> Result:  # fmt: skip
    again = await together(form.ask(plain, text, temperature=0.0) for text in texts)
    said = await in_turn(form.ask(server, text, temperature=0.0) for text in texts)
    wrong, judged = [], 0
    for mine, first, second in zip(said, due, again, strict=True):
        if mine == first or first == second:
            judged += 1
        if mine != first and first == second:
            wrong.append(f"{mine[0]!r} where plain says {first[0]!r}")
    sampled = 0
    for number, text in enumerate(texts):
        fields = {"temperature": 1.0, "seed": FORMED + number}
        mine, first = await form.ask(server, text, **fields), await form.ask(plain, text, **fields)
        if "length" not in (mine[1], first[1]) and form.fits(first[0]):
            sampled += 1
            if not form.fits(mine[0]):
                wrong.append(f"{mine[0]!r} has not its form")
    right = (
        f"by {form.name}: {judged} greedy answers are plain's, {sampled} sampled ones have their "
        f"form; {repeats(due, again)}"
    )
    return counted(name, wrong, judged + sampled, "answers", right)


async def law(
    server: AuditedServer, plain: Plain, prompts: Sequence[Prompt], count: int,
    rng: np.random.Generator, alpha: float,
) -> Result:  # fmt: skip
    """Check that sampled texts are as frequent as plain's, if probabilities are not reported."""

    async def ask(source: Plain, prompt: Prompt) -> str:
        fields = {"temperature": 1.0, "seed": int(rng.integers(1, SEEDS))}
        return (await source.complete(prompt.text, LAW_TOKENS, **fields)).text

    tried = [await together(ask(plain, p) for _ in range(TRIED)) for p in prompts]
    varied = {at: kinds for at, some in enumerate(tried) if (kinds := len(set(some))) > 1}
    # Not so certain that drafts hardly matter, nor so varied that no text repeats.
    chosen = sorted(varied, key=lambda at: abs(varied[at] - TRIED // 2))[:LAW_PROMPTS]
    name = "law, as plain"
    if not chosen:
        return Result(name, Status.INCONCLUSIVE, "plain's answers at temperature 1 do not vary")
    count *= LAW_PROMPTS
    asked = [prompts[chosen[i % len(chosen)]] for i in range(count)]
    mine = await together(ask(server, prompt) for prompt in asked)
    due = await together(ask(plain, prompt) for prompt in asked)
    numbers = [chosen[i % len(chosen)] for i in range(count)]
    seen = list(zip(numbers, mine, due, strict=True))
    bets, size = pairs.evidence(seen), pairs.visible(seen, alpha)
    detects = f"total variation {size:.2g} of texts of {LAW_TOKENS} tokens"
    told = f"texts of {LAW_TOKENS} tokens at temperature 1, the server's or plain's: bets on which "
    if bets <= -math.log(alpha):
        right = f"{told}is which win {bets:.2g} nats, {-math.log(alpha):.3g} would be an error"
        return Result(name, Status.PASSED, right, count, detects, size)
    wrong = f"{told}is which win {bets:.3g} nats, more than {-math.log(alpha):.3g}; {_most(seen)}"
    return Result(name, Status.FAILED, wrong, count, detects, size)


def _most(seen: Sequence[pairs.Pair]) -> str:
    """Return a sentence on the text whose frequencies differ most."""
    texts = {(prompt, text) for prompt, *both in seen for text in both}

    def counts(key: tuple[int, str]) -> tuple[int, int]:
        return (
            sum((p, x) == key for p, x, _ in seen),
            sum((p, y) == key for p, _, y in seen),
        )

    def difference(key: tuple[int, str]) -> int:
        mine, due = counts(key)
        return abs(mine - due)

    worst = max(sorted(texts), key=difference)
    mine, due = counts(worst)
    total = sum(prompt == worst[0] for prompt, _, _ in seen)
    return f"{worst[1]!r} in {mine} of {total} answers, in {due} of plain's"
