"""``python -m tests.support.diagnose_section``: the tables of docs/diagnose.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outrider.ops import markdown
from outrider.ops.diagnose.checklist import points
from outrider.ops.diagnose.diagnose import symptoms
from outrider.ops.diagnose.facts import data


def _table(names: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    return markdown.table(names, rows)[:-1]


def checklist_table() -> list[str]:
    """Return the lines of the checklist; a star marks what can be verified from facts."""
    rows = [
        (f"`{p.id}`" + " *" * bool(p.verify), p.title, p.check, p.remedy) for p in points()
    ]  # fmt: skip
    return _table(("point", "what should be so", "check", "remedy"), rows)


def symptoms_table() -> list[str]:
    """Return the lines of all symptoms with their conditions and causes."""
    rows = [
        (
            f"`{each['id']}`", ", ".join(f"`{condition}`" for condition in each["when"]),
            " or ".join(f"`{condition}`" for condition in each.get("unless", ())),
            "; ".join(cause["title"] for cause in each["cause"]),
        )
        for each in symptoms()
    ]  # fmt: skip
    return _table(("symptom", "found where", "but not where", "causes"), rows)


def thresholds_table() -> list[str]:
    """Return the lines of all thresholds."""
    thresholds = data("symptoms")["threshold"].items()
    rows = [(f"`{name}`", each["value"], each["help"]) for name, each in thresholds]
    return _table(("threshold", "default", "meaning"), rows)


def facts_table() -> list[str]:
    """Return the lines of all facts."""
    rows = []
    for name, each in data("symptoms")["fact"].items():
        others = [f"`{other}`" for other in each.get("also", ())]
        others += [f"`{other}` (x {scale})" for other, scale in each.get("scaled", {}).items()]
        rows.append((f"`{name}`", each["unit"], each["help"], ", ".join(others)))
    return _table(("fact", "unit", "meaning", "other names"), rows)


TABLES = {
    "symptoms": symptoms_table, "thresholds": thresholds_table, "facts": facts_table,
    "checklist": checklist_table,
}  # fmt: skip


if __name__ == "__main__":
    for name, lines in TABLES.items():
        print("\n".join((f"<!-- {name} -->", *lines(), f"<!-- /{name} -->", "")))
