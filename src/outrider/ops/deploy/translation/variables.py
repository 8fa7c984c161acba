"""Keeps variables of shells and clusters as they are written while commands are translated.

A variable inside a word is enclosed in two noncharacters. The first one tells whether it was quoted
or free; a shell splits the value of a free one into words.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from ....errors import ConfigError

FREE, QUOTED, END, NUMBER = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
"""Noncharacters of Unicode; ``NUMBER`` begins a variable that stands for a number in JSON."""
VARIABLE = re.compile(f"([{FREE}{QUOTED}])([^{END}]*){END}")
MARKS = re.compile(f"[{FREE}{QUOTED}{END}{NUMBER}]")
IN_MANIFESTS = re.compile(r"(?<!\$)\$(?:\([A-Za-z_][\w.-]*\)|\{[A-Za-z_]\w*\}|[A-Za-z_]\w*)")
"""Variables that the cluster or envsubst expands."""
NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
PAIRS = {"(": ")", "{": "}"}


def check(text: str) -> None:
    """Refuse a text that already holds the marks.

    Raises:
        ConfigError: it does.
    """
    if MARKS.search(text):
        raise ConfigError("The text has characters from U+FDD0 to U+FDD3; remove them.")


def marked(source: str, quoted: bool) -> str:
    """Return a variable with its marks, for use inside a word."""
    return f"{QUOTED if quoted else FREE}{source}{END}"


def known(value: object) -> bool:
    """Return whether an option's value holds no variable."""
    return not (isinstance(value, str) and MARKS.search(value))


def plain(text: str) -> str:
    """Return a text with its variables as they were written."""
    return MARKS.sub("", text)


def in_manifest(word: str) -> str:
    """Return a word of a manifest with its variables marked."""
    return IN_MANIFESTS.sub(lambda match: marked(match[0], True), word)


def quoted(word: str) -> str:
    """Return a word quoted for a shell, which still expands its variables."""
    parts, at = [], 0
    for match in VARIABLE.finditer(word):
        parts.append(word[at : match.start()])
        parts.append(match[2] if match[1] == FREE else f'"{match[2]}"')
        at = match.end()
    if not at:
        return shlex.quote(word)
    parts.append(word[at:])
    texts = [shlex.quote(each) if each and not i % 2 else each for i, each in enumerate(parts)]
    return "".join(texts)


def json_of(table: Mapping[str, Any]) -> str:
    """Return a table as JSON in which variables are expanded, those of numbers without quotes."""
    sources: list[str] = []

    def hide(match: re.Match[str]) -> str:
        sources.append(match[2])
        return marked(str(len(sources) - 1), True)

    hidden = {k: VARIABLE.sub(hide, v) if isinstance(v, str) else v for k, v in table.items()}
    text = re.sub(f'"{NUMBER}([^"]*)"', r"\1", json.dumps(hidden, ensure_ascii=False))
    return VARIABLE.sub(lambda match: marked(sources[int(match[2])], True), text)


def end_of(text: str, at: int) -> int | None:
    """Return the end of the shell variable that begins with the $ or ` at ``at``.

    None is returned if there is no variable, only a $.

    Raises:
        ValueError: its end is missing.
    """
    if text[at] == "`":
        return _after(text, at + 1, "`")
    opened = text[at + 1 : at + 2]
    if opened in PAIRS:
        return _after(text, at + 2, PAIRS[opened], opened)
    name = NAME.match(text, at + 1)
    return None if name is None else name.end()


def _after(text: str, at: int, closing: str, opening: str = "") -> int:
    """Return the index after the closing character, past quotes and nested pairs.

    Raises:
        ValueError: the closing character is missing.
    """
    depth = 1
    while at < len(text):
        letter = text[at]
        if letter == "\\":
            at += 1
        elif letter in "'\"" and letter != closing:
            at = text.index(letter, at + 1)
        elif letter == closing:
            depth -= 1
            if not depth:
                return at + 1
        elif letter == opening:
            depth += 1
        at += 1
    raise ValueError("its end is missing")
