"""The pool of threads: what it may take, and that no share of it changes what is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.base.groups import GROUPS, cpu_quota
from outrider.native import choice as native
from outrider.native.threads import allowed_threads
from tests.support import REPOSITORY

POCKET = REPOSITORY / "src/outrider/pocket/model"
PROMPTS = [[5, 6, 7, 8] * 9, [40, 41]]
ALONE = """
import json, sys
from outrider import LLM, SamplingParams
from outrider.native.choice import library
from outrider.native.threads import allowed_threads
for group in sys.argv[3:]:  # joined once all is imported, which a quota would make slow
    open(group + "/cgroup.procs", "w").write("0")
params = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True)
llm = LLM(sys.argv[1], drafter="model", num_speculative_tokens=4)  # no costs to be measured
found = llm.generate(json.loads(sys.argv[2]), params)
print(json.dumps([allowed_threads(), [r.outputs[0].token_ids for r in found]]))
"""


def test_a_control_groups_quota_counts(tmp_path: Path) -> None:
    groups, own = tmp_path / "groups", tmp_path / "own"
    groups.mkdir()
    assert cpu_quota(groups, own) is None
    (groups / "cpu").mkdir()
    (groups / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (groups / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_quota(groups, own) is None
    (groups / "cpu" / "cpu.cfs_quota_us").write_text("250000\n")
    assert cpu_quota(groups, own) == 2.5
    (groups / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(groups, own) == 2.5
    inner = groups / "a" / "b"
    inner.mkdir(parents=True)
    (inner.parent / "cpu.max").write_text("150000 100000\n")
    (inner / "cpu.max").write_text("max 100000\n")
    own.write_text("0::/a/b\n")
    assert cpu_quota(groups, own) == 1.5
    assert allowed_threads(groups, own) == 1


def run_alone(*groups: Path, **options: object) -> tuple[int, list[list[int]]]:
    """The threads of a process in control groups, and what it generates."""
    command = [sys.executable, "-c", ALONE, str(POCKET), json.dumps(PROMPTS), *map(str, groups)]
    options |= {"env": os.environ | {"OMP_NUM_THREADS": "2"}}
    done = subprocess.run(command, capture_output=True, text=True, check=True, **options)  # type: ignore[call-overload]
    threads, tokens = json.loads(done.stdout.splitlines()[-1])
    return threads, tokens


@cache
def expected() -> list[list[int]]:
    """What a process with two threads generates, where there are two cores."""
    threads, tokens = run_alone()
    assert threads == min(2, len(os.sched_getaffinity(0)))
    return tokens


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_one_core_is_enough() -> None:
    def cut() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    assert run_alone(preexec_fn=cut) == (1, expected())


@pytest.fixture
def half_a_core() -> Iterator[Path]:
    """A control group with that quota, of version 2 or 1."""
    second = (GROUPS / "cgroup.controllers").exists()
    group = (GROUPS if second else GROUPS / "cpu") / f"outrider-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no right to make a control group: {error}")
    try:
        try:
            if second:
                (group / "cpu.max").write_text("50000 100000")
            else:
                (group / "cpu.cfs_period_us").write_text("100000")
                (group / "cpu.cfs_quota_us").write_text("50000")
        except OSError as error:
            pytest.skip(f"no right to set a quota: {error}")
        yield group
    finally:
        group.rmdir()


def test_a_quota_of_half_a_core_is_enough(half_a_core: Path) -> None:
    assert run_alone(half_a_core) == (1, expected())


@pytest.mark.skipif(native.library() is None, reason="the native step is off")
def test_two_engines_share_the_pool(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path, "qwen3")
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True)
    wanted = [
        [r.outputs[0].token_ids for r in LLM(folder, drafter=None).generate(PROMPTS, params)]
        for folder in (POCKET, other)
    ]
    engines = [
        LLM(POCKET, drafter="model", num_speculative_tokens=4),
        LLM(other, drafter="ngram", num_speculative_tokens=4),
    ]
    found: dict[int, list[list[int]]] = {}

    def run(number: int) -> None:
        for _ in range(3):
            results = engines[number].generate(PROMPTS, params)
            found[number] = [r.outputs[0].token_ids for r in results]
            assert found[number] == wanted[number]

    threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[0], found[1]] == wanted
