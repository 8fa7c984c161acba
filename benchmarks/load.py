"""What one core of ``outrider bench serve`` carries, and whether others measure the same.

The capacity: requests and chunks a second against a stub (``stub.py``) that has the other core, at
a rate that the load shape sets; it is carried if requests are sent when they are due and the stub's
schedule comes back in the figures. The agreement: ``vllm bench serve`` and guidellm, where they are
installed (make clients), on the same stub.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider import pocket
from outrider.base.threads import cpu_name
from outrider.bench.load.arrivals import Closed, Open
from outrider.bench.load.datasets import load_prompts
from outrider.bench.load.measure import LoadOptions, measure_load
from outrider.cli.common import Out, write_json

from .install import GUIDELLM, VLLM, Environment
from .peers.known import FOLDER

KEYS = ("request_throughput", "output_throughput", "median_ttft_ms", "median_e2el_ms")
FIRST, INTERVAL = 0.1, 0.02
STREAMS = 8


@contextmanager
def stub(chunks: int, tokens: int = 1) -> Iterator[str]:
    """A stub on the last CPU; its address."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.stub",
        *map(str, (chunks, tokens, FIRST, INTERVAL)),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        os.sched_setaffinity(process.pid, {max(os.sched_getaffinity(0))})
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def capacity(rate: float, chunks: int, seconds: float) -> dict[str, Any]:
    """Return what one core carried at ``rate`` requests a second of ``chunks`` chunks each."""
    before = os.sched_getaffinity(0)
    with stub(chunks) as url:
        os.sched_setaffinity(0, {min(before)})
        prompts = load_prompts("synthetic:64")
        options = LoadOptions(
            url, prompts, (Open(rate, math.inf),), requests=int(rate * seconds), max_tokens=chunks
        )
        cpu = time.process_time()
        (run,) = measure_load(options)["runs"]
        cpu = time.process_time() - cpu
        os.sched_setaffinity(0, before)
    # Of the time in which requests were sent: the last ones' answers come after it.
    steady = run["completed"] / (run["duration"] - run["median_e2el_ms"] / 1000)
    return {
        "requests_per_second": steady,
        "chunks_per_second": steady * chunks,
        "asked_requests_per_second": rate,
        "failed": run["failed"],
        "cpu_share": cpu / run["duration"],
        "p99_send_lag_ms": run["p99_send_lag_ms"],
        "median_ttft_ms": run["median_ttft_ms"],
        "p99_ttft_ms": run["p99_ttft_ms"],
        "median_e2el_ms": run["median_e2el_ms"],
        "schedule_ttft_ms": 1000 * FIRST,
        "schedule_e2el_ms": 1000 * (FIRST + INTERVAL * (chunks - 1)),
    }


def ours(url: str, requests: int, tokens: int, streams: int) -> dict[str, Any]:
    """Return our figures of a closed loop."""
    options = LoadOptions(
        url, load_prompts("synthetic:64"), (Closed(streams),), requests, max_tokens=tokens,
        body={"temperature": 0, "ignore_eos": True},
    )  # fmt: skip
    (run,) = measure_load(options)["runs"]
    return {key: run[key] for key in KEYS}


def call(environment: Environment, folder: str, *arguments: object) -> None:
    """Run a client of others on the first CPU."""
    command: list[str | Path] = [environment.python.with_name(environment.name)]
    if environment is VLLM:
        command = [VLLM.python, "-P", FOLDER / "runners" / "vllm_command.py"]
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    subprocess.run(
        [*map(str, command), *map(str, arguments)], cwd=folder, check=True, stdout=sys.stderr,
        env={**kept, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        preexec_fn=lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
    )  # fmt: skip


def vllms(url: str, requests: int, tokens: int, streams: int) -> dict[str, Any]:
    """Return the figures of ``vllm bench serve`` at the same load."""
    with tempfile.TemporaryDirectory() as folder:
        call(
            VLLM, folder, "bench", "serve", "--backend", "openai", "--base-url", url,
            "--model", "stub", "--tokenizer", pocket.PATH, "--dataset-name", "random",
            "--random-input-len", 64, "--random-output-len", tokens, "--num-prompts", requests,
            "--max-concurrency", streams, "--temperature", 0, "--num-warmups", streams,
            "--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result",
            "--result-dir", folder, "--result-filename", "result.json",
        )  # fmt: skip
        result = json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
    return {key: result[key] for key in KEYS}


def guidellms(url: str, requests: int, tokens: int, streams: int) -> dict[str, Any]:
    """Return guidellm's figures at the same load."""
    with tempfile.TemporaryDirectory() as folder:
        call(
            GUIDELLM, folder, "run", "--backend", f"kind=openai_http,target={url}",
            "--profile", f"kind=concurrent,streams={streams}",
            "--constraint", f"kind=max_requests,count={requests}",
            "--tokenizer", f"kind=hf_auto,model={pocket.PATH}",
            "--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={tokens}",
            "--output", "kind=json,path=result.json", "--disable-console",
        )  # fmt: skip
        report = json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
    metrics = report["benchmarks"][0]["metrics"]
    good = {
        name: values["successful"]
        for name, values in metrics.items()
        if isinstance(values, dict) and "successful" in values
    }
    return {
        "request_throughput": good["requests_per_second"]["mean"],
        "output_throughput": good["output_tokens_per_second"]["mean"],
        "median_ttft_ms": good["time_to_first_token_ms"]["median"],
        "median_e2el_ms": 1000 * good["request_latency"]["median"],
    }


def agreement(requests: int, tokens: int, streams: int) -> dict[str, Any]:
    """Return the figures of all clients that are installed, on one stub."""
    figures: dict[str, Any] = {}
    with stub(tokens) as url:
        clients = {"outrider": ours}
        clients |= {"vllm": vllms} if VLLM.ready else {}
        clients |= {"guidellm": guidellms} if GUIDELLM.ready else {}
        for name, client in clients.items():
            try:
                figures[name] = client(url, requests, tokens, streams)
                print(name, figures[name], file=sys.stderr, flush=True)
            except (subprocess.CalledProcessError, KeyError, TypeError) as error:
                figures[name] = {"error": repr(error)}
    return figures


def main(
    rate: Annotated[float, typer.Option(help="Requests a second.")] = 500.0,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of each answer.")] = 40,
    seconds: Annotated[float, typer.Option(help="How long requests are sent.")] = 20.0,
    requests: Annotated[
        int, typer.Option(help="Requests of the comparison with other clients; 0 skips it.")
    ] = 160,
    streams: Annotated[int, typer.Option(min=1, help="Of the comparison.")] = STREAMS,
    out: Out = "-",
) -> None:
    """Measure what one core of the load generator carries, and whether others measure the same."""
    report: dict[str, Any] = {
        "cpu": cpu_name(),
        "date": time.strftime("%Y-%m-%d"),
        "capacity": capacity(rate, chunks, seconds),
    }
    if requests:
        print(report["capacity"], file=sys.stderr, flush=True)
        report["agreement"] = agreement(requests, chunks, streams)
    write_json(report, out)
