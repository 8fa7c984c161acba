"""Memory that was freed goes back to the system."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33"
)
BLOCKS = """
import ctypes
from outrider.base.freed_memory import trim_regularly

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
OBJECTS = """
import ctypes, sys
from pathlib import Path
from outrider.base.freed_memory import use_system_allocator

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4 >> 10

use_system_allocator()
before = resident()
objects = [bytes(100) for _ in range(500_000)]
kept = objects[::5000]
del objects
ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
print(resident() - before, *sys.argv[1:])
"""


def told(program: str, *words: str, **environment: str) -> list[str]:
    """The words that a program prints."""
    command = [sys.executable, "-c", program, *words]
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONMALLOC"}
    done = subprocess.run(command, capture_output=True, text=True, env=inherited | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_large_blocks_are_always_mapped() -> None:
    assert told(BLOCKS) == ["8", "8"]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_a_few_objects_hold_no_memory_of_others() -> None:
    grown, *words = told(OBJECTS, "a", "b c")
    assert int(grown) < 10
    assert words == ["a", "b", "c"]
    assert int(told(OBJECTS, PYTHONMALLOC="pymalloc")[0]) > 30  # the user's choice stands
