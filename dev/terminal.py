"""Writes what a command shows in a terminal as a picture: terminal.py FILE.svg COMMAND..."""

import io
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 92


def shown(command: list[str]) -> str:
    """Return the output of ``command`` in a terminal of its own, with its escape sequences."""
    ours, theirs = pty.openpty()
    size = {"COLUMNS": str(COLUMNS), "LINES": "60", "TERM": "xterm-256color", "NO_COLOR": ""}
    environment = {k: v for k, v in (os.environ | size).items() if v}
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL, env=environment):
        os.close(theirs)
        read = bytearray()
        while piece := _read(ours):
            read += piece
    return read.decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65_536)
    except OSError:  # its last writer has left
        return b""


def picture(text: str) -> str:
    """Return an SVG picture of a terminal that shows ``text``."""
    console = Console(
        record=True,
        width=COLUMNS,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        no_color=False,
    )
    console.print(Text.from_ansi(text))
    svg = console.export_svg(title="")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # those lie on the web


if __name__ == "__main__":
    file, *command = sys.argv[1:]
    Path(file).write_text(picture(f"$ {shlex.join(command)}\n\n{shown(command)}"))
