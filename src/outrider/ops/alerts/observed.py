"""The one schema of all engines' figures, ``outrider_observed_*``, and the rules that record it.

If Prometheus scrapes the engines, recording rules give these series; if not, the exporter does,
from the same tables and the same names of each engine's metrics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..metrics import names_of

PREFIX = "outrider_observed_"
ENGINES = ("outrider", "vllm", "sglang", "trtllm", "llamacpp")
COUNTERS = {
    "drafts": ("drafts", "Verify steps of a sequence with a draft."),
    "drafted": ("draft_tokens", "Tokens drafted."),
    "accepted": ("accepted_tokens", "Drafted tokens accepted."),
    "generated": ("generation_tokens", "Output tokens."),
    "requests": ("requests", "Requests done."),
    "good_requests": ("good_requests", "Requests that kept the engine's SLO."),
}
"""By figure of an engine: the name after the prefix, and what it means."""
POSITIONS = ("accepted_tokens_per_position", "Accepted tokens by position, from 0.")
NOW = {
    "running": ("requests_running", "Sequences that run."),
    "waiting": ("requests_waiting", "Sequences that wait."),
    "kv_usage": ("kv_usage", "Share of the KV cache in use, 0 to 1."),
}
RATIOS = {
    "acceptance": ("acceptance", "Accepted / drafted tokens."),
    "acceptance_length": ("acceptance_length", "1 + accepted / drafts."),
}
RATES = {
    "drafted": ("drafted_throughput", "Drafted tokens a second."),
    "accepted": ("accepted_throughput", "Accepted draft tokens a second."),
    "generated": ("generation_throughput", "Output tokens a second."),
    "good_requests": ("goodput", "Requests a second that kept the engine's SLO."),
}
LATENCIES = {
    "ttft": "Time to the first token.",
    "itl": "Time between two outputs; one may carry several tokens.",
    "e2e": "From arrival to end.",
}
SHARES = (0.5, 0.9, 0.95, 0.99)
BY = "namespace, pod, job, instance, model_name"
"""Labels of a series; namespace and pod exist only in Kubernetes."""
SPAN = "5m"
OURS = " on (namespace, pod, job, instance) outrider_draft_length"
"""Tells Outrider apart from vLLM, whose metric names it shares."""
WHOSE = {"outrider": " and" + OURS, "vllm": " unless" + OURS}


def percentile(share: float) -> str:
    """Return the label of a quantile, such as p99."""
    return f"p{100 * share:g}"


def records() -> list[dict[str, Any]]:
    """Return the recording rules of all engines."""
    return [
        {"record": PREFIX + record, "expr": expression + WHOSE.get(engine, ""),
         "labels": {"engine": engine, **labels}}
        for engine in ENGINES
        for record, expression, labels in _of_engine(names_of(engine))
    ]  # fmt: skip


def _of_engine(names: Mapping[str, str]) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield the records of an engine: name, expression, and labels of each."""

    def rate(figure: str) -> str:
        return f"sum by ({BY}) (rate({names[figure]}_total[{SPAN}]))"

    for figure, (record, _) in COUNTERS.items():
        if figure in names:
            yield f"{record}_total", f"sum by ({BY}) ({names[figure]}_total)", {}
    if "by_position" in names:
        same = '"position", "$1", "token_position", "(.+)"'  # as TensorRT-LLM calls the label
        counts = f"label_replace({names['by_position']}_total, {same})"
        yield f"{POSITIONS[0]}_total", f"sum by ({BY}, position) ({counts})", {}
    for figure, (record, _) in NOW.items():
        if figure in names:
            how = "max" if figure == "kv_usage" else "sum"
            yield record, f"{how} by ({BY}) ({names[figure]})", {}
    ratios = (("acceptance", "drafted", ""), ("acceptance_length", "drafts", "1 + "))
    for figure, over, start in ratios:
        if over in names:
            yield RATIOS[figure][0], f"({start}{rate('accepted')} / ({rate(over)} > 0))", {}
        elif figure in names:  # a gauge, which means nothing while an engine is idle
            worked = rate("generated" if "drafted" not in names else "drafted")
            yield RATIOS[figure][0], f"(avg by ({BY}) ({names[figure]} > 0) and {worked} > 0)", {}
    for figure, (record, _) in RATES.items():
        if figure in names:
            yield record, rate(figure), {}
    for latency in LATENCIES:
        if latency in names:
            buckets = f"sum by ({BY}, le) (rate({names[latency]}_bucket[{SPAN}]))"
            for share in SHARES:
                expression = f"histogram_quantile({share:g}, {buckets})"
                yield f"{latency}_seconds", expression, {"percentile": percentile(share)}
