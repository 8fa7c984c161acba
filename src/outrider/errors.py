"""All errors that Outrider raises.

Each message is one or two sentences: what is wrong, where, and what to do.
"""

import difflib
from collections.abc import Sequence
from reprlib import Repr
from typing import Any

SHOWN = 100
"""Most characters of a value in a message."""
_short = Repr()
_short.maxstring = _short.maxother = _short.maxlong = SHOWN
_short.maxlevel = 3  # of lists in lists; reprlib's six levels of six are 46,656 values


class OutriderError(Exception):
    """Base of every error in this package."""


class ConfigError(OutriderError, ValueError):
    """An option, or a combination of options, is wrong."""


class ModelError(OutriderError):
    """A checkpoint, a tokenizer or a drafter cannot be used."""


class MemoryBudgetError(OutriderError):
    """The memory budget is too small."""


class TrainingError(OutriderError):
    """A training cannot go on; what was saved is good."""


class WorkerError(OutriderError):
    """The engine's process died, or cannot be kept alive."""


class EndpointError(OutriderError):
    """A server that is tested cannot be reached, or does not speak OpenAI's API."""


class RequestError(OutriderError, ValueError):
    """One request is wrong; the others are unharmed. ``param`` is the option at fault, or None."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class NumericalError(RequestError):
    """A request's logits are NaN or infinite, no token is allowed, or its processor failed."""


class GenerationError(NumericalError):
    """Some requests of a call failed; ``outputs`` has all, those that did not fail complete."""

    def __init__(self, message: str, outputs: list[Any]) -> None:
        super().__init__(message)
        self.outputs = outputs


MOST_NAMED = 16
"""Options that a message lists."""


def no_option(
    owner: str,
    name: str,
    options: Sequence[str],
    aliases: Sequence[str] = (),
    where: str = "outrider generate --help lists the known ones.",
) -> ConfigError:
    """Return the error for an option that ``owner`` lacks; ``where`` is the hint if many exist."""
    near = difflib.get_close_matches(name, [*options, *aliases], 1)
    if near:
        hint = f"did you mean {near[0]!r}?"
    elif len(options) > MOST_NAMED:
        hint = where
    else:
        hint = f"known are {', '.join(options)}."
    return ConfigError(f"{owner} has no option {shown(name)}; {hint}")


def shown(value: object) -> str:
    """Return the value for a message: on one line, shortened if it is long."""
    try:
        return " ".join(_short.repr(value).split())
    except (ValueError, RecursionError):  # Python writes no number of more than 4,300 digits
        return "a value too long to be shown"
