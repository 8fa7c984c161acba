"""``outrider bench serve``: a load test of any server with OpenAI's API."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from ..bench.intervals import shown
from ..errors import ConfigError
from .bench import named_workload
from .commands import INTERRUPTED
from .common import (
    AsJson,
    Out,
    new_table,
    now_and_then,
    numbers,
    report_console,
    writable,
    write_report,
)
from .flags import argument, setting, with_flags

KEYS = ["OUTRIDER_API_KEY", "OPENAI_API_KEY"]
PERCENTILES = (50, 90, 95, 99)
EVERY = 0.25
"""Seconds between two lines of progress."""


def table(report: dict[str, Any]) -> Table:
    """Return the loads as a table, a row each; latencies as P50/90/95/99 in milliseconds."""
    runs = report["runs"]
    title = f"{runs[0]['endpoint']} · {runs[0]['model_id']} · {runs[0]['dataset']}"
    times = [f"{name} ms\nP50/90/95/99" for name in ("TTFT", "ITL", "TPOT", "E2E")]
    figures = ("ok", "failed", "requests/s", "tokens/s", "goodput/s", *times, "accepted", "length")
    grid = new_table("load", right=figures, title=title)
    for run in runs:
        side = f"{run['side']}, " if "side" in run else ""
        grid.add_row(
            f"{side}{run['label']}", str(run["completed"]), str(run["failed"]),
            _figure(run["request_throughput"]), _figure(run["output_throughput"]),
            _figure(run["request_goodput"]),
            *("/".join(_figure(run[f"p{p}_{name}_ms"]) or "-" for p in PERCENTILES)
              for name in ("ttft", "itl", "tpot", "e2el")),
            _figure(run.get("spec_decode_acceptance_rate"), " %"),
            _figure(run.get("spec_decode_acceptance_length")),
        )  # fmt: skip
    return grid


def _figure(value: float | None, unit: str = "") -> str:
    """Return a figure with three digits or more, nothing for none."""
    if value is None:
        return ""
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}{unit}"


def show(report: dict[str, Any], on_stderr: bool) -> None:
    """Print the table, comparisons, the bottleneck, warnings and definitions."""
    console = report_console(on_stderr)
    console.print(table(report))
    for each in report.get("comparison", ()):
        first, second = each["sides"]
        for key, value in each.items():
            if not isinstance(value, dict) or value["ratio"] is None:
                continue
            console.print(
                f"{each['label']} · {key}: {first} {_figure(value[first])}, {second} "
                f"{_figure(value[second])}, ratio {value['ratio']:.3f} "
                f"{shown(value['interval'], '.3f')} over {value['rounds']} rounds"
            )
    for run in report["runs"]:
        for error, count in run["error_kinds"].items():
            console.print(f"{run['label']}: {count} failed: {error}")
        if "spec_decode_acceptance_rate" not in run:
            console.print(f"{run['label']}: acceptance: {run['spec_decode_source']}")
    limit = report["bottleneck"]
    console.print(f"limit, a hint: {limit['points_to']} ({limit['evidence']})")
    for name, text in report["definitions"].items():
        console.print(f"{name}: {text}", style="dim")
    for text in report["warnings"]:
        typer.echo(f"warning: {text}", err=True)


def progress() -> Callable[[str, int, int, int], None]:
    """Return a function that shows progress on stderr: in place on a terminal, else in lines."""
    terminal, line, last = sys.stderr.isatty(), now_and_then(), 0.0

    def tell(label: str, ended: int, failed: int, total: int) -> None:
        nonlocal last
        text = f"{label}: {ended} of {total}{f', {failed} failed' if failed else ''}"
        if not terminal:
            line(text)
        elif ended == total or time.perf_counter() - last >= EVERY:
            last = time.perf_counter()
            end = "\n" if ended == total else ""
            typer.echo(f"\r\x1b[2K{text}{end}", err=True, nl=False)

    return tell


def shapes(
    concurrency: str | None,
    rate: str | None,
    trace: str | None,
    burstiness: float,
    ramp: str | None,
    most: int | None = None,
) -> tuple[Any, ...]:
    """Return the load shapes of the options; without any a closed loop of ``most``, or of one."""
    from ..bench.load.arrivals import EXPONENTIAL, Closed, Open, load_trace

    end, exponential, seconds = None, False, 0.0
    if ramp is not None:
        value, _, kind = ramp.partition(":")
        (number,) = numbers(value, float, "--ramp")
        if kind not in ("", "linear", EXPONENTIAL):
            raise typer.BadParameter(
                f"--ramp {ramp!r}: give a number, optionally followed by :exponential."
            )
        end, exponential, seconds = number, kind == EXPONENTIAL, number
    loads: list[Any] = []
    if concurrency:
        sizes = numbers(concurrency, int, "--concurrency")
        loads += [Closed(size, 0.0 if rate else seconds) for size in sizes]
    if rate:
        rates = numbers(rate, float, "--request-rate")
        loads += [Open(each, burstiness, end, exponential) for each in rates]
    if trace:
        loads.append(load_trace(trace))
    return tuple(loads or [Closed(most or 1, seconds)])


def extra(text: str | None) -> dict[str, Any]:
    """Return the fields that ``--extra-body`` adds to each request."""
    from ..base.outside.documents import parse_json

    fields = parse_json(text or "{}", "--extra-body")
    if not isinstance(fields, dict):
        raise typer.BadParameter('--extra-body is not an object; write {"top_p": 0.9}.')
    return fields


def save(report: dict[str, Any], html: str | None, results: Path | None) -> None:
    """Write the page, and a file for each load as ``vllm bench serve`` would."""
    try:
        if html is not None:
            from ..bench.load.page import page

            Path(html).write_text(page(report), encoding="utf-8", errors="replace")
        if results is not None:
            results.mkdir(parents=True, exist_ok=True)
            for i, run in enumerate(report["runs"]):
                name = f"{run['backend']}-{run['date']}-{i:03d}.json"
                (results / name).write_text(json.dumps(run), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}.") from None


@dataclass(frozen=True, kw_only=True)
class LoadFlags:
    """The options of ``outrider bench serve``."""

    prompts: str = setting(
        "code",
        "code, edit, prose, json, chat; a .jsonl or .json file of prompts, in ShareGPT's layout, "
        "too; synthetic or synthetic:WORDS, on which acceptance means nothing.",
        metavar="NAME|FILE",
    )
    concurrency: str | None = setting(
        None, "Closed loops: numbers of requests at once, comma-separated.", metavar="INTS"
    )
    request_rate: str | None = setting(
        None,
        "Open loops: requests per second, comma-separated; inf sends all at once.",
        metavar="FLOATS",
    )
    num_prompts: int = setting(100, "Requests of each load.")
    duration: float | None = setting(None, "End each load after this many seconds.")
    max_tokens: int = setting(128, "Output tokens of each request.")
    temperature: float | None = setting(
        None, "Sampling temperature; the server's own unless given."
    )
    model: str | None = setting(
        None, "The model to ask; the first that the server lists unless given."
    )
    api_key: str | None = setting(None, "The API key of the servers.", envvar=KEYS, metavar="KEY")
    compare_speculation: bool = setting(
        False, "Load an Outrider server with speculation off and on, in turns."
    )
    json_: AsJson = False
    out: Out = None
    compare: str | None = setting(None, "Load this server, too, in turns.", metavar="URL")
    rounds: int = setting(7, "Rounds of a comparison.", min=6)
    trace: str | None = setting(
        None,
        "Open loop at recorded times: JSON lines of seconds, or of objects with a timestamp in "
        "milliseconds.",
        metavar="FILE",
    )
    burstiness: float = setting(1.0, "Shape of the gamma-distributed gaps; 1 is Poisson, inf even.")
    ramp: str | None = setting(
        None,
        "Open loops: the rate at the end, along a line, or with :exponential. Closed loops: "
        "seconds over which the first requests start.",
        metavar="NUMBER",
    )
    max_concurrency: int | None = setting(
        None, "Hold open loops back while so many requests run; alone it is --concurrency."
    )
    warm_up: int = setting(4, "Requests before each load that are not measured.")
    ignore_eos: bool = setting(False, "Generate outputs of full length; this distorts acceptance.")
    extra_body: str | None = setting(
        None, "Further fields of each request, as JSON.", metavar="JSON"
    )
    chat: bool | None = setting(
        None,
        "Which endpoint to call; it follows from the data set unless given.",
        "--chat/--completions",
    )
    goodput: list[str] | None = setting(
        None,
        "A latency target: ttft, itl, tpot or e2el; may be given several times.",
        metavar="NAME:MS",
    )
    seed: int = setting(0, "Seed of arrivals and of the order of prompts.", min=0)
    timeout: float = setting(600.0, "Most seconds that a request may take.")
    detailed: bool = setting(False, "Also report every request.")
    html: str | None = setting(
        None,
        "Write the report as one HTML page; needs outrider[plot].",
        metavar="FILE",
        callback=writable,
    )
    result_dir: Path | None = setting(
        None, "Write a file for each load as vllm bench serve --save-result does.", file_okay=False
    )

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that each request has besides its prompt."""
        own = {"temperature": self.temperature, "ignore_eos": self.ignore_eos or None}
        return {n: v for n, v in own.items() if v is not None} | extra(self.extra_body)


