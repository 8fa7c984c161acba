"""The native step under the sanitizers of addresses and undefined behaviour (make slow)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
TESTS = ("native", "native_laws", "quantized", "rows", "shared", "exact_bits", "boundaries")

PLUGIN = """
import outrider.native

outrider.native.__path__.insert(0, {folder!r})

def pytest_sessionfinish(session):
    with open("/proc/self/maps") as maps:
        assert {folder!r} + "/liboutrider" in maps.read(), "other libraries were tested"
"""


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or not (shutil.which("cmake") and shutil.which("g++")),
    reason="needs Linux, cmake and g++",
)
def test_no_address_or_number_is_out_of_bounds(tmp_path: Path) -> None:
    """Three minutes of compiling, shared by the cores, and about one of tests."""
    configure = ["cmake", "-S", str(REPOSITORY), "-B", str(tmp_path), "-DSANITIZE=ON"]
    subprocess.run(configure, check=True)
    cores = str(len(os.sched_getaffinity(0)))
    subprocess.run(["cmake", "--build", str(tmp_path), "--parallel", cores], check=True)
    (tmp_path / "sanitized.py").write_text(PLUGIN.format(folder=str(tmp_path)))
    runtime = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    )
    environment = os.environ | {
        "LD_PRELOAD": runtime.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python and torch keep what they have
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
    }
    tests = [str(REPOSITORY / "tests" / f"test_{name}.py") for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "sanitized"]
    command += ["-k", "not loading_takes", *tests]  # what memory the sanitizer takes says nothing
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
