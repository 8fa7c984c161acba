"""Every error that Outrider raises on purpose.

    OutriderError
    ├── ConfigError (ValueError)      an option or a combination of options is wrong
    ├── ModelError                    a checkpoint, tokenizer or drafter cannot be used
    ├── MemoryBudgetError             the memory given cannot hold what was asked for
    ├── WorkerError                   the engine's process died under a request
    └── RequestError (ValueError)     one request is wrong; the others are unharmed
        └── NumericalError            a request failed on the way: its logits make no law

Each message is one sentence (or two): what is wrong, where, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from reprlib import Repr

SHOWN = 100
"""Characters of a wrong value that a message shows."""
_short = Repr()
_short.maxstring = _short.maxother = _short.maxlong = SHOWN


class OutriderError(Exception):
    """Base of every error in this package."""


class ConfigError(OutriderError, ValueError):
    """An option, or a combination of options, is wrong."""


class ModelError(OutriderError):
    """A checkpoint, a tokenizer or a drafter cannot be used."""


class MemoryBudgetError(OutriderError):
    """The memory given cannot hold what was asked for."""


class WorkerError(OutriderError):
    """The engine's process died under a request, or cannot be kept alive."""


class RequestError(OutriderError, ValueError):
    """One request is wrong; the others are unharmed."""


class NumericalError(RequestError):
    """A request's logits are NaN or infinite, no token is allowed, or its processor failed."""


def no_option(owner: str, name: str, known: Sequence[str], also: Sequence[str] = ()) -> ConfigError:
    """The error for an option that ``owner`` does not have; ``also`` are names it understands."""
    near = difflib.get_close_matches(name, [*known, *also], 1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}."
    return ConfigError(f"{owner} has no option {name!r}; {hint}")


def shown(value: object) -> str:
    """The value as a message shows it: on one line, and shortened where it is long."""
    try:
        return " ".join(_short.repr(value).split())
    except (ValueError, RecursionError):  # Python writes no number of more than 4,300 digits
        return "a value too long to be shown"
