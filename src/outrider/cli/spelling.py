"""Reads the words of commands and prints their help; old spellings work for one more release."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from itertools import pairwise
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

OPTIONS = "Options"
MOST_OPTIONS = 12
"""Options of a command that stand first in its help, in the order of their parameters."""
Function = TypeVar("Function", bound=Callable[..., Any])

TOOLS = ("advise", "roi", "checklist", "doctor", "diagnose", "deploy", "guard")
MOVED = {**dict(zip(TOOLS, TOOLS, strict=True)), "observe": "alerts"}
"""Commands that stood at the top, and their names in ``outrider ops``."""
RENAMED = {
    "--workload": "--prompts", "--dataset": "--prompts", "--sample": "--prompts",
    "--longest": "--num-speculative-tokens", "--output": "--out", "--target": "--model",
}  # fmt: skip
"""Options that had another name in some commands."""


def hint(text: str) -> None:
    """Say on stderr how something is spelled today."""
    typer.echo(f"hint: {text}", err=True)


def _parted(args: list[str], valued: Collection[str]) -> Iterator[list[str]]:
    """Yield each word, the names of options in ``valued`` with the words of their values."""
    words = deque(args)
    while words:
        word = words.popleft()
        rest = len(words) if word == "--" else min(len(words), word in valued)
        yield [word, *(words.popleft() for _ in range(rest))]


def _valued(command: Any) -> set[str]:
    """Return the options of a command that a value follows, in any spelling."""
    own = {name for param in command.params for name in param.opts}
    flags = {name for p in command.params if getattr(p, "is_flag", False) for name in p.opts}
    return {name for name in own | {*RENAMED, "--model"} if name not in flags}


def _today(command: Any, args: list[str]) -> list[str]:
    """Return the words of a command as they are spelled today: MODEL first, options renamed."""
    own = {name for param in command.params for name in param.opts}
    moved = "model" in own and "--model" not in own
    model, parts = list[str](), list[list[str]]()
    for part in _parted(args, _valued(command)):
        name, equals, value = part[0].partition("=")
        now = RENAMED.get(name, name)
        if now != name and name not in own and now in own | {"--model"}:
            hint(f"{name} is now {now}.")
            name, part[0] = now, f"{now}{equals}{value}"
        if name != "--model" or not moved:
            parts.append(part)
        elif equals or part[1:]:
            model = [value] if equals else part[1:]
        else:
            raise typer.BadParameter("--model has no value; give MODEL as the argument.")
    if "--out" in own:
        _replace_file_of_json(parts, _num_spare(command, [model, *parts]))
    return [*model, *(word for part in parts for word in part)]


def _num_spare(command: Any, parts: list[list[str]]) -> int:
    """Return how many arguments there are beyond those that a command needs."""
    needed = sum(p.required for p in command.params if p.param_type_name == "argument")
    behind = sum(len(part) - 1 for part in parts if part[:1] == ["--"])
    before = sum(part[0] == "-" or not part[0].startswith("-") for part in parts if part)
    return int(before + behind - needed)


def _replace_file_of_json(parts: list[list[str]], num_spare: int) -> None:
    """Make ``--out FILE`` of ``--json FILE``, unless the file is an argument that is needed."""
    for i, (part, behind) in enumerate(pairwise([*parts, [""]])):
        name, equals, file = part[0].partition("=")
        file = file if equals else behind[0]
        named = name == "--json" and (file == "-" or file.endswith(".json"))
        if named and (equals or num_spare > 0):
            hint("--json is now a switch; --out FILE writes the report.")
            parts[i : i + 1 + (not equals)] = [["--json"] if file == "-" else ["--out", file]]
            return


class PanelCommand(TyperCommand):
    """A command: MODEL may be an option, too, and help comes in panels, one after the other."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words of the command; old spellings are read as those of today."""
        return super().parse_args(ctx, _today(self, args))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line, without hidden arguments."""
        hidden = [p.get_usage_pieces(ctx) for p in self.params if getattr(p, "hidden", False)]
        return [word for word in super().collect_usage_pieces(ctx) if [word] not in hidden]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, those of most use first; then the commands beside this one, if any."""
        _format_panels(self, ctx, formatter)
        siblings = getattr(ctx.parent and ctx.parent.command, "commands", {}).get(ctx.info_name)
        if isinstance(siblings, PanelGroup):  # this is the default of a group
            siblings.format_commands(ctx, formatter)


class PanelGroup(TyperGroup):
    """A group whose help shows the whole first sentence of each command.

    ``default`` is the command that is meant where the first word names none of the others.
    """

    default: str | None = None

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Return name, command and words of a sub-command; of a group it may be the default."""
        name, command, rest = super().resolve_command(ctx, args)
        if not isinstance(command, PanelGroup) or (rest and rest[0] in command.commands):
            return name, command, rest
        default = command.commands.get(command.default or "")
        if default is None:
            return name, command, rest
        words = (part[0] for part in _parted(rest, _valued(default)))
        first = next((word for word in words if not word.startswith("-")), None)
        if first in command.commands and first != command.default:
            raise typer.BadParameter(f"{rest[0]} comes before {first}; put it after {first}.")
        return name, default, rest

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options and the commands."""
        _format_panels(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands with a sentence each."""
        with formatter.section("Commands"):
            formatter.write_dl(self.sentences())

    def sentences(self) -> list[tuple[str, str]]:
        """Return the commands with a sentence each."""
        return [
            (name, (one.help or "").split("\n\n")[0])
            for name, one in self.commands.items()
            if name != self.default
        ]


class App(typer.Typer):
    """A group of commands; ``default`` names the one that is meant where none is named."""

    def __init__(self, default: str | None = None, **options: Any) -> None:
        kind = type("Default", (PanelGroup,), {"default": default}) if default else PanelGroup
        # Rich's boxes cut long names, and its markup swallows outrider[plot].
        usual = {
            "cls": kind,
            "no_args_is_help": True,
            "rich_markup_mode": None,
            "add_completion": False,
        }
        super().__init__(**{**usual, **options})

    def command(self, *args: Any, **options: Any) -> Callable[[Function], Function]:
        """Return the decorator that makes a command of a function."""
        return super().command(*args, cls=PanelCommand, **options)


def _format_panels(command: Any, ctx: Any, formatter: Any) -> None:
    """Write parameters under the titles of their panels: arguments, a dozen options, others.

    Rich's panels cut long names at 80 columns.
    """
    panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], OPTIONS: []}
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        if record is not None:
            usual = "Arguments" if param.param_type_name == "argument" else OPTIONS
            title = getattr(param, "rich_help_panel", None) or usual
            if title == OPTIONS and len(panels[OPTIONS]) >= MOST_OPTIONS and param.name != "help":
                title = "Further options"
            panels.setdefault(title, []).append(record)
    for title, rows in panels.items():
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)
