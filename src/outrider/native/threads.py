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
    """Threads for the native step: torch's number (``OMP_NUM_THREADS``, else physical cores), at
    most the CPUs that affinity and the quota of the control group leave, at least 1.

    Args:
        groups: where control groups are mounted.
        own: which of them this process is in, as Linux says it.
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
    """Let torch use one thread: with more, its operations on a layer's weights wait for each other.

    They are short, and a kernel may leave both threads on one core.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
