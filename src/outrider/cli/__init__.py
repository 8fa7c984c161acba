"""The command line: one module per command. Nothing heavy is imported before a command runs."""

import os
import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import Annotated

import typer

from .. import __version__
from ..base import stderr
from . import (
    bench,
    copies,
    demo,
    drafters,
    explain,
    generate,
    load,
    quality,
    serve,
    tune,
    verify,
)
from .common import Commands
from .spelling import App, lazy

app = App(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 failed, 2 bad usage, 130 interrupted.",
)
COMMANDS: tuple[Callable[..., None], ...] = (
    generate.generate, serve.serve, serve.config, copies.quantize, copies.convert, demo.demo,
    verify.verify, explain.explain, tune.tune,
)  # fmt: skip
for command in COMMANDS:
    app.command()(command)
benches = App(default="run", help="Measure speculation against plain decoding; load servers.")
benches.command("run")(bench.bench)
benches.command()(quality.quality)
benches.command()(load.serve)
app.add_typer(benches, name="bench")
app.add_typer(drafters.app, name="drafters")
app.add_typer(
    App(
        cls=lazy("outrider.cli.ops"),
        help="Plan, deploy, watch and mend speculation, of this engine and of others.",
    ),
    name="ops",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"outrider {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Exact speculative decoding: the target's own tokens, faster."""


def main() -> None:
    """Entry point of ``outrider`` and ``python -m outrider``."""
    # Closed standard streams are opened on /dev/null, so that no file gets their descriptors.
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.dup2(os.open(os.devnull, os.O_RDONLY), 0))
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.dup2(os.open(os.devnull, os.O_WRONLY), 1), "w")
    if sys.stderr is None:
        stderr.guard()
    if isinstance(sys.stdout, TextIOWrapper):  # a locale's encoding may lack some characters
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    app(prog_name="outrider")
