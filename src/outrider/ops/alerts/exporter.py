"""Republishes an engine's figures under one schema, whatever the engine calls them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ...errors import ConfigError
from ..diagnose.observation import read_file
from .figures import LATENCIES, Figures
from .gpus import Gpus
from .watcher import Watcher

PREFIX = "outrider_observed_"
LABELS = ("engine", "model_name")
COUNTERS = {
    "drafts": ("drafts", "Verify steps of a sequence with a draft."),
    "drafted": ("draft_tokens", "Tokens drafted."),
    "accepted": ("accepted_tokens", "Drafted tokens accepted."),
    "generated": ("generation_tokens", "Output tokens."),
    "requests": ("requests", "Requests done."),
    "good_requests": ("good_requests", "Requests that kept the engine's SLO."),
}
"""By figure: name and help."""
NOW = {
    "running": ("requests_running", "Sequences that run."),
    "waiting": ("requests_waiting", "Sequences that wait."),
    "kv_usage": ("kv_usage", "Share of the KV cache in use, 0 to 1."),
}
LATELY = {
    "acceptance": ("acceptance", "Accepted / drafted tokens."),
    "acceptance_length": ("acceptance_length", "1 + accepted / drafts."),
    "drafted_per_second": ("drafted_throughput", "Drafted tokens a second."),
    "accepted_per_second": ("accepted_throughput", "Accepted draft tokens a second."),
    "generated_per_second": ("generation_throughput", "Output tokens a second."),
    "good_requests_per_second": ("goodput", "Requests a second that kept the engine's SLO."),
}
LATENCY = {
    "ttft": "Time to the first token.",
    "itl": "Time between two outputs; one may carry several tokens.",
    "e2e": "From arrival to end.",
}
COMPATIBLE = {
    "vllm_speculative_acceptance_rate": "acceptance",
    "spec_decode_acceptance_rate": "acceptance",
    "vllm_goodput_tokens_per_second": "good_tokens_per_second",
}
MEDIAN = "vllm_latency_p50_seconds"


class Baseline(NamedTuple):
    """The recorded time of an output token without speculation, and where it stands."""

    seconds: float
    file: str


def read_baseline(file: Path) -> Baseline:
    """Return the time of an output token of a recording.

    Args:
        file: what ``outrider diagnose --save`` kept of a plain server, or a report of
            ``outrider bench serve`` or ``vllm bench serve``.

    Raises:
        ConfigError: it cannot be read, has several runs, or no time of a token.
    """
    found = [run for run in read_file(file) if isinstance(run.facts.get("tpot"), float)]
    if len(found) != 1:
        raise ConfigError(
            f"--baseline {file} has {len(found)} runs with a time per output token (TPOT); give a "
            "recording of one run without speculation."
        )
    return Baseline(float(found[0].facts["tpot"]), file.name)


class Exporter(Collector):
    """Collects the figures of an engine, and its speedup where there is something to compare.

    Args:
        watched: the engine.
        standby: the same model without speculation, under traffic.
        baseline: a recording of it.
        gpus: those of the engine's machine; None where that is another machine.
        compatible: whether to add the gauges of ``COMPATIBLE``.
    """

    def __init__(
        self,
        watched: Watcher,
        standby: Watcher | None = None,
        baseline: Baseline | None = None,
        gpus: Gpus | None = None,
        compatible: bool = False,
    ) -> None:
        self._watched = watched
        self._standby = standby
        self._baseline = baseline
        self._gpus = gpus
        self._compatible = compatible

    def collect(self) -> Iterator[Metric]:
        """Yield every family that is known now."""
        found = self._watched.figures
        yield GaugeMetricFamily(
            f"{PREFIX}up", "1 if the engine's metrics could be read.", float(found is not None)
        )
        if self._standby is not None:
            yield GaugeMetricFamily(
                f"{PREFIX}standby_up", "1 if the standby's metrics could be read.",
                float(self._standby.figures is not None),
            )  # fmt: skip
        if self._gpus is not None:
            yield from _gpu_families(self._gpus)
        if found is not None:
            labels = (found.engine, found.model or self._watched.model)
            yield from families(found, labels)
            yield from self._speedups(found, labels)
            if self._compatible:
                yield from _compatible(found, labels)

    def _speedups(self, found: Figures, labels: tuple[str, str]) -> Iterator[Metric]:
        """Yield the ratio of the times of an output token, by what it is compared with."""
        standby = None if self._standby is None else self._standby.figures
        times = {
            "standby": None if standby is None else standby.token_seconds,
            "baseline": None if self._baseline is None else self._baseline.seconds,
        }
        if found.token_seconds is None:
            return
        family = GaugeMetricFamily(
            f"{PREFIX}speedup", "Time of an output token without speculation / with it.",
            labels=(*LABELS, "against"),
        )  # fmt: skip
        for against, seconds in times.items():
            if seconds is not None:
                family.add_metric((*labels, against), seconds / found.token_seconds)
        if family.samples:
            yield family


def families(found: Figures, labels: tuple[str, str]) -> Iterator[Metric]:
    """Yield an engine's figures, those of them that are known."""
    for figure, value in found.counted.items():
        name, text = COUNTERS[figure]
        counter = CounterMetricFamily(PREFIX + name, text, labels=LABELS)
        counter.add_metric(labels, value)
        yield counter
    if found.positions:
        counter = CounterMetricFamily(
            f"{PREFIX}accepted_tokens_per_position", "Accepted tokens by position, from 0.",
            labels=(*LABELS, "position"),
        )  # fmt: skip
        for position, value in sorted(found.positions.items()):
            counter.add_metric((*labels, str(position)), value)
        yield counter
    yield from _gauges(found.now, NOW, labels, "")
    yield from _gauges(found.lately, LATELY, labels, " Over the last minute.")
    for latency in LATENCIES:
        if latency in found.quantiles:
            gauge = GaugeMetricFamily(
                f"{PREFIX}{latency}_seconds", f"{LATENCY[latency]} Over the last minute.",
                labels=(*LABELS, "percentile"),
            )  # fmt: skip
            for share, value in found.quantiles[latency].items():
                gauge.add_metric((*labels, f"p{100 * share:g}"), value)
            yield gauge


