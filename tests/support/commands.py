"""Runs the command line in this process."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner, Result

from outrider.cli import app


def outrider(*args: object, **options: Any) -> Result:
    """Return what ``outrider ARGS`` printed, and how it ended; ``options`` are ``invoke``'s."""
    return CliRunner().invoke(app, [*map(str, args)], **options)
