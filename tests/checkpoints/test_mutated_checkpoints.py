"""Whatever stands in a checkpoint's files: it runs, or it is refused in a sentence, and cheaply."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from outrider.models.tensors import as_tensor
from tests.support import REPOSITORY
from tests.support.ggufs import byte_level, convert
from tests.support.hostile.families import FAMILIES, IN_FILES
from tests.support.mutations import attempt, mutated
from tests.support.quantised import CASES, FP8, eighths, projections, quantised, write
from tests.support.tiny import build_checkpoint, save_tokenizer

SECONDS = 10
"""CPU time of an attempt at most."""
SIZES = {"hidden_size": 32, "intermediate_size": 64}


def fp8(source: Path, folder: Path) -> None:
    """``source`` with its projections in FP8, by blocks."""
    stored = load_file(source / "model.safetensors")
    for seed, name in enumerate(projections(stored)):
        out, width = stored[name].shape
        stored[name] = as_tensor(eighths(out, width, seed))
        stored[name + "_scale_inv"] = torch.full((-(-out // 16), -(-width // 16)), 0.1)
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    options = json.loads((source / "config.json").read_text())
    options["quantization_config"] = {**FP8, "weight_block_size": [16, 16]}
    (folder / "config.json").write_text(json.dumps(options))


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint of every kind that is read."""
    root = tmp_path_factory.mktemp("bases")
    work = tmp_path_factory.mktemp("sources")
    plain = build_checkpoint(root / "llama", "llama", tokenizer=True, **SIZES)
    build_checkpoint(
        root / "qwen3", "qwen3", tokenizer=True, use_sliding_window=True, sliding_window=24,
        max_window_layers=1, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4,
                                              "factor": 2.0, "beta_fast": 32.0},
    )  # fmt: skip
    build_checkpoint(
        root / "moe", "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
        head_dim=16,
    )  # fmt: skip
    build_checkpoint(root / "gpt2", "gpt2", tokenizer=True, n_embd=32, n_head=4, n_layer=2)
    build_checkpoint(root / "mixtral", "mixtral", num_local_experts=4, num_experts_per_tok=2)
    wide = build_checkpoint(
        work / "wide", "llama", tokenizer=True, hidden_size=64, intermediate_size=96
    )
    files = {"gguf": convert(wide, work / "wide.gguf", Kind.Q8_0, byte_level())[0]}
    for family, options in FAMILIES.items():
        made = build_checkpoint(root / f"{family}-all", family, tokenizer=True, **options)
        if family in IN_FILES:
            path, _ = convert(made, work / f"{family}.gguf", Kind.F32, byte_level())
            files[f"{family}-gguf"] = path
    for name, path in files.items():
        (root / name).mkdir()
        path.rename(root / name / "model.gguf")
    for case in ("gptq-4", "awq", "packed-4-zeros"):
        options, writer, bits, group, zeros = CASES[case]
        made, _, _ = write(
            plain, work / case, options, writer,
            lambda out, width, seed, b=bits, g=group, z=zeros: quantised(out, width, b, g, z, seed),
        )  # fmt: skip
        made.rename(root / case)
    fp8(plain, root / "fp8")
    for case in ("fp8", "awq"):
        save_tokenizer(root / case)
    return root


def test_a_few_hundredths_of_the_mutations(bases: Path, tmp_path: Path) -> None:
    """A slice of the test below, in this process; it found all kinds of damage there are."""
    outcomes = []
    for seed in range(40):
        model, about = mutated(bases, seed, tmp_path / "model")
        started = time.process_time()
        outcomes.append(attempt(model))
        assert time.process_time() - started < 10 * SECONDS, about
    assert 0 < outcomes.count("ran") < len(outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_no_mutation_ends_the_process_or_costs_much(part: int, bases: Path, tmp_path: Path) -> None:
    """In a process that may take 1 GiB more than it took for the checkpoints themselves."""
    count = 300
    command = [
        sys.executable,
        "-m",
        "tests.support.mutations",
        bases,
        1000 + part * count,
        count,
        tmp_path / "model",
    ]
    done = subprocess.run(
        [str(c) for c in command],
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
        cwd=REPOSITORY,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, "\n".join(lines[-2:]) + done.stderr[-3000:]
    ends = [line.split(maxsplit=3) for line in lines if line.startswith("end")]
    assert len(ends) == count
    assert [line for line in ends if float(line[2]) > SECONDS] == []
