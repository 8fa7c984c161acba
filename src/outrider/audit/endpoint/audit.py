"""Audits a server with OpenAI's API: does it emit what its model emits?

Greedy tokens and the frequencies of sampled ones are compared with a reference's probabilities in
the same contexts. A server drafts from an answer's second token on, so first and later tokens are
tested separately. Limits, stop strings, samples, seeds and structured output are checked against
their meaning.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...errors import ConfigError, EndpointError, shown
from ...ops.metrics.acceptance import acceptance, scrape
from ...sampling.seeds import fresh_seed
from . import behaviour, columns, plain
from .answers import EndpointCompletion
from .distributions import Biased, Laws, Prompt
from .outcome import EndpointReport, Result, Status
from .sampled import Sampled
from .sampling import SAMPLINGS, Sampling
from .source import (
    AuditedServer,
    Breakdown,
    Local,
    PromptSource,
    RefusedRequest,
    TimeLimit,
    TimeUp,
    WithoutSpeculation,
    together,
)

FALSE_ALARM = 1e-6  # probability of any false alarm of the law tests of an audit
URL = re.compile(r"https?://.*|[\w.-]+:\d+(/.*)?", re.DOTALL)
LEFT_ALARM = FALSE_ALARM / 2  # what is left of it if later tokens are not reported
SAMPLES = 512  # answers for each set of options
GREEDY_TOKENS = 32  # tokens of a greedy answer
FORMED_ANSWERS = 16  # structured answers
FEWEST_SAMPLES = 64
MOST_SAMPLES = 1_000_000

Progress = Callable[[str], None]
Check = Callable[[], Awaitable[Result | list[Result]]]
Checks = dict[str, Check]
TEXTS = (
    "red, green, blue, red, blue, green, red,",
    "heads tails tails heads tails heads heads tails",
    "1 2 2 1 1 2 1 2 2 2 1 1 2",
    "The quick brown fox jumps over the",
    "Once upon a time there was a",
    "A B B A A B A B B B A A",
    "yes no no yes yes no yes no no yes",
    "def add(a, b):\n    return",
    "import os\nimport sys\nimport",
    "The weather today is",
    "She said that she would",
    "My favourite colour is",
    "x = 1\ny = 2\nz =",
    "one two three one two four one two",
    '{"name": "Alice", "age":',
    "Dear Sir or Madam, I am writing to",
)
"""The prompts of an audit."""


@dataclass
class _Audit:
    """One audit under way."""

    server: AuditedServer
    reference: PromptSource
    samplings: Sequence[Sampling]
    samples: int
    rng: np.random.Generator
    progress: Progress

    async def run(self) -> list[Result]:
        self.progress("reading prompts")
        prompts, biased = await self._prompts()
        laws = Laws(self.reference, self.server.clock)
        results: list[Result] = []
        answers: list[EndpointCompletion] = []
        eight = prompts[: len(prompts) // 2]

        server, rng = self.server, self.rng

        async def tokens() -> list[Result]:
            result, said = await behaviour.greedy(server, laws, eight, GREEDY_TOKENS)
            answers.extend(said)
            return [result, behaviour.told(laws, eight, said)]

        checks: Checks = {"greedy": tokens}
        if (without := self._plain()) is not None:
            checks |= {
                "greedy, as plain": lambda: plain.greedy(
                    server, without, laws, eight, GREEDY_TOKENS
                ),
                "seed, as plain": lambda: plain.seeds(server, without, eight, rng),
                "json_schema, as plain": lambda: plain.forms(server, without, eight),
            }
        checks |= {
            "max_tokens": lambda: behaviour.limits(server, eight),
            "stop": lambda: behaviour.stops(server, eight[: len(answers)], answers, GREEDY_TOKENS),
            "n": lambda: behaviour.samples(server, laws, prompts, FALSE_ALARM),
            "seed": lambda: behaviour.seeds(server, behaviour.spread(laws, eight)[0], rng),
            "json_schema": lambda: behaviour.schema(server, FORMED_ANSWERS),
            "regex": lambda: behaviour.regex(server, FORMED_ANSWERS),
        }
        for name, check in checks.items():
            results += await self._check(name, check)
        seeded = any(r.name.startswith("seed") and r.status is Status.PASSED for r in results)
        sampled = Sampled(
            server, laws, prompts, biased, self.samplings, self.samples, seeded, rng, FALSE_ALARM
        )
        laws_told = await self._check("law", sampled.run)
        results += laws_told
        untold = not any(result.failed or columns.shows_law(result) for result in laws_told)
        if without is not None and untold:
            results += await self._check(
                "law, as plain",
                lambda: plain.law(server, without, eight, self.samples, rng, LEFT_ALARM),
            )
        return results

    def _plain(self) -> plain.Plain | None:
        """Return the same server without drafts, if it gives whole answers; else None."""
        source = self.reference
        if isinstance(source, WithoutSpeculation) and not self.server.has_switch:
            return None
        return source if isinstance(source, AuditedServer | WithoutSpeculation) else None

    async def _check(self, name: str, check: Check) -> list[Result]:
        """Return the results of a check, each with the number of tokens drafted during it."""
        self.progress(f"checking {name}")
        before = await scrape(self.server.client)
        results = await self._results(name, check)
        drafted = _drafted(acceptance(before, await scrape(self.server.client)))
        return [replace(result, drafted=drafted) for result in results]

    async def _results(self, name: str, check: Check) -> list[Result]:
        try:
            outcome = await check()
        except RefusedRequest as error:
            return [Result(name, Status.NOT_OFFERED, str(error))]
        except Breakdown as error:
            if not str(error).startswith(self.server.name):
                raise  # the reference fails, not the server
            return [Result(name, Status.FAILED, str(error))]
        except TimeUp:
            return [Result(name, Status.INCONCLUSIVE, "the time was over before it was done")]
        return outcome if isinstance(outcome, list) else [outcome]

    async def _prompts(self) -> tuple[list[Prompt], Biased]:
        """Return the prompts as both sides read them, and tokens for logit_bias, or raise."""
        server = self.server
        mine = await together(
            server.complete(text, 1, temperature=0.0, **server.telling) for text in TEXTS
        )
        theirs = mine
        if not isinstance(self.reference, WithoutSpeculation):
            ask = self.reference.complete
            theirs = await together(ask(text, 1, temperature=0.0) for text in TEXTS)
        prompts: list[Prompt] = []
        biased: Biased = {}
        for text, own, other in zip(TEXTS, mine, theirs, strict=True):
            for one, two in (
                (own.prompt_ids, other.prompt_ids), (own.prompt_tokens, other.prompt_tokens),
            ):  # fmt: skip
                if one is not None and two is not None and one != two:
                    raise EndpointError(
                        f"{self.reference.name} reads a prompt as other tokens than {server.name}; "
                        "give a reference with the same model."
                    )
            ids = own.prompt_ids if own.prompt_ids == other.prompt_ids else None
            prompt = Prompt(text, ids, other.prompt_tokens)
            prompts.append(prompt)
            if own.tokens and own.tokens[0].clear and own.tokens[0].id is not None:
                biased[prompt] = own.tokens[0]
        return prompts, biased


def _drafted(told: dict[str, Any]) -> int | None:
    """Return how many tokens a server's metrics say it drafted; None if they do not say."""
    if "NOT ACTIVE" in told["spec_decode_source"]:
        return 0
    drafted = told.get("spec_decode_draft_tokens")
    return None if drafted is None else int(drafted)


