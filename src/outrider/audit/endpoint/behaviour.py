"""Checks of what requests ask for beside a law: limits, stops, samples, seeds, forms of output."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from .answers import EndpointCompletion
from .distributions import AnswerContext, Laws, Prompt
from .outcome import Result, Status, counted
from .sampling import plain
from .source import AuditedServer, RefusedRequest, together

LIMITS = (1, 2, 3, 5, 8, 13)
SAMPLES = 4
SEEDS = 8
SEEDED_TOKENS = 16  # tokens of a seeded answer
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"type": "string", "enum": ["red", "green", "blue"]},
        "warm": {"type": "boolean"},
    },
    "required": ["colour", "warm"],
    "additionalProperties": False,
}
QUESTION = "Name a colour and say whether it is warm. Answer with JSON."
FORMED_TOKENS = 96  # tokens in which a formed answer has to end
PATTERN = "[0-9]{3}-[0-9]{4}"
GRAMMAR = 'root ::= [0-9] [0-9] [0-9] "-" [0-9] [0-9] [0-9] [0-9]'
REGEXES: tuple[dict[str, Any], ...] = (
    {"structured_outputs": {"regex": PATTERN}},
    {"guided_regex": PATTERN},
    {"regex": PATTERN},
    {"grammar": GRAMMAR},
)
"""Servers' names of it: vLLM, vLLM before 0.12, SGLang, and llama.cpp, which has a grammar only."""
PROBES = 3


async def limits(server: AuditedServer, prompts: Sequence[Prompt]) -> Result:
    """Check that answers have as many tokens as asked for."""
    asked = [(prompt, limit) for prompt in prompts for limit in LIMITS]
    answers = await together(server.complete(p.text, limit) for p, limit in asked)
    wrong, trials = [], 0
    for (_, limit), answer in zip(asked, answers, strict=True):
        count = answer.output_tokens
        if count is None:
            continue
        trials += 1
        if count > limit or (count < limit and answer.finish_reason == "length"):
            wrong.append(f"{count} tokens with max_tokens {limit} ({answer.finish_reason})")
    return counted("max_tokens", wrong, trials, "answers", "no answer is longer or cut short")


