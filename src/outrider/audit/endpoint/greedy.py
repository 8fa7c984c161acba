"""Greedy equality: every token of a server's greedy answers against its reference."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .answers import EndpointCompletion, Law, Token
from .distributions import AnswerContext, Laws, Prompt, draw_of
from .outcome import Result, Status, counted
from .source import AuditedServer, WithoutSpeculation, together

NAME = "greedy"
TIE_NATS = 0.25  # largest gap that bfloat16 logits from another batch may bridge
ENDED = "the end"


async def greedy(
    server: AuditedServer, laws: Laws, prompts: Sequence[Prompt], length: int
) -> tuple[Result, list[EndpointCompletion]]:
    """Compare each token with the reference's behind the tokens before it; return answers, too."""
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
            continue  # which of those that cannot be told apart it was is not known
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
    return counted(NAME, wrong, trials, "tokens", right)


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
    """Compare texts, where tokens or log probabilities are not told."""
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
        return counted(NAME, [], len(theirs), "answers", "every answer is the reference's")
    seen = (
        f"{parted} of {len(theirs)} answers part from the reference's; without log "
        "probabilities an error cannot be told from a tie"
    )
    return Result(NAME, Status.INCONCLUSIVE, seen, len(theirs))
