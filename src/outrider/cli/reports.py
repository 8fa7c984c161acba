"""Reports: drawn on a terminal, and Markdown where stdout is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from rich.console import RenderResult
from rich.markdown import Heading, Markdown, TableElement

from .common import SIGNS, write, write_json
from .common import screen as terminal


class _Heading(Heading):
    """A heading that begins at the left, as the text below it does."""

    def __rich_console__(self, *_: Any) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class _Table(TableElement):
    """A table that folds long words and cuts none."""

    def __rich_console__(self, *args: Any) -> RenderResult:
        for table in super().__rich_console__(*args):
            for column in getattr(table, "columns", ()):
                column.overflow = "fold"
            yield table


class _Report(Markdown):
    elements: ClassVar[dict[str, Any]] = {
        **Markdown.elements, "heading_open": _Heading, "table_open": _Table,
    }  # fmt: skip


def deliver(
    report: Any, markdown: str, as_json: bool, out: str | None, screen: str | None = None
) -> None:
    """Write a report: to ``out`` as JSON, or Markdown if it ends in .md; and to stdout.

    ``screen`` is what stdout gets in place of the whole of ``markdown``.
    """
    if out is not None and out.endswith(".md"):
        Path(out).write_text(markdown, encoding="utf-8")
    else:
        write_json(report, out)
    if as_json:
        write_json(report, "-")
    else:
        show(screen or markdown)


def show(markdown: str) -> None:
    """Write a report to stdout."""
    console = terminal()
    if console.is_terminal:
        console.print(_Report(markdown.translate(SIGNS)))
    else:
        write(markdown)
