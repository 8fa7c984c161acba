"""An engine's launch: program, options, environment and files, before any format."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Value = str | int | float | bool | dict[str, Any]


@dataclass(frozen=True)
class Launch:
    """A start of an engine.

    An option's value True is a flag alone. The command reads ``files``, texts by their paths;
    ``config_file`` is name and text of the engine's own config, with the same contents.
    """

    program: tuple[str, ...]
    options: Mapping[str, Value]
    config_file: tuple[str, str]
    files: Mapping[str, str] = field(default_factory=dict)

    def arguments(self) -> list[str]:
        """Return the command as a list."""
        words = list(self.program)
        for flag, value in self.options.items():
            words.append(flag)
            if value is not True:
                words.append(text(value))
        return words

    def command(self, quote: Callable[[str], str] = shlex.quote) -> str:
        """Return the command for a shell, one option a line; ``quote`` quotes a word."""
        lines = [" ".join(map(quote, self.program))]
        for flag, value in self.options.items():
            lines.append(flag if value is True else f"{flag} {quote(text(value))}")
        return " \\\n    ".join(lines) + "\n"


def text(value: Value) -> str:
    """Return an option's value on the command line; a table becomes JSON."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)


def present(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are set: neither None nor False nor an empty table."""
    unset = (None, False)
    return {n: v for n, v in options.items() if not (any(v is each for each in unset) or v == {})}
