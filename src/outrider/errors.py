"""Every error that Outrider raises on purpose.

    OutriderError
    ├── ConfigError (ValueError)      an option or a combination of options is wrong
    ├── ModelError                    a checkpoint, tokenizer or drafter cannot be used
    ├── MemoryBudgetError             the memory given cannot hold what was asked for
    └── RequestError (ValueError)     one request is wrong; the others are unharmed
        └── NumericalError            a request's logits are not numbers

Each message is one sentence (or two): what is wrong, where, and what to do.
"""

from __future__ import annotations


class OutriderError(Exception):
    """Base of every error in this package."""


class ConfigError(OutriderError, ValueError):
    """An option, or a combination of options, is wrong."""


class ModelError(OutriderError):
    """A checkpoint, a tokenizer or a drafter cannot be used."""


class MemoryBudgetError(OutriderError):
    """The memory given cannot hold what was asked for."""


class RequestError(OutriderError, ValueError):
    """One request is wrong; the others are unharmed."""


class NumericalError(RequestError):
    """The target's logits for a request are NaN or infinite, or no token is allowed."""
