"""Servers of one GGUF file: seconds to the first answer, memory, and chats of many clients.

A start of its own, with room for one chat of ``ROOM`` tokens where a server is told so, is timed
until a chat is answered and looked at again after ``CHATS`` of them. Then each server is started
with a slot for each client, and loaded by ``outrider bench serve``, by turns.
"""

import json
import subprocess
import sys
import tempfile
import time
import urllib.error
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from outrider.bench.offline import turned
from outrider.bench.workload import Workload
from outrider.checkpoints.tokenizers import read_codec

from .. import install
from ..start import chat, free_port, memory, running, total, tree
from .known import FILE, OWN
from .measure import Bench
from .runners.ik_llamacpp import IkLlamaCpp
from .runners.llamacpp import LlamaCpp
from .session import PeerError
from .settings import DECODE

ROOM, CHATS, CHAT_TOKENS = 2048, 4, 64
STARTS = 3
READY_SECONDS, LOAD_SECONDS = 600.0, 1800.0
LOOK_SECONDS = 0.01
LEAST_REQUESTS = 4
NUMBER_TOKENS = 32
"""More than a chat's number and, where it is a plain text, its template take."""
PROGRAMS = {
    "llama.cpp": (LlamaCpp, install.LLAMA_CPP), "ik_llama.cpp": (IkLlamaCpp, install.IK_LLAMA_CPP),
}  # fmt: skip


@dataclass(frozen=True)
class Server:
    """A peer's server in one mode; ``command`` gives its words for slots, tokens each and port."""

    peer: str
    mode: str
    k: int
    arguments: str
    command: Callable[[int, int, int], list[str]]


def servers(bench: Bench) -> list[Server]:
    """Return the servers of a bench that has run: ours as users start it, others at their best.

    Of a peer whose fastest mode drafts, its plain server is another one.
    """
    drafter = str(bench.pair.drafter or "auto")

    def own(slots: int, tokens: int, port: int) -> list[str]:
        return [
            sys.executable, "-m", "outrider", "serve", str(bench.pair.target),
            "--drafter", drafter, "--port", str(port), "--served-model-name", "model",
        ]  # fmt: skip

    found = [Server(OWN, "auto", 0, "", own)]
    for peer, (runner, environment) in PROGRAMS.items():
        tried = [s for s in bench.search if (s.peer, s.load) == (peer, DECODE)]
        tried.sort(key=lambda s: bench.search[s].speed, reverse=True)
        plain = next((s for s in tried if s.mode == "plain"), None)
        for best in dict.fromkeys(filter(None, (plain, *tried[:1]))):
            mode, _, lookup = best.mode.partition(" ")
            spec = {
                "target": str(bench.pair.target), "drafter": str(bench.pair.drafter),
                "dtype": FILE, "mode": mode, "lookup": lookup, "k": best.k,
                "threads": best.threads, "arguments": best.variant.split(),
            }  # fmt: skip
            program = str(install.program("llama-server", environment))

            def words(
                slots: int,
                tokens: int,
                port: int,
                spec: dict[str, Any] = spec,
                program: str = program,
                runner: type[LlamaCpp] = runner,
            ) -> list[str]:
                sizes = {"parallel": slots, "context": tokens}
                return runner.command(program, {**spec, **sizes}, str(port))

            found.append(Server(peer, best.mode, best.k, best.variant, words))
    return found


def answered(words: list[str], alive: Callable[[], bool], base: str) -> None:
    """Wait until a chat of one token is answered."""
    begin = time.perf_counter()
    while True:
        with suppress(OSError, urllib.error.URLError):
            chat(base, 1)
            return
        if not alive() or time.perf_counter() - begin > READY_SECONDS:
            raise PeerError(f"{' '.join(words)} gave no answer; run it to see why")
        time.sleep(LOOK_SECONDS)


def start(server: Server) -> dict[str, Any]:
    """Return what one start takes: seconds, and bytes when it is ready and after chats."""
    port = free_port()
    base, words = f"http://127.0.0.1:{port}", server.command(1, ROOM, port)
    begin = time.perf_counter()
    with running(words) as process:
        answered(words, lambda: process.poll() is None, base)
        seconds = time.perf_counter() - begin
        ready = memory(tree(process.pid))
        for _ in range(CHATS):
            chat(base, CHAT_TOKENS)
        later = memory(tree(process.pid))
    return {
        "seconds": seconds,
        "ready_bytes": 1e6 * total(ready, lambda p: p.shared),
        "later_bytes": 1e6 * total(later, lambda p: p.shared),
        "peak_bytes": 1e6 * total(later, lambda p: p.peak),
    }


