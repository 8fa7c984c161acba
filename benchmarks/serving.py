"""The server's cost beside its engine.

Tokens a second over HTTP beside those of ``LLM`` in this process, at 1 and 16 streams, in turns;
the time to the first token of a prompt of 1,000 tokens that is new and that came before; and of new
ones without drafts and with. The engine has one thread on the first CPU on both sides, server and
client have the second. Figures are medians over rounds. Needs httpx (``outrider[benchmarks]``).
"""

import asyncio
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from statistics import median
from typing import Annotated, Any

import httpx
import typer

from outrider.base.types import SamplingParams
from outrider.cli.common import Out, write_json
from outrider.errors import ConfigError
from outrider.llm import LLM

from .common import Rounds, Tokens, in_turns, ratio
from .peers.pairs import PROMPT_TOKENS, Pair, find_pair
from .served import Served

CPUS = sorted(os.sched_getaffinity(0))
STREAMS = (1, 16)
LONG = 1000
"""Tokens of the prompt that comes again."""
OFF = {"speculation": {"enabled": False}}


@dataclass(frozen=True)
class Sides:
    """The same pair in this process and behind HTTP."""

    llm: LLM
    server: Served
    pair: Pair
    tokens: int

    def engine(self, streams: int) -> float:
        """Return tokens a second of the engine alone."""
        os.sched_setaffinity(0, {CPUS[0]})
        params = SamplingParams(temperature=0, max_tokens=self.tokens, ignore_eos=True)
        start = time.perf_counter()
        outputs = self.llm.generate(list(self.pair.prompts[:streams]), params)
        made = sum(len(out.outputs[0].token_ids) for out in outputs)
        return made / (time.perf_counter() - start)

    def http(self, streams: int) -> float:
        """Return tokens a second that clients of the server get, all at once and streamed."""
        _, seconds, made = asyncio.run(self.stream(self.pair.prompts[:streams], self.tokens))
        return made / seconds

    def ttft(self, prompt: list[int], **more: Any) -> float:
        """Return milliseconds to the first event of a stream."""
        first, _, _ = asyncio.run(self.stream([prompt], 2, **more))
        return 1000 * first

    async def stream(
        self, prompts: list[list[int]], tokens: int, **more: Any
    ) -> tuple[float, float, int]:
        """Stream outputs at once: seconds to the first event, to the end, and tokens in all."""
        os.sched_setaffinity(0, {CPUS[-1]})
        body = {
            "temperature": 0, "max_tokens": tokens, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}, **more,
        }  # fmt: skip
        async with httpx.AsyncClient(base_url=self.server.url, timeout=600) as client:

            async def call(prompt: list[int]) -> tuple[float, int]:
                first, last = 0.0, ""
                whole = body | {"prompt": prompt}
                async with client.stream("POST", "/v1/completions", json=whole) as stream:
                    stream.raise_for_status()
                    async for line in stream.aiter_lines():
                        first = first or time.perf_counter()
                        last = line if line.startswith("data: {") else last
                usage = json.loads(last.removeprefix("data: "))["usage"]
                return first, int(usage["completion_tokens"])

            await client.get("/health")
            start = time.perf_counter()
            answers = await asyncio.gather(*map(call, prompts))
            seconds = time.perf_counter() - start
        return min(answers)[0] - start, seconds, sum(made for _, made in answers)


def compared(
    rounds: int, before: Callable[[], float], after: Callable[[], float]
) -> dict[str, Any]:
    """Return medians of both, in turns, and of the ratio after / before with its interval."""
    sides = {"before": before, "after": after}
    values = in_turns(sides, lambda side, _: sides[side](), rounds)
    medians = {side: median(each) for side, each in values.items()}
    return medians | ratio(values["after"], values["before"])


def measurements(sides: Sides) -> dict[str, tuple[Callable[[], float], Callable[[], float]]]:
    """Return what is compared, by name: before and after."""
    long, short = sides.pair.long_prompt(LONG), sides.pair.prompts[0]
    salts = count()

    def new(prompt: list[int], **more: Any) -> float:
        return sides.ttft(prompt, cache_salt=f"new {next(salts)}", **more)

    return {
        **{
            f"tokens/s at {n}": (partial(sides.engine, n), partial(sides.http, n)) for n in STREAMS
        },
        "TTFT ms, new and repeated": (
            partial(new, long), partial(sides.ttft, long, cache_salt="again"),
        ),
        "TTFT ms, plain and with drafts": (partial(new, short, **OFF), partial(new, short)),
    }  # fmt: skip


def main(
    pair: Annotated[str, typer.Option(help="planted, pocket, or a checkpoint.")] = "planted",
    drafter: Annotated[
        str | None, typer.Option(help="none, ngram, or a checkpoint; the pair's unless given.")
    ] = None,
    tokens: Tokens = 128,
    rounds: Rounds = 7,
    out: Out = "-",
) -> None:
    """Measure speed over HTTP beside the engine's own."""
    if len(CPUS) < 2:
        raise ConfigError("two CPUs are needed, one for the engine and one for the server.")
    os.sched_setaffinity(0, {CPUS[0]})  # before a model is loaded: it starts as many threads
    chosen = find_pair(pair)
    drafter = drafter or str(chosen.drafter or "none")
    length, most = LONG + PROMPT_TOKENS + tokens, max(STREAMS)
    llm = LLM(chosen.target, drafter=drafter, max_num_seqs=most, max_model_len=length)
    os.sched_setaffinity(0, {CPUS[-1]})
    with Served(
        chosen.target, "--drafter", drafter, "--max-num-seqs", str(most),
        "--max-model-len", str(length),
    ) as server:  # fmt: skip
        server.pin_engine(CPUS[0])
        sides = measurements(Sides(llm, server, chosen, tokens))
        report = {name: compared(rounds, *two) for name, two in sides.items()}
    write_json({"pair": chosen.name, "drafter": drafter, **report}, out)
