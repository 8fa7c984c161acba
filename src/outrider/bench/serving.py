"""What the server adds to its engine: ``python -m outrider.bench.serving``.

Tokens a second over HTTP beside those of ``LLM`` in this process, at 1 and 16 streams, in turns;
the time to the first token of a prompt of 1,000 tokens that is new and that came before; and of new
ones without drafts and with. The engine has one thread on the first CPU on both sides, server and
client have the second. Figures are medians over rounds. Needs httpx (``outrider[dev]``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from statistics import median
from typing import Any

import httpx
import torch
from tqdm import tqdm

from ..errors import ConfigError
from ..llm import LLM
from ..types import SamplingParams
from .intervals import median_interval
from .peers.pairs import PROMPT_TOKENS, Pair, find_pair
from .served import Served

STREAMS = (1, 16)
LONG = 1000
"""Tokens of the prompt that comes again."""


@dataclass(frozen=True)
class Sides:
    """The same pair in this process and behind HTTP."""

    llm: LLM
    server: Served
    pair: Pair
    tokens: int

    def engine(self, streams: int) -> float:
        """Tokens a second of the engine alone."""
        engine_cpu()
        params = SamplingParams(temperature=0, max_tokens=self.tokens, ignore_eos=True)
        start = time.perf_counter()
        outputs = self.llm.generate(list(self.pair.prompts[:streams]), params)
        made = sum(len(out.outputs[0].token_ids) for out in outputs)
        return made / (time.perf_counter() - start)

    def http(self, streams: int) -> float:
        """Tokens a second that clients of the server get, all at once and streamed."""
        server_cpu()
        return asyncio.run(self._http(streams))

    async def _http(self, streams: int) -> float:
        async with httpx.AsyncClient(base_url=self.server.url, timeout=600) as client:
            await client.get("/health")
            start = time.perf_counter()
            calls = [self._call(client, self.pair.prompts[i]) for i in range(streams)]
            made = await asyncio.gather(*calls)
            return sum(made) / (time.perf_counter() - start)

    async def _call(self, client: httpx.AsyncClient, prompt: list[int]) -> int:
        """Stream one output; how many tokens it has."""
        body = self._body(prompt) | {"stream_options": {"include_usage": True}}
        last = ""
        async with client.stream("POST", "/v1/completions", json=body) as stream:
            stream.raise_for_status()
            async for line in stream.aiter_lines():
                last = line if line.startswith("data: {") else last
        return int(json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"])

    def _body(self, prompt: list[int]) -> dict[str, Any]:
        return {
            "prompt": prompt, "temperature": 0, "max_tokens": self.tokens, "ignore_eos": True,
            "stream": True,
        }  # fmt: skip

    def ttft(self, prompt: list[int], **more: Any) -> float:
        """Milliseconds to the first event of a stream."""
        server_cpu()
        body = self._body(prompt) | {"max_tokens": 2} | more
        with httpx.Client(base_url=self.server.url, timeout=600) as client:
            client.get("/health")
            start = time.perf_counter()
            with client.stream("POST", "/v1/completions", json=body) as stream:
                stream.raise_for_status()
                lines = stream.iter_lines()
                next(lines)
                found = 1000 * (time.perf_counter() - start)
                for _ in lines:  # to its end, so that nothing of it is left for the next
                    pass
                return found


def engine_cpu() -> None:
    """Run where the engine runs."""
    os.sched_setaffinity(0, {CPUS[0]})


def server_cpu() -> None:
    """Run where server and clients run."""
    os.sched_setaffinity(0, {CPUS[-1]})


CPUS = sorted(os.sched_getaffinity(0))


def compared(
    rounds: int, before: Callable[[], float], after: Callable[[], float]
) -> dict[str, Any]:
    """Medians of both, in turns, and of the ratio after / before with its interval."""
    pairs = [(before(), after()) for _ in range(rounds)]
    ratios = [b / a for a, b in pairs]
    return {
        "before": median(a for a, _ in pairs), "after": median(b for _, b in pairs),
        "ratio": median(ratios), "interval": median_interval(ratios),
    }  # fmt: skip


def measurements(sides: Sides) -> dict[str, tuple[Callable[[], float], Callable[[], float]]]:
    """What is compared, by name: before and after."""
    long, short = sides.pair.long_prompt(LONG), sides.pair.prompts[0]
    salts, off = count(), {"speculation": {"enabled": False}}

    def new(prompt: list[int], **more: Any) -> float:
        return sides.ttft(prompt, cache_salt=f"new {next(salts)}", **more)

    return {
        **{
            f"tokens/s at {n}": (partial(sides.engine, n), partial(sides.http, n)) for n in STREAMS
        },
        "TTFT ms, new and repeated": (
            partial(new, long), partial(sides.ttft, long, cache_salt="again"),
        ),
        "TTFT ms, plain and with drafts": (partial(new, short, **off), partial(new, short)),
    }  # fmt: skip


def report(sides: Sides, rounds: int) -> dict[str, Any]:
    """Every figure."""
    found = {}
    steps = measurements(sides).items()
    for name, (before, after) in tqdm(steps, "measuring", disable=None, leave=False):
        before(), after()  # warms both up
        found[name] = compared(rounds, before, after)
    return found


def main() -> None:
    """Parse, measure, print JSON."""
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.serving", description=__doc__)
    parser.add_argument("--pair", default="planted", help="planted, pocket, or a checkpoint")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--drafter", default=None, help="none, ngram, or a checkpoint")
    args = parser.parse_args()
    if len(CPUS) < 2:
        raise ConfigError("two CPUs are needed, one for the engine and one for the server.")
    pair = find_pair(args.pair)
    drafter = args.drafter or str(pair.drafter or "none")
    length = LONG + PROMPT_TOKENS + args.tokens
    engine_cpu()
    torch.set_num_threads(1)  # two on one CPU wait for each other most of the time
    llm = LLM(
        pair.target, drafter=None if drafter == "none" else drafter, max_num_seqs=max(STREAMS),
        max_model_len=length,
    )  # fmt: skip
    server_cpu()
    with Served(
        pair.target, "--drafter", drafter, "--max-num-seqs", str(max(STREAMS)),
        "--max-model-len", str(length),
    ) as server:  # fmt: skip
        server.pin_engine(CPUS[0])
        found = report(Sides(llm, server, pair, args.tokens), args.rounds)
    print(json.dumps({"pair": pair.name, "drafter": drafter, **found}, indent=1))


if __name__ == "__main__":
    main()
