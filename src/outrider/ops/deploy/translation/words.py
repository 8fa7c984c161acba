"""Commands as people paste them: their words, and their options."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from ....errors import ConfigError, shown
from .variables import end_of, known, marked, plain, quoted

WRAPPERS = frozenset({"exec", "env", "sudo", "nohup", "time", "$"})
SEPARATORS = frozenset({";", "&&", "||", "|", "&"})
LONGEST_NUMBER = 12
"""Digits."""
PIECE = re.compile(r"""(\s+)|([;&|<>()]+)|'([^']*)'|\\(.)|([^\s;&|<>()'"\\$`]+)""")
"""Spaces, operators, quoted text, an escaped character, or plain characters."""


@dataclass
class Command:
    """A command: words before the options, then options with their values; True is none."""

    program: list[str]
    options: list[tuple[str, str | bool]] = field(default_factory=list)

    def get(self, *names: str) -> str | None:
        """Return the last value of an option under any of its names."""
        found = [value for name, value in self.options if name in names and value is not True]
        return str(found[-1]) if found else None

    def has(self, *names: str) -> bool:
        """Return whether an option is given."""
        return any(name in names for name, _ in self.options)


@dataclass
class Line:
    """The words of a command, and the variables that are set before it, as NAME=VALUE."""

    words: list[str]
    variables: list[str] = field(default_factory=list)

    def prefix(self) -> str:
        """Return the variables as a shell reads them before a command."""
        return "".join(f"{each} " for each in map(assignment, self.variables))


def assignment(text: str) -> str:
    """Return NAME=VALUE quoted for a shell."""
    name, _, value = text.partition("=")
    return f"{name}={quoted(value)}"


def commands(text: str) -> list[Line]:
    """Return the commands of a shell text, lines that only set variables among them.

    Comments are dropped, and so are ``exec`` and the like before a command.

    Raises:
        ConfigError: it is not a plain list of commands.
    """
    joined = re.sub(r"\\\r?\n", " ", text)
    found: list[list[str]] = []
    for line in joined.splitlines():
        found.append([])
        for token in _tokens(line):
            if isinstance(token, str):
                found[-1].append(token)
            elif token.text in SEPARATORS:
                found.append([])
            else:
                raise ConfigError(
                    f"Redirections and sub-shells are not translated: {shown(line.strip())}; "
                    "give the plain command."
                )
    lines = map(_unwrapped, found)
    return [line for line in lines if line.words or line.variables]


class Operator(NamedTuple):
    """An operator between words."""

    text: str


def _tokens(line: str) -> list[str | Operator]:
    """Return a line's operators, and its words without quotes; a comment is left out.

    Raises:
        ConfigError: a quote, backslash or variable is open.
    """
    tokens: list[str | Operator] = []
    word: list[str] = []  # its parts; a word may be an empty text
    at = 0
    while at < len(line):
        if not word and line[at] == "#":
            break
        match = PIECE.match(line, at)
        if match is None:
            text, at = _special(line, at)
            word.append(text)
            continue
        at = match.end()
        space, operator, *texts = match.groups()
        if space is None and operator is None:
            word.append(next(text for text in texts if text is not None))
            continue
        if word:
            tokens.append("".join(word))
            word = []
        if operator is not None:
            tokens.append(Operator(operator))
    return [*tokens, "".join(word)] if word else tokens


def _special(line: str, at: int) -> tuple[str, int]:
    """Return a text between double quotes or a variable, and the index after it.

    Raises:
        ConfigError: it is open.
    """
    try:
        if line[at] not in '"$`' or line[at : at + 2] in ("$'", '$"'):
            raise ValueError
        if line[at] != '"':
            end = end_of(line, at)
            return ("$", at + 1) if end is None else (marked(line[at:end], False), end)
        parts, at = [], at + 1
        while line[at] != '"':
            end = end_of(line, at) if line[at] in "$`" else None
            if end is not None:
                parts.append(marked(line[at:end], True))
                at = end
            elif line[at] == "\\" and line[at + 1] in '$`"\\':
                parts.append(line[at + 1])
                at += 2
            else:
                parts.append(line[at])
                at += 1
        return "".join(parts), at + 1
    except (ValueError, IndexError):
        raise ConfigError(
            f"A command cannot be read: a quote, backslash or variable is open in "
            f"{shown(line.strip())}."
        ) from None


def _unwrapped(words: list[str]) -> Line:
    start = 0
    while start < len(words) and (
        words[start] in WRAPPERS or re.match(r"[A-Za-z_]\w*=", words[start])
    ):
        start += 1
    return Line(words[start:], [word for word in words[:start] if "=" in word])


def options(
    words: list[str],
    switches: Collection[str],
    canonical: Callable[[str], str] = str,
) -> Command:
    """Return the command of its words.

    Args:
        words: the program and its options.
        switches: options without a value, by their canonical names.
        canonical: the name of an option by the flag as it was written.
    """
    command = Command([])
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not re.match(r"--?[A-Za-z]", word):
            command.program.append(word)
            continue
        flag, equals, value = word.partition("=")
        flag = canonical(flag)
        if equals:
            command.options.append((flag, value))
        elif flag in switches or index == len(words) or _is_flag(words[index]):
            command.options.append((flag, True))
        else:
            command.options.append((flag, words[index]))
            index += 1
    return command


def count(value: object, flag: str) -> int:
    """Return an option's value as a number.

    Raises:
        ConfigError: it is not a whole number, or larger than any option accepts.
    """
    text = str(value)
    if not known(value):
        raise ConfigError(
            f"{flag} is {plain(text)}, a variable of the shell; write the number in its place."
        )
    if not text.isdecimal() or len(text) > LONGEST_NUMBER:
        raise ConfigError(f"{flag} is {shown(value)}; give a whole number.")
    return int(text)


def number(value: object, flag: str) -> int | None:
    """Return an option's value as ``count`` does; None where a variable stands for it.

    Raises:
        ConfigError: it is not a whole number, or larger than any option accepts.
    """
    return count(value, flag) if known(value) else None


def _is_flag(word: str) -> bool:
    return re.match(r"--?[A-Za-z]", word) is not None
