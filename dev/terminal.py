"""Pictures of what commands show in a terminal, as SVG that loads nothing."""

from __future__ import annotations

import io
import os
import pty
import shlex
import subprocess
import sys
import time

from rich.console import Console
from rich.text import Text

COLUMNS = 100
ROWS = 22
"""Rows of a picture that moves; one that stands is as tall as its text."""
LINE_HEIGHT = 24.4
"""Of rich's letters, in the units of its pictures."""
END_SECONDS = 6.0
"""How long a picture that moves shows its end before it begins anew."""
FORMAT = """\
<svg viewBox="0 0 {width} HEIGHT" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px; }}
{styles}
MOTION
</style>
<defs>
<clipPath id="screen"><rect width="{terminal_width}" height="SCREEN"/></clipPath>
{lines}
</defs>
<rect width="{width}" height="HEIGHT" rx="8" fill="#292929"/>
<g transform="translate(12, 12)" clip-path="url(#screen)"><g class="text">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g></g>
</svg>
"""
Said = list[tuple[float, str]]
"""What a command wrote, and at which second since its start."""


def said(*words: str, columns: int = COLUMNS) -> Said:
    """Return what ``outrider`` shows in a terminal of its own, with its escape sequences."""
    ours, theirs = pty.openpty()
    size = {"COLUMNS": str(columns), "LINES": "60", "TERM": "xterm-256color", "NO_COLOR": ""}
    environment = {k: v for k, v in (os.environ | size).items() if v}
    found = [(0.0, f"$ {shlex.join(('outrider', *words))}\n\n")]
    start = None
    with subprocess.Popen(
        [sys.executable, "-m", "outrider", *words],
        stdout=theirs, stderr=subprocess.DEVNULL, env=environment,
    ) as process:  # fmt: skip
        os.close(theirs)
        while piece := _read(ours):
            now = time.monotonic()
            start = start or now  # imports and models are loaded before the first word
            found.append((now - start, piece.decode(errors="replace").replace("\r\n", "\n")))
    os.close(ours)
    if process.returncode:
        sys.exit(f"outrider {shlex.join(words)} ended with {process.returncode}.")
    return found


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65_536)
    except OSError:  # its last writer has left
        return b""


def picture(found: Said, columns: int = COLUMNS, moves: bool = False) -> str:
    """Return an SVG picture of a terminal; one that ``moves`` scrolls as the command wrote."""
    console = Console(
        record=True, width=columns, file=io.StringIO(), force_terminal=True,
        color_system="truecolor", no_color=False,
    )  # fmt: skip
    console.print(Text.from_ansi("".join(text for _, text in found).rstrip("\n")))
    rows = console.export_text(clear=False).count("\n")
    screen = (ROWS if moves else rows) * LINE_HEIGHT
    motion = _motion(found, rows) if moves else ""
    style = FORMAT.replace("MOTION", motion.replace("{", "{{").replace("}", "}}"))
    style = style.replace("HEIGHT", f"{screen + 24:g}").replace("SCREEN", f"{screen:g}")
    return console.export_svg(title="", code_format=style, unique_id="t")


def _motion(found: Said, rows: int) -> str:
    """Return the style that brings each row to the lower edge when it was written."""
    seconds = found[-1][0] + END_SECONDS
    shown, first = 0, {ROWS: 0.0}  # it begins with a full screen
    for when, text in found:
        shown += text.count("\n")
        first.setdefault(max(ROWS, min(rows, shown)), when)
    first.setdefault(rows, found[-1][0])
    steps = "".join(
        f"{100 * when / seconds:.2f}% {{ {_at(row)} }}\n" for row, when in first.items()
    )
    end = _at(rows)
    return (
        f"@keyframes scroll {{\n{steps}}}\n"
        f".text {{ {end} animation: scroll {seconds:.1f}s step-end infinite; }}\n"
        "@media (prefers-reduced-motion: reduce) { .text { animation: none; } }"
    )


def _at(row: int) -> str:
    """Return the style that has a row at the lower edge."""
    return f"transform: translateY({(ROWS - row) * LINE_HEIGHT:g}px);"