def write_chats(workload: Workload, file: Path, name: str, count: int) -> None:
    """Write chats that no server has seen before: each begins with a number of its own."""
    lines = []
    for i in range(count):
        item = workload.items[i % len(workload.items)]
        messages = [dict(m) for m in item.messages] or [{"role": "user", "content": item.prompt}]
        first = next(m for m in messages if m["role"] == "user")
        first["content"] = f"({name}, {i + 1}) {first['content']}"
        lines.append(json.dumps({"messages": messages}))
    file.write_text("\n".join(lines), encoding="utf-8")


def load(url: str, clients: int, tokens: int, heat: float, file: Path) -> dict[str, Any]:
    """Return what ``outrider bench serve`` says of one load."""
    words = [
        sys.executable, "-m", "outrider", "bench", "serve", url, "--chat", "--prompts", str(file),
        "--concurrency", str(clients), "--num-prompts", str(max(clients, LEAST_REQUESTS)),
        "--max-tokens", str(tokens), "--temperature", str(heat), "--warm-up", "0", "--json",
    ]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=LOAD_SECONDS)
    if done.returncode:
        raise PeerError(f"bench serve failed: {done.stderr.strip()[-300:]}")
    (run,) = json.loads(done.stdout)["runs"]
    if run["failed"] or not run["completed"]:
        raise PeerError(f"{run['failed']} of {run['num_prompts']} chats failed")
    return dict(run)


class Serving:
    """Servers of a bench that has run, measured by turns; one that fails is left out then on."""

    def __init__(self, bench: Bench, clients: tuple[int, ...], workload: Workload) -> None:
        self.bench, self.clients, self.workload = bench, clients, workload
        codec = read_codec(bench.pair.target)
        longest = max(len(item.encode(codec)) for item in workload.items)
        self.room = longest + NUMBER_TOKENS + bench.options.max_tokens
        self.servers = servers(bench)
        self.starts: dict[Server, list[dict[str, Any]]] = defaultdict(list)
        self.loads: dict[tuple[Server, int], list[dict[str, Any]]] = defaultdict(list)
        self.urls: dict[Server, str] = {}

    def run(self) -> None:
        """Fill ``bench.servers``."""
        for number in range(1 + STARTS):
            self._each(number, f"start {number}", self._start)
        with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
            self._each(0, "start for loads", partial(self._open, stack))
            for number, n in product(range(self.bench.options.rounds), self.clients):
                file = Path(folder) / f"{number}-{n}.jsonl"
                write_chats(self.workload, file, f"{number} of {n}", max(n, LEAST_REQUESTS))
                about = f"round {number + 1}, {n} clients"
                self._each(number, about, partial(self._load, n, file))
        self.bench.servers += map(self._figures, self.servers)

    def _each(self, number: int, about: str, work: Callable[[Server], None]) -> None:
        for server in turned(self.servers, number):
            install.say(f"{about}: {server.peer}, {server.mode}")
            try:
                work(server)
            except (PeerError, OSError, subprocess.TimeoutExpired) as error:
                self.bench.skip(str(error), server.peer, FILE, server.mode, "server")
                self.servers.remove(server)

    def _start(self, server: Server) -> None:
        self.starts[server].append(start(server))

    def _open(self, stack: ExitStack, server: Server) -> None:
        port = free_port()
        words = server.command(max(self.clients), self.room, port)
        process = stack.enter_context(running(words))
        self.urls[server] = f"http://127.0.0.1:{port}"
        answered(words, lambda: process.poll() is None, self.urls[server])

    def _load(self, clients: int, file: Path, server: Server) -> None:
        options = self.bench.options
        done = load(self.urls[server], clients, options.max_tokens, options.temperature, file)
        self.loads[server, clients].append(done)

    def _figures(self, server: Server) -> dict[str, Any]:
        """One entry of ``servers`` of a report; the first start, which fills caches, is left out.

        ``seconds`` are those to the first answer, bytes are of all processes of the server: their
        proportional sets when it is ready and after chats, and the sum of their peaks.
        """
        _, *timed = self.starts[server]
        return {
            "peer": server.peer, "mode": server.mode, "num_speculative_tokens": server.k,
            "arguments": server.arguments,
            **{name: median(each[name] for each in timed) for name in timed[0]},
            "loads": [
                {
                    "clients": n,
                    "tokens_per_second_by_round": [r["output_throughput"] for r in runs],
                    "tokens_per_second": median(r["output_throughput"] for r in runs),
                    "ttft_ms": median(r["median_ttft_ms"] for r in runs),
                    "tpot_ms": median(r["median_tpot_ms"] for r in runs),
                }
                for n in self.clients
                if (runs := self.loads[server, n])
            ],
        }  # fmt: skip
