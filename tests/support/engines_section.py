"""``python -m tests.support.engines_section``: the tables of docs/engines.md."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from outrider.base.methods import NAMES
from outrider.ops import markdown
from outrider.ops.deploy.capabilities import ENGINES, EngineVersion, data, find, versions
from outrider.ops.deploy.translation.rules import rules_of

BEGIN = "<!-- Made from the data files: python -m tests.support.engines_section -->"
SOURCES = ("vllm", "python", "trtllm", "llamacpp", "tgi")


def reference() -> str:
    """Return the generated part of docs/engines.md, with the line that it begins with."""
    engines = [find(name) for name in ENGINES]
    parts = [BEGIN, "## What each engine takes", _versions(engines), _methods(engines)]
    parts += ["## Old forms", *(_translation(source) for source in SOURCES)]
    parts += ["## Known losses and traps", *(_notes(engine) for engine in engines)]
    return "\n\n".join(parts) + "\n"


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(markdown.table(names, rows)).rstrip()


def _versions(engines: Sequence[EngineVersion]) -> str:
    names = ("engine", "versions", "recorded", "draft lengths by batch size",
             "chosen by the engine", "drafter with another vocabulary",
             "over pipeline stages")  # fmt: skip
    rows = (
        (
            f"{each.title} (`{each.engine}`)", ", ".join(versions(each.engine)), each.recorded,
            "yes" if each.schedule else "no", ", ".join(each.adaptive) or "no",
            ", ".join(each.other_vocabulary) or "refused", ", ".join(each.with_pipeline) or "no",
        )
        for each in engines
    )  # fmt: skip
    return _table(names, rows)


def _methods(engines: Sequence[EngineVersion]) -> str:
    methods = [name for name in NAMES if any(name in each.methods for each in engines)]
    return _table(
        ["method", *(each.engine for each in engines)],
        ([m, *(f"`{e.methods[m]}`" if m in e.methods else "no" for e in engines)] for m in methods),
    )


def _translation(source: str) -> str:
    known = data("translations")[source]
    rows = (
        (f"`{rule.old}`", "nothing" if rule.new == "nothing" else f"`{rule.new}`", rule.why)
        for rule in rules_of(source).values()
    )
    heading = f"### {known['title']}\n\nAs of {known['gone']}, looked up on {known['date']}.\n\n"
    return heading + _table(("old", "new", "why"), rows)


def _notes(engine: EngineVersion) -> str:
    lines = [f"### {engine.title}", ""]
    for note in engine.notes:
        where = [*note.methods, *note.features]
        when = f" With {', '.join(where)}:" if where else ""
        text = f"- {note.date}.{when} {note.text} ({note.source})"
        lines.append(textwrap.fill(text, 100, subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(lines)


if __name__ == "__main__":
    print(reference(), end="")
