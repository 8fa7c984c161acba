"""Whatever comes from outside is read, or refused in a sentence: no traceback, hang or death."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import REPOSITORY
from tests.support.hostile import calls as hostile_calls  # noqa: F401 - enters readers in the table
from tests.support.hostile import documents as hostile_documents  # noqa: F401
from tests.support.hostile import guard as hostile_guard  # noqa: F401
from tests.support.hostile import models as hostile_models  # noqa: F401
from tests.support.hostile.readers import READERS
from tests.support.hostile.run import HEAVY

FEW, MANY = 2, 20_000
"""Cases: of each reader in every run, and of all readers together in the slow one."""
PARTS = 4
SEED = int(os.environ.get("OUTRIDER_HOSTILE_SEED", "0"))
CASES = int(os.environ.get("OUTRIDER_HOSTILE_CASES", str(MANY)))


def run(folder: Path, names: Sequence[str], count: int, seed: int) -> list[dict[str, Any]]:
    """Try so many cases of each reader, in a process with limits; return what was found."""
    lines: list[dict[str, Any]] = []
    names = list(names)
    while names:
        command = [sys.executable, "-m", "tests.support.hostile.run", str(folder), str(seed)]
        done = subprocess.run(
            [*command, *(f"{name}={count}" for name in names)],
            capture_output=True, text=True, timeout=3600, check=False, cwd=REPOSITORY,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        lines += map(json.loads, done.stdout.splitlines())
        if done.returncode == 0:
            break
        # It died, or hung: the others are tried all the same.
        begun = [line["begins"] for line in lines if "begins" in line]
        assert begun, done.stderr[-3000:]
        case = (folder / "case").read_text(errors="replace")[:1500]
        lines.append({"reader": begun[-1], "fault": f"ended with {done.returncode}: "
                      f"{done.stderr[-3000:]}", "case": case})  # fmt: skip
        names = names[names.index(begun[-1]) + 1 :]
    return lines


def check(lines: list[dict[str, Any]], least: int) -> None:
    """Assert that all readers were tried, and that none has a fault."""
    ends = {line["reader"]: line for line in lines if "cases" in line}
    counts = "\n".join(f"{name}: {line}" for name, line in ends.items())
    print(counts)  # shown by -s, and where it fails
    faults = [line for line in lines if "fault" in line and "cases" not in line]
    assert not faults, "\n".join(json.dumps(fault) for fault in faults)
    assert sum(line["cases"] for line in ends.values()) >= least, counts


def test_a_few_cases_of_every_reader(tmp_path: Path) -> None:
    """Of checkpoints and grammars, other tests have a few in every run."""
    names = [name for name in READERS if not name.startswith(HEAVY)]
    check(run(tmp_path, names, FEW, 0), FEW * len(names))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_no_reader_fails_on_20_000_cases(part: int, tmp_path: Path) -> None:
    """OUTRIDER_HOSTILE_SEED and OUTRIDER_HOSTILE_CASES take others."""
    names = list(READERS)[part::PARTS]
    count = -(-CASES * 21 // (20 * len(READERS)))  # small readers have fewer different cases
    check(run(tmp_path, names, count, SEED), CASES * len(names) // len(READERS) * 19 // 20)
