"""``doctor``: whether this machine and a pair of models are fit to serve, before they do."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from ...base.config import DEFAULT_SHARE, EngineConfig, free_memory
from ...base.extras import INSTALL, OF_TORCH
from ...errors import ConfigError, shown
from .facts import data
from .host import gpus

OK, WARN, FAIL = "ok", "warn", "fail"
PROBE = (sys.executable, "-m", "outrider.engine.probe")
CHECK = (sys.executable, "-m", "outrider", "drafters", "check")
PROBE_SECONDS = 240.0
PACKAGES = ("outrider", "tokenizers", "safetensors", "numpy", *OF_TORCH)
OF_EXTRA = re.compile(r"""extra == ["']torch["']""")
"""Matches requirements of the extra ``torch``, which doctor checks too."""
COMPILERS = ("c++", "g++", "clang++")
FEW_FILES, LEAST_FILES = 4096, 256
"""Limits on open files below which many clients, or any clients, are at risk."""
LITTLE_DISK = 5 * 10**9
PORTS = 65_535
LEAST_DRIVER = 525
"""The first version of NVIDIA's driver for CUDA 12."""
PROCESSES = 600 << 20
"""Measured bytes of a server's two processes without weights and cache."""
TIGHT_SHARE = 0.7
"""Share of free memory above which a server at start leaves little to other programs."""


class Finding(NamedTuple):
    """The result of one check; ``status`` is ok, warn or fail, ``remedy`` says what to do."""

    what: str
    found: str
    status: str = OK
    remedy: str = ""


def doctor(
    model: str | None = None, drafter: str | None = None, port: int = 8000, host: str = "127.0.0.1"
) -> list[Finding]:
    """Return findings on this machine's fitness to serve, with a remedy for each problem.

    A hub name is downloaded; port 0 is any. Raises ConfigError: a bad port, a drafter but no model.
    """
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= PORTS:
        raise ConfigError(f"port is {shown(port)}; give a whole number from 0 to {PORTS}.")
    if drafter is not None and model is None:
        raise ConfigError("a drafter is checked against its target; give MODEL too.")
    probe = _probe([each for each in (model, drafter) if each is not None])
    findings = [*versions(), *_native(probe), _compiler(probe), *_gpus(probe)]
    room = free_memory()
    memory = Finding("memory", f"{room / 2**30:.1f} GiB free")
    findings += [memory, *_disk(), _files(), _port(host, port)]
    for name in ("model", "drafter"):
        if name in probe:
            findings += _checkpoint(name, probe[name])
    if model is not None and "error" not in probe:
        findings += _fits(probe, room)
    if drafter is not None:
        findings += _pair(model, drafter)  # type: ignore[arg-type]
    return findings


def _finding(
    what: str, text: str, remedy: str = "", status: str = WARN, **values: object
) -> Finding:
    """Return a finding: a problem with ``status`` if ``remedy`` names one, else ok."""
    if not remedy:
        return Finding(what, text)
    return Finding(what, text, status, data("remedies")[remedy].format(**values))


def _run(command: list[str]) -> tuple[str, str]:
    """Return a command's output, and the reason if there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return "", f"nothing within {PROBE_SECONDS:.0f} s"
    except OSError as error:
        return "", str(error.strerror)
    said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return done.stdout, said[-1].strip()


def _probe(models: list[str]) -> dict[str, Any]:
    """Return the probe's report on torch and the checkpoints; only ``error`` if it fails."""
    text, why = _run([*PROBE, *models])
    try:
        probe = json.loads(text.splitlines()[-1])
    except (ValueError, IndexError):
        probe = None
    return probe if isinstance(probe, dict) else {"error": why}


def versions() -> Iterator[Finding]:
    """Yield the machine, Python, and the packages with their required versions."""
    yield Finding("system", f"{platform.system()} {platform.release()} {platform.machine()}")
    yield Finding("processor", f"{_processor()}, {len(os.sched_getaffinity(0))} cores to use")
    yield Finding("python", platform.python_version())
    needed = _needed()
    for name in PACKAGES:
        least = needed.get(name, "0")
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            if name in OF_TORCH:
                how = INSTALL.format(extra="torch")
                yield Finding(name, f"not installed: what has no native step needs it ({how})")
            else:
                yield _finding(name, "missing", "missing", FAIL)
            continue
        old = _parts(version) < _parts(least)
        text = f"{version}, below {least}" if old else version
        yield _finding(name, text, "old" * old, FAIL, name=name, least=least)


def _processor() -> str:
    with suppress(OSError):
        if name := re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.M):
            return name[1].strip()
    return platform.machine()


