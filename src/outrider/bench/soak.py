"""A server under everything at once: ``python -m outrider.bench.soak --seconds 120``.

Clients send random prompts and options, streamed or not; some leave in the middle, some send
nonsense, and once the engine is killed. Every output that was completed must be the one that plain
decoding gives alone for that seed; at the end no page is held, nothing but the restart's 503 was a
server's error, and memory has not grown. Needs httpx, which comes with ``outrider[dev]``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from ..llm import LLM
from ..types import SamplingParams
from .served import Served

POCKET = Path(__file__).parents[1] / "pocket"
ITEMS = 160
CLIENTS = 64
LEAVE, NONSENSE, WHOLE = 0.15, 0.1, 0.3
"""Shares of calls that leave in the middle, that are wrong, and that are not streamed."""
QUIET_SECONDS, LOOK_SECONDS = 30.0, 1.0
GROWTH = 1.1
"""Memory at the end over that after the first third, where it counts as flat."""
BAD: tuple[dict[str, Any], ...] = (
    {"prompt": []}, {"prompt": "a", "temperature": -1}, {"prompt": "a", "n": 0}, {},
    {"prompt": "a", "guided_regex": "("}, {"prompt": [10**9]}, {"prompt": "a", "model": "none"},
    {"prompt": "a" * 100_000}, {"prompt": "a", "stop": [""]}, {"prompt": "a", "seed": -1},
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
SPECULATION: tuple[dict[str, Any] | None, ...] = (
    None, {"enabled": False}, {"drafter": "ngram"}, {"num_speculative_tokens": 1},
)  # fmt: skip


@dataclass(frozen=True)
class Item:
    """A call, and the texts that it must give."""

    body: dict[str, Any]
    texts: list[str]


@dataclass
class Seen:
    """What came of all calls."""

    codes: Counter[int] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    killed: float | None = None


def make_items(count: int, seed: int) -> list[Item]:
    """Random calls with their outputs, decoded plainly and alone."""
    draw = random.Random(seed)
    prompts: list[str] = json.loads((POCKET / "prompts.json").read_text(encoding="utf-8"))
    llm = LLM(POCKET / "model", drafter=None, max_num_seqs=1, enable_prefix_caching=False)
    found = []
    for i in tqdm(range(count), "decoding alone", disable=None, leave=False):
        prompt = draw.choice(prompts)[: draw.randint(20, 1500)]
        options = {**draw.choice(OPTIONS), "max_tokens": draw.randint(1, 96), "seed": i}
        if options.get("min_tokens", 0) > options["max_tokens"]:
            del options["min_tokens"]
        outputs = llm.generate(prompt, SamplingParams(**options))[0].outputs
        speculation = draw.choice(SPECULATION)
        body = {
            "prompt": prompt,
            **options,
            **({"speculation": speculation} if speculation else {}),
        }
        found.append(Item(body, [output.text for output in outputs]))
    return found


async def call(client: httpx.AsyncClient, item: Item, draw: random.Random, seen: Seen) -> None:
    """One call: whole, streamed, or left in the middle."""
    kind = draw.random()
    if kind < WHOLE:
        found = await client.post("/v1/completions", json=item.body)
        seen.codes[found.status_code] += 1
        if found.status_code == 200:
            compare(item, [c["text"] for c in found.json()["choices"]], seen)
        return
    leaves = draw.randint(1, 8) if kind < WHOLE + LEAVE else None
    texts = [""] * len(item.texts)
    body = {**item.body, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as stream:
        seen.codes[stream.status_code] += 1
        if stream.status_code != 200:
            await stream.aread()
            return
        count = 0
        async for line in stream.aiter_lines():
            if not line.startswith("data: {"):
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
    compare(item, texts, seen)


def compare(item: Item, texts: list[str], seen: Seen) -> None:
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
                    found = await client.post("/v1/completions", json=draw.choice(BAD))
                    seen.codes[found.status_code] += 1
                    if not 400 <= found.status_code < 500 and found.status_code != 503:
                        seen.wrong.append(f"nonsense got {found.status_code}")
                else:
                    await call(client, draw.choice(items), draw, seen)
            except httpx.HTTPError as error:
                seen.wrong.append(f"the connection failed: {error!r}")
            if draw.random() < 0.2:
                await asyncio.sleep(draw.random() / 4)


async def watch(server: Served, seconds: float, seen: Seen) -> None:
    """Note the memory, and kill the engine once, after a third of the time."""
    start = time.monotonic()
    with tqdm(total=int(seconds), desc="soaking", unit="s", disable=None, leave=False) as bar:
        while time.monotonic() < start + seconds:
            await asyncio.sleep(LOOK_SECONDS)
            passed = time.monotonic() - start
            bar.update(int(passed) - bar.n)
            if seen.killed is None and passed > seconds / 3 and server.kill_engine():
                seen.killed = passed
            seen.memory.append((passed, server.memory()))


async def soak(server: Served, items: list[Item], clients: int, seconds: float) -> dict[str, Any]:
    """Run it all; what was seen, and what of it is wrong."""
    seen = Seen()
    until = time.monotonic() + seconds
    work = [run_client(server.url, items, i, until, seen) for i in range(clients)]
    await asyncio.gather(watch(server, seconds, seen), *work)
    deadline = time.monotonic() + QUIET_SECONDS
    usage = 1.0
    async with httpx.AsyncClient(base_url=server.url) as client:
        while usage and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
            text = (await client.get("/metrics")).text
            usage = float(re.findall(r"^vllm:kv_cache_usage_perc\S* (\S+)", text, re.M)[0])
    if usage:
        seen.wrong.append(f"{usage:.2%} of the cache is held by nobody")
    for code in seen.codes:
        if code >= 500 and code != 503:
            seen.wrong.append(f"{seen.codes[code]} answers of {code}")
    growth = grown(seen.memory, (seen.killed or 0.0) + seconds / 3)
    if growth > GROWTH:
        seen.wrong.append(f"memory grew to {growth:.2f} of what it was")
    return {
        "clients": clients, "seconds": seconds, "codes": dict(sorted(seen.codes.items())),
        "ended": dict(seen.ended), "memory_growth": growth, "killed_after": seen.killed,
        "wrong": seen.wrong[:20], "wrong_count": len(seen.wrong),
    }  # fmt: skip


def grown(memory: list[tuple[float, int]], settled: float) -> float:
    """The median of the last tenth of the measurements over that of the first tenth settled."""
    values = [size for at, size in memory if at >= settled]
    if len(values) < 4:
        return 1.0
    tenth = max(2, len(values) // 10)
    first, last = sorted(values[:tenth]), sorted(values[-tenth:])
    return last[tenth // 2] / first[tenth // 2]


def main() -> None:
    """Parse, soak, report; exit code 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--items", type=int, default=ITEMS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    items = make_items(args.items, args.seed)
    with Served("--max-queued-requests", "512") as server:
        report = asyncio.run(soak(server, items, args.clients, args.seconds))
        report["exit_code"] = server.stop()
    print(json.dumps(report, indent=1))
    sys.exit(bool(report["wrong"]) or report["exit_code"] != 0)


if __name__ == "__main__":
    main()
