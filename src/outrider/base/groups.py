"""Reads the limits of the control groups that this process is in, versions 1 and 2 of Linux."""

import re
from collections.abc import Iterator
from pathlib import Path

GROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Files of limit and use, and the key in memory.stat of reclaimable bytes: versions 2 and 1."""


def folders(controller: str, groups: Path = GROUPS, own: Path = OWN) -> Iterator[Path]:
    """Yield the folders of this process's groups of cpu or memory, from the mount down.

    ``groups`` is the mount, ``own`` the file in which Linux lists the groups of this process.
    """
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        lines = []
    paths = {"": Path("/"), controller: Path("/")}  # by controller: version 2 has none
    for line in lines:
        for name in line[1].split(","):
            paths[name] = Path(line[2])
    for folder, name in ((groups, ""), (groups / controller, controller)):
        yield folder
        for part in paths[name].parts[1:]:
            folder = folder / part
            yield folder


def cpu_quota(groups: Path = GROUPS, own: Path = OWN) -> float | None:
    """Return the CPUs that control groups grant, the smallest of all limits; None without one."""
    quotas = map(_quota, folders("cpu", groups, own))
    return min((quota for quota in quotas if quota is not None), default=None)


def memory_left(groups: Path = GROUPS, own: Path = OWN) -> int | None:
    """Return the bytes that control groups still grant; None without a limit."""
    rests = map(_left, folders("memory", groups, own))
    return min((left for left in rests if left is not None), default=None)


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


def _left(folder: Path) -> int | None:
    for limit, use, again in MEMORY_FILES:
        try:
            most, used = ((folder / name).read_text().strip() for name in (limit, use))
            about = (folder / "memory.stat").read_text()
        except OSError:
            continue
        if most.isdigit() and used.isdigit():  # not "max"
            cached = re.search(rf"^{again} (\d+)$", about, re.M)
            return max(0, int(most) - int(used) + (int(cached[1]) if cached else 0))
    return None