def _gauges(
    values: Mapping[str, float], shown: Mapping[str, tuple[str, str]], labels: tuple[str, str],
    behind: str,
) -> Iterator[Metric]:  # fmt: skip
    for figure, (name, text) in shown.items():
        if figure in values:
            gauge = GaugeMetricFamily(PREFIX + name, text + behind, labels=LABELS)
            gauge.add_metric(labels, values[figure])
            yield gauge


def _compatible(found: Figures, labels: tuple[str, str]) -> Iterator[Metric]:
    """Yield the gauges that older guides name, those of them that are known."""
    values = {name: found.lately.get(figure) for name, figure in COMPATIBLE.items()}
    values[MEDIAN] = found.quantiles.get("e2e", {}).get(0.5)
    for name, value in values.items():
        if value is not None:
            gauge = GaugeMetricFamily(name, "As the exporter's own figure.", labels=LABELS)
            gauge.add_metric(labels, value)
            yield gauge


def _gpu_families(gpus: Gpus) -> Iterator[Metric]:
    found = gpus.read()
    if not found:
        return
    labels = ("gpu", "gpu_name")
    used = GaugeMetricFamily(f"{PREFIX}gpu_memory_used_bytes", "Memory taken.", labels=labels)
    total = GaugeMetricFamily(f"{PREFIX}gpu_memory_total_bytes", "Memory.", labels=labels)
    busy = GaugeMetricFamily(
        f"{PREFIX}gpu_utilisation", "Share of the last moment with a kernel, 0 to 1.",
        labels=labels,
    )  # fmt: skip
    for gpu in found:
        key = (str(gpu.number), gpu.name)
        used.add_metric(key, gpu.used)
        total.add_metric(key, gpu.total)
        if gpu.busy is not None:
            busy.add_metric(key, gpu.busy)
    yield from (used, total, busy)
