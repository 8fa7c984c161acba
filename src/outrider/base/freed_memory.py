"""Returns freed memory to the system, for servers that run for weeks.

Python's own allocator takes memory by the MiB, and keeps each MiB in which a byte is in use: after
some large requests, a few small objects hold all that the requests took. A server uses glibc's
allocator instead, which can return every free page.

It does so only on request: memory that a thread has freed stays in the process unless it lies at
the end of the thread's heap. Large blocks are mapped one by one, and are returned when freed; but
unless the threshold is set, glibc stops mapping blocks of a size that was once freed, up to 32 MiB.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time

TRIM_SECONDS = 5.0  # a trim takes some milliseconds of a core
M_MMAP_THRESHOLD, MAPPED_BYTES = -3, 4 << 20
ALLOCATOR = "PYTHONMALLOC"


def use_system_allocator() -> None:
    """Restart this program in the same process, with glibc as Python's allocator.

    Nothing happens if another libc is used, if the environment names an allocator, or if
    ``sys.argv`` is not the process's own.
    """
    words = sys.argv[1:]
    own = sys.orig_argv[len(sys.orig_argv) - len(words) :] == words
    if own and ALLOCATOR not in os.environ and sys.executable and _trim() is not None:
        os.environ[ALLOCATOR] = "malloc"  # read when an interpreter starts; workers inherit it
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def trim_regularly() -> None:
    """Start a thread that returns freed memory every few seconds, if glibc is the libc."""
    trim = _trim()
    if trim is not None:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
        threading.Thread(target=_run, args=(trim,), name="outrider-trim", daemon=True).start()


def _trim() -> ctypes._NamedFuncPointer | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def _run(trim: ctypes._NamedFuncPointer) -> None:
    while True:
        time.sleep(TRIM_SECONDS)
        trim(ctypes.c_size_t(0))
