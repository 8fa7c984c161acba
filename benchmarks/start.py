"""How long a server takes until it is ready, and what it holds in memory then and after chats.

Every round starts each contender once, in turns: this build, another build by its Python, and any
other server by its command. Wall time is from the start of the process to the first answer 200;
CPU seconds are those of the whole process tree until then. Linux only. The first round warms the
page cache and whatever a server keeps on disk, and is reported apart.
"""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.table import Table

from outrider.cli.common import new_table, report_console, write_json
from outrider.errors import ConfigError

from .common import POCKET, Model

READY_SECONDS = 600.0
LOOK_SECONDS = 0.01
OURS = "this build"
CHAT = "Write a short poem about the sea, and explain each of its lines."


@dataclass(frozen=True)
class Process:
    """One process of a server: its command's last words, and its memory in bytes.

    ``shared`` is the proportional set size: pages that others map as well count in part.
    """

    name: str
    resident: int
    shared: int
    peak: int


@dataclass(frozen=True)
class Start:
    """One start: seconds to ready, CPU seconds until then, memory when ready and after chats."""

    seconds: float
    cpu: float
    ready: list[Process]
    later: list[Process]


def tree(pid: int) -> list[int]:
    """Return a process and all below it that are alive."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def cpu_seconds(pids: list[int]) -> float:
    """Return the CPU time of processes, and of their ended children, in seconds."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def memory(pids: list[int]) -> list[Process]:
    """Return what each process holds."""
    processes = []
    for pid in pids:
        with contextlib.suppress(OSError):
            folder = Path(f"/proc/{pid}")
            sizes = _sizes(folder / "smaps_rollup")
            peak = _sizes(folder / "status").get("VmHWM", 0)
            words = (folder / "cmdline").read_bytes().split(b"\0")
            name = "engine" if any(b"spawn_main" in word for word in words) else "server"
            if not any(b"resource_tracker" in word for word in words):
                processes.append(Process(name, sizes["Rss"], sizes["Pss"], peak))
    return processes


