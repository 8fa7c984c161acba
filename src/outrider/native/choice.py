"""The native libraries: which one serves this CPU."""

import functools
import logging
import os
import platform
from pathlib import Path

from ..base.threads import allowed_threads
from ..errors import ModelError
from . import __path__ as folders
from .cores import Cores
from .library import Library

logger = logging.getLogger("outrider")

SETS = {
    "x86_64": ("portable", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16", "amx"),
    "aarch64": ("portable", "neon", "dotprod", "bf16"),
}
"""Instruction sets of each architecture; each needs more of a CPU than those before it."""
ISAS = SETS.get(platform.machine(), ("portable",))
"""Those of this machine's."""
VARIABLE = "OUTRIDER_NATIVE_ISA"


def _file(isa: str) -> Path | None:
    files = (Path(folder) / f"outrider_{isa}.so" for folder in folders)
    return next((file for file in files if file.is_file()), None)


def _find(isa: str) -> Library:
    file = _file(isa)
    if file is None:
        raise OSError("it was not built: there was no C++ compiler when Outrider was installed")
    return Library(isa, file)


@functools.lru_cache(len(ISAS))
def open_library(isa: str) -> Library | None:
    """Return the library for ``isa``, else that of the best set before it that this CPU runs.

    Its pool of threads is started. None, with a line in the log, if there is no such library.
    """
    try:
        known = ISAS[: ISAS.index(isa) + 1]
        library = _find(next((name for name in reversed(known) if name in available()), isa))
        if not library.sets() >> ISAS.index(library.isa) & 1:  # the kernel grants AMX when asked
            raise OSError(f"this CPU does not run {library.isa}")
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
    """Return the library of this process: the fastest on this CPU, or that of ``VARIABLE``.

    None where it says "off", or there is none.

    Raises:
        ModelError: the variable names no instruction set, or one that this CPU lacks.
    """
    asked = os.environ.get(VARIABLE, "").strip().lower()
    if asked == "off":
        return None
    if asked and asked not in ISAS:
        raise ModelError(f"{VARIABLE} is {asked!r}; give one of {', '.join(ISAS)}, off.")
    sets = supported()
    if asked and asked not in sets:
        raise ModelError(f"{VARIABLE} is {asked!r}, but this CPU runs {', '.join(sets)}.")
    opened = open_library(asked or fastest())
    if asked and opened is not None and opened.isa != asked:
        raise ModelError(
            f"{VARIABLE} is {asked!r}, which was not built; there is {', '.join(available())}."
        )
    return opened


@functools.cache
def placed(step: Library, cpus: frozenset[int]) -> Library:
    """Return a library whose calls run on some CPUs alone, with a pool of threads of its own."""
    return step.on(Cores(cpus), min(len(cpus), allowed_threads()))


def available() -> tuple[str, ...]:
    """Return the instruction sets that this CPU runs and that were built."""
    return tuple(isa for isa in supported() if _file(isa))


@functools.cache
def fastest() -> str:
    """Return the instruction set that is fastest here, of those that were built if there are any.

    That is the last one, unless this CPU is faster with the one before it.
    """
    built = available()
    if "portable" not in built:
        return (built or supported())[-1]
    number = ISAS.index(built[-1])
    slow = _find("portable").slow_sets() >> number & 1
    before = ISAS[number - 1]
    return before if slow and before in built else built[-1]


@functools.cache
def supported() -> tuple[str, ...]:
    """Return the instruction sets that this CPU runs, by the library that every CPU runs."""
    try:
        sets = _find("portable").sets()
    except OSError:
        return ISAS[:1]
    return tuple(isa for number, isa in enumerate(ISAS) if sets >> number & 1)
