"""Republishes an engine's figures under one schema, for those who have no Prometheus."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ...base.outside.documents import MIB
from ...base.outside.text import printable
from ...errors import ConfigError, EndpointError
from ..diagnose.endpoint import Endpoint
from ..diagnose.host import Gpu
from ..diagnose.observation import read_file
from ..metrics import Figures, Page, Window
from .observed import (
    COUNTERS,
    ENGINES,
    LATENCIES,
    NOW,
    POSITIONS,
    PREFIX,
    RATES,
    RATIOS,
    SHARES,
    percentile,
)

WINDOW = 60.0
"""Seconds that rates and percentiles look back, or one interval where that is longer."""
LONGEST = 500
"""Most characters of a line on the engine's state."""
LABELS = ("engine", "model_name")


class Watcher:
    """An engine that is read again and again.

    Args:
        interval: seconds between two looks.
        say: gets a line when the engine's state changes.

    Attributes:
        model: its name as the metrics or the API tell, "" if nobody does.
        totals, lately: figures since the engine's start and of the window, as of the last look;
            None if it failed.
    """

    def __init__(self, endpoint: Endpoint, interval: float, say: Callable[[str], None]) -> None:
        self.endpoint = endpoint
        self.model = ""
        self.totals: Figures | None = None
        self.lately: Figures | None = None
        self._interval = interval
        self._say = say
        self._window = Window(max(WINDOW, interval))
        self._last: Page | None = None
        self._state = ""

    def run(self, stopped: threading.Event) -> None:
        """Look every interval until it is stopped."""
        while not stopped.is_set():
            began = time.monotonic()
            try:
                self.look()
            except Exception as error:  # a page that nobody thought of must not end the thread
                self._lose(f"{self.endpoint.url}/metrics cannot be read ({error!r:.200}).")
            stopped.wait(max(0.0, self._interval - (time.monotonic() - began)))

    def look(self) -> None:
        """Read the engine once."""
        try:
            page = self.endpoint.metrics()
        except EndpointError as error:
            self._lose(str(error))
            return
        if page is None:
            self._lose(f"{self.endpoint.url}/metrics is refused; check address, switch and key.")
            return
        self.take(page, time.monotonic())

    def take(self, page: Page, now: float) -> None:
        """Take a page that was read at ``now``, in seconds of any clock that only goes forward."""
        totals = Figures.of(page)
        if totals is None or totals.engine not in ENGINES:
            self._lose(f"{self.endpoint.url}/metrics has no metrics of a supported engine.")
            return
        if self._last is not None and page.restarted(self._last):
            self._window.clear()  # counts of before say nothing about those of now
        self._last = page
        before, seconds = self._window.take(page, now)
        self.model = totals.model or self.model or self._asked()
        self.totals, self.lately = totals, Figures.of(page, before, seconds)
        self._tell(f"{self.endpoint.url} answers: {totals.engine}, model {self.model or 'unknown'}")

    def _asked(self) -> str:
        """Return the model's name as the API tells, "" if it does not."""
        try:
            return self.endpoint.model()
        except EndpointError:
            return ""

    def _lose(self, why: str) -> None:
        self._window.clear()
        self.totals = self.lately = None
        self._tell(why)

    def _tell(self, state: str) -> None:
        state = printable(state, LONGEST)
        if state != self._state:
            self._state = state
            self._say(state)


def read_baseline(file: Path) -> float:
    """Return the seconds of an output token of a recording without speculation.

    Args:
        file: what ``outrider ops diagnose --save`` kept of a plain server, or a report of
            ``outrider bench serve`` or ``vllm bench serve``.

    Raises ConfigError: it cannot be read, has several runs, or no time of a token.
    """
    runs = [run for run in read_file(file) if isinstance(run.facts.get("tpot"), float)]
    if len(runs) != 1:
        raise ConfigError(
            f"--baseline {file} has {len(runs)} runs with a time per output token (TPOT); give a "
            "recording of one run without speculation."
        )
    return float(runs[0].facts["tpot"])


