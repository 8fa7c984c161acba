"""A server under everything at once.

Clients send random prompts and options, streamed or not; some leave in the middle, some send
nonsense, and once the engine is killed. Every output that was completed must be the one that plain
decoding gives alone for that seed; at the end no page is held, nothing but the restart's 503 was a
server's error, and memory has not grown. Needs httpx (``outrider[benchmarks]``).

With ``--hostile`` one client beside 16 honest ones attacks the server (see ``fuzz.hostile``), and
no engine is killed: every 503 is a fault. ``--compare`` soaks without that client first and puts
the honest clients' P99 latencies side by side.
"""

import asyncio
import json
import multiprocessing
import random
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_high
from typing import Annotated, Any

import httpx
import typer
from tqdm import tqdm

from outrider import pocket
from outrider.base.types import SamplingParams
from outrider.cli.common import Out, write_json
from outrider.llm import LLM

from .common import Seed, percentiles
from .fuzz.hostile import attack
from .served import Served, unrest

CLIENTS, BESIDE_HOSTILE = 64, 16
LEAVE, NONSENSE, WHOLE = 0.15, 0.1, 0.3
"""Shares of calls that leave in the middle, that are wrong, and that are not streamed."""
QUIET_SECONDS, LOOK_SECONDS = 30.0, 1.0
GROWTH = 1.1
"""Memory at the end over that after the first third, where it counts as flat."""
SLOWDOWN = 2.0
"""The most by which a hostile client may raise the P99 latency of honest ones."""
BAD: tuple[dict[str, Any], ...] = (
    {"prompt": []}, {"prompt": "a", "temperature": -1}, {"prompt": "a", "n": 0}, {},
    {"prompt": "a", "guided_regex": "("}, {"prompt": [10**9]}, {"prompt": "a", "model": "none"},
    {"prompt": "a" * 100_000}, {"prompt": "a", "stop": [""]}, {"prompt": "a", "seed": -2},
)  # fmt: skip
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0}, {"temperature": 1}, {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 20, "min_p": 0.02}, {"temperature": 0.8, "n": 2},
    {"temperature": 0.8, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    {"temperature": 0.8, "repetition_penalty": 1.2},
    {"temperature": 0.8, "stop": ["\n\n", "return"]},
    {"temperature": 0.8, "logit_bias": {"5": 3.0}}, {"temperature": 0.8, "min_tokens": 8},
    {"temperature": 0.5, "ignore_eos": True}, {"temperature": 0.8, "logprobs": 1},
)  # fmt: skip
SPECULATION: tuple[dict[str, Any], ...] = (
    {}, {"speculation": {"enabled": False}}, {"speculation": {"drafter": "ngram"}},
    {"speculation": {"num_speculative_tokens": 1}},
)  # fmt: skip


@dataclass(frozen=True)
class Item:
    """A call, and the texts that it must give."""

    body: dict[str, Any]
    texts: list[str]


@dataclass
class Seen:
    """The outcome of all calls."""

    codes: Counter[int] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    killed: float | None = None


def make_items(count: int, seed: int, model: Path = pocket.PATH) -> list[Item]:
    """Return random calls with the outputs of a model, decoded plainly and alone."""
    draw, prompts, items = random.Random(seed), pocket.prompts(), []
    llm = LLM(model, drafter=None, max_num_seqs=1, enable_prefix_caching=False)
    for i in tqdm(range(count), "decoding alone", disable=None, leave=False):
        prompt = draw.choice(prompts)[: draw.randint(20, 1500)]
        options = {**draw.choice(OPTIONS), "max_tokens": draw.randint(1, 96), "seed": i}
        if options.get("min_tokens", 0) > options["max_tokens"]:
            del options["min_tokens"]
        outputs = llm.generate(prompt, SamplingParams(**options))[0].outputs
        body = {"prompt": prompt, **options, **draw.choice(SPECULATION)}
        items.append(Item(body, [output.text for output in outputs]))
    return items


