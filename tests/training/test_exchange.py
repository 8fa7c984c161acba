"""Heads that are written here are read by the ``speculators`` package, and the other way round."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.install import SPECULATORS
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.checkpoints.extras import Extras
from outrider.checkpoints.head_export import LAYOUTS, export_head
from outrider.checkpoints.head_export import SPECULATORS as SPECULATORS_LAYOUT
from outrider.checkpoints.heads import EAGLE3, read_head
from outrider.models.native import NativeTransformer
from outrider.models.native_heads import NativeHead
from outrider.native import choice as native
from outrider.training.eagle3 import rows_of
from outrider.training.head_files import (
    NewHead,
    ids_of,
    load_eagle3,
    open_head,
    save_eagle3,
    write_new_eagle3,
)
from outrider.training.measure import write_extras
from outrider.training.samples import Sample
from outrider.training.teacher import Teacher
from tests.support import REPOSITORY
from tests.support.commands import outrider
from tests.support.loading import native_model
from tests.support.taught import measure_little

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(native.library() is None, reason="the native step is off"),
    pytest.mark.skipif(not SPECULATORS.ready, reason="run: make clients CLIENTS=speculators"),
]
SUPPORT = REPOSITORY / "tests" / "support"
STEPS, LENGTH = 4, 20


@pytest.fixture(scope="module")
def target(tiny_llama: Path) -> NativeTransformer:
    return native_model(native.library(), tiny_llama, "float32", 64)


def call(script: str, *arguments: object) -> None:
    command = [SPECULATORS.python, "-P", SUPPORT / script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]


@torch.no_grad()
def both_say_the_same(folder: Path, tiny_llama: Path, target: NativeTransformer) -> None:
    """Assert that the package reads a head, and computes what training does at each depth."""
    head = open_head(folder, EAGLE3)
    teacher = Teacher(target, 64, head.target_layers(target.hidden_layers), ids_of(head))
    tokens = np.random.default_rng(3).integers(0, 300, LENGTH).astype(np.int32)
    rows = rows_of([teacher.teach(Sample(tokens, np.arange(LENGTH) >= 1, 0))])
    save_file({"tokens": rows.tokens.long(), "hidden": rows.fused}, folder / "inputs.st")
    call("speculators_reads.py", folder, folder / "inputs.st", folder / "theirs.st")
    theirs = load_file(folder / "theirs.st")
    assert len(theirs) == STEPS
    module = load_eagle3(head, open_checkpoint(tiny_llama), 64)
    for step, x in enumerate(module.unroll(rows, STEPS)):
        own = module.logits(step, x)
        whole = int((rows.drafts < len(rows.tokens) - step).sum())  # the sample has their tokens
        found = theirs[f"{step}"][rows.drafts[:whole]]
        torch.testing.assert_close(own[:whole], found, rtol=1e-3, atol=1e-4)
    NativeHead(read_head(folder), target, 64, "none")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("drafted", [128, 320])
def test_the_package_reads_what_is_exported_here(
    drafted: int, layout: str, tiny_llama: Path, target: NativeTransformer, tmp_path: Path
) -> None:
    checkpoint, ids = open_checkpoint(tiny_llama), np.arange(320)[-drafted:]
    new = NewHead(str(tiny_llama), ids, (-1, 0, 1), STEPS, 0, layout)
    write_new_eagle3(tmp_path / "new", checkpoint, new)
    module = load_eagle3(open_head(tmp_path / "new", EAGLE3), checkpoint, 64)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 + torch.rand_like(parameter))
    save_eagle3(module, None, tmp_path / "saved")
    write_extras(tmp_path / "saved", Extras({"chat": STEPS}, ()))
    saved = open_head(tmp_path / "saved", EAGLE3)
    export_head(saved, tmp_path / "out", SPECULATORS_LAYOUT, checkpoint, str(tiny_llama))
    both_say_the_same(tmp_path / "out", tiny_llama, target)


FLAGS = [
    {"layers": [0, 1, 2]},
    {"layers": [2, 0, 1], "norm_before_fc": True, "norm_output": True},
    {"layers": [0, 2], "fc_norm": True, "norm_before_residual": True},
]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "+".join(flags))
def test_a_head_of_the_packages_own_making_is_trained_on(
    flags: dict[str, object], tiny_llama: Path, target: NativeTransformer, tmp_path: Path
) -> None:
    call("speculators_head.py", tiny_llama, tmp_path / "theirs", json.dumps(flags))
    (tmp_path / "theirs" / "expected.st").unlink()
    both_say_the_same(tmp_path / "theirs", tiny_llama, target)
    head = open_head(tmp_path / "theirs", EAGLE3)
    module = load_eagle3(head, open_checkpoint(tiny_llama), 64)
    save_eagle3(module, None, tmp_path / "again")
    both_say_the_same(tmp_path / "again", tiny_llama, target)
    assert read_head(tmp_path / "again").fused_norms == head.fused_norms


def test_a_head_of_the_packages_own_making_learns_and_adapts(
    tiny_llama: Path, target: NativeTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the commands make of it is read by the package again, and computes the same there."""
    measure_little(monkeypatch)
    theirs, prompts, trained = tmp_path / "theirs", tmp_path / "p.jsonl", tmp_path / "trained"
    call("speculators_head.py", tiny_llama, theirs, json.dumps(FLAGS[1]))
    (theirs / "expected.st").unlink()
    lines = [json.dumps({"prompt": f"{n} the lazy dog jumps {n % 7}"}) for n in range(160)]
    prompts.write_text("\n".join(lines))

    def run(*words: object) -> None:
        done = outrider("train", *words)
        assert done.exit_code == 0, done.output

    run(
        "adapt", "--target", tiny_llama, "--drafter", theirs, "--prompts", prompts,
        "--out", tmp_path / "adapted", "--epochs", 1, "--max-tokens", 24,
    )  # fmt: skip
    run(
        "eagle3", tiny_llama, "--data", tmp_path / "adapted" / "data", "--from", theirs,
        "--out", trained, "--steps", 8, "--batch", 64, "--depth", 3,
    )  # fmt: skip
    for made in (trained, tmp_path / "adapted" / "drafter"):
        before, after = (load_file(each / "model.safetensors") for each in (theirs, made))
        assert not torch.equal(before["fc.weight"].float(), after["fc.weight"].float())
        both_say_the_same(made, tiny_llama, target)
