"""Random bodies against a real server, and a report of all that is wrong with its answers.

A server of the pocket pair is started, or of another checkpoint; an address that begins with
http:// is that of a server that runs already. A body depends on the schema that the server
publishes, on the seed and on its index alone: ``--only INDEX`` sends one of them again and prints
it. The exit code is 1 where anything is wrong.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.request import urlopen

import typer
from tqdm import tqdm

from outrider.cli.common import JsonFile, write_json
from outrider.engine.trim import TRIM_SECONDS

from ..common import POCKET, Model, Seed
from ..served import Served, metrics, unrest
from .bodies import Bodies, Case
from .health import watched_health
from .judge import faults, shown
from .wire import Answer, Connection, NoAnswer

REQUEST_SECONDS = 5.0
"""The started server's timeout: a body may ask for as many tokens as the context holds."""
HANG_SECONDS, QUIET_SECONDS, LOOK_SECONDS = 60.0, 30.0, 0.1
TRIMMED_SECONDS = 2 * TRIM_SECONDS
"""After which an idle server has given back what it freed."""
SETTLED = 0.1
"""Share of the bodies after which memory counts as settled."""
GROWTH, GROWTH_BODIES = 1.02, 100_000
"""Memory at the end over that when settled; it is read where so many bodies are sent."""
KEPT, LONGEST_SHOWN, SHOWN_INDICES = 200, 4000, 5
"""Faults that the report has with their bodies, the characters of a body, and indices printed."""
OPTIONS = (
    "--request-timeout", f"{REQUEST_SECONDS:g}", "--max-queued-requests", "65536",
    "--max-queued-tokens", str(2**30), "--memory", "256MiB", "--log-level", "warning",
    "--log-interval", "0",
)  # fmt: skip
"""Of the started server; its queue is never full, so that 429 is a fault."""
REFERENCE = json.dumps(
    {"prompt": "def add(a, b):", "max_tokens": 32, "temperature": 0.8, "seed": 1}
).encode()


