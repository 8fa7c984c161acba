"""``python -m tests.support.options_section``: the tables of options in docs/server.md."""

from __future__ import annotations

from outrider.base.config import ENGINE_OPTIONS
from outrider.base.options import options_of
from outrider.params import SamplingParams
from outrider.server.options import SERVER_OPTIONS, toml


def reference() -> str:
    """Return every option as tables in Markdown."""
    tables = []
    sampling = tuple(options_of(SamplingParams))
    titles = {"The engine": ENGINE_OPTIONS, "The server": SERVER_OPTIONS, "A request": sampling}
    for title, options in titles.items():
        lines = [f"### {title}", "", "| option | value | default | meaning |", "|---|---|---|---|"]
        for one in options:
            default = "" if one.default is None else f"`{toml(one.default)}`"
            lines.append(f"| `{one.name}` | {one.expected} | {default} | {one.help} |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


if __name__ == "__main__":
    print(reference())
