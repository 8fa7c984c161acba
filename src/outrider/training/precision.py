"""The precision in which a training multiplies matrices."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

ROWS, WIDTH = 512, 1024
ROUNDS = 5
WORTH = 1.1
"""Times as fast that products in bf16 must be."""


@cache
def gains_from_bf16(kind: str) -> bool:
    """Return whether devices of a kind multiply faster in bf16: GPUs, and CPUs where it is timed.

    Instructions for it are not enough: CPUs of Intel with AVX-512 BF16 but no AMX multiply as many
    numbers at a time in fp32, and PyTorch takes twice as long there.
    """
    if kind != "cpu":
        return True
    told: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # of newer releases
    if not any(told.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16")):  # the last on ARM
        return False
    inputs, weights = torch.ones(ROWS, WIDTH), torch.ones(WIDTH, WIDTH)
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(ROUNDS + 1):  # the first one makes ready
        for bf16, taken in times.items():
            begin = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, bf16), torch.no_grad():
                F.linear(inputs, weights)
            taken.append(time.perf_counter() - begin)
    return min(times[False][1:]) > WORTH * min(times[True][1:])
