"""Reports of commands: drawn on a terminal, Markdown elsewhere, JSON for programs."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from outrider.cli import reports
from tests.support.commands import outrider

NAME = "org/a-rather-long-name-of-a-model"
TEXT = f"# A title\n\n| name | value |\n| -- | -- |\n| {NAME} | 1 |\n\n- \x1b[31mred\n"


def test_a_terminal_gets_tables_and_whole_names(monkeypatch: pytest.MonkeyPatch) -> None:
    text = StringIO()
    console = Console(file=text, force_terminal=True, width=24, color_system=None)
    monkeypatch.setattr(reports, "terminal", lambda: console)
    reports.show(TEXT)
    lines = text.getvalue().splitlines()
    assert lines[0].strip() == "A title"
    assert not any("|" in line or "…" in line for line in lines)
    words = "".join("".join(line.split()[:1]) for line in lines)
    assert NAME in words
    assert "\x1b[31m" not in text.getvalue()
    assert "␛[31mred" in text.getvalue()


def test_what_is_no_terminal_gets_markdown(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    reports.show(TEXT)
    assert capfdbinary.readouterr().out.decode() == TEXT


def test_out_is_markdown_or_json_by_its_name(tmp_path: Path) -> None:
    words = ["ops", "advise", "llama-3.1-8b", "--drafter", "eagle3", "--hardware", "h100"]
    short = outrider(*words, "--out", tmp_path / "a.json")
    full = outrider(*words, "--full", "--out", tmp_path / "a.md")
    assert (tmp_path / "a.md").read_text("utf-8") == full.stdout
    assert json.loads((tmp_path / "a.json").read_text("utf-8"))["verdict"] == "use"
    assert short.stdout.startswith("# llama-3.1-8b with EAGLE-3 head of llama-3.1-8b: use\n")
    assert "## Rules of thumb" in full.stdout
    assert "## Rules of thumb" not in short.stdout
