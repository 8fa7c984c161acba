"""The machine that a benchmark runs on, and the memory that this process uses."""

import os
import platform
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..base.threads import allowed_threads, cpu_name
from ..native.choice import library


def machine() -> dict[str, Any]:
    """Return a report's description of the machine."""
    native = library()
    return {
        "cpu": cpu_name(),
        "instruction_set": native.isa if native else "off",
        "cores": available_cores(),
        "threads": allowed_threads(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": _torch_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _torch_version() -> str | None:
    """Return the version of torch, which may not be installed."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def reset_peak_memory() -> None:
    """Reset the peak that is measured, if the kernel can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Return this process's peak resident bytes since the last reset."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])