async def call(client: httpx.AsyncClient, item: Item, draw: random.Random, seen: Seen) -> None:
    """Make one call: whole, streamed, or left in the middle."""
    kind, start = draw.random(), time.monotonic()
    leaves = draw.randint(1, 8) if WHOLE <= kind < WHOLE + LEAVE else None
    body, texts = {**item.body, "stream": kind >= WHOLE}, [""] * len(item.texts)
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        seen.codes[answer.status_code] += 1
        if not answer.is_success:
            await answer.aread()
            return
        count = 0
        async for line in answer.aiter_lines():
            if not line.endswith("}"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                seen.ended["by an error event"] += 1
                if chunk["error"]["code"] != 503:
                    seen.wrong.append(f"a stream ended with {chunk['error']}")
                return
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
            count += 1
            if count == leaves:
                seen.ended["by the client"] += 1
                return
    check_texts(item, texts, seen)
    seen.latencies.append(time.monotonic() - start)


def check_texts(item: Item, texts: list[str], seen: Seen) -> None:
    """Note whether a completed output is what it must be."""
    seen.ended["complete"] += 1
    if texts != item.texts:
        seen.wrong.append(f"{item.body} gave {texts}, alone {item.texts}")


async def run_client(url: str, items: list[Item], number: int, until: float, seen: Seen) -> None:
    """Call after call until the time is over."""
    draw = random.Random(number)
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        while time.monotonic() < until:
            try:
                if draw.random() < NONSENSE:
                    answer = await client.post("/v1/completions", json=draw.choice(BAD))
                    seen.codes[answer.status_code] += 1
                    if not 400 <= answer.status_code < 500 and answer.status_code != 503:
                        seen.wrong.append(f"nonsense got {answer.status_code}")
                else:
                    await call(client, draw.choice(items), draw, seen)
            except httpx.HTTPError as error:
                seen.wrong.append(f"the connection failed: {error!r}")
                await asyncio.sleep(0.1)  # a server that has ended refuses at once
            if draw.random() < 0.2:
                await asyncio.sleep(draw.random() / 4)


async def watch(server: Served, seconds: float, seen: Seen, kill: bool) -> None:
    """Note the memory, and with ``kill`` end the engine once, after a third of the time."""
    start = time.monotonic()
    with tqdm(total=int(seconds), desc="soaking", unit="s", disable=None, leave=False) as bar:
        while time.monotonic() < start + seconds:
            await asyncio.sleep(LOOK_SECONDS)
            passed = time.monotonic() - start
            bar.update(int(passed) - bar.n)
            due = kill and seen.killed is None and passed > seconds / 3
            if due and server.kill_engine():
                seen.killed = passed
            seen.memory.append((passed, server.memory()))


async def soak(
    server: Served, items: list[Item], clients: int, seconds: float, *,
    kill: bool = True, hostile: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return what was seen, and what of it is wrong, of a server that was just started.

    ``items`` are what honest ``clients`` call. ``kill`` ends the engine once on the way; without it
    a 503 is a fault. ``hostile`` lets a hostile client loose beside them.
    """
    seen, engine = Seen(), server.engine()
    until = time.monotonic() + seconds
    attacked: dict[str, Any] | None = None
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
        watching = asyncio.gather(
            watch(server, seconds, seen, kill),
            *(run_client(server.url, items, i, until, seen) for i in range(clients)),
        )
        if hostile:
            attacked = await asyncio.get_running_loop().run_in_executor(
                apart, attack, server.url, seconds
            )
            seen.wrong += [f"hostile: {problem}" for problem in attacked["wrong"]]
        await watching
    try:
        seen.wrong += filter(None, [await unrest(server.url, QUIET_SECONDS)])
    except OSError as error:
        seen.wrong.append(f"/metrics has no answer: {error!r}")
    for code in seen.codes:
        if code >= 500 and not (code == 503 and kill):
            seen.wrong.append(f"{seen.codes[code]} answers of {code}")
    if not kill and server.engine() != engine:
        seen.wrong.append("the engine ended")
    growth = grown(seen.memory, (seen.killed or 0.0) + seconds / 3)
    if growth > GROWTH:
        seen.wrong.append(f"memory grew to {growth:.2f} of what it was")
    return {
        "clients": clients, "seconds": seconds, "codes": dict(sorted(seen.codes.items())),
        "ended": dict(seen.ended), "latency": percentiles(seen.latencies),
        "memory_growth": growth, "killed_after": seen.killed,
        "hostile": attacked,
        "wrong": seen.wrong[:20], "wrong_count": len(seen.wrong),
    }  # fmt: skip


def slowdown(alone: dict[str, Any], beside: dict[str, Any]) -> dict[str, Any]:
    """The ratio of two soaks' P99 latencies, and whether it is allowed."""
    ratio = beside["latency"]["p99"] / max(alone["latency"]["p99"], 1e-9)
    return {"p99_ratio": ratio, "allowed": SLOWDOWN, "passed": ratio <= SLOWDOWN}


def grown(memory: list[tuple[float, int]], settled: float) -> float:
    """The median of the last tenth of the measurements over that of the first tenth settled."""
    values = [size for at, size in memory if at >= settled]
    if len(values) < 4:
        return 1.0
    tenth = max(2, len(values) // 10)
    return median_high(values[-tenth:]) / median_high(values[:tenth])


def main(
    seconds: Annotated[float, typer.Option(min=1)] = 120.0,
    clients: Annotated[
        int | None, typer.Option(min=1, help="64, or 16 beside a hostile one, unless given.")
    ] = None,
    items: Annotated[int, typer.Option(min=1, help="Different calls.")] = 160,
    seed: Seed = 0,
    model: Annotated[
        Path | None, typer.Option(help="A checkpoint; the pocket pair unless given.")
    ] = None,
    hostile: Annotated[bool, typer.Option("--hostile", help="One client attacks.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Soak without and with a hostile client.")
    ] = False,
    out: Out = "-",
) -> None:
    """Soak a server; the exit code is 1 if anything is wrong."""
    hostile = hostile or compare
    count = clients or (BESIDE_HOSTILE if hostile else CLIENTS)
    calls, reports = make_items(items, seed, model or pocket.PATH), []
    served = [] if model is None else [model]
    for attacked in (False, True) if compare else (hostile,):
        with Served(*served, "--max-queued-requests", "512") as server:
            report = asyncio.run(
                soak(server, calls, count, seconds, kill=not hostile, hostile=attacked)
            )
            reports.append(report | {"exit_code": server.stop()})
    wrong = any(report["wrong"] or report["exit_code"] for report in reports)
    report = reports[-1]
    if compare:
        compared = slowdown(*reports)
        report = {"alone": reports[0], "beside_hostile": reports[1], "compared": compared}
        wrong = wrong or not compared["passed"]
    write_json(report, out)
    raise typer.Exit(wrong)
