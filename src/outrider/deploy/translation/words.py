"""Commands as people paste them: their words, and their options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ...errors import ConfigError, shown

WRAPPERS = frozenset({"exec", "env", "sudo", "nohup", "time", "$"})
SEPARATORS = frozenset({";", "&&", "||", "|", "&"})
LONGEST_NUMBER = 12
"""Digits."""
OPERATORS = frozenset(";&|<>()")
TOKEN = re.compile(
    r"""\s+|\#.*|([;&|<>()]+)|((?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s;&|<>()'"\\])+)"""
)
"""Spaces, a comment, an operator, or a word."""


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
        pairs = (each.split("=", 1) for each in self.variables)
        return "".join(f"{name}={shlex.quote(value)} " for name, value in pairs)


def commands(text: str) -> list[Line]:
    """Return the commands of a shell text.

    Comments are dropped, and so are ``exec`` and the like before a command.

    Raises:
        ConfigError: it is no plain list of commands, or needs values that only a shell has.
    """
    joined = re.sub(r"\\\r?\n", " ", text)
    found: list[list[str]] = []
    for line in joined.splitlines():
        found.append([])
        for token in _tokens(line):
            if token in SEPARATORS:
                found.append([])
            elif set(token) <= OPERATORS:
                raise ConfigError(
                    f"Redirections and sub-shells are not translated: {shown(line.strip())}; "
                    "give the plain command."
                )
            else:
                found[-1] += shlex.split(token)
    return [line for line in map(_unwrapped, found) if line.words]


def _tokens(line: str) -> list[str]:
    """Return a line's operators, and its words with their quotes; a comment is left out.

    Raises:
        ConfigError: a quote or backslash is open.
    """
    tokens, at = [], 0
    while at < len(line):
        match = TOKEN.match(line, at)
        if match is None:
            raise ConfigError(
                f"A command cannot be read: a quote or backslash is open in {shown(line.strip())}."
            )
        at = match.end()
        tokens += [each for each in match.groups() if each is not None]
    return tokens


def _unwrapped(words: list[str]) -> Line:
    variables = []
    while words and (words[0] in WRAPPERS or re.match(r"[A-Za-z_]\w*=", words[0])):
        variables += [word for word in words[:1] if "=" in word]
        words = words[1:]
    unknown = [word for word in [*variables, *words] if "$" in word or "`" in word]
    if unknown:
        raise ConfigError(
            f"A command has {shown(unknown[0])}, whose value only its shell knows; write the value."
        )
    return Line(words, variables)


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
        ConfigError: it is no whole number, or a larger one than any option takes.
    """
    text = str(value)
    if not text.isdecimal() or len(text) > LONGEST_NUMBER:
        raise ConfigError(f"{flag} is {shown(value)}; give a whole number.")
    return int(text)


def _is_flag(word: str) -> bool:
    return re.match(r"--?[A-Za-z]", word) is not None
