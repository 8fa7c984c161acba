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
    """Limit ``allowed_threads`` to ``count`` in this process; None changes nothing."""
    global _chosen
    _chosen = count or _chosen


def allowed_threads(groups: Path = GROUPS, own: Path = OWN) -> int:
    """Return the number of threads for the native step, by default that of the cores.

    ``choose_threads`` sets another number, else ``OMP_NUM_THREADS`` does.

    It is at most the CPUs that affinity and the control group's quota allow, and at least 1.
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
    """Return how many cores ``cpus`` belong to: two threads of a core share its multipliers."""
    names = "physical_package_id", "core_id"
    places = [tuple(CPUS / f"cpu{cpu}" / "topology" / name for name in names) for cpu in cpus]
    try:
        return len({tuple(file.read_text() for file in files) for files in places})
    except OSError:
        return len(places)


def on_all_threads(one: Callable[[In], Out], parts: Sequence[In]) -> Iterator[Out]:
    """Yield what ``one`` returns for each part, in order: for work that releases the GIL."""
    threads = min(len(parts), allowed_threads())
    if threads < 2:
        yield from map(one, parts)
        return
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(one, parts)


def cpu_name() -> str:
    """Return the processor's name as the system reports it."""
    name = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.M)
    return name[1].strip() if name else platform.processor() or platform.machine()
