"""``outrider verify``: the audit of a pair, or of a server."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from ..base.extras import need_torch
from ..errors import OutriderError
from .common import (
    ApiKey,
    AsJson,
    model_folder,
    new_table,
    report_console,
    screen,
    status,
    telling,
    write_json,
)
from .flags import argument, engine_options, setting, with_flags

if TYPE_CHECKING:
    from ..audit.endpoint import EndpointReport
    from ..audit.outcome import AuditReport, Check

SHOWN = 5  # violations and ties of each check that are spelt out
LARGEST_SEED = 2**64 - 1
SAMPLES, MANY = 512, 4096
COLOURS = {
    "passed": "green", "failed": "bold red", "differs": "yellow", "not offered": "dim",
    "inconclusive": "yellow", "holds": "green", "fails": "bold red", "cannot be told": "yellow",
}  # fmt: skip


def tested(check: Check, draws: int) -> str:
    """Return the scope of a check in words."""
    if check.name != "distributions":
        runs = f", {len(check.runs)} ways to run" if check.runs else ""
        return f"{check.tested} tokens{runs}"
    return f"{check.tested} comparisons, {check.contexts} contexts x {draws} draws"


def table(report: AuditReport) -> Table:
    """Return the checks, a line each."""
    grid = new_table("demanded", "tested", "ties", "verdict")
    for check in report.checks:
        verdict = Text("pass", "green") if check.passed else Text("VIOLATION", "bold red")
        grid.add_row(check.claim, tested(check, report.draws), str(len(check.ties)), verdict)
    return grid


def show(report: AuditReport) -> None:
    """Print the verdict, the table, and how small an error would have been seen."""
    console = screen(soft_wrap=True)
    console.print(f"{report.verdict}\n", style="bold")
    console.print(table(report))
    for check in report.checks:
        for kind, texts in (("violation", check.violations), ("tie", check.ties)):
            for text in texts[:SHOWN]:
                console.print(f"{kind}: {text}")
            if len(texts) > SHOWN:
                console.print(f"... and {len(texts) - SHOWN} more of the kind")
    for name, drafted, accepted in (run for check in report.checks for run in check.runs):
        console.print(f"{name}: {accepted} of {drafted} draft tokens accepted", style="dim")
    if report.visible is not None:
        console.print(
            f"\nsmallest visible error of a rule, as total variation: "
            f"{report.visible.everywhere:.2g} if it is the same in all contexts, "
            f"{report.visible.somewhere:.2g} in one alone, {report.visible.tokens:.2g} in the "
            f"joint distribution of three tokens; a false alarm once in a million audits"
        )
    console.print(
        f"{report.size}, model {report.model}, drafter {report.drafter}, "
        f"--seed {report.seed} repeats it"
    )


def endpoint_table(report: EndpointReport) -> Table:
    """Return the checks, a line each."""
    grid = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column("check", no_wrap=True)
    grid.add_column("verdict", no_wrap=True)
    grid.add_column("evidence", overflow="fold", ratio=3)
    grid.add_column("samples", justify="right")
    grid.add_column("would have shown", overflow="fold", ratio=2)
    for result in report.results:
        said = result.status.upper() if result.failed else result.status
        samples = str(result.samples) if result.samples else ""
        verdict = Text(said, COLOURS[result.status])
        grid.add_row(result.name, verdict, result.seen, samples, result.detects)
    return grid


def columns_table(report: EndpointReport) -> Table:
    """Return the verdicts about drafts, a line each."""
    grid = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column("with drafts", no_wrap=True)
    grid.add_column("verdict", no_wrap=True)
    grid.add_column("evidence", overflow="fold")
    for column in report.columns:
        verdict = Text(column.verdict, COLOURS[column.verdict])
        grid.add_row(column.name, verdict, Text(column.seen))
    return grid


def drafts(report: EndpointReport) -> str:
    """Return what the server says about its drafts during the audit."""
    said = report.speculation
    if "spec_decode_draft_tokens" not in said:
        return f"drafts during the audit: {said['spec_decode_source']}"
    accepted, drafted = said["spec_decode_accepted_tokens"], said["spec_decode_draft_tokens"]
    return f"drafts during the audit: {accepted} of {drafted} draft tokens accepted"


def show_endpoint(report: EndpointReport) -> None:
    """Print the verdict, the table, and how to repeat it."""
    console = report_console(on_stderr=False)
    console.print(f"{report.verdict}\n", style="bold")
    console.print(endpoint_table(report))
    console.print()
    console.print(columns_table(report))
    console.print(
        "\nwould have shown: an error so large, with 90 % probability; a false alarm of a law test "
        "once in a million audits",
        soft_wrap=True,
    )
    console.print(drafts(report), soft_wrap=True)
    console.print(
        f"{report.endpoint}, model {report.model}, against {report.reference}; "
        f"{report.requests} requests, --seed {report.seed} repeats them",
        soft_wrap=True,
    )


def audit_endpoint(endpoint: str, json_: bool, **options: Any) -> None:
    """Audit a server, show the report, and raise ``OutriderError`` unless it passes."""
    from ..audit.endpoint import verify_endpoint

    with telling("asking the server") as tell:
        report = verify_endpoint(endpoint, progress=tell, **options)
    if json_:
        write_json(report.as_json(), "-")
    else:
        show_endpoint(report)
    if not report.passed:
        sys.stdout.flush()
        failed = any(result.failed for result in report.results)
        end = "found a violation" if failed else "could not test anything"
        raise OutriderError(f"the audit {end}.")


def encoded(file: str, folder: str | Path) -> list[list[int]]:
    """Return the token ids of a workload file's prompts."""
    from ..bench.workload import load_workload
    from ..checkpoints.folders import find_folder
    from ..checkpoints.tokenizers import read_codec

    codec = read_codec(find_folder(folder))
    return [item.encode(codec) for item in load_workload(file).items]