async def _audit(
    server: AuditedServer, reference: str | None, key: str | None, samplings: Sequence[Sampling],
    samples: int, seed: int, progress: Progress,
) -> EndpointReport:  # fmt: skip
    other: AuditedServer | Local | WithoutSpeculation = WithoutSpeculation(server)
    try:
        progress("asking the server")
        await server.open()
        if reference is not None:
            progress("asking the reference")
            if URL.fullmatch(reference):
                other = AuditedServer(reference, None, key, server.clock)
            else:
                other = Local(reference)
            await other.open()
        before = await scrape(server.client)
        rng = np.random.default_rng(seed)
        results = await _Audit(server, other, samplings, samples, rng, progress).run()
        drafts = acceptance(before, await scrape(server.client))
        return EndpointReport(
            server.name, server.model, other.name, seed, server.requests, results,
            columns.columns(results), drafts,
        )  # fmt: skip
    except TimeUp:
        raise EndpointError(
            f"{server.name} is too slow for so short an audit; give --seconds more."
        ) from None
    finally:
        await other.close()
        await server.close()


def verify_endpoint(
    endpoint: str,
    *,
    reference: str | None = None,
    model: str | None = None,
    key: str | None = None,
    laws: Sequence[str] = (),
    samples: int = SAMPLES,
    seconds: float | None = None,
    seed: int | None = None,
    progress: Progress = lambda _: None,
) -> EndpointReport:
    """Return the audit of a server with OpenAI's API at ``endpoint``, with or without ``/v1``.

    Args:
        reference: the address of another server with the same model, or a checkpoint (folder, GGUF
            file or hub name) to be run here without drafts. None takes the server itself: with
            speculation off if it is Outrider's, else asked for one token at a time.
        model: its name at the endpoint; None takes the first listed one.
        key: sent to both servers as a bearer token.
        laws: names of the sets of sampling options whose law is tested; all by default.
        samples: answers to each set of sampling options, 64 to 1,000,000; more show smaller errors.
        seconds: begin no request after this time; checks left undone are inconclusive.
        seed: 0 and up; None takes a fresh one, which the report shows.
        progress: called with each new activity.

    Raises ConfigError: an argument is wrong; EndpointError: a server cannot be reached, refuses the
    key, does not complete prompts as OpenAI's API says, or the reference has another tokenizer.
    """
    if not FEWEST_SAMPLES <= samples <= MOST_SAMPLES:
        raise ConfigError(f"samples is {samples}; give {FEWEST_SAMPLES} to {MOST_SAMPLES:,}.")
    known = {one.name: one for one in SAMPLINGS}
    for name in laws:
        if name not in known:
            raise ConfigError(f"There is no law {shown(name)}; known are {', '.join(known)}.")
    samplings = [known[name] for name in dict.fromkeys(laws)] or list(SAMPLINGS)
    if seconds is not None and not seconds > 0:
        raise ConfigError(f"seconds is {seconds}; give a number above 0.")
    seed = fresh_seed() if seed is None else seed
    server = AuditedServer(endpoint, model, key, TimeLimit(seconds))
    return asyncio.run(_audit(server, reference, key, samplings, samples, seed, progress))