@with_flags(LoadFlags)
def serve(
    flags: LoadFlags,
    url: str = argument("URL", "The server, as in http://127.0.0.1:8000."),
) -> None:
    """Load a server with OpenAI's API and measure what its users would see.

    Ctrl-C ends the load and keeps what was measured.
    """
    from ..bench.load.datasets import load_prompts
    from ..bench.load.figures import parse_slos
    from ..bench.load.measure import LoadOptions, measure_load
    from ..bench.load.paired import compare

    if flags.html is not None:
        import_module("outrider.base.plots")  # says before the load that matplotlib is missing
    if flags.compare and flags.compare_speculation:
        raise typer.BadParameter("give --compare or --compare-speculation, not both.")
    if flags.temperature is not None and not 0 <= flags.temperature < math.inf:
        raise typer.BadParameter(f"--temperature is {flags.temperature}; give 0 or more.")
    code, most = flags.prompts == "code", flags.max_concurrency
    options = LoadOptions(
        url=url,
        workload=named_workload("code") if code else load_prompts(flags.prompts, flags.seed),
        shapes=shapes(
            flags.concurrency, flags.request_rate, flags.trace, flags.burstiness, flags.ramp, most
        ),
        requests=flags.num_prompts, seconds=flags.duration, warm_up=flags.warm_up,
        max_concurrency=most, max_tokens=flags.max_tokens, model=flags.model, chat=flags.chat,
        body=flags.fields, slos=parse_slos(flags.goodput or ()), seed=flags.seed,
        timeout=flags.timeout, detailed=flags.detailed, key=flags.api_key or None,
    )  # fmt: skip
    if flags.compare or flags.compare_speculation:
        report = compare(options, flags.compare, flags.rounds, progress())
    else:
        report = measure_load(options, progress())
    write_report(report, flags.json_, flags.out)
    save(report, flags.html, flags.result_dir)
    show(report, on_stderr=flags.json_)
    if any(run["interrupted"] for run in report["runs"]):
        typer.echo("interrupted: the report holds what was measured until then", err=True)
        raise typer.Exit(INTERRUPTED)