class Exporter(Collector):
    """Collects the figures of an engine, and its speedup where there is something to compare.

    Args:
        watched: the engine.
        standby: the same model without speculation, under traffic.
        baseline: seconds of an output token in a recording of it.
        gpus: returns those of the engine's machine; None where that is another machine.
        compatible: whether to add gauges by the names that older guides use.
    """

    def __init__(
        self,
        watched: Watcher,
        standby: Watcher | None = None,
        baseline: float | None = None,
        gpus: Callable[[], Sequence[Gpu]] | None = None,
        compatible: bool = False,
    ) -> None:
        self._watched = watched
        self._standby = standby
        self._baseline = baseline
        self._gpus = gpus
        self._compatible = compatible

    def collect(self) -> Iterator[Metric]:
        """Yield every family that is known now."""
        totals, lately = self._watched.totals, self._watched.lately
        up = float(totals is not None)
        yield GaugeMetricFamily(f"{PREFIX}up", "1 if the engine's metrics could be read.", up)
        if self._standby is not None:
            up, text = float(self._standby.totals is not None), "1 if the standby's could be read."
            yield GaugeMetricFamily(f"{PREFIX}standby_up", text, up)
        if self._gpus is not None:
            yield from _gpu_families(self._gpus())
        if totals is not None and lately is not None:
            labels = [totals.engine, totals.model or self._watched.model]
            yield from _families(totals, lately, labels)
            yield from self._speedups(lately, labels)
            if self._compatible:
                yield from _compatible(lately, labels)

    def _speedups(self, lately: Figures, labels: list[str]) -> Iterator[Metric]:
        """Yield the ratio of the times of an output token, by what it is compared with."""
        standby = self._standby.lately if self._standby is not None else None
        times = {
            "standby": standby.token_seconds if standby is not None else None,
            "baseline": self._baseline,
        }
        family = GaugeMetricFamily(
            f"{PREFIX}speedup", "Time of an output token without speculation / with it.",
            labels=(*LABELS, "against"),
        )  # fmt: skip
        for against, seconds in times.items():
            if seconds is not None and lately.token_seconds is not None:
                family.add_metric([*labels, against], seconds / lately.token_seconds)
        if family.samples:
            yield family


def _families(totals: Figures, lately: Figures, labels: list[str]) -> Iterator[Metric]:
    """Yield an engine's figures, those of them that are known."""
    for figure, (name, text) in COUNTERS.items():
        yield from _family(CounterMetricFamily, name, text, labels, totals.total(figure))
    counter = CounterMetricFamily(PREFIX + POSITIONS[0], POSITIONS[1], labels=(*LABELS, "position"))
    for position, value in totals.positions().items():
        counter.add_metric([*labels, str(position)], value)
    if counter.samples:
        yield counter
    for figure, (name, text) in NOW.items():
        yield from _family(GaugeMetricFamily, name, text, labels, totals.total(figure))
    for figure, (name, text) in RATIOS.items():
        yield from _family(GaugeMetricFamily, name, text, labels, getattr(lately, figure))
    for figure, (name, text) in RATES.items():
        yield from _family(GaugeMetricFamily, name, text, labels, lately.rate(figure))
    for latency, text in LATENCIES.items():
        gauge = GaugeMetricFamily(
            f"{PREFIX}{latency}_seconds", f"{text} Over the last minute.",
            labels=(*LABELS, "percentile"),
        )  # fmt: skip
        for share in SHARES:
            quantile = lately.quantile(latency, share)
            if quantile is not None:
                gauge.add_metric([*labels, percentile(share)], quantile)
        if gauge.samples:
            yield gauge


def _family(
    kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, text: str, labels: list[str],
    value: float | None, prefix: str = PREFIX,
) -> Iterator[Metric]:  # fmt: skip
    """Yield a family of one sample, if its value is known."""
    if value is not None:
        family = kind(prefix + name, text, labels=LABELS)
        family.add_metric(labels, value)
        yield family


def _compatible(lately: Figures, labels: list[str]) -> Iterator[Metric]:
    """Yield the gauges that older guides name, those of them that are known."""
    values = {
        "vllm_speculative_acceptance_rate": lately.acceptance,
        "spec_decode_acceptance_rate": lately.acceptance,
        "vllm_goodput_tokens_per_second": lately.rate("good_tokens"),
        "vllm_latency_p50_seconds": lately.quantile("e2e", 0.5),
    }
    for name, value in values.items():
        text = "As the exporter's own figure."
        yield from _family(GaugeMetricFamily, name, text, labels, value, "")


def _gpu_families(gpus: Sequence[Gpu]) -> Iterator[Metric]:
    for name, text, field, unit in (
        ("gpu_memory_used_bytes", "Memory taken.", "used", MIB),
        ("gpu_memory_total_bytes", "Memory.", "total", MIB),
        ("gpu_utilisation", "Share of the last moment with a kernel, 0 to 1.", "busy", 1),
    ):
        family = GaugeMetricFamily(PREFIX + name, text, labels=("gpu", "gpu_name"))
        for number, gpu in enumerate(gpus):
            value = getattr(gpu, field)
            if value is not None:
                family.add_metric([str(number), gpu.name], value * unit)
        if gpus:
            yield family
