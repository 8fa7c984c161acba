"""The threads that this process may keep busy."""

import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from .groups import GROUPS, OWN, cpu_quota

CPUS = Path("/sys/devices/system/cpu")
VARIABLE = "OMP_NUM_THREADS"

In = TypeVar("In")
Out = TypeVar("Out")


_chosen: int | None = None


def choose_threads(count: int | None) -> None:
    """Have ``allowed_threads`` return at most ``count`` in this process; None changes nothing."""
    global _chosen
    _chosen = count or _chosen


def allowed_threads(groups: Path = GROUPS, own: Path = OWN) -> int:
    """Return the threads for the native step: those chosen, or as many as there are cores.

    ``choose_threads`` chooses, else ``OMP_NUM_THREADS``.

    At most the CPUs that affinity and the quota of the control group leave, at least 1.
    """
    cpus = os.sched_getaffinity(0)
    asked = re.match(r"\s*(\d+)", os.environ.get(VARIABLE, ""))  # a list's first number
    wanted = _chosen or (int(asked[1]) if asked else 0)
    counts = [len(cpus), wanted or _cores(cpus)]
    quota = cpu_quota(groups, own)
    if quota is not None:
        counts.append(int(quota))
    return max(1, min(counts))


def _cores(cpus: Iterable[int]) -> int:
    """Return how many cores ``cpus`` are of: two threads of one share what multiplies."""
    names = "physical_package_id", "core_id"
    places = [tuple(CPUS / f"cpu{cpu}" / "topology" / name for name in names) for cpu in cpus]
    try:
        return len({tuple(file.read_text() for file in files) for files in places})
    except OSError:
        return len(places)


def on_all_threads(one: Callable[[In], Out], parts: Sequence[In]) -> Iterator[Out]:
    """Yield what ``one`` returns for each part, in order: for work outside Python's lock."""
    threads = min(len(parts), allowed_threads())
    if threads < 2:
        yield from map(one, parts)
        return
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(one, parts)


def cpu_name() -> str:
    """Return the processor's name as the system tells it."""
    name = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.M)
    return name[1].strip() if name else platform.processor() or platform.machine()
