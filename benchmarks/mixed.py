"""The default drafter under mixed load, beside the same server without speculation.

Clients in a closed loop (as soon as one answer ends they ask again) send code to complete, files to
edit, JSON with a schema and chats, at random temperatures and lengths, streamed or not.
``/v1/speculation`` turns drafting on and off in windows, in the order on, off, off, on. What counts
is the server's own counter of tokens, without the first moments of a window, in which requests of
the one before still run, and after a first pair of windows that warms up. Each client draws the
requests of both sides from the same seed. The answer is the ratio on / off within pairs of windows.
Needs httpx (``outrider[benchmarks]``).
"""

import asyncio
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import Annotated, Any, NamedTuple

import httpx
import typer

from outrider import pocket
from outrider.bench.intervals import shown
from outrider.bench.machine import machine
from outrider.bench.workload import Item, load_workload
from outrider.cli.common import JsonFile, write_json
from outrider.errors import OutriderError

from .common import Seed, ratio, table
from .served import Served, metrics

TOKENS = "vllm:generation_tokens_total"
WARM_UP = 1.5
"""Seconds at the beginning of a window that do not count."""
TEMPERATURES = (0, 0.7, 1)
SHORTEST, LONGEST = 16, 256
"""Output tokens of a request."""
KINDS = ("code", "edit", "json", "chat")
SIDES = ("on", "off")


class Call(NamedTuple):
    """A request: its endpoint and body."""

    path: str
    body: dict[str, Any]


def make_calls(seed: str) -> Iterator[Call]:
    """Yield random requests of every kind without end, the same ones for the same seed."""
    draw = random.Random(seed)
    prompts = pocket.prompts()
    items = {kind: load_workload(kind).items for kind in KINDS[1:]}
    for number in count():
        kind = draw.choice(KINDS)
        item = Item(draw.choice(prompts)) if kind == "code" else draw.choice(items[kind])
        body: dict[str, Any] = {
            "temperature": draw.choice(TEMPERATURES), "max_tokens": draw.randint(SHORTEST, LONGEST),
            "stream": draw.random() < 0.5, "seed": number,
        }  # fmt: skip
        if item.messages:
            yield Call("/v1/chat/completions", {"messages": item.messages, **body})
            continue
        body["prompt"] = item.prompt
        if kind == "edit" and item.answer:  # begun, since the pocket pair obeys no instruction
            body["prompt"] += "\n" + item.answer[: draw.randrange(len(item.answer) // 2)]
        if item.schema is not None:
            form = {"name": kind, "schema": item.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        yield Call("/v1/completions", body)


@dataclass
class Load:
    """Clients of one server, and the side that its switch is on."""

    client: httpx.AsyncClient
    url: str
    side: str = SIDES[0]

    async def run(self, calls: Mapping[str, Iterator[Call]]) -> None:
        """Make call after call, each the next of the side that is on."""
        while True:
            path, body = next(calls[self.side])
            async with self.client.stream("POST", path, json=body) as answer:
                answer.raise_for_status()
                async for _ in answer.aiter_raw():  # unread, since the server counts
                    pass

    async def window(self, side: str, seconds: float, warm_up: float) -> float:
        """Turn the switch and return tokens a second behind the warm-up."""
        self.side = side
        switched = await self.client.post("/v1/speculation", json={"enabled": side == SIDES[0]})
        switched.raise_for_status()
        await asyncio.sleep(warm_up)
        before, start = await self.emitted()
        await asyncio.sleep(seconds - warm_up)
        after, end = await self.emitted()
        return (after - before) / (end - start)

    async def emitted(self) -> tuple[float, float]:
        """Return the number of tokens that the server has emitted, and when that was."""
        found = await asyncio.to_thread(metrics, self.url)
        return found[TOKENS], time.perf_counter()


async def measure(
    url: str, clients: int, seconds: float, rounds: int, seed: int, warm_up: float = WARM_UP
) -> dict[str, list[float]]:
    """Return tokens a second of each side, by pair of windows.

    Raises:
        OutriderError: a call failed.
    """
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        load = Load(client, url)
        tasks = [
            asyncio.create_task(load.run({side: make_calls(f"{seed} {i}") for side in SIDES}))
            for i in range(clients)
        ]
        try:
            for number in range(-1, rounds):  # -1 fills caches and teaches the controller
                for side in SIDES[:: -1 if number % 2 else 1]:
                    speed = await load.window(side, seconds, warm_up)
                    found[side] += [speed] if number >= 0 else []
                    for task in tasks:
                        if task.done():
                            task.result()
        except httpx.HTTPError as error:
            raise OutriderError(f"a call failed: {error!r}") from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return found


def figures(found: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return the medians of both sides, and of the ratio on / off with its interval."""
    return {
        "tokens_per_second": {side: median(values) for side, values in found.items()},
        **ratio(found["on"], found["off"]),
        "pairs": [
            dict(zip(found, pair, strict=True)) for pair in zip(*found.values(), strict=True)
        ],
    }


def main(
    clients: Annotated[int, typer.Option(min=1, help="Clients that ask at once.")] = 48,
    window: Annotated[float, typer.Option(min=2, help="Seconds of a window.")] = 10.0,
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of windows.")] = 12,
    seed: Seed = 0,
    json_: JsonFile = None,
) -> None:
    """Measure whether speculation ever costs speed under mixed load."""
    with Served("--drafter", "auto") as server:
        found = asyncio.run(measure(server.url, clients, window, rounds, seed))
    report = figures(found)
    settings = {"clients": clients, "window": window, "rounds": rounds, "seed": seed}
    write_json({"machine": machine(), **settings, **report}, json_)
    if json_ != "-":
        on, off = (f"{report['tokens_per_second'][side]:.0f}" for side in SIDES)
        compared = f"{report['ratio']:.3f} {shown(report['interval'], '.3f')}"
        names = ("clients", "tokens/s with drafts", "without", "ratio")
        print("\n".join(table(names, [(clients, on, off, compared)])))
