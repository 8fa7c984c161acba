"""TOML that users write: what is in it, or a sentence that says why it is none."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from .errors import ConfigError

SHOWN = 200
"""Most characters of what the parser says."""


def parse(text: str, name: str) -> dict[str, Any]:
    """Return the document of a text; ``name`` is what a message calls it.

    Raises:
        ConfigError: it is no TOML.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{name} is no TOML: it is nested too deeply.") from None
    except ValueError as error:  # also a number that Python does not convert for its length
        said = " ".join(str(error).split())[:SHOWN]
        raise ConfigError(f"{name} is no TOML: {said.rstrip('.')}.") from None


def read(file: Path, name: str) -> dict[str, Any]:
    """Return the document of a file; ``name`` is what a message calls it.

    Raises:
        ConfigError: it cannot be read, or is no TOML.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{name} is no TOML: it is not UTF-8.") from None
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}.") from None
    return parse(text, name)
