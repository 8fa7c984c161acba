"""The native step under the sanitizers: addresses, undefined behaviour, data races (make slow)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.native import choice as native
from tests.support import REPOSITORY

TESTS = (
    "models/test_native", "native/test_native_sampling", "models/test_draft_trees",
    "native/test_quantized_products", "native/test_native_ranges", "drafters/test_suffix",
    "models/test_rows", "models/test_shared", "equality/test_exact_bits", "server/test_boundaries",
    "native/test_coded_products", "models/test_kept_weights", "native/test_native_threads",
)  # fmt: skip

PLUGIN = """
import outrider.native

outrider.native.__path__.insert(0, {folder!r})

def pytest_sessionfinish(session):
    with open("/proc/self/maps") as maps:
        assert {folder!r} + "/outrider_" in maps.read(), "other libraries were tested"
"""
HAZARD = """
import runpy, sanitized

runpy.run_module("tests.support.native_hazards", run_name="__main__", alter_sys=True)
sanitized.pytest_sessionfinish(None)
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or not (shutil.which("cmake") and shutil.which("g++")),
        reason="needs Linux, cmake and g++",
    ),
]


def runtime_of(name: str) -> str:
    """The path of a sanitizer's runtime, or a skip where the compiler has none."""
    asked = ["g++", f"-print-file-name={name}"]
    found = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    if not os.path.isabs(found):
        pytest.skip(f"the compiler has no {name}")
    return found


def sanitized(folder: Path, option: str, runtime: str, *targets: str) -> dict[str, str]:
    """Build the libraries with a CMake option in ``folder``; the environment that runs them."""
    preload = runtime_of(runtime)
    configure = ["cmake", "-S", str(REPOSITORY), "-B", str(folder), f"-D{option}=ON"]
    subprocess.run(configure, check=True)
    cores = str(len(os.sched_getaffinity(0)))
    build = ["cmake", "--build", str(folder), "--parallel", cores]
    subprocess.run([*build, *(f"--target={t}" for t in targets)], check=True)
    (folder / "sanitized.py").write_text(PLUGIN.format(folder=str(folder)))
    return os.environ | {
        "LD_PRELOAD": preload,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python and torch keep what they have
        # Only what was compiled for it can tell the order of its accesses.
        "TSAN_OPTIONS": "exitcode=66 ignore_noninstrumented_modules=1",
        "PYTHONPATH": os.pathsep.join(
            [str(folder), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        ),
    }


def run(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def run_hazard(name: str, environment: dict[str, str]) -> None:
    """Run one of native_hazards.py with the sanitized libraries."""
    run([sys.executable, "-c", HAZARD, name], environment)


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Three minutes of compiling, shared by the cores."""
    return sanitized(tmp_path_factory.mktemp("addresses"), "SANITIZE", "libasan.so")


def test_no_address_or_number_is_out_of_bounds(addresses: dict[str, str]) -> None:
    tests = [str(REPOSITORY / "tests" / f"{name}.py") for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "sanitized"]
    # What memory the sanitizer takes says nothing.
    command += ["-k", "not loading_takes and not is_bounded", *tests]
    run(command, addresses)


@pytest.mark.parametrize("hazard", ["exits", "released", "together"])
def test_nothing_is_used_after_it_is_freed(hazard: str, addresses: dict[str, str]) -> None:
    run_hazard(hazard, addresses)


def test_no_two_threads_race(tmp_path: Path) -> None:
    best = native.fastest()
    environment = sanitized(tmp_path, "SANITIZE_THREADS", "libtsan.so", f"outrider_{best}")
    for hazard in ("together", "released", "apart"):
        run_hazard(hazard, environment)
