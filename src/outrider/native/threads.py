"""The number of threads that this process may keep busy."""

import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import torch

GROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


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


def cpu_quota(groups: Path = GROUPS, own: Path = OWN) -> float | None:
    """Return the CPUs that control groups grant, the smallest of their limits; None without one.

    Versions 2 and 1; a group's own limit and those of all groups that it lies in.
    """
    found = [quota for folder in _folders(groups, own) if (quota := _quota(folder)) is not None]
    return min(found, default=None)


def _folders(groups: Path, own: Path) -> Iterator[Path]:
    """Return the folders of this process's groups, from the mount down."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        lines = []
    paths = {"": Path("/"), "cpu": Path("/")}  # by controller: version 2 has none
    for line in lines:
        for controller in line[1].split(","):
            paths[controller] = Path(line[2])
    for mount, controller in ((groups, ""), (groups / "cpu", "cpu")):
        folder = mount
        yield folder
        for part in paths[controller].parts[1:]:
            folder = folder / part
            yield folder


def _quota(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:  # "max", or -1
        return None
    return int(quota) / int(period)
