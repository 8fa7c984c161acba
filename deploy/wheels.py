"""Builds the source distribution and the wheels of Linux on x86-64 and ARM, without a container.

    python deploy/wheels.py                  # dist/: sdist and both wheels
    python deploy/wheels.py --arch x86_64    # only this wheel
    python deploy/wheels.py --twice          # build twice and compare the bytes

The compiler is zig's clang from PyPI, which links against the symbols of glibc 2.28 and builds for
both architectures on either. Wheels are built from the sdist, as ``pip`` does it. The script
checks that a wheel has every instruction set, that auditwheel confirms its tag, and that no file is
larger than ``MOST_BYTES``.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
TOOLS = REPOSITORY / "deploy" / "wheels.txt"
GLIBC = (2, 28)
FOUND = re.compile(r'platform\s+tag:\s+"manylinux_(\d+)_(\d+)_(\w+)"')
"""The tag that auditwheel finds. It also repeats the file name, which has a tag as well."""
SETS = {
    "x86_64": ("portable", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16", "amx"),
    "aarch64": ("portable", "neon", "dotprod", "bf16"),
}
"""The instruction sets of each architecture, as in native/choice.py."""
DETECTED = {
    "x86_64": ((1, "avx2"), (3, "avx512bw"), (4, "avx512_vnni"), (5, "avx512_bf16")),
    "aarch64": ((1, "asimd"), (2, "asimddp")),
}
"""The number of each set, and the kernel's name of the CPU feature that it needs."""
MOST_BYTES = 30_000_000


class Failed(Exception):
    """A step failed; the message says why."""


def call(*command: str | Path, **environment: str) -> str:
    """Return what a command prints; Failed with its last lines if it ends with an error."""
    done = subprocess.run(
        [*map(str, command)], env={**os.environ, **environment}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        last = "\n".join(done.stdout.splitlines()[-40:])
        raise Failed(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{last}")
    return done.stdout


def tools() -> Path:
    """Return the Python of a virtual environment that has the tools."""
    folder = REPOSITORY / "build" / "wheels"
    python, stamp = folder / "bin" / "python", folder / "tools"
    wanted = TOOLS.read_text()
    if not (stamp.is_file() and stamp.read_text() == wanted):
        print("installing the tools of deploy/wheels.txt", file=sys.stderr)
        venv.create(folder, clear=True, with_pip=True)
        call(python, "-m", "pip", "--quiet", "install", "--requirement", TOOLS)
        stamp.write_text(wanted)
    return python


def date_of_source() -> str:
    """Return the second of the last commit, which every file of an archive gets as its time."""
    if "SOURCE_DATE_EPOCH" in os.environ:
        return os.environ["SOURCE_DATE_EPOCH"]
    return call("git", "-C", REPOSITORY, "log", "-1", "--format=%ct").strip()


def build_sdist(python: Path, out: Path, date: str) -> Path:
    """Build the source distribution and return it."""
    print("building the source distribution", file=sys.stderr)
    call(python, "-m", "build", "--no-isolation", "--sdist", "--outdir", out, REPOSITORY,
         SOURCE_DATE_EPOCH=date)  # fmt: skip
    return max(out.glob("outrider-*.tar.gz"), key=lambda file: file.stat().st_mtime_ns)


def build_wheel(python: Path, source: Path, arch: str, out: Path, date: str) -> Path:
    """Build the wheel for an architecture from a source tree, tag it, check it and return it."""
    print(f"building the wheel for {arch}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as work:
        compiler = Path(work, "c++")
        glibc = ".".join(map(str, GLIBC))
        target = f"-target {arch}-linux-gnu.{glibc}" + (" -mcpu=x86_64" * (arch == "x86_64"))
        # The libraries must not contain build paths.
        compiler.write_text(
            f'#!/bin/sh\nexec "{python}" -m ziglang c++ {target} '
            f'-ffile-prefix-map={source}=. "$@"\n'
        )
        compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
        call(
            python, "-m", "build", "--no-isolation", "--wheel", "--outdir", work, source,
            SOURCE_DATE_EPOCH=date, CXX=str(compiler),
            CMAKE_ARGS=f"-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR={arch}",
        )  # fmt: skip
        (made,) = Path(work).glob("*.whl")
        tag = "manylinux_{}_{}_{}".format(*GLIBC, arch)
        call(python, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, made,
             SOURCE_DATE_EPOCH=date)  # fmt: skip
        (wheel,) = Path(work).glob("*.whl")
        check(python, wheel, arch)
        return Path(shutil.move(wheel, out / wheel.name))


def check(python: Path, wheel: Path, arch: str) -> None:
    """Raise Failed if a wheel lacks a set, is too large, or does not match its tag."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    found = {m[1] for name in names if (m := re.search(r"/native/outrider_(\w+)\.so$", name))}
    if found != set(SETS[arch]):
        raise Failed(f"{wheel.name} has the sets {sorted(found)}, not {sorted(SETS[arch])}.")
    if arch == platform.machine():
        check_detection(wheel)
    size = wheel.stat().st_size
    if size > MOST_BYTES:
        raise Failed(f"{wheel.name} has {size} bytes, more than {MOST_BYTES}.")
    said = call(python, "-m", "auditwheel", "show", wheel)
    fit = FOUND.search(said)
    if fit is None or fit[3] != arch or (int(fit[1]), int(fit[2])) > GLIBC:
        raise Failed(f"auditwheel reports that {wheel.name} does not match its tag:\n{said}")
    print(f"{wheel.name}: {size / 1e6:.1f} MB, {len(found)} instruction sets")


def check_detection(wheel: Path) -> None:
    """Raise Failed if a wheel's libraries do not detect the features of this CPU."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        file = archive.extract("outrider/native/outrider_portable.so", folder)
        sets = ctypes.CDLL(file).outrider_cpu()
    flags = set(Path("/proc/cpuinfo").read_text().split())
    for number, flag in DETECTED[platform.machine()]:
        if bool(sets >> number & 1) != (flag in flags):
            raise Failed(f"{wheel.name} is wrong about this CPU's {flag}: it sees sets {sets:b}.")


def build(archs: list[str], out: Path) -> list[Path]:
    """Build the sdist, and from it the wheels; return all of them."""
    python, date = tools(), date_of_source()
    out.mkdir(parents=True, exist_ok=True)
    sdist = build_sdist(python, out, date)
    with tempfile.TemporaryDirectory() as work:
        shutil.unpack_archive(sdist, work, filter="data")
        (source,) = Path(work).iterdir()
        return [sdist, *(build_wheel(python, source, arch, out, date) for arch in archs)]


def digest(file: Path) -> str:
    """Return a file's SHA-256."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def main() -> None:
    """Build what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", action="append", choices=[*SETS], help="default: all")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "dist")
    parser.add_argument("--twice", action="store_true", help="build again and compare the bytes")
    asked = parser.parse_args()
    archs = asked.arch or [*SETS]
    try:
        files = build(archs, asked.out)
        if asked.twice:
            with tempfile.TemporaryDirectory() as other:
                for first, again in zip(files, build(archs, Path(other)), strict=True):
                    if digest(first) != digest(again):
                        raise Failed(f"{first.name} has different bytes in the second build.")
            print("the second build has the same bytes")
    except Failed as error:
        sys.exit(f"wheels: {error}")
    for file in files:
        print(f"{digest(file)}  {file.name}")


if __name__ == "__main__":
    main()
