"""Refuses what needs packages of an extra where they are not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import ConfigError

OF_TORCH = ("torch", "transformers")
"""Packages of the extra "torch"."""
INSTALL = "pip install 'outrider[torch]'"


@contextmanager
def torch_for(what: str) -> Iterator[None]:
    """Raise ConfigError naming the extra where an import inside lacks torch or transformers.

    ``what`` begins the message: what cannot be had without them.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in OF_TORCH:
            raise
        raise ConfigError(
            f"{what} needs torch and transformers, which are not installed: {INSTALL}."
        ) from None
