"""Freed memory goes back to the system.

glibc keeps what a thread has freed unless it lies at the end of the thread's heap. A grammar or an
answer that once took 50 MB would then stay in the size of a process that runs for weeks.
"""

from __future__ import annotations

import ctypes
import threading
import time

TRIM_SECONDS = 5.0  # a trim takes some milliseconds of a core


def trim_regularly() -> None:
    """Start a thread that gives freed memory back every few seconds, where glibc is the libc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        threading.Thread(target=_run, args=(trim,), name="outrider-trim", daemon=True).start()


def _run(trim: ctypes._NamedFuncPointer) -> None:
    while True:
        time.sleep(TRIM_SECONDS)
        trim(ctypes.c_size_t(0))