async def stops(
    server: AuditedServer, prompts: Sequence[Prompt], greedy: Sequence[EndpointCompletion],
    length: int,
) -> Result:  # fmt: skip
    """Check that answers end before strings from the middle of the ``greedy`` ones."""
    asked = []
    for prompt, answer in zip(prompts, greedy, strict=True):
        text = answer.text
        middle = text[len(text) // 2 : len(text) // 2 + 3]
        if middle.strip() and "\ufffd" not in middle:
            asked.append((prompt, text, middle))
    answers = await together(
        server.complete(prompt.text, length, temperature=0.0, stop=[word])
        for prompt, _, word in asked
    )
    wrong, trials = [], 0
    for (_, text, word), answer in zip(asked, answers, strict=True):
        if word in answer.text:
            trials += 1
            wrong.append(f"{answer.text!r} with stop {word!r}")
        elif text.startswith(answer.text):  # else rounding led elsewhere
            trials += 1
            if answer.text != text[: text.index(word)] or answer.finish_reason != "stop":
                wrong.append(f"{answer.text!r} ({answer.finish_reason}) with stop {word!r}")
    return counted("stop", wrong, trials, "answers", "every answer ends before its stop string")


async def samples(
    server: AuditedServer, laws: Laws, prompts: Sequence[Prompt], alpha: float
) -> Result:  # fmt: skip
    """Check that ``n`` gives so many answers, not copies of one."""
    name = "n"
    answers = await together(
        server.choices(prompt.text, 4, n=SAMPLES, temperature=1.0) for prompt in prompts
    )
    wrong = [f"{len(some)} choices with n {SAMPLES}" for some in answers if len(some) != SAMPLES]
    if wrong:
        return counted(name, wrong, len(answers), "answers", "")
    if any(len({one.text for one in some}) > 1 for some in answers):
        return counted(name, [], len(answers), "answers", f"{SAMPLES} choices that differ")
    chance = 1.0
    for prompt in prompts:
        law = laws.get(AnswerContext(prompt, ()))
        chance *= 1.0 if law is None else float((plain(law) ** SAMPLES).sum())
    copies = f"the {SAMPLES} choices of each answer are the same (chance {chance:.1g})"
    status = Status.FAILED if chance <= alpha else Status.INCONCLUSIVE
    return Result(name, status, copies, len(answers))


async def seeds(server: AuditedServer, prompt: Prompt, rng: np.random.Generator) -> list[Result]:
    """Check that a seed repeats an answer, alone and among others, and that it matters."""
    numbers = [int(one) for one in rng.integers(1, 2**31, SEEDS)]

    async def ask(**seed: int) -> str:
        return (await server.complete(prompt.text, SEEDED_TOKENS, temperature=1.0, **seed)).text

    once = [await ask(seed=seed) for seed in numbers]
    again = [await ask(seed=seed) for seed in numbers]
    calls = [call for seed in numbers for call in (ask(seed=seed), ask())]
    crowd = (await together(calls))[::2]
    results = []
    for name, second in (("seed, alone", again), ("seed, among others", crowd)):
        wrong = [
            f"{one!r}, then {two!r}" for one, two in zip(once, second, strict=True) if one != two
        ]
        if len(set(once)) == 1 and not wrong:
            seen = f"{SEEDS} seeds give one answer, {once[0]!r}"
            results.append(Result(name, Status.INCONCLUSIVE, seen, SEEDS))
            continue
        right = f"every seed repeats its answer; {len(set(once))} of {SEEDS} answers differ"
        results.append(counted(name, wrong, SEEDS, "pairs", right))
    return results


def valid(text: str) -> bool:
    """Return whether a text is what ``SCHEMA`` asks for."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if not isinstance(value, dict) or set(value) != {"colour", "warm"}:
        return False
    colours = SCHEMA["properties"]["colour"]["enum"]
    return value["colour"] in colours and isinstance(value["warm"], bool)


async def schema(server: AuditedServer, count: int) -> Result:
    """Check that answers follow a JSON schema; chats are tried first."""
    named = {"name": "colour", "strict": True, "schema": SCHEMA}
    fields = {"temperature": 1.0, "response_format": {"type": "json_schema", "json_schema": named}}

    async def chat() -> tuple[str, str | None]:
        return await server.chat(QUESTION, FORMED_TOKENS, **fields)

    async def complete() -> tuple[str, str | None]:
        answer = await server.complete(QUESTION, FORMED_TOKENS, **fields)
        return answer.text, answer.finish_reason

    ask = chat
    try:
        first = await ask()
    except RefusedRequest:
        ask = complete
        first = await ask()
    answers = [first, *await together(ask() for _ in range(count - 1))]
    return _formed("json_schema", answers, [valid(text) for text, _ in answers])


async def regex(server: AuditedServer, count: int) -> Result:
    """Check that answers match a regular expression, by the field that has an effect."""

    async def ask(fields: dict[str, Any]) -> tuple[str, str | None]:
        answer = await server.complete("My number is ", FORMED_TOKENS, temperature=1.0, **fields)
        return answer.text, answer.finish_reason

    for fields in REGEXES:
        try:
            answers = [await ask(fields) for _ in range(PROBES)]
        except RefusedRequest:
            continue
        if any(re.fullmatch(PATTERN, text) for text, _ in answers):
            answers += await together(ask(fields) for _ in range(count - PROBES))
            matched = [re.fullmatch(PATTERN, text) is not None for text, _ in answers]
            return _formed(f"regex ({next(iter(fields))})", answers, matched)
    names = ", ".join(next(iter(fields)) for fields in REGEXES)
    return Result("regex", Status.NOT_OFFERED, f"none of {names} has an effect")


def _formed(name: str, answers: Sequence[tuple[str, str | None]], right: Sequence[bool]) -> Result:
    """Return the check of formed answers; those that are cut by their limit are not judged."""
    wrong, trials = [], 0
    for (text, reason), good in zip(answers, right, strict=True):
        if reason != "length" or good:
            trials += 1
            if not good:
                wrong.append(repr(text[:80]))
    if not trials and answers and not any(text.lstrip().startswith("{") for text, _ in answers):
        wrong, trials = [repr(text[:80]) for text, _ in answers], len(answers)  # nothing forms it
    return counted(name, wrong, trials, "answers", "every answer has its form")


def spread(laws: Laws, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return prompts by how uncertain their first tokens are, the most uncertain first."""

    def surest(prompt: Prompt) -> float:
        law = laws.get(AnswerContext(prompt, ()))
        return math.inf if law is None else law.p[0]

    return sorted(prompts, key=surest)
