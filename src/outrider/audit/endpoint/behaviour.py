"""Checks of greedy tokens, limits, stops, samples, seeds and forms of output."""

import json
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from .answers import EndpointCompletion, Law, Token
from .distributions import AnswerContext, Laws, Prompt, draw_of
from .outcome import Result, Status, counted
from .sampling import plain
from .source import AuditedServer, RefusedRequest, WithoutSpeculation, together

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
NAMED_SCHEMA: dict[str, Any] = {
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "colour", "strict": True, "schema": SCHEMA},
    }
}
QUESTION = "Name a colour and say whether it is warm. Answer with JSON."
FORMED_TOKENS = 96  # tokens within which a formed answer must end
PATTERN = "[0-9]{3}-[0-9]{4}"
GRAMMAR = 'root ::= [0-9] [0-9] [0-9] "-" [0-9] [0-9] [0-9] [0-9]'
REGEXES: tuple[dict[str, Any], ...] = (
    {"structured_outputs": {"regex": PATTERN}},
    {"guided_regex": PATTERN},
    {"regex": PATTERN},
    {"grammar": GRAMMAR},
)
"""Servers' fields for it: vLLM, vLLM before 0.12, SGLang, and llama.cpp, with a grammar only."""
PROBES = 3
TIE_NATS = 0.25  # largest gap that bfloat16 logits from another batch may bridge
ENDED = "the end"


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
        elif text.startswith(answer.text):  # else rounding led to another answer
            trials += 1
            if answer.text != text[: text.index(word)] or answer.finish_reason != "stop":
                wrong.append(f"{answer.text!r} ({answer.finish_reason}) with stop {word!r}")
    return counted("stop", wrong, trials, "answers", "every answer ends before its stop string")


async def samples(
    server: AuditedServer, laws: Laws, prompts: Sequence[Prompt], alpha: float
) -> Result:  # fmt: skip
    """Check that ``n`` gives ``n`` answers, not copies of one."""
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
    """Check that a seed repeats an answer, alone and among others, and has an effect."""
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
    """Return whether a text follows ``SCHEMA``."""
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
    fields = {"temperature": 1.0, **NAMED_SCHEMA}

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
    """Return the check of formed answers; answers cut off by their limit are not judged."""
    wrong, trials = [], 0
    for (text, reason), good in zip(answers, right, strict=True):
        if reason != "length" or good:
            trials += 1
            if not good:
                wrong.append(repr(text[:80]))
    if not trials and answers and not any(text.lstrip().startswith("{") for text, _ in answers):
        wrong, trials = [repr(text[:80]) for text, _ in answers], len(answers)  # none was formed
    return counted(name, wrong, trials, "answers", "every answer has its form")


def spread(laws: Laws, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return prompts ordered by how uncertain their first tokens are, most uncertain first."""

    def surest(prompt: Prompt) -> float:
        law = laws.get(AnswerContext(prompt, ()))
        return math.inf if law is None else law.p[0]

    return sorted(prompts, key=surest)


async def greedy(
    server: AuditedServer, laws: Laws, prompts: Sequence[Prompt], length: int
) -> tuple[Result, list[EndpointCompletion]]:
    """Return the check of each token given the tokens before it, and the greedy answers."""
    answers = await together(
        server.complete(prompt.given, length, temperature=0.0, **server.telling)
        for prompt in prompts
    )
    draws = [draw_of(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    places = [
        (AnswerContext(draw.prompt, draw.tokens[:at]), token)
        for draw in draws
        for at, token in enumerate(draw.tokens)
    ]
    if server.tells_tokens:
        await laws.fetch(context for context, _ in places)
        judged = [(c, token, law) for c, token in places if (law := laws.get(c)) is not None]
        if judged:
            return _result(judged), answers
    return await _by_text(laws, prompts, answers, length), answers


def _result(judged: list[tuple[AnswerContext, Token, Law]]) -> Result:
    wrong, ties, trials, largest = [], 0, 0, 0.0
    for context, token, law in judged:
        best = law.tokens[0]
        if not law.tells(token) or not (token.clear or best.clear):
            continue  # it is one of several tokens that cannot be told apart
        trials += 1
        if best.same(token):
            continue
        rank = law.rank(token)
        least = law.p[-1] if rank is None else law.p[rank]
        gap = math.log(law.p[0] / least) if least > 0 else math.inf
        if gap <= TIE_NATS and rank is not None:
            ties, largest = ties + 1, max(largest, gap)
            continue
        at = len(context.tokens) + 1
        wrong.append(
            f"{token.text or ENDED!r} at position {at} behind {context.prompt.text!r} where the "
            f"reference says {best.text!r}, likelier by {gap:.2g} nats"
            f"{' or more' if rank is None else ''}"
        )
    right = "every token is the reference's"
    if ties:
        right += f" but for {ties} {'tie' if ties == 1 else 'ties'} of {largest:.2g} nats at most"
    return counted("greedy", wrong, trials, "tokens", right)


def told(laws: Laws, prompts: Sequence[Prompt], answers: Sequence[EndpointCompletion]) -> Result:
    """Check that the log probabilities within greedy answers are the reference's."""
    wrong, trials = [], 0
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = answer.tokens or ()
        for at, (token, value) in enumerate(zip(tokens, answer.logprobs, strict=False)):
            law = laws.get(AnswerContext(prompt, tokens[:at]))
            rank = law.rank(token) if law is not None else None
            if law is None or rank is None or value is None:
                continue
            trials += 1
            due = math.log(law.p[rank])
            if not abs(value - due) <= TIE_NATS:
                wrong.append(f"{token.text!r} at position {at + 1} has {value:.3g}, due {due:.3g}")
    if not trials:
        why = "the server or its reference tells no log probabilities"
        return Result("logprobs", Status.NOT_OFFERED, why)
    right = f"all within {TIE_NATS} nats of the reference's"
    return counted("logprobs", wrong, trials, "tokens", right)


async def _by_text(
    laws: Laws, prompts: Sequence[Prompt], answers: Sequence[EndpointCompletion], length: int
) -> Result:
    """Compare texts, for servers that do not report tokens or log probabilities."""
    source = laws.source
    step_by_step = isinstance(source, WithoutSpeculation) and not source.server.has_switch

    async def text(prompt: Prompt) -> str:
        if not step_by_step:
            return (await source.complete(prompt.text, length, temperature=0.0)).text
        said = ""
        for _ in range(length):
            answer = await source.complete(prompt.text + said, 1, temperature=0.0)
            said += answer.text
            if answer.finish_reason == "stop" or not answer.text:
                break
        return said

    theirs = await together(text(prompt) for prompt in prompts)
    parted = sum(mine.text != other for mine, other in zip(answers, theirs, strict=True))
    if not parted:
        return counted("greedy", [], len(theirs), "answers", "every answer is the reference's")
    seen = (
        f"{parted} of {len(theirs)} answers part from the reference's; without log "
        "probabilities an error cannot be told from a tie"
    )
    return Result("greedy", Status.INCONCLUSIVE, seen, len(theirs))
