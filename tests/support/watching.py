"""Watchers of engines that are pages of text, and GPUs that are none."""

from __future__ import annotations

import time

from outrider.ops.alerts.gpus import Gpus, GpuUse
from outrider.ops.alerts.watcher import Watcher
from outrider.ops.diagnose.endpoint import Endpoint
from outrider.ops.metrics import Page, parse

SECONDS = 10.0


class FakeGpus(Gpus):
    """One GPU, half full and 87 % busy."""

    def __init__(self) -> None:
        return

    def read(self) -> list[GpuUse]:
        return [GpuUse(0, "NVIDIA H100", 40 << 30, 80 << 30, 0.87)]


class Replay(Watcher):
    """A watcher that saw an empty engine, and then these pages, ten seconds apart."""

    def __init__(self, *texts: str) -> None:
        super().__init__(Endpoint("http://127.0.0.1:9"), SECONDS, lambda _: None)
        self.clock = time.monotonic()
        self.take(Page(sample._replace(value=0.0) for sample in parse(texts[0]).all()), self.clock)
        for text in texts:
            self.see(text)

    def see(self, text: str) -> None:
        self.clock += SECONDS
        self.take(parse(text), self.clock)
