"""Memory that was freed goes back to the system."""

import ctypes
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes
from outrider.engine.worker.freed_memory import trim_regularly

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                ("arena", "free", "small", "blocks", "mapped", "a", "b", "used", "left", "top")]

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.mallinfo2.restype = ctypes.c_void_p, Info
trim_regularly()
for _ in range(2):  # of a size of which one was freed, glibc would map no other
    before = libc.mallinfo2().mapped
    block = libc.malloc(ctypes.c_size_t(8 << 20))
    print((libc.mallinfo2().mapped - before) >> 20)
    libc.free(ctypes.c_void_p(block))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
def test_large_blocks_are_always_mapped() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout.split() == ["8", "8"], done.stderr
