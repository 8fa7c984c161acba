"""Random bodies against a real server, and a report of all that is wrong with its answers.

``python -m outrider.bench.fuzz [MODEL] --bodies 200000 --seed 0`` starts a server of the pocket
pair, or of MODEL; a MODEL that begins with http:// is the address of a server that runs already. A
body depends on the schema that the server publishes, on the seed and on its index alone:
``--only INDEX`` sends one of them again and prints it. The exit code is 1 where anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ...engine.trim import TRIM_SECONDS
from ..served import Served
from .bodies import Bodies, Case
from .health import Health
from .judge import faults, shown
from .wire import Answer, Connection, NoAnswer

POCKET = Path(__file__).parents[2] / "pocket" / "model"
CONNECTIONS = 16
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
    classes: dict[str, list[int]] = field(default_factory=dict)
    kept: list[dict[str, Any]] = field(default_factory=list)
    general: list[str] = field(default_factory=list)
    running: dict[int, float] = field(default_factory=dict)

    def note(self, case: Case, problem: str) -> None:
        """Keep a fault, by its class."""
        words = re.split(r"['\"\[{]", problem)[0]
        name = re.sub(r"-?[0-9][0-9.e+-]*", "0", words)[:80]
        if name not in self.classes:
            tqdm.write(f"body {case.index}: {problem[:200]}", file=sys.stderr)
        self.classes.setdefault(name, []).append(case.index)
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
        """Send so many bodies; the report."""
        seen, start = self.seen, time.monotonic()
        reference, restarts = await self.reference(), await self.restarts()
        settled = int(count * SETTLED)
        watch = asyncio.create_task(self.watch())
        with (
            Health(self.url, lambda: list(seen.running)) as health,
            tqdm(total=count, desc="fuzzing", unit="body", disable=None) as bar,
        ):
            await self.all(iter(range(settled)), connections, bar)
            await self.quiet()
            before = await self.memory(count)
            await self.all(iter(range(settled, count)), connections, bar)
            await self.quiet()
            after = await self.memory(count)
        watch.cancel()
        growth = after / before if before and after else None
        if growth is not None and growth > GROWTH:
            seen.general.append(f"memory grew to {growth:.3f} of what it was")
        if self.alive() and await self.reference() != reference:
            seen.general.append("the reference request has another output than before")
        if self.alive() and await self.restarts() != restarts:
            seen.general.append(f"the engine was restarted {await self.restarts()} times")
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
        """Send one body and judge what comes back."""
        seen, start = self.seen, time.monotonic()
        seen.kinds[case.kind] += 1
        seen.running[case.index] = start
        try:
            async with asyncio.timeout(HANG_SECONDS):
                answer = await connection.post(case.path, case.raw, case.leaves)
        except TimeoutError:
            connection.close()
            seen.note(case, f"no answer in {HANG_SECONDS:g} s")
            return None
        except (NoAnswer, OSError) as error:
            connection.close()
            seen.codes["none"] += 1
            seen.note(case, f"no answer: {error}")
            return None
        finally:
            del seen.running[case.index]
        if not answer.whole:
            connection.close()
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

    async def quiet(self) -> None:
        """Wait until nothing runs, and note what does."""
        deadline = time.monotonic() + QUIET_SECONDS
        left: dict[str, float] = {"vllm:num_requests_running": 1}
        while any(left.values()) and self.alive() and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_SECONDS)
            names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            found = await self.metrics()
            left = {name: found[f"vllm:{name}"] for name in names}
        if any(left.values()):
            self.seen.general.append(f"nobody waits for an answer, and yet: {left}")

    async def memory(self, count: int) -> int | None:
        """The memory of an idle server; None where too few bodies are sent to tell growth."""
        if self.server is None or not self.alive() or count < GROWTH_BODIES:
            return None
        await asyncio.sleep(TRIMMED_SECONDS)
        return self.server.memory()

    async def metrics(self) -> dict[str, float]:
        """The server's metrics, summed over their labels."""
        found: dict[str, float] = {}
        async with Connection(self.url) as connection:
            text = (await connection.get("/metrics")).body.decode()
        for name, value in re.findall(r"^([a-z_:]+)\S* (\S+)$", text, re.M):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    async def restarts(self) -> float:
        """How often the engine was started again."""
        return (await self.metrics())["outrider_engine_restarts_total"]

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


async def published(url: str) -> dict[str, Any]:
    """The schema of a server."""
    async with Connection(url) as connection:
        found: dict[str, Any] = json.loads((await connection.get("/openapi.json")).body)
    return found


async def fuzz(args: argparse.Namespace, url: str, server: Served | None) -> dict[str, Any]:
    """Do what the command line asks for; the report."""
    fuzzer = Fuzzer(url, server, Bodies(await published(url), args.seed))
    if args.only is not None:
        return await fuzzer.only(args.only)
    return await fuzzer.run(args.bodies, args.connections)


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """A report without bodies, and without most indices."""
    found = {key: value for key, value in report.items() if key != "faults"}
    for part in found.get("classes", {}).values():
        part["indices"] = part["indices"][:SHOWN_INDICES]
    if "health" in found:
        found["health"] = {k: v for k, v in found["health"].items() if k != "worst"}
    return found


def main() -> None:
    """Parse, fuzz, report; exit code 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.fuzz", description=__doc__)
    parser.add_argument("model", nargs="?", default=str(POCKET), help="a checkpoint, or an address")
    parser.add_argument("--bodies", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--connections", type=int, default=CONNECTIONS)
    parser.add_argument("--only", type=int, metavar="INDEX", help="send this body alone")
    parser.add_argument("--json", type=Path, help="the report's file; fuzz.json after a fault")
    args = parser.parse_args()
    with ExitStack() as stack:
        server = None
        if not args.model.startswith("http://"):
            server = stack.enter_context(Served(args.model, *OPTIONS))
        report = asyncio.run(fuzz(args, server.url if server else args.model, server))
        if server is not None:
            report["exit_code"] = server.stop()
    wrong = bool(report["wrong_count"]) or report.get("exit_code", 0) != 0
    file = args.json or (Path("fuzz.json") if wrong and args.only is None else None)
    if file is not None:
        file.write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(json.dumps(summary(report), indent=1))
    if wrong and file is not None:
        print(f"the faults and their bodies are in {file}.", file=sys.stderr)
    sys.exit(wrong)
