"""A server under everything at once: ``python -m outrider.bench.soak --seconds 120``.

Clients send random prompts and options, streamed or not; some leave in the middle, some send
nonsense, and once the engine is killed. Every output that was completed must be the one that plain
decoding gives alone for that seed; at the end no page is held, nothing but the restart's 503 was a
server's error, and memory has not grown. Needs httpx, which comes with ``outrider[dev]``.

With ``--hostile`` one client beside 16 honest ones attacks the server (see ``fuzz.hostile``), and
no engine is killed: every 503 is a fault. ``--compare`` soaks without that client first and puts
the honest clients' P99 latencies side by side.
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
from statistics import quantiles
from typing import Any

import httpx
from tqdm import tqdm

from ..llm import LLM
from ..types import SamplingParams
from .served import Served

POCKET = Path(__file__).parents[1] / "pocket"
ITEMS = 160
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
    latencies: list[float] = field(default_factory=list)
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
    kind, start = draw.random(), time.monotonic()
    if kind < WHOLE:
        found = await client.post("/v1/completions", json=item.body)
        seen.codes[found.status_code] += 1
        if found.status_code == 200:
            compare(item, [c["text"] for c in found.json()["choices"]], seen)
            seen.latencies.append(time.monotonic() - start)
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
    seen.latencies.append(time.monotonic() - start)


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


async def attack(server: Served, seconds: float, seen: Seen) -> dict[str, Any]:
    """Let a hostile client loose in a process of its own; what it was answered."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "outrider.bench.fuzz.hostile", server.url, "--seconds", str(seconds),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    said, _ = await process.communicate()
    if process.returncode:
        seen.wrong.append(f"the hostile client ended with {process.returncode}")
        return {}
    found: dict[str, Any] = json.loads(said)
    seen.wrong += [f"hostile: {problem}" for problem in found["wrong"]]
    return found


async def soak(
    server: Served, items: list[Item], clients: int, seconds: float, *,
    kill: bool = True, hostile: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Run it all; what was seen, and what of it is wrong.

    Args:
        server: just started.
        items: what honest clients call.
        clients: honest ones.
        seconds: to soak.
        kill: end the engine once on the way; without it a 503 is a fault.
        hostile: let a hostile client loose beside them.
    """
    seen, engine = Seen(), server.engine()
    until = time.monotonic() + seconds
    work = [run_client(server.url, items, i, until, seen) for i in range(clients)]
    attacks = [attack(server, seconds, seen)] if hostile else []
    _, *answers = await asyncio.gather(watch(server, seconds, seen, kill), *attacks, *work)
    await check_quiet(server, seen)
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
        "hostile": answers[0] if hostile else None,
        "wrong": seen.wrong[:20], "wrong_count": len(seen.wrong),
    }  # fmt: skip


async def check_quiet(server: Served, seen: Seen) -> None:
    """Note what of the cache is held though nobody waits for an answer."""
    deadline = time.monotonic() + QUIET_SECONDS
    usage = 1.0
    async with httpx.AsyncClient(base_url=server.url, timeout=QUIET_SECONDS) as client:
        while usage and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
            try:
                text = (await client.get("/metrics")).text
            except httpx.HTTPError as error:
                seen.wrong.append(f"/metrics has no answer: {error!r}")
                return
            usage = float(re.findall(r"^vllm:kv_cache_usage_perc\S* (\S+)", text, re.M)[0])
    if usage:
        seen.wrong.append(f"{usage:.2%} of the cache is held by nobody")


def percentiles(seconds: list[float]) -> dict[str, float]:
    """P50 and P99 of the latencies of calls that were completed."""
    cuts = quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else [0.0] * 99
    return {"p50": cuts[49], "p99": cuts[98]}


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
    first, last = sorted(values[:tenth]), sorted(values[-tenth:])
    return last[tenth // 2] / first[tenth // 2]


def soaked(items: list[Item], args: argparse.Namespace, **more: bool) -> dict[str, Any]:
    """Soak a server of its own; the report."""
    with Served("--max-queued-requests", "512") as server:
        report = asyncio.run(soak(server, items, args.clients, args.seconds, **more))
        report["exit_code"] = server.stop()
    return report


def main() -> None:
    """Parse, soak, report; exit code 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--clients", type=int, help="64, or 16 beside a hostile one")
    parser.add_argument("--items", type=int, default=ITEMS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hostile", action="store_true", help="one client attacks the server")
    parser.add_argument("--compare", action="store_true", help="soak without and with --hostile")
    args = parser.parse_args()
    hostile = args.hostile or args.compare
    args.clients = args.clients or (BESIDE_HOSTILE if hostile else CLIENTS)
    items = make_items(args.items, args.seed)
    reports = []
    if args.compare:
        reports.append(soaked(items, args, kill=False))
    reports.append(soaked(items, args, kill=not hostile, hostile=hostile))
    wrong = any(report["wrong"] or report["exit_code"] != 0 for report in reports)
    shown = reports[-1]
    if args.compare:
        compared = slowdown(*reports)
        shown = {"alone": reports[0], "beside_hostile": reports[1], "compared": compared}
        wrong = wrong or not compared["passed"]
    print(json.dumps(shown, indent=1))
    sys.exit(wrong)


if __name__ == "__main__":
    main()
