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
"""Least speedup of products in bf16 that makes it worth using."""


@cache
def gains_from_bf16(kind: str) -> bool:
    """Return whether devices of a kind multiply faster in bf16: GPUs do; CPUs are timed.

    Instructions for it are not enough: Intel CPUs with AVX-512 BF16 but no AMX multiply as many
    numbers at a time in fp32, and PyTorch's bf16 takes twice as long there.
    """
    if kind != "cpu":
        return True
    told: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # in newer releases
    if not any(told.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16")):  # the last on ARM
        return False
    inputs, weights = torch.ones(ROWS, WIDTH), torch.ones(WIDTH, WIDTH)
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(ROUNDS + 1):  # the first warms up
        for bf16, taken in times.items():
            begin = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, bf16), torch.no_grad():
                F.linear(inputs, weights)
            taken.append(time.perf_counter() - begin)
    return min(times[False][1:]) > WORTH * min(times[True][1:])
