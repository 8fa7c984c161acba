"""Parses pasted shell commands: their words, variables and options.

A variable inside a word is enclosed in two noncharacters. The first tells whether it was quoted or
free; a shell splits the value of a free one into words.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ....errors import ConfigError, shown

FREE, QUOTED, END, NUMBER = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
"""Noncharacters of Unicode; ``NUMBER`` precedes a variable that is a number in JSON."""
VARIABLE = re.compile(f"([{FREE}{QUOTED}])([^{END}]*){END}")
OPERATORS = ";&|<>()"
STAND_INS = {letter: chr(0xFDD4 + i) for i, letter in enumerate(OPERATORS)}
"""Noncharacters for quoted operators, which shlex would not tell from unquoted ones."""
TO_STAND_INS = str.maketrans(STAND_INS)
FROM_STAND_INS = str.maketrans({mark: letter for letter, mark in STAND_INS.items()})
MARKS = re.compile("[\ufdd0-\ufddf]")
IN_MANIFESTS = re.compile(r"(?<!\$)\$(?:\([A-Za-z_][\w.-]*\)|\{[A-Za-z_]\w*\}|[A-Za-z_]\w*)")
"""Variables that the cluster or envsubst expands."""
NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
PAIRS = {"(": ")", "{": "}"}
WRAPPERS = frozenset({"exec", "env", "sudo", "nohup", "time", "$"})
SEPARATORS = frozenset({";", "&&", "||", "|", "&"})
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
FLAG = re.compile(r"--?[A-Za-z]")
MOST_DIGITS = 12
MOST_COMMANDS = 5_000
"""Most non-empty lines of a text; splitting a line takes 40 µs or more."""


@dataclass
class ShellCommand:
    """A command: its words that are not options, and its options with values; True is no value."""

    program: list[str]
    options: list[tuple[str, str | bool]] = field(default_factory=list)

    def get(self, name: str) -> str | None:
        """Return the last value of an option; None if it has none."""
        values = [value for flag, value in self.options if flag == name and value is not True]
        return str(values[-1]) if values else None

    def has(self, *names: str) -> bool:
        """Return whether an option is given under any of its names."""
        return any(name in names for name, _ in self.options)


class ShellLine(NamedTuple):
    """The words of a command, and the variables set before it, as NAME=VALUE."""

    words: list[str]
    variables: list[str]

    def prefix(self) -> str:
        """Return the variables in the form that precedes a command."""
        return "".join(f"{assignment(each)} " for each in self.variables)


def known(value: object) -> bool:
    """Return whether an option's value holds no variable."""
    return not (isinstance(value, str) and MARKS.search(value))


def plain(text: str) -> str:
    """Return a text with its variables as they were written."""
    return MARKS.sub("", text)


def in_manifest(word: str) -> str:
    """Return a word of a manifest with its variables marked."""
    return IN_MANIFESTS.sub(lambda match: f"{QUOTED}{match[0]}{END}", word)


def quoted(word: str) -> str:
    """Return a word quoted for a shell, which still expands its variables."""
    kind, parts = "", []
    for i, part in enumerate(VARIABLE.split(word)):  # text, kind, source, text, ...
        if i % 3 == 0:
            parts.append(shlex.quote(part) if part or part == word else "")
        elif i % 3 == 1:
            kind = part
        else:
            parts.append(part if kind == FREE else f'"{part}"')
    return "".join(parts)


def assignment(text: str) -> str:
    """Return NAME=VALUE quoted for a shell."""
    name, _, value = text.partition("=")
    return f"{name}={quoted(value)}"


def json_of(table: Mapping[str, Any]) -> str:
    """Return a table as JSON whose variables a shell expands, those of numbers without quotes."""
    sources: list[str] = []

    def hide(match: re.Match[str]) -> str:
        sources.append(match[2])
        return f"{QUOTED}{len(sources) - 1}{END}"

    hidden = {k: VARIABLE.sub(hide, v) if isinstance(v, str) else v for k, v in table.items()}
    text = re.sub(f'"{NUMBER}([^"]*)"', r"\1", json.dumps(hidden, ensure_ascii=False))
    return VARIABLE.sub(lambda match: f"{QUOTED}{sources[int(match[2])]}{END}", text)


def commands(text: str) -> list[ShellLine]:
    """Return the commands of a plain list of commands, and the lines that only set variables."""
    lines: list[list[str]] = []
    texts = [line for line in re.sub(r"\\\r?\n", " ", text).splitlines() if line.strip()]
    if len(texts) > MOST_COMMANDS:
        raise ConfigError(
            f"The text has more than {MOST_COMMANDS:,} commands; give those that launch the engine."
        )
    for line in texts:
        lines.append([])
        for word, operator in _tokens(line):
            if not operator:
                lines[-1].append(word)
            elif word in SEPARATORS:
                lines.append([])
            else:
                raise ConfigError(
                    f"Redirections and sub-shells are not translated: {shown(line.strip())}; "
                    "give the plain command."
                )
    return [line for line in map(_unwrapped, lines) if line.words or line.variables]


