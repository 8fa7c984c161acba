"""How commands read their words and print their help; old spellings work for one more release."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

Function = TypeVar("Function", bound=Callable[..., Any])

MOVED = {
    **{name: name for name in ("advise", "roi", "checklist", "doctor", "diagnose")},
    **{name: name for name in ("deploy", "guard")},
    "observe": "alerts",
}
"""Commands that stood at the top, and their names in ``outrider ops``."""
RENAMED = {
    "--workload": "--prompts", "--dataset": "--prompts", "--sample": "--prompts",
    "--longest": "--num-speculative-tokens", "--output": "--out", "--target": "--model",
}  # fmt: skip
"""Options that had another name in some commands."""


def hint(text: str) -> None:
    """Say on stderr how something is spelled today."""
    typer.echo(f"hint: {text}", err=True)


def _renamed(args: list[str], own: set[str]) -> list[str]:
    """Return the arguments of a command with the options' names of today; ``own`` are its own."""
    words = list(args)
    for i, word in enumerate(words):
        if word == "--":
            break
        name, equals, value = word.partition("=")
        now = RENAMED.get(name)
        if now is not None and name not in own and now in own | {"--model"}:
            hint(f"{name} is {now} now.")
            words[i] = f"{now}{equals}{value}"
    return words


def _model_first(args: list[str]) -> list[str]:
    """Return the arguments with the value of ``--model``, the last one, first and unnamed."""
    rest, model, words = list[str](), list[str](), iter(args)
    for word in words:
        if word == "--":
            rest += [word, *words]
        elif word.startswith("--model="):
            model = [word.partition("=")[2]]
        elif word == "--model":
            model = list(islice(words, 1)) or [word]
        else:
            rest.append(word)
    return model + rest


def _file_of_json(args: list[str]) -> list[str] | None:
    """Return the arguments with ``--json FILE`` as ``--out FILE``; None where there is none."""
    for i, word in enumerate(args):
        file = word.partition("=")[2] if "=" in word else "".join(args[i + 1 : i + 2])
        if word.partition("=")[0] != "--json" or not (file == "-" or file.endswith(".json")):
            continue
        rest = args[i + 1 if "=" in word else i + 2 :]
        return [*args[:i], *(["--json"] if file == "-" else ["--out", file]), *rest]
    return None


class Command(TyperCommand):
    """A command: MODEL may be an option, too, and help comes in panels, one after the other."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words of the command; old spellings are read as those of today."""
        own = {name for param in self.params for name in param.opts}
        args = _renamed(args, own)
        if "model" in own and "--model" not in own:
            args = _model_first(args)
        older = _file_of_json(args) if "--out" in own else None
        if older is not None:
            try:
                read = super().parse_args(ctx, older)
            except typer.BadParameter as error:
                if type(error).__name__ != "MissingParameter":
                    raise
            else:
                hint("--json is a switch now; --out FILE writes the report.")
                return read
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line, without hidden arguments."""
        hidden = [p.get_usage_pieces(ctx) for p in self.params if getattr(p, "hidden", False)]
        return [word for word in super().collect_usage_pieces(ctx) if [word] not in hidden]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, those of most use first; then the commands beside this one, if any."""
        _format_panels(self, ctx, formatter)
        siblings = getattr(ctx.parent and ctx.parent.command, "commands", {}).get(ctx.info_name)
        if isinstance(siblings, Group):  # this is the default of a group
            siblings.format_commands(ctx, formatter)


class Group(TyperGroup):
    """A group whose help shows the whole first sentence of each command.

    ``default`` is the command that is meant where the first word names none of the others.
    """

    default: str | None = None

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Return name, command and words of a sub-command; of a group it may be the default."""
        name, command, rest = super().resolve_command(ctx, args)
        if isinstance(command, Group) and not (rest and rest[0] in command.commands):
            command = command.commands.get(command.default or "", command)
        return name, command, rest

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options and the commands."""
        _format_panels(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands with a sentence each."""
        rows = [
            (name, (one.help or "").split("\n\n")[0])
            for name, one in self.commands.items()
            if name != self.default
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class App(typer.Typer):
    """A group of commands; ``default`` names the one that is meant where none is named."""

    def __init__(self, default: str | None = None, **options: Any) -> None:
        kind = type("Default", (Group,), {"default": default}) if default else Group
        super().__init__(**{"cls": kind, **options})

    def command(self, *args: Any, **options: Any) -> Callable[[Function], Function]:
        """Return the decorator that makes a command of a function."""
        return super().command(*args, cls=Command, **options)


def _format_panels(command: Any, ctx: Any, formatter: Any) -> None:
    """Write parameters under the titles of their panels: arguments, options, and others behind.

    Rich's panels cut long names at 80 columns.
    """
    panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        if record is not None:
            usual = "Arguments" if param.param_type_name == "argument" else "Options"
            title = getattr(param, "rich_help_panel", None) or usual
            panels.setdefault(title, []).append(record)
    for title, rows in panels.items():
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)
