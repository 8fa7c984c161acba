"""Errors of the tokenizers library that are no ``Exception``.

It is written in Rust, and what it does not expect, such as an expression that takes too many tries
on some text, is a panic: a ``BaseException`` that ends whoever only catches exceptions.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import RequestError
from ..fields import one_line

ENDS = (Exception, KeyboardInterrupt, SystemExit, GeneratorExit)
"""Errors that are no panic."""


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
