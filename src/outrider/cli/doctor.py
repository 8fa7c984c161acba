"""``outrider ops doctor``: whether this machine and a pair of models are fit to serve."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from .common import FAILED, AsJson, Model, model_folder, status, write


def doctor(
    model: Model = None,
    drafter: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="The drafter: a checkpoint's or a head's folder."),
    ] = None,
    port: Annotated[int, typer.Option(help="Where the server would listen.")] = 8000,
    host: Annotated[str, typer.Option(help="The address of that.")] = "127.0.0.1",
    json_: AsJson = False,
) -> None:
    """Check the machine and the pair before serving; exit with 1 where something fails."""
    from ..ops.diagnose.doctor import FAIL, text_of
    from ..ops.diagnose.doctor import doctor as check

    with status("looking"):
        findings = check(str(model_folder(model)), drafter, port, host)
    failed = any(each.status == FAIL for each in findings)
    if json_:
        report = {"fit": not failed, "findings": [each._asdict() for each in findings]}
        write(json.dumps(report, indent=1) + "\n")
    else:
        write(text_of(findings))
    if failed:
        raise typer.Exit(FAILED)