@dataclass
class Seen:
    """What came of all bodies."""

    codes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    classes: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    kept: list[dict[str, Any]] = field(default_factory=list)
    general: list[str] = field(default_factory=list)
    running: set[int] = field(default_factory=set)

    def note(self, case: Case, problem: str) -> None:
        """Keep a fault, by its class."""
        words = re.split(r"['\"\[{]", problem)[0]
        name = re.sub(r"-?[0-9][0-9.e+-]*", "0", words)[:80]
        if name not in self.classes:
            tqdm.write(f"body {case.index}: {problem[:200]}", file=sys.stderr)
        self.classes[name].append(case.index)
        if len(self.kept) < KEPT and len(self.classes[name]) <= 5:
            self.kept.append(described(case) | {"fault": problem})

    @property
    def wrong(self) -> int:
        """How many faults there are."""
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
        self.url = url
        self.server = server
        self.bodies = bodies
        self.seen = Seen()
        self.timeout = REQUEST_SECONDS if server is not None else None

    async def run(self, count: int, connections: int) -> dict[str, Any]:
        """Send so many bodies and return the report."""
        seen, start = self.seen, time.monotonic()
        reference, restarts = await self.reference(), self.restarts()
        settled = int(count * SETTLED)
        memory = []
        watch = asyncio.create_task(self.watch())
        with (
            watched_health(self.url, lambda: list(seen.running)) as health,
            tqdm(total=count, desc="fuzzing", unit="body", disable=None) as bar,
        ):
            for part in (range(settled), range(settled, count)):
                await self.all(iter(part), connections, bar)
                if self.alive() and (problem := await unrest(self.url, QUIET_SECONDS)):
                    seen.general.append(problem)
                memory.append(await self.memory(count))
        watch.cancel()
        before, after = memory
        growth = after / before if before and after else None
        if growth is not None and growth > GROWTH:
            seen.general.append(f"memory grew to {growth:.3f} of what it was")
        if self.alive() and await self.reference() != reference:
            seen.general.append("the reference request has another output than before")
        if self.alive() and self.restarts() != restarts:
            seen.general.append(f"the engine was restarted {self.restarts()} times")
        seconds = time.monotonic() - start
        return {
            "seed": self.bodies.seed, "bodies": count, "seconds": seconds,
            "bodies_per_second": count / seconds, "codes": dict(sorted(seen.codes.items())),
            "kinds": dict(seen.kinds), "health": health.report(), "memory_settled": before,
            "memory_after": after, "memory_growth": growth, "wrong_count": seen.wrong,
            "general": seen.general,
            "classes": {k: {"count": len(v), "indices": v} for k, v in seen.classes.items()},
            "faults": seen.kept,
        }  # fmt: skip

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
        seen.running.add(case.index)
        try:
            async with asyncio.timeout(HANG_SECONDS):
                answer = await connection.post(case.path, case.raw, case.leaves)
        except (TimeoutError, NoAnswer, OSError) as error:
            connection.close()
            late = isinstance(error, TimeoutError)
            seen.codes["late" if late else "none"] += 1
            seen.note(case, f"no answer in {HANG_SECONDS:g} s" if late else f"no answer: {error}")
            return None
        finally:
            seen.running.remove(case.index)
        if not answer.whole:
            seen.codes["left"] += 1
            return None
        seen.codes[str(answer.status)] += 1
        for problem in faults(case, answer, time.monotonic() - start, self.timeout):
            seen.note(case, problem)
        if answer.status == 429 and self.server is not None:
            seen.note(case, f"429 though the queue has room: {shown(answer)}")
        if answer.status == 503:
            await asyncio.sleep(0.5)  # the engine starts; what is sent now tells nothing
        return answer

    async def watch(self) -> None:
        """Note when the engine's process is another, and what ran then."""
        if self.server is None:
            return
        engine = self.server.engine()
        while self.alive():
            await asyncio.sleep(LOOK_SECONDS)
            now = self.server.engine()
            if now != engine and now is not None:
                running = sorted(self.seen.running)
                self.seen.general.append(f"the engine ended; these bodies ran: {running}")
                engine = now
        self.seen.general.append(f"the server ended: {self.server.lines[-3:]}")

    def alive(self) -> bool:
        """Whether the server's process runs."""
        return self.server is None or self.server.process.poll() is None

    async def memory(self, count: int) -> int | None:
        """The memory of an idle server; None where too few bodies are sent to tell growth."""
        if self.server is None or not self.alive() or count < GROWTH_BODIES:
            return None
        await asyncio.sleep(TRIMMED_SECONDS)
        return self.server.memory()

    def restarts(self) -> float:
        """Return how often the engine was started again."""
        return metrics(self.url)["outrider_engine_restarts_total"]

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
        found = {"status": answer.status, "answer": shown(answer)} if answer else {}
        problems = [fault["fault"] for fault in self.seen.kept]
        return described(case) | found | {"wrong": problems, "wrong_count": self.seen.wrong}


def published(url: str) -> dict[str, Any]:
    """Return the schema of a server."""
    with urlopen(f"{url}/openapi.json") as answer:
        document: dict[str, Any] = json.load(answer)
    return document


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report without bodies, and without most indices."""
    short = {key: value for key, value in report.items() if key != "faults"}
    for part in short.get("classes", {}).values():
        part["indices"] = part["indices"][:SHOWN_INDICES]
    if "health" in short:
        short["health"] = {k: v for k, v in short["health"].items() if k != "worst"}
    return short


def main(
    model: Model = POCKET,
    bodies: Annotated[int, typer.Option(min=1, help="How many are sent.")] = 200_000,
    seed: Seed = 0,
    connections: Annotated[int, typer.Option(min=1)] = 16,
    only: Annotated[int | None, typer.Option(metavar="INDEX", help="Send this body alone.")] = None,
    json_: JsonFile = None,
) -> None:
    """Send random bodies to a server of MODEL, or at an address; exit code 1 after a fault."""
    with ExitStack() as stack:
        server = None
        if not model.startswith("http://"):
            server = stack.enter_context(Served(model, *OPTIONS))
        url = server.url if server else model
        fuzzer = Fuzzer(url, server, Bodies(published(url), seed))
        sent = fuzzer.run(bodies, connections) if only is None else fuzzer.only(only)
        report = asyncio.run(sent)
        if server is not None:
            report["exit_code"] = server.stop()
    wrong = bool(report["wrong_count"]) or report.get("exit_code", 0) != 0
    file = json_ or ("fuzz.json" if wrong and only is None else None)
    write_json(report, file)
    if file != "-":
        write_json(summary(report), "-")
    if wrong and file is not None:
        print(f"the faults and their bodies are in {file}.", file=sys.stderr)
    raise typer.Exit(wrong)
