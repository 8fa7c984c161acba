"""The server's machine during a load: CPU, memory, GPUs, and the likely bottleneck.

If the server runs on this machine: from /proc, and from nvidia-smi if there is one.
"""

import asyncio
import math
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean, pstdev
from typing import Any, Self

from ...base.outside.sockets import is_local
from ...base.outside.stamped import Client

SAMPLE_SECONDS = 0.5  # seconds between two samples
LISTENING_STATE = "0A"
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
GPU_FIELDS = "utilization.gpu,utilization.memory,memory.used,power.draw,power.limit"
GPU_NAMES = ("gpu_percent", "gpu_memory_percent", "gpu_memory_mib", "gpu_power_watts")
BUSY_PERCENT = 80.0  # percent of time above which a device is busy
IDLE_PERCENT = 50.0  # percent of time below which it waits
FLAT_GROWTH = 0.35  # exponent of the time per token by batch size, below which memory is the limit
STEEP_GROWTH = 0.75  # the growth above which compute is the limit


class MachineWatch:
    """Samples the server's processes and the GPUs inside its context."""

    def __init__(self, client: Client) -> None:
        self._port = client.port
        self._local = is_local(client.host)
        self._busy: list[float] = []
        self._resident: list[float] = []
        self._gpus: list[list[float]] = []
        self._cores = 1
        self._tasks: list[asyncio.Task[None]] = []
        self._pids: list[int] = []

    async def __aenter__(self) -> Self:
        if self._local:
            self._pids = listeners(self._port)
            self._cores = cores_of(self._pids) or len(os.sched_getaffinity(0))
            self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._smi())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self) -> None:
        if not self._pids:
            return
        before, spent = time.perf_counter(), usage(self._pids)[0]
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            now, (seconds, resident) = time.perf_counter(), usage(self._pids)
            self._busy.append(max(seconds - spent, 0.0) / (now - before))
            self._resident.append(resident)
            before, spent = now, seconds

    async def _smi(self) -> None:
        try:
            process = await asyncio.create_subprocess_exec(
                "nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader,nounits",
                f"--loop-ms={int(1000 * SAMPLE_SECONDS)}", stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        except OSError:
            return
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                with suppress(ValueError):
                    self._gpus.append([_number(part) for part in line.decode().split(",")])
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def report(self) -> dict[str, Any]:
        """Return means, deviations and peaks; ``note`` says why there are none."""
        if not self._local:
            return {"note": "the server runs elsewhere: memory and utilisation are not known"}
        result: dict[str, Any] = {}
        if self._busy:
            result["cores"] = self._cores
            result["cpu_percent"] = spread([100 * busy / self._cores for busy in self._busy])
            result["memory_bytes"] = spread(self._resident)
        columns = list(zip(*self._gpus, strict=False))
        if len(columns) >= len(GPU_NAMES):
            for name, column in zip(GPU_NAMES, columns, strict=False):
                if known := [value for value in column if not math.isnan(value)]:
                    result[name] = spread(known)
        if not result:
            result["note"] = "too short, or the server's processes cannot be seen"
        return result


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # [N/A]
        return math.nan


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return mean, deviation, its share of the mean, and the peak."""
    middle, deviation = mean(values), pstdev(values)
    share = deviation / middle if middle else 0.0
    return {"mean": middle, "std": deviation, "variation": share, "peak": max(values)}


def listeners(port: int) -> list[int]:
    """Return the processes that listen on a port, and all their children."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING_STATE and int(fields[1].rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{fields[9]}]")
    processes = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    pids = [pid for pid in processes if sockets and sockets & set(_open_files(pid))]
    parents = {pid: int(fields[1]) for pid in processes if (fields := _fields(pid))}
    for pid in sorted(parents):
        chain = pid
        while chain in parents and chain not in pids:
            chain = parents[chain]
        if chain in pids and pid not in pids:
            pids.append(pid)
    return pids


def cores_of(pids: Iterable[int]) -> int:
    """Return the number of cores that any of the processes may use."""
    cores: set[int] = set()
    for pid in pids:
        with suppress(OSError):
            cores |= os.sched_getaffinity(pid)
    return len(cores)


def _open_files(pid: int) -> list[str]:
    links = []
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                links.append(os.readlink(entry))
    return links


def _fields(pid: int) -> list[str]:
    """Return the fields of a process's stat after its name."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def usage(pids: Iterable[int]) -> tuple[float, float]:
    """Return the CPU seconds that processes have used, and their resident bytes."""
    seconds = resident = 0.0
    for fields in filter(None, map(_fields, pids)):
        seconds += (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND
        resident += int(fields[21]) * PAGE_BYTES
    return seconds, resident


def bottleneck(runs: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the likely bottleneck, and the evidence: a hint, no proof.

    On GPUs it follows from the device's utilisation. On CPUs it follows from the time per token:
    weights are read once for a whole batch, so if memory is the limit, a larger batch takes hardly
    longer; if compute is, its time grows with its size.
    """
    measured = [run for run in runs if run["median_tpot_ms"] is not None]
    if not measured:
        return _limit("unknown", "no request had two tokens")
    run = max(measured, key=lambda each: float(each["output_throughput"]))
    machine = run["machine"]
    if "gpu_percent" in machine:
        return _gpu_limit(machine)
    cpu = machine.get("cpu_percent", {}).get("mean")
    where = f"at {run['label']}"
    if cpu is not None and cpu < IDLE_PERCENT:
        evidence = f"the server kept only {cpu:.0f} % of the cores busy {where}: it waited for one "
        return _limit("host", f"{evidence}thread, for its network, or for more load")
    return _by_growth(measured, where, cpu)


def _limit(points_to: str, evidence: str) -> dict[str, str]:
    return {"points_to": points_to, "evidence": evidence}


def _gpu_limit(machine: dict[str, Any]) -> dict[str, str]:
    """Return the limit that a GPU's utilisation points to."""
    gpu = machine["gpu_percent"]["mean"]
    memory = machine.get("gpu_memory_percent", {}).get("mean", math.nan)
    evidence = f"GPU busy {gpu:.0f} % of the time, its memory interface {memory:.0f} %"
    if gpu < IDLE_PERCENT:
        return _limit("host", f"{evidence}: it waits for the host")
    if gpu < BUSY_PERCENT:
        return _limit("unclear", evidence)
    if memory >= IDLE_PERCENT:
        return _limit("memory bandwidth", evidence)
    evidence += "; a kernel that waits for other GPUs counts as busy"
    return _limit("compute or, with several GPUs, communication", evidence)


def _by_growth(runs: Sequence[dict[str, Any]], where: str, cpu: float | None) -> dict[str, str]:
    """Return the limit that the growth of the time per token with the batch points to."""
    by_size = {run["max_concurrent_requests"]: run["median_tpot_ms"] for run in runs}
    low, high = min(by_size), max(by_size)
    busy = "" if cpu is None else f"the server kept {cpu:.0f} % of the cores busy {where}; "
    if high < 2 * low or not by_size[low]:
        told = "a sweep over two sizes of batch, one twice the other, would tell"
        return _limit("unclear", busy + told)
    growth = math.log(by_size[high] / by_size[low]) / math.log(high / low)
    evidence = (
        f"{busy}from {low} to {high} requests at once the time per token grew "
        f"{by_size[high] / by_size[low]:.2f}-fold"
    )
    if growth < FLAT_GROWTH:
        return _limit("memory bandwidth", evidence)
    names = ("between memory bandwidth and compute", "compute")
    return _limit(names[growth > STEEP_GROWTH], evidence)
