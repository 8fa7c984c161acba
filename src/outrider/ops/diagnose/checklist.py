"""``checklist``: thirty points to check before production, answered by facts or by people."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Final, Literal, NamedTuple

from ...base.outside.documents import parse_json, read
from ...base.outside.models import DataPart, Part, checked
from ...errors import ConfigError, shown
from .facts import Facts, check_facts, check_thresholds, data, figure, holds

Status = Literal["yes", "no", "open"]
YES: Final = "yes"
NO: Final = "no"
OPEN: Final = "open"
SIGNS = {YES: "x", NO: "!", OPEN: " "}


class Point(NamedTuple):
    """One point: what should be so, how to see it, what to do, and how to verify it."""

    id: str
    area: str
    title: str
    check: str
    remedy: str
    verify: Sequence[str] = ()


@dataclass(frozen=True)
class PointAnswer(DataPart):
    """The answer to a point: its status, who gave it, on what evidence, and when."""

    status: Status = OPEN
    by: str = ""
    evidence: str = ""
    date: str = ""


State = dict[str, PointAnswer]
"""Answers by the ids of points."""


def points() -> list[Point]:
    """Return all points in order."""
    return [Point(**each) for each in data("checklist")["point"]]


def checklist(
    state: Mapping[str, PointAnswer] | None = None,
    *,
    facts: Mapping[str, object] | None = None,
    yes: Iterable[str] = (),
    no: Iterable[str] = (),
) -> State:
    """Return the answers to all points: from facts, else ``yes`` and ``no``, else ``state``."""
    said = _said(list(yes), list(no))
    known, limits = check_facts(facts or {}), check_thresholds({})
    today = datetime.now(UTC).date().isoformat()
    answers = {}
    for point in points():
        answer = (state or {}).get(point.id, PointAnswer())
        if point.id in said:
            answer = PointAnswer(said[point.id], "said", date=today)
        answers[point.id] = _verified(point, known, limits, today) or answer
    return answers


def _said(yes: list[str], no: list[str]) -> dict[str, Status]:
    known = [point.id for point in points()]
    for id in (*yes, *no):
        if id not in known:
            near = difflib.get_close_matches(id, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else "docs/diagnose.md lists all."
            raise ConfigError(f"there is no point {shown(id)}; {hint}")
    both = sorted(set(yes) & set(no))
    if both:
        raise ConfigError(f"point {both[0]} is answered both yes and no; give one.")
    said: dict[str, Status] = dict.fromkeys(yes, YES)
    return said | dict.fromkeys(no, NO)


def _verified(
    point: Point, facts: Facts, limits: Mapping[str, float], date: str
) -> PointAnswer | None:
    """Return the answer that facts give to a point; None if they do not suffice."""
    held = [holds(condition, facts, limits) for condition in point.verify]
    if not held or None in held:
        return None
    names = dict.fromkeys(condition.split(" ", 1)[0] for condition in point.verify)
    evidence = "; ".join(str(figure(name, facts)) for name in names)
    return PointAnswer(YES if all(held) else NO, "verified", evidence, date)


class _KeptChecklist(Part):
    checklist: Literal[1]
    points: State


def read_state(file: Path) -> State:
    """Return the answers kept in a file; none if it does not exist yet."""
    if not file.exists():
        return {}
    text = read(file, str(file))
    try:
        return checked(_KeptChecklist, parse_json(text, str(file)), str(file)).points
    except ConfigError:
        raise ConfigError(
            f"{file} is not a checklist's state; move it away, or name another file."
        ) from None


def save_state(state: Mapping[str, PointAnswer], file: Path) -> None:
    """Keep answers in a file, which is replaced as a whole or not at all."""
    content = {"checklist": 1, "points": {id: asdict(each) for id, each in state.items()}}
    beside = None
    try:
        with NamedTemporaryFile(
            "w", dir=file.absolute().parent, prefix=f".{file.name}.", delete=False, encoding="utf-8"
        ) as whole:
            beside = whole.name
            json.dump(content, whole, indent=1)
            whole.write("\n")
            whole.flush()
            os.fsync(whole.fileno())
        os.replace(beside, file)
    except OSError as error:
        if beside is not None:
            Path(beside).unlink(missing_ok=True)
        raise ConfigError(f"{file} cannot be written: {error.strerror}.") from None


def markdown(state: Mapping[str, PointAnswer]) -> str:
    """Return the list with its answers, and checks and remedies of points that are not done."""
    lines, area = ["# Before production"], ""
    for point in points():
        if point.area != area:
            area = point.area
            lines += ["", f"## {area.capitalize()}", ""]
        answer = state.get(point.id, PointAnswer())
        by = ": ".join(filter(None, (answer.by, answer.evidence)))
        by = f" ({by})" if answer.by else ""
        lines.append(f"- [{SIGNS[answer.status]}] {point.id}: {point.title}{by}")
        if answer.status != YES:
            lines += [f"  - check: {point.check}", f"  - remedy: {point.remedy}"]
    done, not_done, open_ = (sum(a.status == s for a in state.values()) for s in (YES, NO, OPEN))
    told = f"{done} of {len(points())} done, {not_done} not done, {open_} open"
    return "\n".join([*lines, "", told]) + "\n"


def to_json(state: Mapping[str, PointAnswer]) -> list[dict[str, Any]]:
    """Return the points with their answers as plain objects."""
    return [{**point._asdict(), **asdict(state.get(point.id, PointAnswer()))} for point in points()]
