"""Handles panics of the tokenizers library (Rust), which ``except Exception`` does not catch."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..base.fields import one_line
from ..errors import RequestError

ENDS = (Exception, KeyboardInterrupt, SystemExit, GeneratorExit)
"""Errors that are not panics."""


@contextmanager
def no_panic() -> Iterator[None]:
    """Raise RequestError for a panic inside."""
    try:
        yield
    except ENDS:
        raise
    except BaseException as error:
        raise RequestError(
            f"the tokenizer fails on this text ({one_line(error)}); send another text, or repair "
            "tokenizer.json."
        ) from None
