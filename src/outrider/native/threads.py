"""The number of threads that this process may keep busy."""

import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ..base.groups import GROUPS, OWN, cpu_quota


def allowed_threads(groups: Path = GROUPS, own: Path = OWN) -> int:
    """Return the threads for the native step: torch's number, from ``OMP_NUM_THREADS`` or cores.

    At most the CPUs that affinity and the quota of the control group leave, at least 1.
    """
    counts = [torch.get_num_threads(), len(os.sched_getaffinity(0))]
    quota = cpu_quota(groups, own)
    if quota is not None:
        counts.append(int(quota))
    return max(1, min(counts))


def cpu_name() -> str:
    """Return the processor's name as the system tells it."""
    name = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.M)
    return name[1].strip() if name else platform.processor() or platform.machine()


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread: more would wait for each other in the short work on weights."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
