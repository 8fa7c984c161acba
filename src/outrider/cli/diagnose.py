"""``outrider ops diagnose`` and ``ops doctor``: what is wrong with a server, or with a machine."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import typer

from ..base.outside.documents import read_toml
from ..errors import ConfigError
from .commands import FAILED
from .common import (
    ApiKey,
    AsJson,
    Model,
    Out,
    model_folder,
    status,
    writable,
    write,
    write_json,
)
from .flags import argument, setting


def pairs(texts: Iterable[str], option: str) -> dict[str, object]:
    """Return NAME=VALUE texts by name."""
    by_name: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"{option} is {text!r}; give NAME=VALUE.")
        by_name[name.strip()] = value.strip()
    return by_name


def read_thresholds(file: Path | None) -> dict[str, object]:
    """Return the thresholds of a TOML file."""
    return {} if file is None else read_toml(file, f"--thresholds {file}")


def diagnose(
    source: str = argument(
        "ENDPOINT|FILE",
        "A server's address; a saved page of /metrics; a report of outrider bench or vllm "
        "bench serve; or facts by name as JSON.",
    ),
    plain: str | None = setting(
        None,
        "The same without speculation. Two servers are also asked 8 short prompts, to "
        "compare their greedy answers.",
        metavar="ENDPOINT|FILE",
    ),
    before: str | None = setting(None, "An earlier report: what was lost since.", metavar="FILE"),
    fact: list[str] | None = setting(
        None, "A fact that the server does not tell, as in temperature=0.8.", metavar="NAME=VALUE"
    ),
    threshold: list[str] | None = setting(None, "Another threshold.", metavar="NAME=VALUE"),
    thresholds: Path | None = setting(None, "Other thresholds: a TOML file.", metavar="FILE"),
    seconds: float = setting(
        0.0, "Watch the server for this long; 0 uses its counts since its start.", min=0, max=86_400
    ),
    save: str | None = setting(
        None, "Keep what was seen: JSON to diagnose later.", metavar="FILE", callback=writable
    ),
    api_key: ApiKey = None,
    json_: AsJson = False,
    out: Out = None,
) -> None:
    """Find faults of speculation: symptoms, causes, remedies; exit with 1 if there are any."""
    from ..ops.diagnose.diagnose import judge, look, markdown
    from ..ops.diagnose.facts import check_thresholds
    from .reports import deliver

    limits = check_thresholds(read_thresholds(thresholds) | pairs(threshold or [], "--threshold"))
    with status("looking"):
        seen = look(source, plain, before, pairs(fact or [], "--fact"), api_key, seconds)
    if save is not None:
        if len(seen) > 1:
            raise ConfigError(
                "--save is for one server; a report of several runs is already a file."
            )
        write_json(seen[0].saved(), save)
    problems = [each for run in seen for each in judge(run.facts, limits, run.where)]
    report = {
        "seen": [{"where": run.where, "facts": run.facts, "notes": run.notes} for run in seen],
        "problems": [problem.to_json() for problem in problems],
    }
    deliver(report, markdown(seen, problems), json_, out)
    if problems:
        raise typer.Exit(FAILED)


def doctor(
    model: Model = None,
    drafter: str | None = setting(
        None, "The drafter: a checkpoint's or a head's folder.", metavar="PATH"
    ),
    port: int = setting(8000, "Port that the server would use."),
    host: str = setting("127.0.0.1", "Address that the server would use."),
    json_: AsJson = False,
) -> None:
    """Check the machine and the model before serving; exit with 1 if a check fails."""
    from ..ops.diagnose.doctor import FAIL, text_of
    from ..ops.diagnose.doctor import doctor as check

    with status("looking"):
        findings = check(str(model_folder(model)), drafter, port, host)
    failed = any(each.status == FAIL for each in findings)
    if json_:
        rows = [each._asdict() for each in findings]
        write_json({"fit": not failed, "findings": rows}, "-")
    else:
        write(text_of(findings))
    if failed:
        raise typer.Exit(FAILED)
