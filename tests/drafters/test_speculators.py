"""Heads that the ``speculators`` package makes, beside its own forward (make clients)."""

from __future__ import annotations

import json
import subprocess
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.install import SPECULATORS
from outrider import LLM, SamplingParams
from outrider.checkpoints.heads import read_head
from outrider.models.native_heads import NativeHead
from outrider.models.native_store import NativeStore
from outrider.models.rows import Segment
from outrider.native import choice as native
from outrider.sampling.pipeline import Logits
from tests.support import REPOSITORY
from tests.support.loading import native_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(native.library() is None, reason="the native step is off"),
]
SCRIPT = REPOSITORY / "tests" / "support" / "speculators_head.py"
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {"layers": [0, 1, 2]},
    "norm before residual": {"layers": [2, 1], "norm_before_residual": True},
    "norm before fc": {"layers": [1, 2, 1], "norm_before_fc": True, "norm_output": True},
    "fc norm": {"layers": [0, 2], "fc_norm": True, "depth": 2},
    "window": {"layers": [0, 1, 2], "window": 6, "depth": 2},
    "one pass": {"layers": [0, 1, 2], "parallel": True},
    "one pass, norms": {"layers": [2, 0], "parallel": True, "norm_before_residual": True,
                        "fc_norm": True},
    "one pass, window": {"layers": [0, 1, 2], "parallel": True, "window": 6, "depth": 2},
}  # fmt: skip
PAGE = 4


def fed_back(
    model: NativeHead, store: NativeStore, rows: Segment, tokens: list[int], steps: int
) -> Iterator[Logits]:
    """Logits behind rows, and behind those that go on with their own states and what follows."""
    ended = model.shape.num_layers
    for _ in range(steps):
        found = model.run([rows], store, (ended,))
        assert found.logits is not None
        yield found.logits
        place, state = rows.start + len(rows.tokens), found.hidden[ended][-1:].copy()
        rows = rows._replace(tokens=tokens[place : place + 1], start=place, states=state)


@pytest.mark.parametrize("kind", FLAGS)
@torch.inference_mode()
def test_a_head_computes_what_the_package_does(kind: str, tiny_llama: Path, tmp_path: Path) -> None:
    if not SPECULATORS.ready:
        pytest.skip("speculators is not installed; run: make clients")
    folder = tmp_path / "head"
    done = subprocess.run(
        [SPECULATORS.python, "-P", SCRIPT, tiny_llama, folder, json.dumps(FLAGS[kind])],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    expected = load_file(folder / "expected.st")
    (folder / "expected.st").unlink()
    tokens, kept = expected["tokens"].tolist(), expected["kept"]
    head, step = read_head(folder), native.library()
    assert head is not None
    assert step is not None
    target = native_model(step, tiny_llama, "float32", 64)
    model = NativeHead(head, target, 64, "none")
    pages, count = array("i", [5, 1, 4, 2, 3, 6]), len(tokens)
    whole = Segment(tokens, 0, pages, 0, count)
    hidden = target.run([whole], target.new_store(8, PAGE), model.target_layers).hidden
    states = np.empty((count - 1, model.hidden_size), np.float32)
    places = array("i", range(count - 1))
    model.fuse([hidden[layer] for layer in model.target_layers], places, states, places)
    np.testing.assert_allclose(states, expected["fused"], rtol=1e-4, atol=1e-5)
    wanted = [logits for name, logits in sorted(expected.items()) if name.startswith("logits")]
    assert len(wanted) == 4
    there = torch.stack(wanted).isfinite().all(0).all(-1)[: count - len(wanted)]
    anchors = there.nonzero().flatten().tolist()
    for last in (anchors[2], anchors[-1]):
        rows = Segment(tokens[1 : last + 2], 1, pages, 1, count, first=1, states=states[: last + 1])
        own = model.new_store(8, PAGE)
        if FLAGS[kind].get("parallel"):
            found = model.run([model.behind(rows, len(wanted), tokens[last + 1])], own).logits
        else:
            found = np.concatenate([*fed_back(model, own, rows, tokens, len(wanted))])
        assert found is not None
        assert (np.isfinite(found).sum(-1) == len(kept)).all()
        # In training, later steps see a window that ends before them; engines move it along.
        steps = 1 if FLAGS[kind].get("window") and not FLAGS[kind].get("parallel") else len(wanted)
        for logits, each in list(zip(found, wanted, strict=True))[:steps]:
            np.testing.assert_allclose(logits[kept], each[last], rtol=1e-3, atol=1e-4)
    params = SamplingParams(temperature=0, max_tokens=12)
    said = [
        LLM(tiny_llama, drafter, num_speculative_tokens=3, dtype="float32")
        .generate([5, 6, 7], params)[0].outputs[0].token_ids
        for drafter in (None, str(folder))
    ]  # fmt: skip
    assert said[0] == said[1]
