"""``measure_load``: loads a server as its options say, and reports the results."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ...base.outside.stamped import Client
from ...base.outside.text import printable
from ...errors import ConfigError, EndpointError
from ...ops.metrics.acceptance import acceptance, scrape
from ..workload import Workload
from .arrivals import Closed, Open, Shape, check
from .datasets import SYNTHETIC, WARNING, body_of, shuffled
from .drive import Driver, Load, LoadLimits, warm_up
from .figures import DEFINITIONS, figures
from .stream import Record, read
from .watch import MachineWatch, bottleneck

BYTES_OF_TOKEN = 4096  # allowed per token of an answer; an event has a few hundred
Progress = Callable[[str, int, int, int], None]
"""Called with a load's label, and its numbers of ended, failed and all requests."""


@dataclass(frozen=True)
class LoadOptions:
    """A load test; an option out of its range raises ConfigError.

    Attributes:
        workload: what is asked; the seed decides the order, the same for every load.
        shapes: one load each, one after the other.
        requests: number in each load; prompts are reused if there are fewer.
        seconds: ends a load early.
        warm_up: unmeasured requests before each load.
        max_concurrency: limits an open loop's requests.
        chat: true for chat completions; None decides by the workload.
        body: further fields of each request.
        slos: limits for goodput, in milliseconds by latency.
        detailed: whether a run also lists every request.
    """

    url: str
    workload: Workload
    shapes: tuple[Shape, ...]
    requests: int = 100
    seconds: float | None = None
    warm_up: int = 4
    max_concurrency: int | None = None
    max_tokens: int = 128
    model: str | None = None
    chat: bool | None = None
    body: dict[str, Any] = field(default_factory=dict)
    slos: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    timeout: float = 600.0
    detailed: bool = False
    key: str | None = None

    def __post_init__(self) -> None:
        for shape in self.shapes:
            check(shape)
        least = {"requests": 1, "max_tokens": 1, "max_concurrency": 1, "warm_up": 0}
        for name in (*least, "seconds", "timeout"):
            if (value := getattr(self, name)) is None:
                continue
            if name in least and value < least[name]:
                raise ConfigError(f"{name} is {value}; give {least[name]} or more.")
            if name not in least and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value:g}; give more than 0.")
        if self.uses_chat is False and any(item.messages for item in self.workload.items):
            raise ConfigError(f"workload {self.workload.name!r} has messages; they need chat.")

    @property
    def uses_chat(self) -> bool:
        """True if requests go to chat completions."""
        return any(i.messages for i in self.workload.items) if self.chat is None else self.chat

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.uses_chat else "/v1/completions"


