"""``python -m outrider.ops.diagnose.documentation``: the tables of docs/diagnose.md."""

from __future__ import annotations

from collections.abc import Iterator

from .checklist import points
from .diagnose import symptoms
from .tables import table


def checklist_table() -> Iterator[str]:
    """Yield the lines of the checklist; a star marks what can be verified from facts."""
    yield "| point | what should be so | check | remedy |"
    yield "| -- | -- | -- | -- |"
    for point in points():
        name = f"`{point.id}`" + (" *" if point.verify else "")
        yield f"| {name} | {point.title} | {point.check} | {point.remedy} |"


def symptoms_table() -> Iterator[str]:
    """Yield the lines of all symptoms with their conditions and causes."""
    yield "| symptom | found where | but not where | causes |"
    yield "| -- | -- | -- | -- |"
    for each in symptoms():
        when = ", ".join(f"`{condition}`" for condition in each["when"])
        unless = " or ".join(f"`{condition}`" for condition in each.get("unless", ()))
        causes = "; ".join(cause["title"] for cause in each["cause"])
        yield f"| `{each['id']}` | {when} | {unless} | {causes} |"


def thresholds_table() -> Iterator[str]:
    """Yield the lines of all thresholds."""
    yield "| threshold | default | meaning |"
    yield "| -- | -- | -- |"
    for name, each in table("symptoms")["threshold"].items():
        yield f"| `{name}` | {each['value']} | {each['help']} |"


def facts_table() -> Iterator[str]:
    """Yield the lines of all facts."""
    yield "| fact | unit | meaning | other names |"
    yield "| -- | -- | -- | -- |"
    for name, each in table("symptoms")["fact"].items():
        others = [f"`{other}`" for other in each.get("also", ())]
        others += [f"`{other}` (x {scale})" for other, scale in each.get("scaled", {}).items()]
        yield f"| `{name}` | {each['unit']} | {each['help']} | {', '.join(others)} |"


TABLES = {
    "symptoms": symptoms_table, "thresholds": thresholds_table, "facts": facts_table,
    "checklist": checklist_table,
}  # fmt: skip


def main() -> None:
    """Print every table between the marks that it has in the docs."""
    for name, lines in TABLES.items():
        print("\n".join((f"<!-- {name} -->", *lines(), f"<!-- /{name} -->", "")))


if __name__ == "__main__":
    main()
