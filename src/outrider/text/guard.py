"""Errors of libraries that read a checkpoint's files, as one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import ModelError, OutriderError
from ..fields import one_line

OURS = (OutriderError, KeyboardInterrupt, SystemExit, GeneratorExit)
"""Exceptions that pass through."""


@contextmanager
def readable(what: str, remedy: str) -> Iterator[None]:
    """Raise ModelError, ``what`` (the reason); ``remedy``, for any error inside.

    The tokenizers library is written in Rust, and a panic there is no ``Exception``.
    """
    try:
        yield
    except OURS:
        raise
    except BaseException as error:
        raise ModelError(f"{what} ({one_line(error)}); {remedy}") from error