@dataclass(frozen=True, kw_only=True)
class VerifyFlags:
    """The options of ``outrider verify``."""

    thorough: bool = setting(
        False,
        "64 contexts of 65,536 draws and many more mixes, or what takes two minutes.",
        "--thorough/--quick",
    )
    prompts: str | None = setting(
        None,
        "A .jsonl or .json file of prompts, as in outrider bench. The first 4 are used, 16 if "
        "thorough; Python code unless given.",
        metavar="FILE",
    )
    seed: int | None = setting(
        None, "Seed of the audit, to repeat it; random unless given.", min=0, max=LARGEST_SEED
    )
    endpoint: str | None = setting(
        None, "Audit this server, of any kind with OpenAI's API.", metavar="URL"
    )
    reference: str | None = setting(
        None,
        "What to compare the server with: another server, or a checkpoint that is run plainly "
        "here. Unless given, the server itself with drafting turned off.",
        metavar="URL|MODEL",
    )
    samples: int | None = setting(
        None,
        f"Answers to ask for with each set of options: {SAMPLES} unless given, {MANY} if thorough.",
        min=64,
        max=1_000_000,
    )
    laws: str | None = setting(
        None,
        "Sets of sampling options to test, comma-separated, as in 'temperature 0.5,top_k 2'; "
        "all unless given.",
        metavar="NAMES",
    )
    seconds: float | None = setting(
        None, "Stop sending requests after this long; no limit unless given.", min=1
    )
    api_key: ApiKey = None
    fault: str | None = setting(
        None, "Test the audit itself: install a wrong rule, which it must catch.", metavar="NAME"
    )
    json_: AsJson = False


@with_flags(
    VerifyFlags,
    engine_options(
        "drafter", "quantization", "drafter_quantization", "drafter_window", "preset", "threads"
    ),
)
def verify(
    flags: VerifyFlags,
    model: str | None = argument(
        "MODEL",
        "The target: a checkpoint's folder, .gguf file or hub name; the bundled pocket "
        "pair unless given. With --endpoint, the model's name there.",
        None,
    ),
    **options: Any,
) -> None:
    """Check that speculative output equals plain output, and acceptance rules their oracles."""
    given = {name: value for name, value in options.items() if value is not None}
    if flags.endpoint is not None:
        of_pairs = {**given, "prompts": flags.prompts, "fault": flags.fault}
        for name in (name for name, value in of_pairs.items() if value is not None):
            said = f"--{name.replace('_', '-')} is for the audit of a pair"
            raise typer.BadParameter(f"{said}; leave it out with --endpoint.")
        answers = flags.samples or (MANY if flags.thorough else SAMPLES)
        laws = [] if flags.laws is None else [name.strip() for name in flags.laws.split(",")]
        audit_endpoint(
            flags.endpoint, flags.json_, reference=flags.reference, model=model,
            key=flags.api_key, laws=laws, samples=answers, seconds=flags.seconds, seed=flags.seed,
        )  # fmt: skip
        return
    for name in ("reference", "laws", "samples", "seconds"):
        if getattr(flags, name) is not None:
            raise typer.BadParameter(f"--{name} needs --endpoint, the server to audit.")
    need_torch("outrider verify")
    with status("loading the models"):
        from .. import pocket
        from ..audit.faults import FAULTS
        from ..audit.verify import QUICK, THOROUGH
        from ..audit.verify import verify as audit
    if flags.fault is not None and flags.fault not in FAULTS:
        raise typer.BadParameter(f"--fault is {flags.fault!r}; give one of {', '.join(FAULTS)}.")
    folder, size = model_folder(model), THOROUGH if flags.thorough else QUICK
    texts = pocket.prompts() if flags.prompts is None else encoded(flags.prompts, folder)
    with telling("verifying") as tell:
        report = audit(
            folder, texts, size=size, seed=flags.seed,
            fault=FAULTS[flags.fault] if flags.fault else None, progress=tell, **given,
        )  # fmt: skip
    if flags.json_:
        write_json(report.as_json(), "-")
    else:
        show(report)
    if not report.passed:
        sys.stdout.flush()
        raise OutriderError("the audit found a violation.")
