"""Reads a Dockerfile and a .dockerignore: as much of them as this project's use, no more.

What is not understood is refused, never skipped.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Of an image that sets none."""
OPTIONS = {
    "FROM": set(),
    "ARG": set(),
    "ENV": set(),
    "WORKDIR": set(),
    "COPY": {"from"},
    "RUN": set(),
    "USER": set(),
    "EXPOSE": set(),
    "HEALTHCHECK": {"interval", "timeout", "start-period", "retries"},
    "ENTRYPOINT": set(),
    "CMD": set(),
}
"""By instruction: its options that are understood."""
SUBSTITUTED = {"FROM", "ENV", "WORKDIR", "COPY", "USER", "EXPOSE"}
"""Where Docker puts in variables; in the others a shell does, or nobody."""
VARIABLE = re.compile(
    r"\$(?:(?P<bare>\w+)|\{(?P<name>\w+)(?::(?P<how>[-+])(?P<word>[^{}$]*))?\}|(?P<bad>.))"
)


class Refused(ValueError):
    """A line that is not understood."""


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Args:
        line: its first line in the file, from 1.
        name: in capitals.
        options: what stands before the text, as in ``--from=build``.
        text: the rest, its lines joined.
    """

    line: int
    name: str
    options: Mapping[str, str]
    text: str

    def refuse(self, why: str) -> Refused:
        """An error that names the line."""
        return Refused(f"Dockerfile:{self.line}: {self.name} {self.text}: {why}")

    def words(self) -> list[str]:
        """The text as a list: of its exec form, else of a shell's words."""
        return json.loads(self.text) if self.text.startswith("[") else shlex.split(self.text)

    def command(self) -> list[str]:
        """What is run: the exec form as it is, else a shell with the text."""
        return self.words() if self.text.startswith("[") else ["/bin/sh", "-c", self.text]


@dataclass
class Stage:
    """What a stage has so far; instructions change it one after the other."""

    image: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)
    arguments: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    folder: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """What a RUN line sees: a variable wins over an argument of the same name."""
        return {**self.arguments, **self.variables}

    def expanded(self, found: Instruction) -> Instruction:
        """The instruction with its variables put in, where Docker does so."""
        text = substitute(found, self.environment) if found.name in SUBSTITUTED else found.text
        return Instruction(found.line, found.name, found.options, text)

    def apply(self, found: Instruction, given: Mapping[str, str]) -> None:
        """Take note of what an expanded instruction says; RUN and COPY say nothing here.

        Args:
            given: arguments of the build, by name.
        """
        if found.name == "ARG":
            name, _, default = found.text.partition("=")
            self.arguments[name] = given.get(name, shlex.split(default)[0] if default else "")
        elif found.name == "ENV":
            pairs = [word.partition("=") for word in found.words()]
            if not all(equals for _, equals, _ in pairs):
                raise found.refuse("write NAME=value")
            self.variables |= {name: value for name, _, value in pairs}
        elif found.name == "WORKDIR":
            self.folder = (
                found.text if found.text.startswith("/") else f"{self.folder}/{found.text}"
            )
        elif found.name == "USER":
            if not re.fullmatch(r"\d+:\d+", found.text):
                raise found.refuse("write numbers, UID:GID, which Kubernetes can check")
            self.user = found.text
        elif found.name == "HEALTHCHECK":
            kind, _, text = found.text.partition(" ")
            if kind != "CMD":
                raise found.refuse("only CMD is known")
            self.health = Instruction(found.line, "CMD", {}, text.strip()).command()
        elif found.name == "ENTRYPOINT":
            self.entrypoint = found.command()
        elif found.name == "CMD":
            self.command = found.command()


def substitute(found: Instruction, variables: Mapping[str, str]) -> str:
    """The text with ``$X``, ``${X}``, ``${X:-word}`` and ``${X:+word}`` put in.

    Raises:
        Refused: another form, or a variable that is not set.
    """

    def value(match: re.Match[str]) -> str:
        name = match["bare"] or match["name"]
        if match["bad"] is not None:
            raise found.refuse(f"{match[0]} is not understood")
        if match["how"]:
            given = bool(variables.get(name))
            return (
                variables[name]
                if given and match["how"] == "-"
                else (match["word"] if given == (match["how"] == "+") else "")
            )
        if name not in variables:
            raise found.refuse(f"{name} is not set")
        return variables[name]

    return VARIABLE.sub(value, found.text)


def parse(text: str) -> list[Instruction]:
    """Every instruction of a Dockerfile, in order.

    Raises:
        Refused: an instruction or option that is not in ``OPTIONS``, or a here-document.
    """
    found = []
    first, joined = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or not (line.strip() or joined):
            continue
        first = first if joined else number
        joined += line.removesuffix("\\")
        if not line.endswith("\\"):
            found.append(_instruction(first, joined.strip()))
            joined = ""
    if joined:
        raise Refused(f"Dockerfile:{first}: the last line goes on")
    return found


def _instruction(line: int, text: str) -> Instruction:
    name, _, rest = text.partition(" ")
    name, rest, options = name.upper(), rest.strip(), {}
    while rest.startswith("--"):
        option, _, rest = rest.partition(" ")
        key, _, options_value = option.removeprefix("--").partition("=")
        options[key] = options_value
        rest = rest.strip()
    found = Instruction(line, name, options, rest)
    if name not in OPTIONS:
        raise found.refuse(f"{name} is not known")
    if unknown := options.keys() - OPTIONS[name]:
        raise found.refuse(f"--{min(unknown)} is not known")
    if "<<" in rest:
        raise found.refuse("here-documents are not known")
    return found


def stages(instructions: list[Instruction], given: Mapping[str, str]) -> list[Stage]:
    """The stages, each with its instructions, none of them applied.

    Args:
        given: arguments of the build, by name.

    Raises:
        Refused: an argument that the file does not have, or an instruction before all stages.
    """
    names = {f.text.partition("=")[0] for f in instructions if f.name == "ARG"}
    if unknown := given.keys() - names:
        raise Refused(f"the Dockerfile has no ARG {min(unknown)}")
    before = Stage("", "")
    found: list[Stage] = []
    for instruction in instructions:
        if instruction.name == "FROM":
            words = substitute(instruction, before.arguments).split()
            if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS"):
                raise instruction.refuse("write FROM image AS name")
            found.append(Stage(words[0], words[2] if len(words) == 3 else str(len(found))))
        elif found:
            found[-1].instructions.append(instruction)
        elif instruction.name == "ARG":
            before.apply(instruction, given)
        else:
            raise instruction.refuse("it stands before the first FROM")
    return found


class Ignore:
    """What a .dockerignore keeps out; the last line that fits decides, as in Docker."""

    def __init__(self, text: str) -> None:
        lines = [line.strip() for line in text.splitlines()]
        self.rules = [
            (_pattern(line.removeprefix("!").strip("/")), not line.startswith("!"))
            for line in lines
            if line and not line.startswith("#")
        ]

    def __call__(self, path: Path) -> bool:
        """Whether a path, relative to the context, is kept out by itself or by its folders."""
        names = ["/".join(path.parts[:end]) for end in range(1, len(path.parts) + 1)]
        kept_out = False
        for pattern, out in self.rules:
            if any(pattern.fullmatch(name) for name in names):
                kept_out = out
        return kept_out


def _pattern(text: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]]+\])", text)
    meaning = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile(
        "".join(
            meaning.get(part, part if part.startswith("[") else re.escape(part)) for part in parts
        )
    )
