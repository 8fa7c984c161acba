"""Watchers of engines that are pages of text, and GPUs that are none."""

from __future__ import annotations

import time

from outrider.ops.alerts.exporter import Watcher
from outrider.ops.diagnose.endpoint import Endpoint
from outrider.ops.diagnose.host import Gpu
from outrider.ops.metrics import Figures, Page, parse

SECONDS = 10.0


def fake_gpus() -> list[Gpu]:
    """One GPU, half full and 87 % busy."""
    return [Gpu("NVIDIA H100", "580.1", 40 << 10, 80 << 10, 0.87)]


class Replay(Watcher):
    """A watcher that saw an empty engine, and then these pages, ten seconds apart."""

    def __init__(self, *texts: str) -> None:
        super().__init__(Endpoint("http://127.0.0.1:9"), SECONDS, lambda _: None)
        self.endpoint.model = lambda: ""  # type: ignore[method-assign]
        self.clock = time.monotonic()
        self.take(Page(sample._replace(value=0.0) for sample in parse(texts[0]).all()), self.clock)
        for text in texts:
            self.see(text)

    def see(self, text: str) -> None:
        self.clock += SECONDS
        self.take(parse(text), self.clock)

    @property
    def window(self) -> Figures:
        assert self.lately is not None
        return self.lately