class LoadedServer:
    """A server under test: its client, its model, and the encoded requests."""

    def __init__(self, options: LoadOptions) -> None:
        self.options = options
        self.client = Client(options.url, options.key, BYTES_OF_TOKEN * options.max_tokens)
        self.model = options.model or ""
        self.requests: list[bytes] = []

    async def open(self) -> None:
        """Find the model, and check that one request is answered; or raise EndpointError."""
        options = self.options
        self.model = self.model or await self.client.model()
        base = {
            "model": self.model, "max_tokens": options.max_tokens, "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **options.body,
        }  # fmt: skip
        items = shuffled(options.workload, options.seed).items
        encode = self.client.encode
        bodies = [body_of(item, options.uses_chat, base) for item in items]
        if await self._trouble(bodies[0]):
            # OpenAI's own service refuses the field that it does not know.
            for body in bodies:
                body["stream_options"] = {"include_usage": True}
            if why := await self._trouble(bodies[0]):
                raise EndpointError(f"{self.client.url}{options.path} does not serve: {why}.")
        self.requests = [encode(options.path, body) for body in bodies]

    async def _trouble(self, body: dict[str, Any]) -> str:
        record = Record(0.0, 0.0)
        small = body | {"max_tokens": min(2, self.options.max_tokens)}
        read(await self.client.ask(self.options.path, small, self.options.timeout), record)
        return record.error

    async def run(self, shape: Shape, progress: Progress) -> dict[str, Any]:
        """Return one load's figures; ``interrupted`` is True if it did not run to its end."""
        options = self.options
        limits = LoadLimits(
            options.requests, options.seconds, options.max_concurrency, options.timeout
        )

        def tell(ended: int, failed: int) -> None:
            progress(shape.label, ended, failed, options.requests)

        tell(0, 0)
        driver = Driver(self.client, self.requests, limits, tell)
        wide = shape.concurrency if isinstance(shape, Closed) else options.warm_up or 1
        await warm_up(driver, options.warm_up, wide)
        before = await scrape(self.client)
        async with MachineWatch(self.client) as watch:
            load = await driver.run(shape, options.seed)
        after = await scrape(self.client)
        return {
            **self._head(shape), **figures(load, options.slos), **acceptance(before, after),
            "machine": watch.report(), **(detail(load) if options.detailed else {}),
            "error_kinds": dict(Counter(r.error for r in load.records if r.error).most_common(10)),
        }  # fmt: skip

    def _head(self, shape: Shape) -> dict[str, Any]:
        """Return the fields in which vLLM's results describe a load."""
        options = self.options
        rate = shape.rate if isinstance(shape, Open) else math.inf
        limit = shape.concurrency if isinstance(shape, Closed) else options.max_concurrency
        backend = "openai-chat" if options.uses_chat else "openai"
        return {
            "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
            "backend": backend,
            "endpoint_type": backend,
            "label": shape.label,
            "endpoint": self.client.url,
            "model_id": printable(self.model),
            "tokenizer_id": None,
            "dataset": printable(options.workload.name),
            "num_prompts": options.requests,
            "request_rate": "inf" if math.isinf(rate) else rate,
            "burstiness": shape.burstiness if isinstance(shape, Open) else 1.0,
            "max_concurrency": limit,
            "seed": options.seed,
        }


def detail(load: Load) -> dict[str, Any]:
    """Return lists with a value for each request, as in ``vllm bench serve --save-detailed``."""
    return {
        "input_lens": [r.prompt_tokens for r in load.records],
        "output_lens": [r.output_tokens for r in load.records],
        "ttfts": [r.ttft if r.times else 0.0 for r in load.records],
        "itls": [r.gaps for r in load.records],
        "chunk_tokens": [r.tokens for r in load.records],
        "start_times": [r.sent for r in load.records],
        "errors": [r.error for r in load.records],
    }


async def _measure(options: LoadOptions, progress: Progress) -> list[dict[str, Any]]:
    server = LoadedServer(options)
    try:
        await server.open()
        runs: list[dict[str, Any]] = []
        for shape in options.shapes:
            try:
                runs.append(await server.run(shape, progress))
            except asyncio.CancelledError:  # during warm-up; earlier loads are reported
                if not runs:
                    raise
                runs[-1]["interrupted"] = True
            if runs[-1]["interrupted"]:
                break
        return runs
    finally:
        await server.client.close()


def measure_load(options: LoadOptions, progress: Progress = lambda *_: None) -> dict[str, Any]:
    """Load a server and return the report: ``runs``, a dict of figures each, and ``definitions``.

    A run has the keys of ``vllm bench serve --save-result`` and further ones. Ctrl-C ends the load,
    and what was measured so far is reported. Raises ConfigError: an option is wrong; EndpointError:
    the server is down, or does not speak OpenAI's API.
    """
    runs = asyncio.run(_measure(options, progress))
    return report_of(runs, [options])


def report_of(runs: list[dict[str, Any]], tests: Sequence[LoadOptions]) -> dict[str, Any]:
    """Return the report of runs: the runs, warnings and definitions."""
    warnings = [WARNING] if tests[0].workload.name == SYNTHETIC else []
    if tests[0].body.get("ignore_eos"):
        warnings.append(
            "ignore_eos: outputs run on after their end, and loops are easy to draft; acceptance "
            "is not that of real outputs."
        )
    if not all(run["tokens_counted"] for run in runs):
        warnings.append(
            "The server does not count tokens as it streams: tokens of a chunk are shares of the "
            "total by text length, and ITL is an estimate."
        )
    return {
        "runs": runs,
        "slos": tests[0].slos,
        "bottleneck": bottleneck(runs),
        "warnings": warnings,
        "definitions": DEFINITIONS,
    }
