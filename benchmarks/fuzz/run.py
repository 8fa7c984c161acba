"""Random bodies against a real server, and a report of all that is wrong with its answers.

A server of the pocket pair is started, or of another checkpoint; an address that begins with
http:// is that of a server that runs already. A body depends on the schema that the server
publishes, on the seed and on its index alone: ``--only INDEX`` sends one of them again and prints
it. The exit code is 1 where anything is wrong.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.request import urlopen

import typer
from prometheus_client.parser import text_string_to_metric_families
from tqdm import tqdm

from outrider.base.freed_memory import TRIM_SECONDS
from outrider.cli.common import Out, write_json

from ..common import POCKET, Model, Seed, percentiles
from ..served import Served, metrics, unrest
from .bodies import Bodies, Case
from .judge import faults, shown
from .wire import Answer, Connection, NoAnswer

REQUEST_SECONDS = 5.0
"""The started server's timeout: a body may ask for as many tokens as the context holds."""
HANG_SECONDS, QUIET_SECONDS, HEALTH_SECONDS = 60.0, 30.0, 0.05
TRIMMED_SECONDS = 2 * TRIM_SECONDS
"""After which an idle server has given back what it freed."""
SETTLED = 0.1
"""Share of the bodies after which memory counts as settled; the cache is filled before them."""
GROWTH, GROWTH_BODIES = 1.02, 100_000
"""Memory at the end over that when settled; it is read where so many bodies are sent."""
KEPT, LONGEST_SHOWN = 200, 4000
"""Faults that the report has with their bodies, and the characters of a body."""
OPTIONS = (
    "--request-timeout", f"{REQUEST_SECONDS:g}", "--max-queued-requests", "65536",
    "--max-queued-tokens", str(2**30), "--memory", "256MiB", "--log-level", "warning",
    "--log-interval", "0",
)  # fmt: skip
"""Of the started server; its queue is never full, so that 429 is a fault."""
CACHE, FILLING_TOKENS = "vllm:cache_config_info", 512
RESTARTS = "outrider_engine_restarts_total"
REFERENCE = json.dumps(
    {"prompt": "def add(a, b):", "max_tokens": 32, "temperature": 0.8, "seed": 1}
).encode()


@dataclass
class Seen:
    """The outcome of all bodies."""

    codes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    classes: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    kept: list[dict[str, Any]] = field(default_factory=list)
    general: list[str] = field(default_factory=list)

    def note(self, case: Case, problem: str) -> None:
        """Keep a fault, by its class."""
        name = re.sub(r"-?[0-9][0-9.e+-]*", "0", re.split(r"['\"\[{]", problem)[0])[:80]
        if name not in self.classes:
            tqdm.write(f"body {case.index}: {problem[:200]}", file=sys.stderr)
        self.classes[name].append(case.index)
        if len(self.kept) < KEPT and len(self.classes[name]) <= 5:
            self.kept.append(described(case) | {"fault": problem})

    @property
    def wrong(self) -> int:
        """The number of faults."""
        return len(self.general) + sum(map(len, self.classes.values()))


def described(case: Case) -> dict[str, Any]:
    """A case as the report has it."""
    text = case.raw.decode("utf-8", "backslashreplace")
    body = text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}... ({len(text)})"
    return {
        "index": case.index, "kind": case.kind, "path": case.path, "leaves": case.leaves,
        "body": body,
    }  # fmt: skip


