"""Freed memory goes back to the system.

glibc keeps what a thread has freed unless it lies at the end of the thread's heap. A grammar or an
answer that once took 50 MB would then stay in the size of a process that runs for weeks.

Large blocks are mapped one by one, and go back when they are freed. glibc stops mapping blocks of a
size of which one was freed, up to 32 MiB, unless the threshold is set: they then leave holes among
small blocks (50 MB in a server of 350 MB, after grammars of many sizes).
"""

from __future__ import annotations

import ctypes
import threading
import time

TRIM_SECONDS = 5.0  # a trim takes some milliseconds of a core
M_MMAP_THRESHOLD, MAPPED_BYTES = -3, 4 << 20


def trim_regularly() -> None:
    """Start a thread that gives freed memory back every few seconds, where glibc is the libc."""
    libc = ctypes.CDLL(None)
    trim = getattr(libc, "malloc_trim", None)
    if trim is not None:
        libc.mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
        threading.Thread(target=_run, args=(trim,), name="outrider-trim", daemon=True).start()


def _run(trim: ctypes._NamedFuncPointer) -> None:
    while True:
        time.sleep(TRIM_SECONDS)
        trim(ctypes.c_size_t(0))
