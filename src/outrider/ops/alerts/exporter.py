"""Republishes an engine's figures under one schema, where no recording rules give it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
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
from ..metrics import Figures, Page, PageWindow
from . import observed
from .observed import PREFIX

WINDOW_SECONDS = 60.0
LONGEST_STATE = 500
LABELS = ("engine", "model_name")


class Watcher:
    """Reads an engine every ``interval`` seconds; ``say`` is called with a line on each new state.

    ``totals`` are figures since the engine's start, ``lately`` those of the window; None if the
    last read failed. ``model`` is the name from the metrics or the API, "" if unknown.
    """

    def __init__(self, endpoint: Endpoint, interval: float, say: Callable[[str], None]) -> None:
        self.endpoint = endpoint
        self.model = ""
        self.totals: Figures | None = None
        self.lately: Figures | None = None
        self._interval = interval
        self._say = say
        self._window = PageWindow(max(WINDOW_SECONDS, interval))
        self._last: Page | None = None
        self._state = ""

    def run(self, stopped: threading.Event) -> None:
        """Read the engine every interval until ``stopped`` is set."""
        while not stopped.is_set():
            began = time.monotonic()
            try:
                self.look()
            except Exception as error:  # an unforeseen page must not end the thread
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
        """Take a page that was read at ``now``, in seconds of any monotonic clock."""
        totals = Figures.of(page)
        if totals is None or totals.engine not in observed.ENGINES:
            self._lose(f"{self.endpoint.url}/metrics has no metrics of a supported engine.")
            return
        if self._last is not None and page.restarted(self._last):
            self._window.clear()  # counts from before the restart do not compare
        self._last = page
        before, seconds = self._window.take(page, now)
        with suppress(EndpointError):
            self.model = totals.model or self.model or self.endpoint.model()
        self.totals, self.lately = totals, Figures.of(page, before, seconds)
        self._tell(f"{self.endpoint.url} answers: {totals.engine}, model {self.model or 'unknown'}")

    def _lose(self, why: str) -> None:
        self._window.clear()
        self.totals = self.lately = None
        self._tell(why)

    def _tell(self, state: str) -> None:
        state = printable(state, LONGEST_STATE)
        if state != self._state:
            self._state = state
            self._say(state)


def read_baseline(file: Path) -> float:
    """Return the seconds per output token in a recording without speculation.

    The file is what ``outrider ops diagnose --save`` kept, or a report of ``outrider bench serve``
    or ``vllm bench serve``. Raises ConfigError: it has several runs, or no time per output token.
    """
    runs = [run for run in read_file(file) if isinstance(run.facts.get("tpot"), float)]
    if len(runs) != 1:
        raise ConfigError(
            f"--baseline {file} has {len(runs)} runs with a time per output token (TPOT); give a "
            "recording of one run without speculation."
        )
    return float(runs[0].facts["tpot"])


class Exporter(Collector):
    """Collects the figures of an engine, and its speedup if there is something to compare with.

    ``standby`` is the same model without speculation, under traffic; ``baseline`` is the seconds
    per output token in a recording of that. ``gpus`` returns the engine's GPUs if it runs on this
    machine. ``compatible`` adds gauges under the names that older guides use.
    """

    def __init__(
        self, watched: Watcher, standby: Watcher | None = None, baseline: float | None = None,
        gpus: Callable[[], Sequence[Gpu]] | None = None, compatible: bool = False,
    ) -> None:  # fmt: skip
        self._watched, self._standby, self._baseline = watched, standby, baseline
        self._gpus, self._compatible = gpus, compatible

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family with known values."""
        totals, lately = self._watched.totals, self._watched.lately
        up = float(totals is not None)
        yield from _family("up", "1 if the engine's metrics could be read.", (), [((), up)])
        if self._standby is not None:
            up = float(self._standby.totals is not None)
            yield from _family("standby_up", "1 if the standby's could be read.", (), [((), up)])
        if self._gpus is not None:
            yield from _of_gpus(self._gpus())
        if totals is not None and lately is not None:
            labels = [totals.engine, totals.model or self._watched.model]
            yield from _of_engine(totals, lately, labels)
            yield from self._speedups(lately, labels)
            if self._compatible:
                yield from _compatible(lately, labels)

    def _speedups(self, lately: Figures, labels: list[str]) -> Iterator[Metric]:
        """Yield the ratio of times per output token, labelled by what it is compared with."""
        own, standby = lately.token_seconds, self._standby.lately if self._standby else None
        times = {
            "standby": standby.token_seconds if standby is not None else None,
            "baseline": self._baseline,
        }
        yield from _family(
            "speedup", "Time of an output token without speculation / with it.",
            (*LABELS, "against"),
            (([*labels, against], seconds / own if seconds is not None and own else None)
             for against, seconds in times.items()),
        )  # fmt: skip


