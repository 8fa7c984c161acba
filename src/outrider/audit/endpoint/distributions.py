"""The laws of contexts, asked of a reference, and what a server drew there."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .answers import NAMED_TOKENS, EndpointCompletion, Law, Token
from .sampling import CELLS, Cells, Sampling, expected, unaffected
from .source import Given, PromptSource, RefusedRequest, TimeLimit, TimeUp, together

END_TOKEN = Token("")  # the token that ended an answer; servers do not report which one
LAWS_AT_ONCE = 64  # laws between two checks of the clock


@dataclass(frozen=True)
class Prompt:
    """A prompt: its text, and its ids and number of tokens if the server reports them."""

    text: str
    ids: tuple[int, ...] | None = None
    count: int | None = None

    @property
    def given(self) -> Given:
        """The prompt as it is sent: its ids if they are known."""
        return self.text if self.ids is None else self.ids


class AnswerContext(NamedTuple):
    """A prompt, and the tokens of an answer, or of its beginning."""

    prompt: Prompt
    tokens: tuple[Token, ...]

    @property
    def given(self) -> Given | None:
        """The context as a prompt; None if no prompt is sure to mean these tokens."""
        ids = [token.id for token in self.tokens if token.id is not None]
        if self.prompt.ids is not None and len(ids) == len(self.tokens):
            return (*self.prompt.ids, *ids)
        if all(token.clear and not token.partial for token in self.tokens):
            return self.prompt.text + "".join(token.text for token in self.tokens)
        return None


class Laws:
    """The laws of contexts that a reference gives; each is asked for once."""

    def __init__(self, source: PromptSource, clock: TimeLimit) -> None:
        self.source, self._clock = source, clock
        self._known: dict[AnswerContext, Law | None] = {}

    def get(self, context: AnswerContext) -> Law | None:
        return self._known.get(context)

    async def fetch(self, contexts: Iterable[AnswerContext]) -> None:
        """Ask for laws until the time is up."""
        new = [context for context in dict.fromkeys(contexts) if context not in self._known]
        for start in range(0, len(new), LAWS_AT_ONCE):
            some = new[start : start + LAWS_AT_ONCE]
            try:
                answered = await together(self._ask(context) for context in some)
            except TimeUp:
                return
            self._known.update(zip(some, answered, strict=True))

    async def _ask(self, context: AnswerContext) -> Law | None:
        self._clock.check()
        if (given := context.given) is None:
            return None
        try:
            answer = await self.source.complete(given, 1, logprobs=NAMED_TOKENS, temperature=1.0)
        except RefusedRequest:
            return None
        count, read = context.prompt.count, answer.prompt_tokens
        if count is None or read is None or not isinstance(given, str):
            return answer.law
        # Unless the lengths agree, the text is tokenised differently.
        return answer.law if read == count + len(context.tokens) else None


def draw_of(prompt: Prompt, answer: EndpointCompletion) -> AnswerContext:
    """Return an answer's tokens; if only its text is reported, it must be a single token."""
    tokens = answer.tokens
    if tokens is None:
        tokens = (Token(answer.text),) if answer.text else ()
    if answer.finish_reason == "stop" and (not tokens or tokens[-1].clear):
        tokens = (*tokens, END_TOKEN)
    return AnswerContext(prompt, tokens)


async def fetch_along(laws: Laws, draws: Sequence[AnswerContext], length: int, most: int) -> None:
    """Fetch laws of contexts with draws, the ``most`` frequent ones at each depth."""
    for depth in range(1, length):
        counts: Counter[AnswerContext] = Counter(
            AnswerContext(draw.prompt, draw.tokens[:depth])
            for draw in draws
            if len(draw.tokens) > depth
        )
        usable = [(one, n) for one, n in counts.most_common() if one.given is not None]
        await laws.fetch(one for one, _ in usable[:most])


Biased = dict[Prompt, Token]  # by prompt, the token that logit_bias is tried on


@dataclass(frozen=True)
class ObservedDraws:
    """Draws and their laws, [contexts, CELLS]; ``ignored`` are the laws without the options."""

    contexts: list[AnswerContext]
    laws: Cells
    ignored: Cells
    counts: NDArray[np.int64]


def observe(
    draws: Sequence[AnswerContext], sampling: Sampling, laws: Laws, biased: Biased, later: bool
) -> ObservedDraws:
    """Return the draws of first tokens, or of later ones, whose laws are known."""
    drawn: defaultdict[AnswerContext, list[Token]] = defaultdict(list)
    for draw in draws:
        places = range(1, len(draw.tokens)) if later else range(min(1, len(draw.tokens)))
        for at in places:
            if at and not draw.tokens[at - 1].clear:
                continue  # it is not known whether an answer ended there, see ``draw_of``
            drawn[AnswerContext(draw.prompt, draw.tokens[:at])].append(draw.tokens[at])
    contexts, rows = [], []
    for context, tokens in drawn.items():
        if (law := laws.get(context)) is None:
            continue
        bias = biased.get(context.prompt)
        if (cells := expected(law, sampling, context.tokens, bias)) is None:
            continue
        counts = np.zeros(CELLS, np.int64)
        for token in tokens:
            rank = law.rank(token)
            counts[CELLS - 1 if rank is None else rank] += 1
        if sampling.reweighs:  # the law is that given one of the named tokens
            counts[-1] = 0
        if counts.any():
            contexts.append(context)
            rows.append((cells, unaffected(law, sampling), counts))
    due, ignored, drawn_counts = zip(*rows, strict=True) if rows else ((), (), ())
    shape = (len(rows), CELLS)
    return ObservedDraws(
        contexts, np.reshape(due, shape), np.reshape(ignored, shape),
        np.reshape(drawn_counts, shape).astype(np.int64),
    )  # fmt: skip
