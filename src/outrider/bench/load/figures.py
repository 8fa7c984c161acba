"""The figures of a load, and what each one means."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import ConfigError
from .drive import Load
from .stream import Record

PERCENTILES = (50, 90, 95, 99)
LATENCIES = ("ttft", "itl", "tpot", "e2el")
DEFINITIONS = {
    "completed": "requests whose answer came whole and held output; all latencies are theirs",
    "failed": "requests with an error; those given up at Ctrl-C or at the end of the duration are "
    "not counted",
    "duration": "seconds from the load's start to the end of its last answer",
    "request_throughput": "completed requests a second of the duration",
    "output_throughput": "accepted throughput: output tokens that clients received, by the "
    "server's usage, a second of the duration; drafted tokens that the target rejected are none",
    "total_token_throughput": "prompt and output tokens of completed requests a second",
    "request_goodput": "completed requests a second that met every limit of the SLOs",
    "ttft": "time to first token: from sending a request (with its connection, where it needs a "
    "new one) to the first chunk that holds output",
    "itl": "inter-token latency: the gap between two chunks over the tokens of the second, counted "
    "once for each of them; tokens of a first chunk have none",
    "tpot": "time per output token after the first: (E2E - TTFT) / (output tokens - 1) of a "
    "request",
    "e2el": "end-to-end latency: from sending a request to its last chunk that holds output",
    "chunk_gap": "the gap between two chunks with output, however many tokens they hold (what "
    "vllm bench serve calls ITL)",
    "percentiles": "linear interpolation between ranks; of requests for TTFT, TPOT and E2E, of "
    "tokens for ITL, of gaps for chunks",
    "tokens_per_chunk": "output tokens over chunks with output",
    "send_lag": "how long after its due time a request was sent; high values mean that this client "
    "or --max-concurrency held the load back",
    "acceptance_rate": "accepted / drafted tokens, by counters of the server's /metrics around the "
    "load; other clients' requests count too",
    "acceptance_length": "1 + accepted / drafts: tokens per verify step",
}


def parse_slos(texts: Iterable[str]) -> dict[str, float]:
    """Return limits in milliseconds by latency, from texts such as ``ttft:200``, or raise."""
    limits: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition(":")
        name = "e2el" if name == "e2e" else name
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = -1.0
        if name not in LATENCIES or not limits[name] > 0:
            raise ConfigError(
                f"--goodput {text!r}: give ttft, tpot, itl or e2el and milliseconds, as in "
                "ttft:200."
            )
    return limits


def figures(load: Load, slos: Mapping[str, float]) -> dict[str, Any]:
    """Return a load's figures by the keys of ``vllm bench serve``, None where none was measured."""
    good = [record for record in load.records if not record.error]
    prompts = sum(record.prompt_tokens for record in good)
    outputs = sum(record.output_tokens for record in good)
    samples = {
        "ttft": weighted((r.ttft, 1.0) for r in good),
        "itl": weighted(pair for r in good for pair in r.itls),
        "tpot": weighted((t, 1.0) for r in good if (t := r.tpot) is not None),
        "e2el": weighted((r.e2e, 1.0) for r in good),
        "chunk_gap": weighted((gap, 1.0) for r in good for gap in r.gaps),
        "send_lag": weighted((r.sent - r.due, 1.0) for r in good),
    }
    chunks = sum(len(r.times) for r in good)
    result: dict[str, Any] = {
        "duration": load.seconds,
        "completed": len(good),
        "failed": len(load.records) - len(good),
        "cut": load.cut,
        "interrupted": load.interrupted,
        "total_input_tokens": prompts,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / load.seconds,
        "request_goodput": _goodput(good, slos) / load.seconds if slos else None,
        "output_throughput": outputs / load.seconds,
        "total_token_throughput": (prompts + outputs) / load.seconds,
        "max_output_tokens_per_s": max(per_second(load), default=0.0),
        "max_concurrent_requests": load.peak,
        "tokens_per_second_series": per_second(load),
        "tokens_per_chunk": outputs / chunks if chunks else None,
        "tokens_counted": all(r.counted for r in good),
    }
    for name, (values, weights) in samples.items():
        result |= _summary(name, 1000 * values, weights)
    return result


def weighted(pairs: Iterable[tuple[float, float]]) -> tuple[np.ndarray[Any, Any], Any]:
    """Return values and weights as arrays."""
    array = np.array(list(pairs), dtype=float).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def _summary(name: str, values: Any, weights: Any) -> dict[str, Any]:
    """Return mean, median, deviation and percentiles; None for no values."""
    keys = [f"{kind}_{name}_ms" for kind in ("mean", "median", "std")]
    keys += [f"p{p}_{name}_ms" for p in PERCENTILES]
    if not len(values):
        return dict.fromkeys(keys)
    mean = float(np.average(values, weights=weights))
    deviation = float(np.sqrt(np.average((values - mean) ** 2, weights=weights)))
    cuts = [percentile(values, weights, p) for p in PERCENTILES]
    return dict(zip(keys, [mean, cuts[0], deviation, *cuts], strict=True))


def percentile(values: Any, weights: Any, percent: float) -> float:
    """Return numpy's percentile of values, each repeated ``weights`` times."""
    order = np.argsort(values)
    ordered, ends = values[order], np.cumsum(weights[order])
    place = percent / 100 * max(ends[-1] - 1, 0.0)
    low = np.searchsorted(ends, np.floor(place), side="right")
    high = np.searchsorted(ends, np.floor(place) + 1, side="right")
    last = len(ordered) - 1
    below, above = ordered[min(low, last)], ordered[min(high, last)]
    return float(below + (above - below) * (place - np.floor(place)))


def _goodput(good: Sequence[Record], slos: Mapping[str, float]) -> int:
    """Return how many requests met all limits; a request's ITL is its tokens' mean."""

    def met(record: Record) -> bool:
        count = sum(n for _, n in record.itls)
        itl = sum(gap * n for gap, n in record.itls) / count if count else 0.0
        tpot = record.tpot or 0.0
        seconds = {"ttft": record.ttft, "tpot": tpot, "itl": itl, "e2el": record.e2e}
        return all(1000 * seconds[name] <= limit for name, limit in slos.items())

    return sum(map(met, good))


def per_second(load: Load) -> list[float]:
    """Return the output tokens that arrived in each second of the load."""
    seconds = [0.0] * (int(load.seconds) + 1)
    for record in load.records:
        for time, tokens in zip(record.times, record.tokens, strict=False):
            place = int(time - load.start)
            if 0 <= place < len(seconds):
                seconds[place] += tokens
    return seconds
