"""Markdown of reports: tables, lists, and a page of HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

STYLE = (
    "body{font:16px sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "td,th{text-align:left;padding:.2rem 1rem .2rem 0}"
)


def table(names: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table, an empty one at the end."""
    lines = [names, ["--"] * len(names), *rows]
    cells = ([str(cell).replace("|", "\\|") for cell in line] for line in lines)
    return [f"| {' | '.join(line)} |" for line in cells] + [""]


def listed(figures: Mapping[str, object]) -> list[str]:
    """Return the lines of a list of figures by name, an empty one at the end."""
    return [f"- {name.replace('_', ' ')}: {figure}" for name, figure in figures.items()] + [""]


def section(title: str, lines: Sequence[str]) -> list[str]:
    """Return lines below their heading; nothing where there are none."""
    return [f"## {title}", "", *lines] if lines else []


def html(title: str, markdown: str, picture: str = "") -> str:
    """Return one HTML page that loads nothing: a report, and a picture as an SVG element."""
    from markdown_it import MarkdownIt

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style>\n{body}{picture}</html>\n"
    )
