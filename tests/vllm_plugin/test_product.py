"""The whole product: vLLM on a CPU with the plugin, an engine for each way to draft.

It runs in the environment that `make peers` installs, on this repository's source.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import VOCABULARY, build_checkpoint

import outrider
from benchmarks.install import VLLM
from outrider import LLM, SamplingParams

SOURCE = Path(outrider.__file__).parents[1]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VLLM.ready, reason="vllm is not installed; run: make peers"),
]
# vLLM's attention on CPUs knows heads of 32 numbers and more.
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
OURS = {"method": "custom_class", "model": "outrider.vllm.Proposer"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("t"), "llama", tokenizer=True, **SHAPE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that makes our entry point known, as an installed Outrider would."""
    folder = tmp_path_factory.mktemp("site")
    info = folder / "outrider-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: outrider\nVersion: 0.1.0\n", encoding="utf-8")
    points = "[vllm.general_plugins]\noutrider = outrider.vllm.plugin:register\n"
    (info / "entry_points.txt").write_text(points, encoding="utf-8")
    return folder


def run_vllm(
    site: Path, engine: dict[str, Any], processes: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run an engine in one process, or as a server does: front end, engine and worker apart."""
    environment = os.environ | {
        "PYTHONPATH": f"{site}:{SOURCE}",
        "OUTRIDER_VLLM": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(
        [VLLM.python, Path(__file__).with_name("vllm_product.py")],
        input=json.dumps([engine]),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=900,
    )


def requests() -> list[list[Any]]:
    """Requests with every option that vLLM takes under speculation, and texts that repeat."""
    rng = random.Random(0)
    options: list[dict[str, Any]] = [
        {"temperature": 0.8},
        {"temperature": 1.0, "top_k": 20},
        {"temperature": 0.0},
        {"temperature": 0.6, "top_p": 0.7, "top_k": 50},
        {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "n": 2},
        {"temperature": 0.3, "frequency_penalty": 0.2, "seed": -5},
        {"temperature": 0.9, "choice": ["yes it is", "no it is not"]},
    ]
    batch = []
    for i, one in enumerate(options):
        prompt = [rng.randrange(3, VOCABULARY - 20) for _ in range(5 + i)] * (4 if i % 2 else 1)
        ended = {} if "choice" in one else {"ignore_eos": True}
        batch.append([prompt, {"seed": 100 + i, "max_tokens": 24, **ended, **one}])
    return batch


def engine(model: Path, batches: list[Any], **options: Any) -> dict[str, Any]:
    common = {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 8,
    }
    return {"options": common | options, "batches": batches}


def test_tokens_do_not_depend_on_drafts_batches_or_chunks(site: Path, target: Path) -> None:
    batch = requests()
    alone = [[request] for request in batch]
    drafted = [
        {"speculative_config": NGRAM | {"num_speculative_tokens": 4}},
        {"speculative_config": OURS | {"num_speculative_tokens": 6}},
        {  # the target drafts for itself: many drafts stand
            "speculative_config": {
                "method": "draft_model", "model": str(target), "num_speculative_tokens": 3,
            }
        },
    ]  # fmt: skip
    # Few blocks: requests are preempted. Few tokens a step: prompts come in chunks.
    tight = {"num_gpu_blocks_override": 9, "block_size": 32, "max_num_batched_tokens": 16}
    plain = ids(run_vllm(site, engine(target, [batch, *alone]), processes=True))
    expected = plain[0]
    assert len(expected[4]) == 2
    assert [answer for (answer,) in plain[1:]] == expected
    for options in (*drafted, tight | drafted[1]):
        ended = run_vllm(site, engine(target, [batch, *alone[:2]], **options))
        assert ids(ended)[0] == expected
        assert [answer for (answer,) in ids(ended)[1:]] == expected[:2]
        assert any(line.startswith("accepted ") for line in ended.stderr.splitlines())
        assert "accepted 0" not in ended.stderr.splitlines()


def ids(ended: subprocess.CompletedProcess[str]) -> list[Any]:
    """The ids by batch, request and sample."""
    assert ended.returncode == 0, ended.stderr[-4000:]
    (answers,) = json.loads(ended.stdout)
    assert isinstance(answers, list)
    return answers


def test_tokens_are_those_of_outrider(site: Path, target: Path) -> None:
    batch = [one for one in requests() if not {"choice", "n"} & one[1].keys()]
    batch = [one for one in batch if one[1]["seed"] >= 0]
    answers = ids(run_vllm(site, engine(target, [batch])))
    own = LLM(target, dtype="float32", drafter="none")
    for (prompt, options), (got,) in zip(batch, answers[0], strict=True):
        params = SamplingParams(**options)
        (output,) = own.generate([{"prompt_token_ids": prompt}], params)
        assert list(output.outputs[0].token_ids) == got


def test_unseeded_requests_differ_and_a_rule_of_vllm_s_ends_the_server(
    site: Path, target: Path
) -> None:
    unseeded = [[5, 6, 7], {"temperature": 1.0, "max_tokens": 16, "ignore_eos": True}]
    ((first, second),) = ids(run_vllm(site, engine(target, [[unseeded, unseeded]])))
    assert first != second
    synthetic = NGRAM | {
        "num_speculative_tokens": 2,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.5, 0.25],
    }
    ended = run_vllm(site, engine(target, [[unseeded]], speculative_config=synthetic))
    assert ended.returncode != 0
    assert "error: rejection_sample_method is 'synthetic'" in ended.stderr
