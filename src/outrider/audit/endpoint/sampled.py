"""Law tests: a server's sampled tokens against the laws of the contexts they were drawn in."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .answers import Token
from .distributions import (
    AnswerContext,
    Biased,
    Laws,
    ObservedDraws,
    Prompt,
    draw_of,
    fetch_along,
    observe,
)
from .martingale import Comparison, compare
from .outcome import Result, Status
from .sampling import Sampling, expected, plain
from .source import AuditedServer, RefusedRequest, TimeUp, together

ANSWERS_A_TURN = 32  # answers for one set of options before the next set's turn
DRAWING_SHARE = 0.7  # share of the time for drawing; laws are asked for in the rest
FEWEST_DRAWS = 50  # draws below which there is no verdict
ANSWER_TOKENS = 5  # tokens of an answer
PROMPTS = 2  # prompts for each set of options
ANSWERS_FOR_A_LAW = 2  # answers per law that may be asked for, at each depth
SEEDS = 2**31
LEAST_EFFECT = 0.05  # least effect on a prompt, as total variation, that is worth drawing for


@dataclass
class SamplingTrial:
    """One set of options: the answers so far, or why there are none."""

    sampling: Sampling
    prompts: list[Prompt] = field(default_factory=list)
    draws: list[AnswerContext] = field(default_factory=list)
    refused: str = ""


@dataclass(frozen=True)
class Sampled:
    """The law tests of one audit; ``alpha`` bounds the probability of any false alarm."""

    server: AuditedServer
    laws: Laws
    prompts: Sequence[Prompt]
    biased: Biased
    samplings: Sequence[Sampling]
    answers: int
    seeds: bool
    rng: np.random.Generator
    alpha: float

    async def run(self) -> list[Result]:
        first = [AnswerContext(prompt, ()) for prompt in self.prompts]
        await self.laws.fetch(first)
        # Penalties act after a first token: a prompt is useful if its likeliest token may repeat.
        known = [(one, law) for one in first if (law := self.laws.get(one)) is not None]
        if not known:
            self.server.clock.check()
            why = f"{self.laws.source.name} gives no log probabilities"
            return [Result("law", Status.NOT_OFFERED, why)]
        await self.laws.fetch(AnswerContext(one.prompt, law.tokens[:1]) for one, law in known)
        texts = [one.prompt for one, _ in known]
        trials = [self._trial(sampling, texts) for sampling in self.samplings]
        await self._draw(trials)
        draws = [draw for trial in trials for draw in trial.draws]
        most = max(1, self.answers // ANSWERS_FOR_A_LAW)
        await fetch_along(self.laws, draws, ANSWER_TOKENS, most)
        return [result for trial in trials for result in self._results(trial)]

    def _trial(self, sampling: Sampling, prompts: list[Prompt]) -> SamplingTrial:
        if sampling.bias:
            prompts = [prompt for prompt in prompts if prompt in self.biased]
            if not prompts:
                why = "the server tells no token ids, which it takes"
                return SamplingTrial(sampling, refused=why)
        return SamplingTrial(sampling, chosen(self.laws, prompts, sampling, self.biased, PROMPTS))

    async def _draw(self, trials: list[SamplingTrial]) -> None:
        """Take answers in turns, so that each set of options has some if time runs out."""
        clock = self.server.clock
        until = clock.left() * (1 - DRAWING_SHARE)
        for start in range(0, self.answers, ANSWERS_A_TURN):
            for trial in trials:
                if trial.refused or clock.left() < until:
                    continue
                count = min(ANSWERS_A_TURN, self.answers - start)
                try:
                    trial.draws += await self._answers(trial, start, count)
                except RefusedRequest as error:
                    trial.refused = str(error)
                except TimeUp:
                    return

    async def _answers(self, trial: SamplingTrial, start: int, count: int) -> list[AnswerContext]:
        async def one(number: int) -> AnswerContext:
            prompt = trial.prompts[number % len(trial.prompts)]
            fields = trial.sampling.fields(self.biased.get(prompt)) | self.server.telling
            if self.seeds:
                fields["seed"] = int(self.rng.integers(0, SEEDS))
            length = ANSWER_TOKENS if self.server.tells_tokens else 1
            return draw_of(prompt, await self.server.complete(prompt.given, length, **fields))

        if start == 0:  # a refusal costs one request
            return [await one(0), *await together(one(i) for i in range(1, count))]
        return await together(one(start + i) for i in range(count))

    def _results(self, trial: SamplingTrial) -> list[Result]:
        name = f"law, {trial.sampling.name}"
        if trial.refused:
            return [Result(name, Status.NOT_OFFERED, trial.refused)]
        results = []
        for later in (False, True):
            title = f"{name}: {'later tokens' if later else 'first token'}"
            if later and not self.server.tells_tokens:
                why = "the server does not tell tokens, so later ones cannot be told apart"
                results.append(Result(title, Status.NOT_OFFERED, why))
                continue
            data = observe(trial.draws, trial.sampling, self.laws, self.biased, later)
            results.append(self._judged(title, data))
        return results

    def _judged(self, title: str, data: ObservedDraws) -> Result:
        n = int(data.counts.sum())
        if n < FEWEST_DRAWS:
            why = f"only {n} draws have a law that is known well enough"
            return Result(title, Status.INCONCLUSIVE, why, n)
        alpha = self.alpha / (2 * len(self.samplings))
        got = compare(data.laws, data.ignored, data.counts, alpha)
        detects = (
            f"total variation {got.visible_alike:.2g} if alike in all contexts, "
            f"{got.visible_apart:.2g} if not"
        )
        if not got.wrong:
            text = f"all within bounds; {ranks(got)}"
            return Result(title, Status.PASSED, text, n, detects, got.visible_alike)
        text = self._wrong(got, data)
        if not compare(data.ignored, data.laws, data.counts, alpha).wrong:
            text += "; as if the option were ignored"
        return Result(title, Status.FAILED, text, n, detects, got.visible_alike)

    def _wrong(self, got: Comparison, data: ObservedDraws) -> str:
        if got.excluded:
            return f"{got.excluded} of {got.draws} tokens were impossible"
        if got.alike > got.apart:
            return ranks(got)
        row, cell = got.worst
        context = data.contexts[row]
        law = self.laws.get(context)
        named = law.tokens if law is not None else ()
        token = repr(named[cell].text) if cell < len(named) else "another token"
        total = int(data.counts[row].sum())
        text = context.prompt.text + "".join(token.text for token in context.tokens)
        return (
            f"{token} behind {text!r} in {data.counts[row, cell] / total:.0%} of {total} draws, "
            f"due {data.laws[row, cell]:.0%}"
        )


def effect(
    laws: Laws, prompt: Prompt, before: tuple[Token, ...], sampling: Sampling, biased: Biased
) -> float:
    """Return how far options move a law, or how spread it is; 0 if it is not known."""
    law = laws.get(AnswerContext(prompt, before))
    cells = expected(law, sampling, before, biased.get(prompt)) if law is not None else None
    if law is None or cells is None:
        return 0.0
    if not sampling.truncates and not sampling.reweighs:
        return float(plain(law)[:-1].sum() * (1 - max(law.p)))
    named = np.array([*plain(law)[:-1], 0.0 if sampling.reweighs else plain(law)[-1]])
    share = named.sum() if sampling.reweighs else 1.0
    return float(share * np.abs(cells - named / named.sum()).sum() / 2)


def chosen(
    laws: Laws, prompts: Sequence[Prompt], sampling: Sampling, biased: Biased, most: int
) -> list[Prompt]:
    """Return the prompts on which an error would show best."""
    scores = {}
    for prompt in prompts:
        law = laws.get(AnswerContext(prompt, ()))
        after = () if law is None else (law.tokens[0],)
        first = effect(laws, prompt, (), sampling, biased)
        second = effect(laws, prompt, after, sampling, biased)
        # The share of draws after the likeliest token is that token's probability.
        scores[prompt] = first + 2 * second * (0 if law is None else law.p[0])
    ranked = sorted(prompts, key=lambda prompt: -scores[prompt])
    return [prompt for prompt in ranked[:most] if scores[prompt] > LEAST_EFFECT] or ranked[:1]


def ranks(got: Comparison) -> str:
    """Return a phrase on the ranks that deviate most."""
    names = ", ".join(str(rank) for rank in got.ranks)
    return f"tokens of rank {names}: {got.seen:.1%} of draws, due {got.due:.1%}"
