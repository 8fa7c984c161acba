"""Prometheus metrics: vLLM's by its names, and those that vLLM lacks under ``outrider_``."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import quantiles
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..async_llm import AsyncLLM
from ..base.methods import AUTO, NONE
from ..base.types import SAMPLE, Counts, Event, Request, grouped_by
from ..engine.worker.messages import Gauges, Ready, Stepped
from ..frontend.outputs import RequestState
from . import beliefs

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
"""Values of a family, keyed by the values of its labels."""
Family = tuple[
    type[GaugeMetricFamily] | type[CounterMetricFamily], str, str, tuple[str, ...], Values
]
COUNTS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))

COUNTERS = {
    "prompt": ("vllm:prompt_tokens", "Prompt tokens of requests whose first token was emitted."),
    "output": ("vllm:generation_tokens", "Output tokens."),
    "preemptions": (
        "vllm:num_preemptions",
        "Times a sequence was preempted and lost its cache pages.",
    ),
    "queries": ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "hits": ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "drafting": ("outrider_drafting_seconds", "Seconds that the engine spent drafting."),
    "verifying": ("outrider_verifying_seconds", "Seconds that the engine spent verifying."),
    "good": ("outrider_good_requests", "Requests that met the targets of --slo."),
    "good_tokens": (
        "outrider_good_tokens",
        "Output tokens of requests that met the targets of --slo.",
    ),
}
"""By key: name and help of a counter."""
HISTOGRAMS = {
    "ttft": ("vllm:time_to_first_token_seconds", "Time from arrival to the first token.", SHORT),
    "itl": ("vllm:inter_token_latency_seconds", "Time between two steps that emit tokens.", SHORT),
    "tpot": (
        "vllm:request_time_per_output_token_seconds",
        "Mean time per token of a request, after the first.",
        SHORT,
    ),
    "e2e": ("vllm:e2e_request_latency_seconds", "Time from arrival to the end of a request.", LONG),
    "queue": (
        "vllm:request_queue_time_seconds",
        "Time that a request waits before the engine runs it.",
        LONG,
    ),
    "prefill": (
        "vllm:request_prefill_time_seconds",
        "Time from leaving the queue to the first token.",
        LONG,
    ),
    "decode": ("vllm:request_decode_time_seconds", "Time from the first token to the end.", LONG),
    "inference": (
        "vllm:request_inference_time_seconds",
        "Time from leaving the queue to the end.",
        LONG,
    ),
    "prompts": ("vllm:request_prompt_tokens", "Prompt tokens of each request.", COUNTS),
    "outputs": ("vllm:request_generation_tokens", "Output tokens of each request.", COUNTS),
    "max_tokens": ("vllm:request_params_max_tokens", "The max_tokens of each request.", COUNTS),
    "n": ("vllm:request_params_n", "The n of each request.", (1, 2, 5, 10, 20)),
    "iteration": (
        "vllm:iteration_tokens_total",
        "Rows computed in a step of the engine.",
        COUNTS,
    ),
}
"""By key: name, help and buckets of a histogram."""
RATES = ("acceptance_rate", "acceptance_length", "acceptance_by_position")
"""Figures of ``Counts`` in answers."""
RATE_SECONDS = 60
REQUESTS_KEPT = 1000
"""Number of last requests that percentiles cover."""


class Rate:
    """Events per second, over the last minute or since the start if that is shorter."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        # The last seconds, and the events in each.
        self._counts: deque[tuple[int, int]] = deque(maxlen=RATE_SECONDS + 1)

    def add(self, count: int) -> None:
        """Count events that have just happened."""
        now = int(time.perf_counter())
        if not self._counts or self._counts[-1][0] != now:
            self._counts.append((now, 0))
        self._counts[-1] = (now, self._counts[-1][1] + count)

    def value(self) -> float:
        """Return events per second."""
        now = time.perf_counter()
        total = sum(count for second, count in self._counts if second >= now - RATE_SECONDS)
        return total / min(RATE_SECONDS, max(1.0, now - self._start))


