"""The pool of threads: what it may take, and that no share of it changes what is said."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.base import threads
from outrider.base.groups import GROUPS, cpu_quota
from outrider.base.threads import allowed_threads
from outrider.native import choice as native
from tests.support import REPOSITORY
from tests.support.exactness import planted_pair
from tests.support.forked import run_program

POCKET = REPOSITORY / "src/outrider/pocket/model"
PROMPTS = [[5, 6, 7, 8] * 9, [40, 41]]
ALONE = """
import json, os, sys
os.environ["OMP_NUM_THREADS"] = "2"
if sys.argv[3] == "one":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from outrider import LLM, SamplingParams
from outrider.native.choice import library
from outrider.base.threads import allowed_threads
for group in sys.argv[4:]:  # joined once all is imported, which a quota would make slow
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


def run_alone(folder: Path, *groups: Path, cores: str = "all") -> tuple[int, list[list[int]]]:
    """The threads of a process in control groups, and what it generates."""
    words = [str(folder), json.dumps(PROMPTS), cores, *map(str, groups)]
    done = run_program([sys.executable, "-c", ALONE, *words])
    assert done.returncode == 0, done.stderr
    threads, tokens = json.loads(done.stdout.splitlines()[-1])
    return threads, tokens


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair whose products threads share."""
    sizes = {"hidden_size": 128, "intermediate_size": 240, "head_dim": 32}
    return planted_pair(tmp_path_factory.mktemp("wide"), **sizes)


@pytest.fixture(scope="module")
def expected(wide: Path) -> list[list[int]]:
    """What a process with two threads generates, where there are two cores."""
    threads, tokens = run_alone(wide)
    assert threads == min(2, len(os.sched_getaffinity(0)))
    return tokens


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_one_core_is_enough(wide: Path, expected: list[list[int]]) -> None:
    assert run_alone(wide, cores="one") == (1, expected)


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


def test_a_quota_of_half_a_core_is_enough(
    wide: Path, expected: list[list[int]], half_a_core: Path
) -> None:
    assert run_alone(wide, half_a_core) == (1, expected)


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


def test_an_option_chooses_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_chosen", None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = allowed_threads()
    threads.choose_threads(None)
    assert allowed_threads() == before == 1
    threads.choose_threads(4096)
    assert allowed_threads() <= len(os.sched_getaffinity(0))
    threads.choose_threads(1)
    assert allowed_threads() == 1