def _sizes(file: Path) -> dict[str, int]:
    lines = (line.split() for line in file.read_text().splitlines())
    return {w[0].rstrip(":"): 1024 * int(w[1]) for w in lines if len(w) == 3 and w[2] == "kB"}


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(url: str) -> bool:
    """Return whether a GET is answered with 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def chat(base: str, tokens: int) -> None:
    """Have one conversation of one turn."""
    body = {"messages": [{"role": "user", "content": CHAT}], "max_tokens": tokens, "model": "model"}
    request = urllib.request.Request(
        f"{base}/v1/chat/completions",
        json.dumps({**body, "temperature": 0}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=READY_SECONDS) as answer:
        answer.read()


@contextlib.contextmanager
def running(words: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a group of its own, which is killed at the end."""
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(words, stdout=quiet, stderr=quiet, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def start(words: list[str], path: str, chats: int, tokens: int, rest: float) -> Start:
    """Return what one start of a server took; ``{port}`` in its command stands for its port.

    After the chats it has ``rest`` seconds for what it does while it is idle.
    """
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    begin = time.perf_counter()
    with running([word.replace("{port}", str(port)) for word in words]) as process:
        while not answers(base + path):
            if process.poll() is not None or time.perf_counter() - begin > READY_SECONDS:
                raise ConfigError(f"{shlex.join(words)} was not ready; run it to see why.")
            time.sleep(LOOK_SECONDS)
        seconds = time.perf_counter() - begin
        pids = tree(process.pid)
        cpu, ready = cpu_seconds(pids), memory(pids)
        for _ in range(chats):
            chat(base, tokens)
        time.sleep(rest)
        return Start(seconds, cpu, ready, memory(tree(process.pid)))


def words_of(command: str) -> list[str]:
    """Return the words of a server's command. Raises ConfigError: it has no place for a port."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"--command {command!r} cannot be read ({error}).") from None
    if not any("{port}" in word for word in words[1:]):
        raise ConfigError(f"--command {command!r} lacks {{port}}, where its port is to stand.")
    return words


def total(processes: list[Process], what: Callable[[Process], int]) -> float:
    """Return the sum over processes in MB."""
    return sum(map(what, processes)) / 1e6


def of_starts(starts: dict[str, list[Start]]) -> Table:
    """Return a table: what a start took, and what the processes held; medians without the first."""
    columns = "ready s", "CPU s", "first s", "MB", "MB after chats", "proportional", "peak"
    shown = new_table("server", "processes after chats", right=columns)
    for name, (first, *others) in starts.items():
        some = others or [first]
        last = some[-1]
        seconds, cpu = (median(getattr(one, what) for one in some) for what in ("seconds", "cpu"))
        shown.add_row(
            name, " + ".join(f"{p.name} {p.resident / 1e6:.0f}" for p in last.later),
            f"{seconds:.2f}", f"{cpu:.2f}", f"{first.seconds:.2f}",
            f"{total(last.ready, lambda p: p.resident):.0f}",
            f"{total(last.later, lambda p: p.resident):.0f}",
            f"{total(last.later, lambda p: p.shared):.0f}",
            f"{total(last.later, lambda p: p.peak):.0f}",
        )  # fmt: skip
    return shown


def of_phases(parts: list[dict[str, Any]]) -> Table:
    """Return a table of an engine's phases."""
    shown = new_table("phase of the engine", right=("wall s", "CPU s"))
    for each in parts:
        shown.add_row(each["phase"], f"{each['wall']:.3f}", f"{each['cpu']:.3f}")
    return shown


def phases(model: str, drafter: str, python: str) -> list[dict[str, Any]]:
    """Return the phases of the engine's start, see ``start_phases``."""
    words = [python, "-m", "benchmarks.start_phases", model, drafter]
    run = subprocess.run(words, stdout=subprocess.PIPE, check=False)
    if run.returncode:
        raise ConfigError("the phases of a start cannot be measured; its error is above.")
    listed: list[dict[str, Any]] = json.loads(run.stdout)
    return listed


def main(
    model: Model = POCKET,
    drafter: Annotated[str, typer.Option(help="As of outrider serve.")] = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="Starts of each, behind a first one.")] = 3,
    chats: Annotated[int, typer.Option(min=0, help="Chats before memory is read again.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each chat.")] = 64,
    rest: Annotated[
        float, typer.Option(min=0, help="Idle seconds at the end of each first start.")
    ] = 30,
    beside: Annotated[
        str | None, typer.Option(metavar="PYTHON", help="The Python of another build.")
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(help="Another server's command with {port} in it; /health says it is ready."),
    ] = None,
    out: Annotated[str | None, typer.Option(help="Write a report here, - for stdout.")] = None,
) -> None:
    """Measure the start of a server, and its memory, beside other builds and servers."""
    serve = ["-m", "outrider", "serve", model, "--drafter", drafter, "--port", "{port}"]
    contenders = {OURS: ([sys.executable, *serve, "--served-model-name", "model"], "/ready")}
    if beside is not None:
        contenders["other build"] = ([beside, *serve, "--served-model-name", "model"], "/ready")
    if command is not None:
        words = words_of(command)
        contenders[Path(words[0]).name] = (words, "/health")
    starts: dict[str, list[Start]] = {name: [] for name in contenders}
    for number in range(1 + rounds):
        for name, (words, path) in contenders.items():
            one = start(words, path, chats, tokens, 0 if number else rest)
            starts[name].append(one)
    parts = phases(model, drafter, sys.executable)
    if out is not None:
        whole = {name: [asdict(one) for one in each] for name, each in starts.items()}
        write_json({"model": model, "drafter": drafter, "starts": whole, "phases": parts}, out)
        return
    console = report_console(False)
    console.print(of_starts(starts))
    console.print(of_phases(parts))
