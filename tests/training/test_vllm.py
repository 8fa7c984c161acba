"""Heads that are exported here load in vLLM as they are, and are accepted as often as here."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.install import VLLM
from outrider import LLM, SamplingParams
from outrider.bench.record import run_all, total
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.checkpoints.extras import KEY
from outrider.checkpoints.head_export import export_head
from outrider.checkpoints.heads import read_head
from tests.support import REPOSITORY
from tests.support.heads import (
    Eagle,
    agreeing_head,
    agreeing_medusa,
    save_head,
    taciturn_target,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VLLM.ready, reason="vllm is not installed; run: make peers"),
]
LENGTH, TOKENS = 3, 48
# vLLM's attention on CPUs knows heads of 32 numbers and more.
ABOUT = Eagle(
    layers=(1, 0, -1), drafted=180, heads=2, kv_heads=2, head_dim=32, state_normed=True,
    extra={KEY: {"recommended_tokens": {"chat": 3}}},
)  # fmt: skip
PROMPTS = [[5, 9, 3, 41, 7], [12, 80, 6, 3], [99] * 6, [17, 4, 160, 8], [33, 2, 1], [7, 70, 77]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose layers say little, so that heads without training can agree with it."""
    return taciturn_target(tmp_path_factory.mktemp("heads") / "target", head_dim=32)


def in_vllm(target: Path, speculative: dict[str, Any]) -> tuple[list[list[int]], float]:
    """What vLLM says, and the share of the drafted tokens that it accepts."""
    options = {
        "model": str(target), "dtype": "float32", "max_model_len": 128, "enforce_eager": True,
        "skip_tokenizer_init": True, "speculative_config": speculative,
    }  # fmt: skip
    params = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True, "detokenize": False}
    batches = [[[ids, params]] for ids in PROMPTS]
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [VLLM.python, REPOSITORY / "tests" / "plugins" / "vllm_product.py"],
        input=json.dumps([{"options": options, "batches": batches}]), capture_output=True,
        text=True, timeout=900, env={
            **inherited, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),
            "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    (answers,) = json.loads(done.stdout)
    drafted, accepted = (
        int(re.search(rf"^{name} (\d+)", done.stderr, re.M)[1]) for name in ("drafted", "accepted")
    )
    return [ids for ((ids,),) in answers], accepted / drafted


def here(target: Path, head: Path) -> tuple[list[list[int]], float]:
    llm = LLM(
        target, head, num_speculative_tokens=LENGTH, dtype="float32", max_num_seqs=1,
        drafter_quantization="none", max_draft_nodes=LENGTH, enable_prefix_caching=False,
    )  # fmt: skip
    params = [SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)] * len(PROMPTS)
    done = run_all(llm, PROMPTS, params)
    rate = total(state.counts for state in done.states).acceptance_rate
    assert rate is not None
    return [list(ids) for ids in done.outputs], rate


@pytest.mark.parametrize("kind", ["speculators", "safeailab", "medusa"])
def test_vllm_accepts_as_often(kind: str, target: Path, tmp_path: Path) -> None:
    if kind == "medusa":
        agreeing_medusa(tmp_path / "made", target, LENGTH)
    else:
        made = agreeing_head(ABOUT, target)
        if kind == "safeailab":  # whose code has no such flag
            made.about = replace(ABOUT, state_normed=False)
        save_head(made, tmp_path / "made", embeds=kind != "safeailab")
    head = read_head(tmp_path / "made")
    layout = "safeailab" if kind == "safeailab" else "speculators"
    export_head(head, tmp_path / "head", layout, open_checkpoint(target), str(target))
    said, rate = here(target, tmp_path / "head")
    speculative = {"model": str(tmp_path / "head"), "num_speculative_tokens": LENGTH}
    speculative["method"] = "medusa" if kind == "medusa" else "eagle3"
    theirs, accepted = in_vllm(target, speculative)
    print(kind, accepted, rate)  # shown by -s
    assert theirs == said
    assert accepted > 0.1
    assert accepted == pytest.approx(rate, abs=0.03)