def _needed() -> dict[str, str]:
    """Return the least versions that this package asks for."""
    try:
        texts = metadata.requires("outrider") or []
    except metadata.PackageNotFoundError:
        return {}
    own = (text for text in texts if ";" not in text or OF_EXTRA.search(text))
    pairs = (re.match(r"([\w.-]+)\s*\(?>=([\d.]+)", text) for text in own)
    return {pair[1]: pair[2] for pair in pairs if pair}


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _native(probe: dict[str, Any]) -> Iterator[Finding]:
    if "error" in probe:
        yield _finding("torch", f"cannot be used: {probe['error']}", "torch", FAIL)
    elif probe["isa_error"]:
        yield _finding("instruction set", probe["isa_error"], "isa", FAIL)
    elif probe["isa"] is None and probe["torch"] is None:
        yield _finding("instruction set", "none, and no torch: no model can run", "no_isa", FAIL)
    elif probe["isa"] is None:
        yield _finding("instruction set", "none: torch runs the models, slowly", "no_isa")
    else:
        yield Finding("instruction set", f"{probe['isa']}, of {', '.join(probe['isas'])}")
        wide = probe["isa"] in ("avx512bf16", "amx", "bf16")
        yield Finding("bf16", "in hardware" if wide else "converted to fp32 as it is read")
        yield Finding("threads", str(probe["threads"]))


def _compiler(probe: dict[str, Any]) -> Finding:
    path = next(filter(None, map(shutil.which, COMPILERS)), None)
    if path is None:
        if probe.get("isa"):
            return Finding("compiler", "none; the native step is built")
        return _finding("compiler", "none", "compiler")
    text, why = _run([path, "--version"])
    return Finding("compiler", text.splitlines()[0] if text else why)


def _gpus(probe: dict[str, Any]) -> Iterator[Finding]:
    devices, usable = gpus(), probe.get("cuda", [])
    for gpu in devices:
        room = f"{gpu.name}, {(gpu.total - gpu.used) / 1024:.1f} of {gpu.total / 1024:.1f} GiB free"
        major = gpu.driver.partition(".")[0]
        old = major.isdecimal() and int(major) < LEAST_DRIVER
        yield _finding("GPU", f"{room}, driver {gpu.driver}", "driver" * old, least=LEAST_DRIVER)
    if devices and not usable and "error" not in probe:
        build = probe["cuda_build"]
        cpus = "torch is a build for CPUs" if probe["torch"] else "torch is not installed"
        why = f"torch for CUDA {build} cannot use it" if build else cpus
        yield _finding("CUDA", why, "cuda")
    for gpu in usable:
        known = "bf16" if gpu["bf16"] else "no bf16: use float16 or float32"
        yield Finding("CUDA", f"{gpu['name']}, compute capability {gpu['capability']}, {known}")
    if not devices and not usable:
        yield Finding("GPU", "none; Outrider's own engine runs on the CPU")


def _disk() -> Iterator[Finding]:
    folder = Path(os.environ.get("HF_HOME") or os.path.expanduser("~/.cache"))
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    text = f"{free / 10**9:.1f} GB free at {folder}"
    yield _finding("disk", text, "disk" * (free < LITTLE_DISK))
    if not os.access(folder, os.W_OK):
        yield _finding("disk", f"{folder} cannot be written", "locked")


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = [str(x) if x != resource.RLIM_INFINITY else "unlimited" for x in (soft, hard)]
    few = soft != resource.RLIM_INFINITY and soft < FEW_FILES
    text = f"{limits[0]} (hard limit {limits[1]})"
    return _finding("open files", text, "files" * few, FAIL if soft < LEAST_FILES else WARN)


def _port(host: str, port: int) -> Finding:
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as own:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            own.bind((host, port))
        return Finding(f"port {port}", f"free on {host}")
    except OSError as error:
        why = error.strerror or str(error)
        return _finding(f"port {port}", f"cannot be used on {host}: {why}", "port", FAIL)


