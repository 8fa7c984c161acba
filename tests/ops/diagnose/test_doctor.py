"""``outrider.ops.diagnose.doctor``: what it finds of this machine and of pairs, good and bad."""

from __future__ import annotations

import functools
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import ConfigError
from outrider.ops.diagnose import doctor as package_doctor
from outrider.ops.diagnose.doctor import (
    FAIL,
    OK,
    WARN,
    Finding,
    _checkpoint,
    _compiler,
    _files,
    _fits,
    _gpus,
    _native,
    _port,
    doctor,
    pair_facts,
    text_of,
    versions,
)
from outrider.ops.diagnose.host import Gpu, memory, parse_gpus
from tests.support.forked import run_program

MODULE = sys.modules["outrider.ops.diagnose.doctor"]  # the package has the function by that name
PROBE: dict[str, Any] = {
    "torch": "2.13", "threads": 2, "isas": ["portable"], "isa": "portable", "isa_error": "",
    "cuda_build": None, "cuda": [],
}  # fmt: skip
CHECKED: dict[str, Any] = {
    "family": "llama", "native": True, "dtype": "bfloat16", "context": 4096, "vocabulary": 320,
    "largest_id": 319, "bytes": 1 << 20, "weights": 1 << 30, "working": 1 << 28, "page": 1 << 20,
    "states": 0, "mtp": 0, "no_mtp": None,
    "usual": 4097,
}  # fmt: skip


@pytest.fixture
def with_torch_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that import torch are forked from one that has."""
    run = subprocess.run
    monkeypatch.setattr(
        "subprocess.run",
        lambda words, **given: (run_program if "-m" in words else run)(words, **given),
    )


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {each.what: each for each in findings}


def test_a_pair_that_fits_passes(
    tiny_llama: Path, tiny_drafter: Path, with_torch_forked: None
) -> None:
    found = by_name(doctor(str(tiny_llama), str(tiny_drafter), port=0))
    assert {
        "system", "processor", "python", "torch", "instruction set", "compiler", "GPU", "memory",
        "disk", "open files", "port 0", "model family", "model dtype", "model context",
        "model tokenizer", "drafter family", "memory at start", "cache", "pair tokenizer",
    } <= set(found)  # fmt: skip
    assert found["pair tokenizer"].status == OK
    assert found["model family"].found == "llama"
    assert [each for each in found.values() if each.status == FAIL] == []
    assert text_of(list(found.values())).endswith("warnings\n")
    assert package_doctor is doctor


def test_a_pair_that_does_not_fit_fails(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_torch_forked: None
) -> None:
    run = functools.cache(lambda *command, whole=MODULE._run: whole([*command]))
    monkeypatch.setattr(MODULE, "_run", lambda command: run(*command))
    monkeypatch.setattr(MODULE, "_probe", lambda models: PROBE)
    found = by_name(doctor(str(tiny_llama), str(tmp_path), port=0))
    assert found["drafter"].status == FAIL
    assert found["drafter"].remedy
    assert "Traceback" not in text_of(list(found.values()))
    assert pair_facts(str(tiny_llama), str(tmp_path)) == {}


def test_a_port_that_is_taken_fails() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        found = _port("127.0.0.1", taken.getsockname()[1])
    assert found.status == FAIL
    assert "--port" in found.remedy
    found = _port("no such host", 0)
    assert found.status == FAIL


@pytest.mark.parametrize(("soft", "status"), [(64, FAIL), (1024, WARN), (65_536, OK)])
def test_few_files_are_a_problem(soft: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, resource.RLIM_INFINITY))
    found = _files()
    assert found.status == status
    assert bool(found.remedy) == (status != OK)
    assert "unlimited" in found.found


def test_old_and_missing_packages_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "_needed", lambda: {"torch": "99.1"})
    found = by_name(list(versions()))
    assert found["torch"].status == FAIL
    assert "torch>=99.1" in found["torch"].remedy
    assert found["numpy"].status == OK
    monkeypatch.setattr(MODULE, "PACKAGES", ("no-such-package",))
    assert by_name(list(versions()))["no-such-package"].status == FAIL


@pytest.mark.parametrize(
    ("probe", "status", "words"),
    [
        ({"error": "No module named torch"}, FAIL, "No module named torch"),
        ({**PROBE, "isa": None, "isa_error": "OUTRIDER_NATIVE_ISA is 'x'"}, FAIL, "is 'x'"),
        ({**PROBE, "isa": None}, WARN, "torch runs the models"),
        (PROBE, OK, "portable"),
    ],
)
def test_a_native_step_that_is_missing_is_told(
    probe: dict[str, Any], status: str, words: str
) -> None:
    found = next(_native(probe))
    assert found.status == status
    assert words in found.found
    assert bool(found.remedy) == (status != OK)


def test_a_compiler_is_wanted_only_where_the_step_is_not_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert _compiler(PROBE).status == OK
    assert _compiler(PROBE | {"isa": None}).status == WARN


def test_gpus_are_told_and_so_is_a_torch_that_cannot_use_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = "NVIDIA A, 470.1, 1024, 81920, 7\nbroken\nNVIDIA B, 550.1, [N/A], x, y\n"
    assert parse_gpus(table) == [Gpu("NVIDIA A", "470.1", 1024.0, 81_920.0, 0.07)]
    monkeypatch.setattr(MODULE, "gpus", lambda: parse_gpus(table))
    found = by_name(list(_gpus(PROBE)))
    assert found["GPU"].status == WARN
    assert "79.0 of 80.0 GiB" in found["GPU"].found
    assert "build for CPUs" in found["CUDA"].found
    card = {"name": "A", "capability": "7.5", "bf16": False, "memory": 1}
    assert "no bf16" in by_name(list(_gpus({**PROBE, "cuda": [card]})))["CUDA"].found


@pytest.mark.parametrize(
    ("about", "what", "status"),
    [
        ({"error": "no config.json"}, "model", FAIL),
        ({**CHECKED, "native": False}, "model dtype", WARN),
        ({**CHECKED, "largest_id": 400}, "model tokenizer", WARN),
        ({**CHECKED, "largest_id": None}, "model tokenizer", WARN),
        (CHECKED, "model tokenizer", OK),
    ],
)
def test_checkpoints_are_judged(about: dict[str, Any], what: str, status: str) -> None:
    assert by_name(list(_checkpoint("model", about)))[what].status == status


@pytest.mark.parametrize(
    ("room", "start", "cache"),
    [(1 << 30, FAIL, None), (2 << 30, WARN, WARN), (8 << 30, OK, WARN), (32 << 30, OK, OK)],
)
def test_what_a_load_takes_must_fit_into_memory(room: int, start: str, cache: str | None) -> None:
    """The file of 1 MiB would fit anywhere; its weights, a step and two processes take 2 GiB."""
    found = by_name(list(_fits({**PROBE, "model": CHECKED}, room)))
    assert found["memory at start"].status == start
    assert "1.00 GiB of weights as they are held" in found["memory at start"].found
    assert (found["cache"].status if "cache" in found else None) == cache
    assert all(bool(each.remedy) == (each.status != OK) for each in found.values())


def test_memory_is_read_where_the_system_tells_it(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    assert memory(file) is None
    file.write_text("MemTotal:  100 kB\nMemAvailable:   40 kB\n")
    assert memory(file) == (40 * 1024, 100 * 1024)


def test_wrong_options_get_a_sentence(tiny_llama: Path) -> None:
    for port in (-1, 65_536, True, "80"):
        with pytest.raises(ConfigError, match="port is"):
            doctor(port=port)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="give MODEL too"):
        doctor(drafter=str(tiny_llama))
