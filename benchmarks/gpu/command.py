"""The battery for a GPU: five checks in under four minutes, or their rehearsal on a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from time import monotonic
from typing import Annotated, Any, Literal

import typer

from outrider.base.extras import need_torch
from outrider.bench.machine import machine
from outrider.cli.commands import FAILED
from outrider.cli.common import AsJson, Out, write_report
from outrider.errors import ConfigError, NumericalError
from outrider.native.choice import VARIABLE
from outrider.ops.diagnose.host import gpus

from ..common import table
from .checks import Check, Part, Processes, Result

MACHINE = Check("machine", "benchmarks.gpu.command:torch_facts", 4)
CHECKS = (
    Check("noise", "benchmarks.gpu.draws:noise", 2),
    Check("equality", "benchmarks.gpu.decoding:equality", 5),
    Check("decode", "benchmarks.gpu.decoding:decode", 3),
    Check("kernel", "benchmarks.gpu.draws:kernel", 3),
    Check("rule", "benchmarks.gpu.draws:rule", 2),
)
IMPORTED = "benchmarks.gpu.draws", "benchmarks.gpu.decoding", "transformers.activations"
SPARE_SECONDS = 15.0
"""For the start of the command, ends of processes that hang, and the report."""
LEAST_MINUTES = 0.5


def torch_facts(device: str) -> Iterator[Part]:
    """Yield what torch says of itself and of its GPUs."""
    from outrider.engine.probe import torch_and_gpus

    yield Part("torch", torch_and_gpus())


def facts(found: Result, device: str) -> dict[str, Any]:
    """Return what a report says of the machine. Raises ConfigError: there is no such device."""
    if found.end.verdict != "passed":
        raise NumericalError(f"torch cannot be asked for its devices: {found.end.reason}.")
    of_torch = found.parts[0].figures
    if device == "cuda" and not of_torch["cuda"]:
        raise ConfigError(
            f"torch {of_torch['torch']} finds no CUDA device here; run this where it finds one "
            "(outrider ops doctor says why it does not), or rehearse it with --device cpu."
        )
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    card = of_torch["cuda"][0] if device == "cuda" else {}
    driver = next((gpu.driver for gpu in gpus()), None)
    return {
        **machine(), "gpu": card.get("name"), "capability": card.get("capability"),
        "gpu_memory": card.get("memory"), "driver": driver, "cuda": of_torch["cuda_build"],
        "triton": triton,
    }  # fmt: skip


def run_all(
    checks: Sequence[Check], device: str, seconds: float, processes: Processes
) -> Iterator[Result]:
    """Yield the results of checks that share ``seconds`` by weight; what one leaves, others get."""
    end = monotonic() + seconds
    for number, check in enumerate(checks):
        share = check.weight / sum(each.weight for each in checks[number:])
        yield processes.run(check, device, max(0.0, share * (end - monotonic())))


def figures_of(part: Part) -> str:
    """Return a part's figures in a line."""
    return ", ".join(f"{name} {value}" for name, value in part.figures.items())


def lines_of(result: Result) -> Iterator[str]:
    """Yield the lines of a report on one check."""
    why = f" ({result.end.reason})" if result.end.reason else ""
    yield f"{result.name}: {result.end.verdict} in {result.seconds:.0f} s{why}"
    if result.parts:
        yield ""
        rows = [(part.name, part.wrong or "", figures_of(part)) for part in result.parts]
        yield from table(("part", "wrong", "figures"), rows)
    yield ""


def ending(where: dict[str, Any], device: str) -> Iterator[str]:
    """Yield the last lines of the report: where it was made."""
    if device == "cpu":
        yield "A rehearsal on a CPU: no GPU was used, and its times measure nothing."
    yield (
        f"{where['gpu'] or where['cpu']}, driver {where['driver']}, CUDA {where['cuda']}, "
        f"torch {where['torch']}, Triton {where['triton']}, {where['date'][:10]}."
    )


def main(
    device: Annotated[
        Literal["cuda", "cpu"], typer.Option(help="cpu is the rehearsal, at tiny sizes.")
    ] = "cuda",
    minutes: Annotated[
        float, typer.Option(min=LEAST_MINUTES, help="In which all of it ends.")
    ] = 4.0,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Check on a GPU what is promised of one; exit with 1 where something is wrong."""
    need_torch("benchmarks gpu")
    if device == "cpu":  # the checks' processes inherit it: torch is what is rehearsed, and is tiny
        os.environ |= {"TRITON_INTERPRET": "1", VARIABLE: "off", "OMP_NUM_THREADS": "1"}
    begin, seconds = monotonic(), 60 * minutes - SPARE_SECONDS
    processes = Processes(IMPORTED)
    found = run_all([MACHINE, *CHECKS], device, seconds, processes)
    where, printed = facts(next(found), device), not as_json and out != "-"
    results = list[Result]()
    for result in found:  # minutes pass between them
        results.append(result)
        if printed:
            typer.echo("\n".join(lines_of(result)))
    report = {
        "command": f"python -m benchmarks gpu --device {device} --minutes {minutes:g}",
        "rehearsal": device == "cpu", "seconds": round(monotonic() - begin, 1), "machine": where,
        "checks": [
            {
                "name": result.name, **result.end._asdict(), "seconds": round(result.seconds, 1),
                "parts": [asdict(part) for part in result.parts],
            }
            for result in results
        ],
    }  # fmt: skip
    write_report(report, as_json, out)
    if printed:
        typer.echo("\n".join(ending(where, device)))
    if any(result.end.verdict == "failed" for result in results):
        raise typer.Exit(FAILED)
