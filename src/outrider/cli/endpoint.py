"""``outrider verify --endpoint``: the audit of somebody's server."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from ..errors import OutriderError
from .common import report_console, telling, write_json

if TYPE_CHECKING:
    from ..audit.endpoint import EndpointReport

COLOURS = {"passed": "green", "failed": "bold red", "not offered": "dim", "inconclusive": "yellow"}


def table(report: EndpointReport) -> Table:
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


def drafts(report: EndpointReport) -> str:
    """Return what the server says about its drafts during the audit."""
    said = report.speculation
    if "spec_decode_draft_tokens" not in said:
        return f"drafts during the audit: {said['spec_decode_source']}"
    accepted, drafted = said["spec_decode_accepted_tokens"], said["spec_decode_draft_tokens"]
    return f"drafts during the audit: {accepted} of {drafted} draft tokens accepted"


def show(report: EndpointReport) -> None:
    """Print the verdict, the table, and how to repeat it."""
    console = report_console(on_stderr=False)
    console.print(f"{report.verdict}\n", style="bold")
    console.print(table(report))
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


def audit(endpoint: str, json_: bool, **options: Any) -> None:
    """Audit a server, show the report, and raise ``OutriderError`` unless it passes.

    ``options`` are those of ``verify_endpoint``.
    """
    from ..audit.endpoint import verify_endpoint

    with telling("asking the server") as tell:
        report = verify_endpoint(endpoint, progress=tell, **options)
    if json_:
        write_json(report.as_json(), "-")
    else:
        show(report)
    if report.passed:
        return
    sys.stdout.flush()
    failed = any(result.failed for result in report.results)
    raise OutriderError(
        "the audit found a violation." if failed else "the audit could not test anything."
    )