Kind = type[CounterMetricFamily | GaugeMetricFamily]


def _of_engine(totals: Figures, lately: Figures, labels: list[str]) -> Iterator[Metric]:
    """Yield the known figures of an engine."""
    tables: tuple[tuple[Kind, dict[str, tuple[str, str]], Callable[[str], float | None]], ...] = (
        (CounterMetricFamily, observed.COUNTERS, totals.total),
        (GaugeMetricFamily, observed.NOW, totals.total),
        (GaugeMetricFamily, observed.RATIOS, partial(getattr, lately)),
        (GaugeMetricFamily, observed.RATES, lately.rate),
    )  # fmt: skip
    for kind, figures, value_of in tables:
        for figure, (name, text) in figures.items():
            yield from _family(name, text, LABELS, [(labels, value_of(figure))], kind)
    counts = (([*labels, str(place)], value) for place, value in totals.positions().items())
    yield from _family(*observed.POSITIONS, (*LABELS, "position"), counts, CounterMetricFamily)
    for latency, text in observed.LATENCIES.items():
        quantiles = (
            ([*labels, observed.percentile(share)], lately.quantile(latency, share))
            for share in observed.SHARES
        )
        name, text = f"{latency}_seconds", f"{text} Over the last minute."
        yield from _family(name, text, (*LABELS, "percentile"), quantiles)


def _compatible(lately: Figures, labels: list[str]) -> Iterator[Metric]:
    """Yield the known figures as the gauges that older guides name."""
    for name, value in (
        ("vllm_speculative_acceptance_rate", lately.acceptance),
        ("spec_decode_acceptance_rate", lately.acceptance),
        ("vllm_goodput_tokens_per_second", lately.rate("good_tokens")),
        ("vllm_latency_p50_seconds", lately.quantile("e2e", 0.5)),
    ):
        text = "As the exporter's own figure."
        yield from _family(name, text, LABELS, [(labels, value)], prefix="")


def _of_gpus(gpus: Sequence[Gpu]) -> Iterator[Metric]:
    for name, text, field, unit in (
        ("gpu_memory_used_bytes", "Memory taken.", "used", MIB),
        ("gpu_memory_total_bytes", "Memory.", "total", MIB),
        ("gpu_utilisation", "Share of the last moment with a kernel, 0 to 1.", "busy", 1),
    ):
        values = ((str(i), gpu.name, getattr(gpu, field)) for i, gpu in enumerate(gpus))
        samples = (([i, of], None if x is None else x * unit) for i, of, x in values)
        yield from _family(name, text, ("gpu", "gpu_name"), samples)


def _family(
    name: str, text: str, labels: Sequence[str],
    samples: Iterable[tuple[Sequence[str], float | None]], kind: Kind = GaugeMetricFamily,
    prefix: str = PREFIX,
) -> Iterator[Metric]:  # fmt: skip
    """Yield a family with the samples whose values are known, if there are any."""
    family = kind(prefix + name, text, labels=labels)
    for own, value in samples:
        if value is not None:
            family.add_metric(own, value)
    if family.samples:
        yield family
