"""Checks of a device that go as their names say, for the runner of ``benchmarks gpu``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from benchmarks.gpu.checks import Part, Skipped


def facts(device: str) -> Iterator[Part]:
    yield Part("torch", {"torch": "2.0", "cuda_build": None, "cuda": []})


def passes(device: str) -> Iterator[Part]:
    yield Part(device, {"number": 1})
    yield Part("another", {"number": 2})


def finds(device: str) -> Iterator[Part]:
    yield Part("a", {})
    yield Part("b", {}, "3 of 4 differ")
    yield Part("c", {})


def raises(device: str) -> Iterator[Part]:
    yield Part("a", {})
    raise RuntimeError("an illegal memory access")


def skips(device: str) -> Iterator[Part]:
    raise Skipped("Triton is not installed")
    yield Part("a", {})


def hangs(device: str) -> Iterator[Part]:
    yield Part("a", {})
    time.sleep(600)


def dies(device: str) -> Iterator[Part]:
    yield Part("a", {})
    os._exit(9)


def goes_on(device: str) -> Iterator[Part]:
    while True:
        yield Part("a", {})
        time.sleep(0.01)
