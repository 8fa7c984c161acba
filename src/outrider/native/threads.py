"""How many threads this process may keep busy."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def allowed_threads(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Threads for the native step: torch's number (``OMP_NUM_THREADS``, else physical cores), at
    most the CPUs that affinity and the quota of the control group leave, at least 1.

    Args:
        groups: where control groups are mounted.
    """
    counts = [torch.get_num_threads()]
    if hasattr(os, "sched_getaffinity"):
        counts.append(len(os.sched_getaffinity(0)))
    quota = cpu_quota(groups)
    if quota is not None:
        counts.append(int(quota))
    return max(1, min(counts))


def cpu_quota(groups: Path) -> float | None:
    """CPUs that the control group in ``groups`` grants (v2 or v1), None where it sets no limit."""
    try:
        quota, period = (groups / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (groups / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (groups / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:  # "max", or -1
        return None
    return int(quota) / int(period)