def _checkpoint(name: str, about: dict[str, Any]) -> Iterator[Finding]:
    if "error" in about:
        # A head (EAGLE-3, Medusa) is no causal language model; the pair's check covers it.
        if name == "model":
            yield _finding(name, about["error"], "checkpoint", FAIL)
        return
    yield Finding(f"{name} family", about["family"])
    runs = "the native step runs it" if about["native"] else "the native step does not run it"
    yield _finding(f"{name} dtype", f"{about['dtype']}; {runs}", "" if about["native"] else "slow")
    yield Finding(f"{name} context", f"{about['context']} tokens")
    if about["states"]:
        text = f"{about['states'] / 2**20:.1f} MiB of states for each sequence, beside its pages"
        yield Finding(f"{name} states", text)
    if about["no_mtp"]:
        yield _finding(f"{name} MTP layers", about["no_mtp"], "mtp")
    elif about["mtp"]:
        yield Finding(f"{name} MTP layers", f"{about['mtp']}, for the drafter mtp")
    size, largest, what = about["vocabulary"], about["largest_id"], f"{name} tokenizer"
    if largest is None:
        yield _finding(what, "none", "no_tokenizer")
    elif largest >= size:
        yield _finding(what, f"has id {largest}, the model only {size} ids", "tokenizer")
    else:
        yield Finding(what, f"ids to {largest}, within the vocabulary of {size}")


def _fits(probe: dict[str, Any], room: int) -> Iterator[Finding]:
    """Yield whether a server's memory at start and its cache fit into ``room`` bytes."""
    pair = [probe[name] for name in ("model", "drafter") if "weights" in probe.get(name, {})]
    if not pair:
        return
    weights, page = (sum(about[name] for about in pair) for name in ("weights", "page"))
    working, usual = pair[0]["working"], pair[0]["usual"]
    start = weights + working + PROCESSES
    cache, rest = usual * page, max(0, room - start)
    text = (
        f"{_gib(weights)} of weights as they are held ({_gib(sum(a['bytes'] for a in pair))} on "
        f"disk), {_gib(working)} for a step, {_gib(PROCESSES)} for two processes; {_gib(room)} free"
    )
    status, tight = FAIL if start > room else WARN, start > TIGHT_SHARE * room
    yield _finding("memory at start", text, "memory" * tight, status)
    if page and start <= room:
        short = cache > rest * DEFAULT_SHARE
        text = f"up to {_gib(cache)} once it is full, {(usual - 1) * EngineConfig.page_size} tokens"
        low = f"{_gib(int(rest * DEFAULT_SHARE))} of the default {_gib(cache)}"
        yield _finding("cache", low if short else text, "cache" * short)


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def _pair(model: str, drafter: str) -> Iterator[Finding]:
    """Yield how a drafter's checkpoint fits its target: ``outrider drafters check``."""
    text, why = _run([*CHECK, model, "--drafter", drafter, "--json"])
    try:
        report = json.loads(text)
        facts = [(fact["what"], fact["drafter"], fact["target"], fact["fits"])
                 for fact in report["facts"]]  # fmt: skip
    except (ValueError, LookupError, TypeError):
        yield _finding("drafter", why.removeprefix("error: "), "head", FAIL)
        return
    yield Finding("drafter", report["drafter"])
    for what, own, theirs, fits in facts:
        yield _finding(f"pair {what}", f"{own}; target: {theirs}", "" if fits else "pair", FAIL)


def pair_facts(model: str, drafter: str) -> dict[str, str]:
    """Return the pair's check as the fact ``same_tokenizer``; empty if it has no result."""
    findings = [each for each in _pair(model, drafter) if each.what == "pair tokenizer"]
    return {"same_tokenizer": "yes" if findings[0].status == OK else "no"} if findings else {}


def text_of(findings: list[Finding]) -> str:
    """Return findings as text to paste, each remedy below its finding."""
    wide = max(len(each.what) for each in findings)
    lines = []
    for each in findings:
        lines.append(f"{each.status:<5} {each.what:<{wide}}  {each.found}")
        if each.remedy:
            lines.append(f"{'':5} {'':{wide}}  -> {each.remedy}")
    counts = {s: sum(each.status == s for each in findings) for s in (FAIL, WARN)}
    lines.append(f"{counts[FAIL]} failed, {counts[WARN]} warnings")
    return "\n".join(lines) + "\n"