def _tokens(line: str) -> list[tuple[str, bool]]:
    """Return a line's words without quotes and its operators; the flag is True for operators."""
    sources: list[str] = []
    try:
        lexer = shlex.shlex(_hidden(line, sources), posix=True, punctuation_chars=OPERATORS)
        lexer.whitespace_split, lexer.commenters = True, ""
        tokens = list(lexer)
    except ValueError:
        raise ConfigError(
            f"A command cannot be read: a quote, backslash or variable is open in "
            f"{shown(line.strip())}."
        ) from None

    def source(match: re.Match[str]) -> str:
        return f"{match[1]}{sources[int(match[2])]}{END}"

    return [
        (VARIABLE.sub(source, token.translate(FROM_STAND_INS)), token[:1] in (*OPERATORS,))
        for token in tokens
    ]


def _hidden(line: str, sources: list[str]) -> str:
    """Return a line for shlex: variables as indices into ``sources``, stand-ins, no comment."""
    parts, quote, at = [], "", 0
    while at < len(line):
        letter, begin = line[at], at
        at += 1
        if letter in "$`" and quote != "'":
            if not quote and line[begin : at + 1] in ("$'", '$"'):
                raise ValueError("quotes with escapes")
            end = end_of(line, begin)
            if end is not None:
                parts.append(f"{QUOTED if quote else FREE}{len(sources)}{END}")
                sources.append(line[begin:end])
                at = end
                continue
        elif letter == "\\" and quote != "'" and at < len(line):
            escaped = line[at].translate(TO_STAND_INS)
            parts.append(escaped if quote and escaped in "$`" else letter + escaped)
            at += 1
            continue
        elif letter in "'\"" and quote in ("", letter):
            quote = "" if quote else letter
        elif letter == "#" and not quote and (not begin or line[begin - 1] in f" \t{OPERATORS}"):
            break
        parts.append(letter.translate(TO_STAND_INS) if quote else letter)
    return "".join(parts)


def end_of(text: str, at: int) -> int | None:
    """Return the end of the shell variable that begins at ``at``; None if there is only a $."""
    opening = "`" if text[at] == "`" else text[at + 1 : at + 2]
    if opening != "`" and opening not in PAIRS:
        name = NAME.match(text, at + 1)
        return None if name is None else name.end()
    closing, depth = PAIRS.get(opening, "`"), 1
    at += 1 if opening == "`" else 2
    while at < len(text):
        letter = text[at]
        if letter == "\\":
            at += 1
        elif letter in "'\"":
            at = text.index(letter, at + 1)
        elif letter == closing:
            depth -= 1
            if not depth:
                return at + 1
        elif letter == opening:
            depth += 1
        at += 1
    raise ValueError("its end is missing")


def _unwrapped(words: list[str]) -> ShellLine:
    start = 0
    while start < len(words) and (words[start] in WRAPPERS or ASSIGNMENT.match(words[start])):
        start += 1
    return ShellLine(words[start:], [word for word in words[:start] if "=" in word])


def options(
    words: list[str], switches: Collection[str], canonical: Callable[[str], str] = str
) -> ShellCommand:
    """Return the command in words; ``switches`` are canonical names of flags without value."""
    command = ShellCommand([])
    rest = iter([*words, None])
    word = next(rest)
    while word is not None:
        after = next(rest)
        if FLAG.match(word):
            flag, equals, value = word.partition("=")
            flag = canonical(flag)
            if equals:
                command.options.append((flag, value))
            elif flag in switches or after is None or FLAG.match(after):
                command.options.append((flag, True))
            else:
                command.options.append((flag, after))
                after = next(rest)
        else:
            command.program.append(word)
        word = after
    return command


def starts(words: list[str], *programs: str) -> bool:
    """Return whether a command starts one of ``programs``, in any folder."""
    return bool(words) and words[0].rpartition("/")[2] in programs


def count(value: object, flag: str) -> int:
    """Return an option's value as a number."""
    text = str(value)
    if not known(value):
        raise ConfigError(
            f"{flag} is {plain(text)}, a variable of the shell; write the number in its place."
        )
    if not text.isdecimal() or len(text) > MOST_DIGITS:
        raise ConfigError(f"{flag} is {shown(value)}; give a whole number.")
    return int(text)


def number(value: object, flag: str) -> int | None:
    """Return an option's value as ``count`` does; None if it is a variable."""
    return count(value, flag) if known(value) else None
