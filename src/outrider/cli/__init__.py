"""The command line: one module per command. Nothing heavy is imported before a command runs."""

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from .. import __version__
from ..engine.stderr import guard
from . import bench, convert, demo, drafters, explain, generate, quality, quantize, serve, verify
from .common import Commands

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 failed, 2 bad usage, 130 interrupted.",
)
COMMANDS: tuple[Callable[..., None], ...] = (
    generate.generate, serve.serve, serve.config, quantize.quantize, convert.convert, demo.demo,
    verify.verify, explain.explain,
)  # fmt: skip
for command in COMMANDS:
    app.command()(command)
benches = typer.Typer(invoke_without_command=True)
benches.callback()(bench.bench)
benches.command()(quality.quality)
app.add_typer(benches, name="bench")
app.add_typer(drafters.app, name="drafters")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"outrider {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Exact speculative decoding: the target's own tokens, faster."""


def main() -> None:
    """Entry point of ``outrider`` and ``python -m outrider``."""
    if sys.stderr is None:  # the caller closed it
        guard()
    app(prog_name="outrider")
