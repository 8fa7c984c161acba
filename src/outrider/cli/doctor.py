"""``outrider ops doctor``: whether this machine and a pair of models are fit to serve."""

from __future__ import annotations

import json

import typer

from .common import FAILED, AsJson, Model, model_folder, status, write
from .flags import setting


def doctor(
    model: Model = None,
    drafter: str | None = setting(
        None, "The drafter: a checkpoint's or a head's folder.", metavar="PATH"
    ),
    port: int = setting(8000, "Where the server would listen."),
    host: str = setting("127.0.0.1", "The address of that."),
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
