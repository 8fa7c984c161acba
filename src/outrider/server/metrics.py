"""Prometheus metrics: vLLM's, by its names, and under ``outrider_`` what it has none of."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..async_llm import AsyncLLM
from ..engine.worker import Gauges, Stepped
from ..types import Counts, Event, Request
from .tally import Rate, Tally

ENGINE = "0"
LABELS = ("model_name", "engine")
# Small and speculative models answer in a few milliseconds: vLLM's begin at 10 ms.
SHORT = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
LONG = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0,
    15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
)  # fmt: skip
Values = Mapping[tuple[str, ...], float]
"""By the values of labels."""
COUNTS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))


@dataclass
class _Life:
    """The times of one request, s on the clock that worker and server share."""

    arrival: float
    prompt_tokens: int
    samples_left: int
    scheduled: float | None = None
    first: float | None = None
    last: float = 0.0
    tokens: int = 0


@dataclass(frozen=True)
class Slo:
    """What a good request keeps, s; None where nothing is asked."""

    ttft: float | None = None
    tpot: float | None = None


NO_SLO = Slo()


class _State(Collector):
    """What holds at the moment of reading, and what is counted by drafter."""

    def __init__(self, tally: Tally, good: Rate, model: str) -> None:
        self.tally = tally
        self.good = good
        self.labels = (model, ENGINE)

    def collect(self) -> Iterator[Metric]:
        """Gauges first."""
        tally, llm = self.tally, self.tally.llm
        gauges = llm.gauges
        used = gauges.pages_used / max(1, gauges.pages)
        off = {tally.off: 1.0} if tally.off else {}
        for name, text, value in (
            ("vllm:num_requests_running", "Sequences that run.", gauges.running),
            ("vllm:num_requests_waiting", "Sequences that wait.", gauges.waiting),
            ("vllm:kv_cache_usage_perc", "Share of the cache in use, 0 to 1.", used),
            ("outrider_draft_length", "Longest draft in use, 0 for none.", tally.draft_length),
            ("outrider_accepted_throughput", "Accepted draft tokens a second, over a minute.",
             tally.accepted_rate.value()),
            ("outrider_goodput", "Requests a second that kept the SLO, over a minute.",
             self.good.value()),
        ):  # fmt: skip
            yield self._family(GaugeMetricFamily, name, text, (), {(): value})
        text = "1 while nothing is drafted."
        yield self._gauge("outrider_speculation_off", text, "reason", off)
        text = "Emitted tokens times a plain step's time, over the time taken."
        yield self._gauge("outrider_speedup", text, "drafter", gauges.speedups)
        yield from self._counted(tally.total, tally.by_drafter)
        text = "Starts of the engine after a death."
        yield self._counter("outrider_engine_restarts", text, (), {(): llm.restarts})

    def _counted(self, total: Counts, drafters: Mapping[str, Counts]) -> Iterator[Metric]:
        """What was drafted: all in vLLM's names, and by drafter."""
        spec = "vllm:spec_decode_num"
        for name, text, value in (
            ("drafts", "Steps of a sequence with a draft.", total.drafts),
            ("draft_tokens", "Tokens drafted.", total.drafted),
            ("accepted_tokens", "Drafted tokens accepted.", total.accepted),
        ):
            yield self._counter(f"{spec}_{name}", text, (), {(): value})
        accepted: Values = {(str(i),): n for i, n in enumerate(total.accepted_by_position)}
        name, text = f"{spec}_accepted_tokens_per_pos", "Of them by position."
        yield self._counter(name, text, ("position",), accepted)
        by = ("drafter", "position")
        for name, text, field in (
            ("drafted", "Drafted by position.", "drafted_by_position"),
            ("accepted", "Accepted of them.", "accepted_by_position"),
        ):
            values: Values = {
                (drafter, str(i)): count
                for drafter, counts in drafters.items()
                for i, count in enumerate(getattr(counts, field))
            }
            yield self._counter(f"outrider_{name}_tokens_per_pos", text, by, values)
        nodes: Values = {(drafter,): counts.nodes for drafter, counts in drafters.items()}
        yield self._counter("outrider_verified_nodes", "Nodes verified.", ("drafter",), nodes)

    def _gauge(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        keyed: Values = {(key,): value for key, value in values.items()}
        return self._family(GaugeMetricFamily, name, text, (label,), keyed)

    def _counter(self, name: str, text: str, labels: Sequence[str], values: Values) -> Metric:
        return self._family(CounterMetricFamily, name, text, labels, values)

    def _family(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        labels: Sequence[str],
        values: Values,
    ) -> Metric:
        found = kind(name, text, labels=[*LABELS, *labels])
        for label, value in values.items():
            found.add_metric([*self.labels, *label], value)
        return found


class Metrics:
    """Counts what the engine does.

    Args:
        llm: the engine.
        model: the label ``model_name``.
        slo: what goodput counts.
    """

    def __init__(self, llm: AsyncLLM, model: str, slo: Slo) -> None:
        self.registry = CollectorRegistry()
        self.tally = Tally(llm)
        self.good_rate = Rate()
        self.registry.register(_State(self.tally, self.good_rate, model))
        llm.observers.append(self.observe)
        self.slo = slo
        self._labels = {"model_name": model, "engine": ENGINE}
        self._lives: dict[str, _Life] = {}
        self._before = Gauges()
        histogram, counter = self._histogram, self._counter
        self.prompt = counter("vllm:prompt_tokens", "Prompt tokens computed or found.")
        self.output = counter("vllm:generation_tokens", "Output tokens.")
        self.preemptions = counter("vllm:num_preemptions", "Sequences whose pages were taken.")
        self.queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up.")
        self.hits = counter("vllm:prefix_cache_hits", "Prompt tokens found.")
        self.success = counter("vllm:request_success", "Requests done.", "finished_reason")
        self.ttft = histogram("vllm:time_to_first_token_seconds", "To the first token.", SHORT)
        self.itl = histogram("vllm:inter_token_latency_seconds", "Between two outputs.", SHORT)
        self.tpot = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean after the first token.", SHORT
        )
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "From arrival to end.", LONG)
        self.queue = histogram("vllm:request_queue_time_seconds", "Waiting.", LONG)
        self.prefill = histogram("vllm:request_prefill_time_seconds", "To the first token.", LONG)
        self.decode = histogram("vllm:request_decode_time_seconds", "From the first token.", LONG)
        self.inference = histogram("vllm:request_inference_time_seconds", "Running.", LONG)
        self.prompts = histogram("vllm:request_prompt_tokens", "Prompt tokens.", COUNTS)
        self.outputs = histogram("vllm:request_generation_tokens", "Output tokens.", COUNTS)
        self.iteration = histogram("vllm:iteration_tokens_total", "Rows of a step.", COUNTS)
        self.drafting = counter("outrider_drafting_seconds", "Time spent drafting.")
        self.verifying = counter("outrider_verifying_seconds", "Time spent verifying.")
        self.errors = counter("outrider_request_errors", "Requests that failed.", "code")
        self.good = counter("outrider_good_requests", "Requests that kept the SLO.")

    def begin(self, request: Request) -> None:
        """A request came in."""
        prompt, samples = len(request.prompt_token_ids), request.params.n
        self._lives[request.id] = _Life(time.perf_counter(), prompt, samples)

    def end(self, request_id: str) -> None:
        """A request is over, however it ended."""
        self._lives.pop(request_id, None)

    def failed(self, status: int) -> None:
        """A call ended with an error."""
        self.errors.labels(**self._labels, code=str(status)).inc()

    def observe(self, step: Stepped, events: Mapping[str, Sequence[Event]]) -> None:
        """Count one step of the engine."""
        now, labels, gauges, before = time.perf_counter(), self._labels, step.gauges, self._before
        if gauges.generation != before.generation:  # another process, whose counts begin at 0
            before = Gauges()
        for counter, count, counted in (
            (self.preemptions, gauges.preemptions, before.preemptions),
            (self.drafting, gauges.draft_seconds, before.draft_seconds),
            (self.verifying, gauges.verify_seconds, before.verify_seconds),
            (self.queries, gauges.queried, before.queried),
            (self.hits, gauges.hit, before.hit),
        ):
            counter.labels(**labels).inc(max(0, count - counted))
        self.iteration.labels(**labels).observe(gauges.rows - before.rows)
        self._before = gauges
        for id, mine in events.items():
            life = self._lives.get(id)
            if life is not None:
                self._count(life, mine, now)

    def _count(self, life: _Life, events: Sequence[Event], now: float) -> None:
        """Count what one step brought to one request."""
        labels = self._labels
        emitted = sum(event.token_id is not None for event in events)
        self.output.labels(**labels).inc(emitted)
        life.tokens += emitted
        if life.first is None and emitted:
            life.first = now
            starts = [e.start for e in events if e.start is not None]
            life.scheduled = starts[0].scheduled if starts else life.arrival
            self.prompt.labels(**labels).inc(life.prompt_tokens)
            self.ttft.labels(**labels).observe(now - life.arrival)
            self.queue.labels(**labels).observe(max(0.0, life.scheduled - life.arrival))
            self.prefill.labels(**labels).observe(max(0.0, now - life.scheduled))
        elif emitted:
            self.itl.labels(**labels).observe(now - life.last)
        life.last = now
        for event in events:
            if event.finish_reason is not None:
                self.success.labels(**labels, finished_reason=event.finish_reason).inc()
                life.samples_left -= 1
        if not life.samples_left:
            self._close(life, now)

    def _close(self, life: _Life, now: float) -> None:
        """Count a whole request."""
        labels = self._labels
        first = life.first if life.first is not None else now
        ttft, decode = first - life.arrival, now - first
        tpot = decode / (life.tokens - 1) if life.tokens > 1 else 0.0
        if life.tokens > 1:
            self.tpot.labels(**labels).observe(tpot)
        self.e2e.labels(**labels).observe(now - life.arrival)
        self.decode.labels(**labels).observe(decode)
        self.inference.labels(**labels).observe(max(0.0, now - (life.scheduled or life.arrival)))
        self.prompts.labels(**labels).observe(life.prompt_tokens)
        self.outputs.labels(**labels).observe(life.tokens)
        good = (self.slo.ttft is None or ttft <= self.slo.ttft) and (
            self.slo.tpot is None or tpot <= self.slo.tpot
        )
        if good:
            self.good.labels(**labels).inc()
            self.good_rate.add(1)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, [*self._labels, *labels], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, list(self._labels), registry=self.registry, buckets=buckets)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)
