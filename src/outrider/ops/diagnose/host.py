"""This machine's memory and GPUs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

SMI = ("nvidia-smi", "--query-gpu=name,driver_version,memory.used,memory.total,utilization.gpu",
       "--format=csv,noheader,nounits")  # fmt: skip
SMI_SECONDS = 10.0
MEMINFO = Path("/proc/meminfo")


class Gpu(NamedTuple):
    """A GPU as reported by nvidia-smi: memory in MiB, ``busy`` the recent utilisation (share)."""

    name: str
    driver: str
    used: float
    total: float
    busy: float | None


def gpus() -> list[Gpu]:
    """Return the GPUs of this machine; none if nvidia-smi is missing or fails."""
    try:
        done = subprocess.run(SMI, capture_output=True, text=True, timeout=SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_gpus(done.stdout)


def parse_gpus(text: str) -> list[Gpu]:
    """Return the GPUs in nvidia-smi's table; other lines are skipped."""
    devices = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        try:
            busy = float(cells[4]) / 100 if cells[4].isdecimal() else None
            devices.append(Gpu(cells[0], cells[1], float(cells[2]), float(cells[3]), busy))
        except (ValueError, IndexError):
            continue
    return devices


def memory(file: Path = MEMINFO) -> tuple[int, int] | None:
    """Return the bytes of available memory and of all memory; None if they are unknown."""
    try:
        kilobytes = dict(re.findall(r"^(\w+):\s+(\d+) kB", file.read_text(), re.M))
        return 1024 * int(kilobytes["MemAvailable"]), 1024 * int(kilobytes["MemTotal"])
    except (OSError, KeyError, ValueError):
        return None


def load_facts(busy: bool) -> dict[str, float | str]:
    """Return this machine's memory in use, and its utilisation if ``busy``: the server works."""
    facts: dict[str, float | str] = {}
    devices = [gpu for gpu in gpus() if gpu.total > 0]
    if devices:
        facts["memory_used"] = min(1.0, max(gpu.used / gpu.total for gpu in devices))
        known = [gpu.busy for gpu in devices if gpu.busy is not None]
        if busy and known:
            facts["utilisation"] = min(1.0, max(known))
    elif (room := memory()) is not None:
        facts["memory_used"] = min(1.0, max(0.0, 1 - room[0] / max(1, room[1])))
    return facts
