"""Makes untrusted text safe to show on one line."""

from __future__ import annotations

import re

LONGEST = 300
_surrogate = re.compile("[\ud800-\udfff]")


def printable(text: object, limit: int = LONGEST) -> str:
    """Return ``str(text)`` as one line of printable characters.

    Runs of whitespace become one space. Every other character that does not print becomes its
    escape, such as ``\\x1b``. A text longer than ``limit`` ends in an ellipsis.
    """
    # More is never shown, and untrusted text may have gigabytes.
    try:
        start = str(text)[: 4 * limit]
    except ValueError:  # Python writes no number of more than 4,300 digits
        start = "a value too long to be shown"
    line = " ".join(start.split())
    escaped = (x if x.isprintable() else x.encode("unicode_escape").decode() for x in line)
    shown = "".join(escaped)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def well_formed(text: str) -> str:
    """Return the text with U+FFFD for each lone surrogate, which UTF-8 cannot hold."""
    return text if text.isascii() else _surrogate.sub("\ufffd", text)
