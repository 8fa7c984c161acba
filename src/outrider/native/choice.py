"""The native libraries: which one serves this CPU."""

import functools
import logging
import os
from pathlib import Path

from ..errors import ModelError
from . import __path__ as folders
from .library import Library
from .threads import allowed_threads

logger = logging.getLogger("outrider")

ISAS = ("portable", "avx2", "avx512", "avx512vnni", "avx512bf16", "amx")
"""Instruction sets, each with all that stand before it."""
VARIABLE = "OUTRIDER_NATIVE_ISA"


def _file(isa: str) -> Path | None:
    files = (Path(folder) / f"liboutrider_{isa}.so" for folder in folders)
    return next((file for file in files if file.is_file()), None)


def _find(isa: str) -> Library:
    found = _file(isa)
    if found is None:
        raise OSError("it was not built: there was no C++ compiler when Outrider was installed")
    return Library(isa, found)


@functools.lru_cache(len(ISAS))
def open_library(isa: str) -> Library | None:
    """Return the library for ``isa``, else the next lower one; None, with a line, if there is none.

    The pool of threads is started.
    """
    try:
        best = ISAS.index(isa)
        while best and _file(ISAS[best]) is None:
            best -= 1
        library = _find(ISAS[best])
        if library.level() < best:  # this also has the kernel grant what the library needs
            raise OSError(f"this CPU does not run {ISAS[best]}")
    except OSError as error:
        logger.warning("The native step is not used (%s); torch runs the models.", error)
        return None
    asked = allowed_threads()
    started = library.start(asked)
    if started < asked:
        logger.warning(
            "The native step runs on %d threads instead of %d: the system starts no more.",
            started,
            asked,
        )
    return library


def library() -> Library | None:
    """Return the library of this process: the best that the CPU runs, or that of ``VARIABLE``.

    None where it says "off", or there is none.

    Raises:
        ModelError: the variable names no instruction set, or one that this CPU lacks.
    """
    asked = os.environ.get(VARIABLE, "").strip().lower()
    if asked == "off":
        return None
    if asked and asked not in ISAS:
        raise ModelError(f"{VARIABLE} is {asked!r}; give one of {', '.join(ISAS)}, off.")
    level = _level()
    if asked and ISAS.index(asked) > level:
        raise ModelError(f"{VARIABLE} is {asked!r}, but this CPU runs {ISAS[level]} at most.")
    return open_library(asked or ISAS[level])


def available() -> tuple[str, ...]:
    """Return the instruction sets that this CPU runs and that were built."""
    return tuple(isa for isa in ISAS[: _level() + 1] if _file(isa))


@functools.cache
def _level() -> int:
    try:
        return _find("portable").level()
    except OSError:
        return 0
