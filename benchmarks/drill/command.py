"""The guard's drill: two real servers, HAProxy, Prometheus, faults, and the guard.

One server speculates, the other is the plain standby; clients are those of ``outrider bench
serve`` and reach both through HAProxy. In each case something goes wrong, and the drill reports
what the guard did, after how long, and what clients lost. It needs Debian's packages haproxy and
prometheus; without them it says so and ends well.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from outrider import pocket
from outrider.bench.machine import machine
from outrider.cli.common import Out, write_json

from .cases import GOOD, NOISE, Case, Stage, healthy, work_folder
from .faults import noise_drafter
from .fleet import LONG, SHORT, Fleet, Pace, missing

QUIET_SHORT, QUIET_LONG = 2.0, 20.0
"""Windows after a return in which nothing may change: ten minutes in the long form."""


def main(
    short: Annotated[
        bool, typer.Option("--short", help="Windows of 6 s instead of 30, for CI.")
    ] = False,
    cases: Annotated[str, typer.Option(help="Which, with commas between.")] = ",".join(
        [*NOISE, *GOOD]
    ),
    quiet: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds after a return in which nothing may change."),
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep configs, logs and audits there.")
    ] = None,
    out: Out = "-",
) -> None:
    """Drill the guard on a real fleet; the exit code is 1 if a case fails."""
    names = [name for name in cases.split(",") if name]
    known = {**NOISE, **GOOD}
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"--cases: {name!r} is none of {', '.join(known)}.")
    if (need := missing()) is not None:
        typer.echo(f"skipped: the drill needs HAProxy and Prometheus; run: {need}", err=True)
        return
    # Background jobs of a shell ignore SIGINT, and so would the loads, which are ended by it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pace = SHORT if short else LONG
    if quiet is None:
        quiet = pace.window * (QUIET_SHORT if short else QUIET_LONG)
    with tempfile.TemporaryDirectory(prefix="outrider-drill-") as folder:
        results = list(drill(keep or Path(folder), names, pace, quiet))
    passed = all(case["passed"] for case in results)
    pacing = {
        "interval": pace.interval, "window": pace.window, "scrape": pace.scrape, "quiet": quiet,
    }  # fmt: skip
    write_json({"machine": machine(), "pace": pacing, "cases": results, "passed": passed}, out)
    raise typer.Exit(not passed)


def drill(folder: Path, names: list[str], pace: Pace, quiet: float) -> Iterable[Case]:
    """Yield the results of the cases, told as they come."""
    noise = [name for name in NOISE if name in names]
    good = [name for name in GOOD if name in names]
    if noise:
        drafter = noise_drafter(work_folder(folder, "drafter"))
        with Fleet(work_folder(folder, "noise"), drafter, pace) as fleet:
            stage = Stage(fleet, quiet)
            for name in noise:
                yield told(NOISE[name](stage))
    if good:
        with Fleet(work_folder(folder, "good"), pocket.PATH / "drafter", pace) as fleet:
            stage = Stage(fleet, quiet)
            yield told(healthy(stage))
            for name in good:
                yield told(GOOD[name](stage))


def told(case: Case) -> Case:
    """Tell a case on stderr, and return it."""
    wrong = [name for name, good in case["checks"].items() if not good]
    after = f" after {case['seconds']} s ({case['windows']} windows)" if "seconds" in case else ""
    verdict = f"FAILED: {', '.join(wrong)}" if wrong else "passed"
    typer.echo(f"{case['case']}:{after} {verdict}", err=True)
    return case
