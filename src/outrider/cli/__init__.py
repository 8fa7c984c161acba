"""The command line: one module per command. Nothing heavy is imported before a command runs."""

import os
import sys
from io import TextIOWrapper
from typing import Annotated

import typer

from .. import __version__
from ..base import stderr
from .commands import Home, LateCommands, interrupt_again
from .spelling import App

HOMES = {
    "generate": Home(
        "generate", "generate",
        "Continue a prompt; accepted tokens are green, the target's own after a draft cyan.",
    ),
    "chat": Home(
        "chat", "chat",
        "Chat with a model; accepted tokens are green, the target's own after a draft cyan.",
    ),
    "serve": Home("serve", "serve", "Serve a model over the APIs of OpenAI and vLLM."),
    "config": Home(
        "serve", "config",
        "Show a server's options and the source of each.",
    ),
    "quantize": Home("copies", "quantize", "Write a quantised copy of a checkpoint."),
    "convert": Home(
        "copies", "convert",
        "Convert a checkpoint to safetensors, the only format that is served.",
    ),
    "demo": Home(
        "demo", "demo", "Decode held-out code plainly and speculatively, side by side.",
    ),
    "verify": Home(
        "verify", "verify",
        "Check that speculative output equals plain output, and acceptance rules their oracles.",
    ),
    "explain": Home(
        "explain", "explain",
        "Show one decode step token by token: draft, probabilities, noise and verdict.",
    ),
    "tune": Home(
        "tune", "tune",
        "Find the drafter, the draft length and the batch size that are fastest here.",
    ),
    "bench": Home(
        "benches", "app", "Measure speculation against plain decoding; load servers.",
    ),
    "drafters": Home(
        "drafters", "app", "List all drafters; suggest some for a target; check one against it."
    ),
    "train": Home("train", "app", "Train drafters on the target's own answers."),
    "ops": Home(
        "ops", "app", "Plan, deploy, watch and mend speculation, of this engine and of others.",
    ),
}  # fmt: skip
"""The commands in the order of the help, which imports none of them."""


class _All(LateCommands):
    homes = HOMES


app = App(
    cls=_All,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 failed, 2 bad usage, 130 interrupted.",
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
    if sys.argv[1:2] == ["serve"]:
        from ..base.freed_memory import use_system_allocator

        use_system_allocator()
    sys.unraisablehook = interrupt_again
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