class Stats:
    """Counts since the start, and the times of the last requests."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.counts = Counts()
        self.requests = 0
        self.tokens = 0
        self._times: dict[str, deque[float]] = {
            name: deque(maxlen=REQUESTS_KEPT) for name in ("latency", "ttft", "tpot")
        }

    def add(self, state: RequestState) -> None:
        """Count a request that ended well."""
        latency = time.perf_counter() - state.started
        tokens = sum(len(sample.token_ids) for sample in state.samples)
        self.requests += 1
        self.tokens += tokens
        self.counts.add(state.counts)
        self._times["latency"].append(latency)
        if state.ttft is not None:
            self._times["ttft"].append(state.ttft)
            if tokens > 1:
                self._times["tpot"].append((latency - state.ttft) / (tokens - 1))

    def as_json(self) -> dict[str, Any]:
        """Return times in seconds; rates and percentiles are null where nothing was measured."""
        seconds = time.perf_counter() - self.start
        counts = self.counts
        times = {name: percentiles(values) for name, values in self._times.items()}
        return {
            "total_requests": self.requests,
            "total_tokens": self.tokens,
            "total_time_seconds": seconds,
            "throughput_tokens_per_second": self.tokens / seconds,
            "total_speculative_tokens": counts.drafted,
            "accepted_speculative_tokens": counts.accepted,
            **{name: getattr(counts, name) for name in RATES},
            **{f"latency_{name}": value for name, value in times["latency"].items()},
            "ttft": times["ttft"],
            "tpot": times["tpot"],
        }


def percentiles(values: Sequence[float] | deque[float]) -> dict[str, float | None]:
    """Return P50, P90, P95 and P99, each null without values."""
    if not values:
        return dict.fromkeys(("p50", "p90", "p95", "p99"))
    cuts = quantiles(values, n=100, method="inclusive") if len(values) > 1 else [values[0]] * 99
    return {f"p{p}": cuts[p - 1] for p in (50, 90, 95, 99)}


@dataclass
class _Life:
    """The times of one request, in seconds of the clock that worker and server share."""

    arrival: float
    prompt_tokens: int
    samples_left: int
    wants_drafts: bool
    scheduled: float | None = None
    first: float | None = None
    last: float = 0.0
    tokens: int = 0


class Metrics(Collector):
    """Counts the engine's steps, times its requests, and reads gauges when they are collected.

    ``model`` is the label ``model_name``, ``slo`` the limits of a good request as in ``Settings``.
    """

    def __init__(self, llm: AsyncLLM, model: str, slo: Mapping[str, float]) -> None:
        self.registry = CollectorRegistry()
        self.others: list[Callable[[], tuple[Family, ...]]] = []
        """Functions that return more families."""
        self.llm = llm
        self.by_drafter: dict[str, Counts] = {}
        self.tokens = 0
        self.draftable = 0
        """Tokens that could have been drafted: all but the first of requests that want drafts."""
        self.accepted_rate = Rate()
        self.good_rate = Rate()
        llm.observers.append(self.observe)
        self.slo = slo
        self._labels = {"model_name": model, "engine": ENGINE}
        self._lives: dict[str, _Life] = {}
        self._before = Gauges()
        self.registry.register(self)
        self._counters = {
            key: Counter(name, text, LABELS, registry=self.registry).labels(**self._labels)
            for key, (name, text) in COUNTERS.items()
        }
        self._times = {
            key: Histogram(name, text, LABELS, registry=self.registry, buckets=buckets).labels(
                **self._labels
            )
            for key, (name, text, buckets) in HISTOGRAMS.items()
        }
        self.success = Counter(
            "vllm:request_success", "Samples that ended.", [*LABELS, "finished_reason"],
            registry=self.registry,
        )  # fmt: skip
        self.errors = Counter(
            "outrider_request_errors", "Failed calls by HTTP status.", [*LABELS, "code"],
            registry=self.registry,
        )  # fmt: skip
        # Prometheus's rate() misses a first event that no zero precedes.
        for reason in ("stop", "length"):
            self.success.labels(**self._labels, finished_reason=reason)
        for code in ("500", "503"):
            self.errors.labels(**self._labels, code=code)

    def begin(self, request: Request) -> None:
        """Begin to time a request."""
        wishes = request.speculation
        wants_drafts = wishes.length(1) > 0 and wishes.drafter != NONE
        self._times["n"].observe(request.params.n)
        if request.params.max_tokens is not None:
            self._times["max_tokens"].observe(request.params.max_tokens)
        self._lives[request.id] = _Life(
            time.perf_counter(), len(request.prompt_token_ids), request.params.n, wants_drafts
        )

    @property
    def under_way(self) -> int:
        """Requests that have begun and not ended."""
        return len(self._lives)

    def end(self, request_id: str) -> None:
        """Forget a request, however it ended."""
        self._lives.pop(request_id, None)

    def failed(self, status: int) -> None:
        """Count a call that ended with an error."""
        self.errors.labels(**self._labels, code=str(status)).inc()

    def observe(self, step: Stepped, events: Mapping[str, Sequence[Event]]) -> None:
        """Count one step of the engine."""
        now, gauges, before = time.perf_counter(), step.gauges, self._before
        if gauges.generation != before.generation:  # another process, whose counts begin at 0
            before = Gauges()
        for key, count in gauges.counts.items():
            self._counters[key].inc(max(0, count - before.counts.get(key, 0)))
        self._times["iteration"].observe(gauges.rows - before.rows)
        self._before = gauges
        for id, mine in events.items():
            life = self._lives.get(id)
            for own in grouped_by(mine, SAMPLE).values():
                emitted = self._record(own)
                if life is not None and life.wants_drafts and own[0].start is None:
                    self.draftable += emitted
            if life is not None:
                self._count(life, mine, now)

    def _record(self, events: Sequence[Event]) -> int:
        """Count one step of one sample; return how many tokens it emitted."""
        emitted = sum(event.token_id is not None for event in events)
        self.tokens += emitted
        drafted = events[0].drafted
        if drafted is not None:
            self.by_drafter.setdefault(drafted.drafter, Counts()).record(
                drafted.depth, len(drafted.tokens), drafted.accepted, emitted
            )
            self.accepted_rate.add(drafted.accepted)
        return emitted

    def _count(self, life: _Life, events: Sequence[Event], now: float) -> None:
        """Count one step of one request."""
        emitted = sum(event.token_id is not None for event in events)
        self._counters["output"].inc(emitted)
        life.tokens += emitted
        if life.first is None and emitted:
            life.first = now
            starts = [e.start for e in events if e.start is not None]
            life.scheduled = starts[0].scheduled if starts else life.arrival
            self._counters["prompt"].inc(life.prompt_tokens)
            self._times["ttft"].observe(now - life.arrival)
            self._times["queue"].observe(max(0.0, life.scheduled - life.arrival))
            self._times["prefill"].observe(max(0.0, now - life.scheduled))
        elif emitted:
            self._times["itl"].observe(now - life.last)
        life.last = now
        for event in events:
            if event.finish_reason is not None:
                self.success.labels(**self._labels, finished_reason=event.finish_reason).inc()
                life.samples_left -= 1
        if not life.samples_left:
            self._close(life, now)

    def _close(self, life: _Life, now: float) -> None:
        """Count a whole request."""
        first = life.first if life.first is not None else now
        ttft, decode = first - life.arrival, now - first
        tpot = decode / (life.tokens - 1) if life.tokens > 1 else 0.0
        if life.tokens > 1:
            self._times["tpot"].observe(tpot)
        self._times["e2e"].observe(now - life.arrival)
        self._times["decode"].observe(decode)
        self._times["inference"].observe(max(0.0, now - (life.scheduled or life.arrival)))
        self._times["prompts"].observe(life.prompt_tokens)
        self._times["outputs"].observe(life.tokens)
        if ttft <= self.slo.get("ttft", inf) and tpot <= self.slo.get("tpot", inf):
            self._counters["good"].inc()
            self._counters["good_tokens"].inc(life.tokens)
            self.good_rate.add(1)

    @property
    def total(self) -> Counts:
        """The counts of all drafters together."""
        total = Counts()
        for counts in self.by_drafter.values():
            total.add(counts)
        return total

    @property
    def off(self) -> str | None:
        """The reason why nothing is drafted by default; None while something is."""
        now = self.llm.speculation
        if self.llm.ready is None or now is None:
            return "engine_down"
        if now.drafter == "none":
            return "no_drafter"
        return None if now.enabled else "switched_off"

    @property
    def chosen(self) -> beliefs.Beliefs | None:
        """The engine's beliefs where it chooses drafter or draft length itself, else None."""
        now = self.llm.speculation
        chooses = now is not None and (now.drafter == AUTO or now.num_speculative_tokens is None)
        return self.llm.beliefs if chooses and not self.off else None

    @property
    def draft_length(self) -> int:
        """The longest draft K in use, 0 while nothing is drafted."""
        now, ready, chosen = self.llm.speculation, self.llm.ready, self.chosen
        if now is None or ready is None or self.off:
            return 0
        if chosen is not None:
            return beliefs.longest(chosen)
        return now.num_speculative_tokens or ready.max_draft

    def collect(self) -> Iterator[Metric]:
        """Yield every family with its current values."""
        for kind, name, text, labels, values in self._families():
            family = kind(name, text, labels=[*LABELS, *labels])
            for label, value in values.items():
                family.add_metric([*self._labels.values(), *label], value)
            yield family

    def _families(self) -> tuple[Family, ...]:
        """Return type, name, help, labels and values of each family."""
        gauges, total = self.llm.gauges, self.total
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        position, spec = ("drafter", "position"), "vllm:spec_decode_num"
        return (
            (gauge, "vllm:num_requests_running", "Running sequences.", (), {(): gauges.running}),
            (gauge, "vllm:num_requests_waiting", "Waiting sequences.", (), {(): gauges.waiting}),
            (gauge, "vllm:num_requests_waiting_by_reason", "Waiting sequences by reason.",
             ("reason",), {("capacity",): gauges.waiting, ("deferred",): 0}),
            (gauge, "vllm:cache_config_info",
             "1; its labels give the size and dtype of the cache.",
             ("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching"),
             {} if self.llm.ready is None else {self._cache(self.llm.ready): 1.0}),
            (gauge, "vllm:kv_cache_usage_perc", "Share of the cache in use, 0 to 1.", (),
             {(): gauges.pages_used / max(1, gauges.pages)}),
            (gauge, "outrider_draft_length", "Longest draft length K in use; 0 without drafts.", (),
             {(): self.draft_length}),
            (gauge, "outrider_accepted_throughput",
             "Accepted draft tokens per second, over the last minute.", (),
             {(): self.accepted_rate.value()}),
            (gauge, "outrider_goodput",
             "Requests per second that met --slo, over the last minute.", (),
             {(): self.good_rate.value()}),
            (gauge, "outrider_speculation_off",
             "1 while drafting is off: engine_down, no_drafter or switched_off.", ("reason",),
             {(self.off,): 1.0} if self.off else {}),
            (gauge, "outrider_speedup",
             "Speed relative to plain decoding, measured in one step of 256.",
             ("drafter",),
             {(drafter,): value for drafter, value in gauges.speedups.items()}),
            (counter, f"{spec}_drafts", "Verified drafts.", (),
             {(): total.drafts}),
            (counter, f"{spec}_draft_tokens",
             "Draft tokens; a tree counts its depth.", (), {(): total.drafted}),
            (counter, f"{spec}_accepted_tokens", "Accepted draft tokens.", (),
             {(): total.accepted}),
            (counter, f"{spec}_accepted_tokens_per_pos",
             "Accepted draft tokens by position.", ("position",),
             {(str(i),): count for i, count in enumerate(total.accepted_by_position)}),
            (counter, "outrider_drafted_tokens_per_pos",
             "Draft tokens by position and drafter.", position,
             self._by_position("drafted_by_position")),
            (counter, "outrider_accepted_tokens_per_pos",
             "Accepted draft tokens by position and drafter.", position,
             self._by_position("accepted_by_position")),
            (counter, "outrider_verified_nodes",
             "Draft nodes that the target verified.", ("drafter",),
             {(drafter,): counts.nodes for drafter, counts in self.by_drafter.items()}),
            (counter, "outrider_engine_restarts", "Restarts of the engine's process.", (),
             {(): self.llm.restarts}),
            *self._believed(),
            *(family for told in self.others for family in told()),
        )  # fmt: skip

    def _cache(self, ready: Ready) -> tuple[str, str, str, str]:
        """Return tokens of a page, pages, dtype of the cache, and whether prefixes are shared."""
        config = self.llm.config
        pages, shares = ready.num_tokens // config.page_size, str(config.enable_prefix_caching)
        return str(config.page_size), str(pages), config.kv_cache_dtype, shares

    def _believed(self) -> tuple[Family, ...]:
        """Return the families on what the engine's controller believes; none without one."""
        known, gauge = self.llm.beliefs, GaugeMetricFamily
        if known is None:
            return ()
        return (
            (gauge, "outrider_expected_tokens_per_second",
             "Expected speed of the choices in use (chosen) and of plain decoding (plain).",
             ("kind",),
             {("chosen",): known["tokens_per_second"],
              ("plain",): known["plain_tokens_per_second"]}),
            (gauge, "outrider_survival",
             "Expected share of drafts accepted up to a position.",
             ("method", "position"), beliefs.survival(known)),
            (gauge, "outrider_choice_depth",
             "Mean draft length that the engine chose; 0 without drafts.",
             ("method",), {(name,): depth for name, depth in beliefs.depths(known).items()}),
            (gauge, "outrider_speculation_paused",
             "1 while drafting is paused because every drafter lost time.",
             (), {(): float(known["paused"])}),
        )  # fmt: skip

    def _by_position(self, field: str) -> Values:
        return {
            (drafter, str(i)): count
            for drafter, counts in self.by_drafter.items()
            for i, count in enumerate(getattr(counts, field))
        }
