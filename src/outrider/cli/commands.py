"""The commands by name, and what becomes of their errors and warnings."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping
from importlib import import_module
from threading import Timer, main_thread
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import typer

from ..errors import ConfigError, NumericalError, OutriderError, RequestError
from .spelling import MOVED, App, PanelGroup, hint

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

FAILED, BAD_USAGE = 1, 2
INTERRUPTED, BROKEN_PIPE = 130, 141  # a shell's codes for SIGINT and SIGPIPE
AGAIN_SECONDS = 0.01


def exit_code(error: OutriderError) -> int:
    """Return 2 for bad usage, 1 for a failure."""
    wrong = isinstance(error, ConfigError | RequestError) and not isinstance(error, NumericalError)
    return BAD_USAGE if wrong else FAILED


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    # What is old is for the user to know; other warnings are for developers.
    if issubclass(category, FutureWarning):
        typer.echo(f"warning: {message}", err=True)


def interrupt_again(ignored: UnraisableHookArgs) -> None:
    """Repeat a Ctrl+C that came inside a callback or finaliser, where Python drops exceptions.

    Imports run such callbacks all the time. It is a ``sys.unraisablehook``.
    """
    if not issubclass(ignored.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(ignored)
        return
    # Here it would be dropped again. The signal ends the main thread's waiting, too.
    again = main_thread().ident, signal.SIGINT
    later = Timer(AGAIN_SECONDS, signal.pthread_kill, again)
    later.daemon = True
    later.start()


class Home(NamedTuple):
    """The module of a command, its function or ``app`` there, and the sentence about it."""

    module: str
    name: str
    help: str


class _Late(Mapping[str, Any]):
    """Commands by name, each imported when it is asked for."""

    def __init__(self, homes: Mapping[str, Home]) -> None:
        self._homes = homes
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            home = self._homes[name]
            found = getattr(import_module(f"{__package__}.{home.module}"), home.name)
            if not isinstance(found, App):
                single = App()
                single.command(name)(found)
                found = single
            self._made[name] = typer.main.get_command(found)
            self._made[name].name = name
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)


class Commands(PanelGroup):
    """The commands, with one place where their errors become a sentence and an exit code."""

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            return super().main(*args, **options)
        except OSError as error:  # a full disk, a read-only folder, too many open files
            where = "" if error.filename is None else f"{error.filename}: "
            typer.echo(f"error: {where}{error.strerror or error}.", err=True)
            sys.exit(FAILED)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        if args[0] in MOVED and args[0] not in self.commands:
            now = MOVED[args[0]]
            hint(f"outrider {args[0]} is now outrider ops {now}.")
            args = ["ops", now, *args[1:]]
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # no notices of libraries
        if not sys.stderr.isatty():
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always", FutureWarning)
                warnings.showwarning = _show_warning
                result = super().invoke(ctx)
            sys.stdout.flush()  # so that a broken pipe shows here and not at the very end
            return result
        except OutriderError as error:
            from .common import SIGNS  # it imports much

            typer.echo(f"error: {str(error).translate(SIGNS)}", err=True)
            raise typer.Exit(exit_code(error)) from None
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # The interpreter flushes stdout once more at its end: let that go nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(BROKEN_PIPE) from None


class LateCommands(Commands):
    """Commands that are imported when they are asked for, so that help waits for none of them."""

    homes: ClassVar[Mapping[str, Home]]

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "commands": _Late(self.homes)})

    def sentences(self) -> list[tuple[str, str]]:
        """Return the commands with a sentence each."""
        return [(name, home.help) for name, home in self.homes.items()]