class Fuzzer:
    """Sends bodies to one server.

    Args:
        url: of the server.
        server: its process, None where somebody else started it.
        bodies: what is sent.
    """

    def __init__(self, url: str, server: Served | None, bodies: Bodies) -> None:
        self.url, self.server, self.bodies = url, server, bodies
        self.seen = Seen()

    async def run(self, count: int, connections: int) -> dict[str, Any]:
        """Send so many bodies and return the report."""
        seen, start, end = self.seen, time.monotonic(), threading.Event()
        reference, restarts = await self.reference(), metrics(self.url)[RESTARTS]
        settled = int(count * SETTLED)
        memory = []
        if self.server is not None and count >= GROWTH_BODIES:
            await self.fill_cache()
        # In a thread, so that the fuzzer's own work does not count.
        health = asyncio.create_task(asyncio.to_thread(ask_health, self.url, end))
        try:
            with tqdm(total=count, desc="fuzzing", unit="body", disable=None) as bar:
                for part in (range(settled), range(settled, count)):
                    await self.all(iter(part), connections, bar)
                    if self.alive() and (problem := await unrest(self.url, QUIET_SECONDS)):
                        seen.general.append(problem)
                    memory.append(await self.memory(count))
        finally:
            end.set()
        before, after = memory
        growth = after / before if before and after else None
        if growth is not None and growth > GROWTH:
            seen.general.append(f"memory grew to {growth:.3f} of what it was")
        if not self.alive():
            seen.general.append("the server ended")
        elif await self.reference() != reference:
            seen.general.append("the reference request has another output than before")
        elif metrics(self.url)[RESTARTS] != restarts:
            seen.general.append("the engine was restarted")
        seconds = time.monotonic() - start
        return {
            "seed": self.bodies.seed, "bodies": count, "seconds": seconds,
            "bodies_per_second": count / seconds, "codes": dict(sorted(seen.codes.items())),
            "kinds": dict(seen.kinds), "health": await health, "memory_settled": before,
            "memory_after": after, "memory_growth": growth, "wrong_count": seen.wrong,
            "general": seen.general,
            "classes": {k: {"count": len(v), "indices": v} for k, v in seen.classes.items()},
            "faults": seen.kept,
        }  # fmt: skip

    async def fill_cache(self) -> None:
        """Use every page of the server's caches: those that were used once stay resident."""
        with urlopen(f"{self.url}/metrics") as answer:
            families = text_string_to_metric_families(answer.read().decode())
        (cache,) = next(each for each in families if each.name == CACHE).samples
        tokens = int(cache.labels["block_size"]) * int(cache.labels["num_gpu_blocks"])
        with urlopen(f"{self.url}/v1/speculation") as answer:
            drafters = json.load(answer)["drafters"].items()
        # A drafter from a folder has a cache of its own.
        own = [name for name, state in drafters if state["folder"]] or ["auto"]
        rng = random.Random(self.bodies.seed)
        async with Connection(self.url) as connection:
            for name in own * (2 * tokens // FILLING_TOKENS):
                ids = [rng.randrange(1, 256) for _ in range(FILLING_TOKENS)]
                body = {"prompt": ids, "max_tokens": 32, "ignore_eos": True, "temperature": 0}
                body["speculation"] = {"drafter": name, "num_speculative_tokens": 1}
                await connection.post("/v1/completions", json.dumps(body).encode())

    async def all(self, indices: Iterator[int], connections: int, bar: tqdm[Any]) -> None:
        """Send every index over so many connections."""

        async def work() -> None:
            async with Connection(self.url) as connection:
                for index in indices:
                    if not self.alive():
                        return
                    await self.send(connection, self.bodies.case(index))
                    bar.update()

        await asyncio.gather(*(work() for _ in range(connections)))

    async def send(self, connection: Connection, case: Case) -> Answer | None:
        """Send one body and judge what comes back; None where no whole answer came."""
        seen, start = self.seen, time.monotonic()
        seen.kinds[case.kind] += 1
        try:
            async with asyncio.timeout(HANG_SECONDS):
                answer = await connection.post(case.path, case.raw, case.leaves)
        except (TimeoutError, NoAnswer, OSError) as error:
            connection.close()
            late = isinstance(error, TimeoutError)
            seen.codes["late" if late else "none"] += 1
            seen.note(case, f"no answer in {HANG_SECONDS:g} s" if late else f"no answer: {error}")
            return None
        if not answer.whole:
            seen.codes["left"] += 1
            return None
        seen.codes[str(answer.status)] += 1
        timeout = None if self.server is None else REQUEST_SECONDS
        for problem in faults(case, answer, time.monotonic() - start, timeout):
            seen.note(case, problem)
        if answer.status == 429 and self.server is not None:
            seen.note(case, f"429 though the queue has room: {shown(answer)}")
        if answer.status == 503:
            await asyncio.sleep(0.5)  # the engine starts; what is sent now tells nothing
        return answer

    def alive(self) -> bool:
        """True while the server's process runs."""
        return self.server is None or self.server.process.poll() is None

    async def memory(self, count: int) -> int | None:
        """The memory of an idle server; None where too few bodies are sent to tell growth."""
        if self.server is None or not self.alive() or count < GROWTH_BODIES:
            return None
        await asyncio.sleep(TRIMMED_SECONDS)
        return self.server.memory()

    async def reference(self) -> str | None:
        """The text of a request that always has the same; None where it gets none."""
        async with Connection(self.url) as connection:
            for _ in range(int(QUIET_SECONDS)):
                answer = await connection.post("/v1/completions", REFERENCE)
                if answer.status == 200:
                    return str(json.loads(answer.body)["choices"][0]["text"])
                await asyncio.sleep(1)
        return None

    async def only(self, index: int) -> dict[str, Any]:
        """Send one body; what was sent, what came back, and what is wrong with it."""
        case = self.bodies.case(index)
        async with Connection(self.url) as connection:
            answer = await self.send(connection, case)
        got = {"status": answer.status, "answer": shown(answer)} if answer else {}
        return described(case) | got | {
            "wrong": [fault["fault"] for fault in self.seen.kept], "wrong_count": self.seen.wrong,
        }  # fmt: skip


def ask_health(url: str, end: threading.Event) -> dict[str, Any]:
    """Ask a server how it is until ``end`` is set; return latencies in seconds, and failures."""
    seconds, failed = [], 0
    while not end.wait(HEALTH_SECONDS):
        start = time.monotonic()
        try:
            urlopen(f"{url}/health", timeout=HANG_SECONDS).close()
        except OSError:
            failed += 1
        seconds.append(time.monotonic() - start)
    return {
        "asked": len(seconds), "failed": failed, **percentiles(seconds),
        "max": max(seconds, default=0.0),
    }  # fmt: skip


def published(url: str) -> dict[str, Any]:
    """Return the schema of a server."""
    with urlopen(f"{url}/openapi.json") as answer:
        return dict(json.load(answer))


def main(
    model: Model = POCKET,
    bodies: Annotated[int, typer.Option(min=1, help="How many are sent.")] = 200_000,
    seed: Seed = 0,
    connections: Annotated[int, typer.Option(min=1)] = 16,
    only: Annotated[int | None, typer.Option(metavar="INDEX", help="Send this body alone.")] = None,
    out: Out = None,
) -> None:
    """Send random bodies to a server of MODEL, or at an address; exit code 1 after a fault."""
    server = None if model.startswith("http://") else Served(model, *OPTIONS)
    with server or nullcontext():
        url = server.url if server else model
        fuzzer = Fuzzer(url, server, Bodies(published(url), seed))
        sent = fuzzer.run(bodies, connections) if only is None else fuzzer.only(only)
        report = asyncio.run(sent)
        report["exit_code"] = server.stop() if server else 0
    wrong = bool(report["wrong_count"] or report["exit_code"])
    file = out or ("fuzz.json" if wrong and only is None else None)
    write_json(report, file)
    if file != "-":
        write_json({k: v for k, v in report.items() if k not in ("classes", "faults")}, "-")
    if wrong and file is not None:
        print(f"the faults and their bodies are in {file}.", file=sys.stderr)
    raise typer.Exit(wrong)
