"""``outrider ops checklist``: thirty points before speculation serves production."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..errors import ConfigError
from .commands import FAILED
from .common import ApiKey, AsJson, Out, status
from .diagnose import pairs
from .flags import argument, setting

if TYPE_CHECKING:
    from ..ops.diagnose.checklist import State


def _ids(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _facts(
    source: str | None, plain: str | None, before: str | None, key: str | None,
    model: str | None, drafter: str | None,
) -> dict[str, object]:  # fmt: skip
    """Return the facts that can be verified here."""
    from ..ops.diagnose.diagnose import look
    from ..ops.diagnose.doctor import pair_facts

    facts: dict[str, object] = {}
    if (model is None) != (drafter is None):
        raise ConfigError("a pair is a target and a drafter; give MODEL and --drafter.")
    if source is None and (plain is not None or before is not None):
        raise ConfigError("--plain and --before compare with a server or report; give --source.")
    if source is not None:
        seen = look(source, plain, before, key=key)
        if len(seen) > 1:
            raise ConfigError(f"{source} has {len(seen)} runs; give a report of one run.")
        facts |= seen[0].facts
    if model is not None and drafter is not None:
        facts |= pair_facts(model, drafter)
    return facts


def _ask(state: State) -> tuple[list[str], list[str]]:
    """Ask what is open on the terminal; return the ids of yes and of no."""
    from ..ops.diagnose.checklist import OPEN, points

    said: dict[str, list[str]] = {"y": [], "n": []}
    for point in points():
        if state[point.id].status != OPEN:
            continue
        typer.echo(f"\n{point.title}\n  {point.check}", err=True)
        given = typer.prompt("  so? [y]es [n]o [s]kip [q]uit", default="s", err=True)
        letter = given.strip().lower()[:1]
        if letter == "q":
            break
        if letter in said:
            said[letter].append(point.id)
    return said["y"], said["n"]


def checklist(
    model: str | None = argument("MODEL", "The target of a pair.", None),
    state: Path | None = setting(None, "File in which answers are kept.", metavar="FILE"),
    source: str | None = setting(
        None, "A server or a report with facts about the points.", metavar="ENDPOINT|FILE"
    ),
    plain: str | None = setting(None, "The same without speculation.", metavar="ENDPOINT|FILE"),
    before: str | None = setting(None, "The report from staging.", metavar="FILE"),
    drafter: str | None = setting(None, "The drafter.", metavar="PATH"),
    yes: str | None = setting(None, "Points that hold, comma-separated.", metavar="IDS"),
    no: str | None = setting(None, "Points that do not hold, comma-separated.", metavar="IDS"),
    fact: list[str] | None = setting(
        None, "A fact that neither server nor report tells.", metavar="NAME=VALUE"
    ),
    api_key: ApiKey = None,
    json_: AsJson = False,
    out: Out = None,
) -> None:
    """Go through the checklist for production; exit with 1 while a point is open or not done.

    What facts show is ticked. The rest is asked where this is a terminal and neither --yes nor
    --no is given.
    """
    from ..ops.diagnose.checklist import YES, markdown, read_state, save_state, to_json
    from ..ops.diagnose.checklist import checklist as answer
    from .reports import deliver

    kept = {} if state is None else read_state(state)
    with status("verifying"):
        known = _facts(source, plain, before, api_key, model, drafter)
    known |= pairs(fact or [], "--fact")
    answers = answer(kept, facts=known, yes=_ids(yes), no=_ids(no))
    if yes is None and no is None and sys.stdin is not None and sys.stdin.isatty():
        try:
            said = _ask(answers)
        except typer.Abort:
            said = ([], [])
        answers = answer(answers, yes=said[0], no=said[1])
    if state is not None:
        save_state(answers, state)
    deliver(to_json(answers), markdown(answers), json_, out)
    if any(each.status != YES for each in answers.values()):
        raise typer.Exit(FAILED)
