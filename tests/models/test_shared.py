"""What target and drafter have in common is held once, and changes nothing."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.base.config import Recipe
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.checkpoints.export import export
from outrider.models.load import load_model
from outrider.models.native import NativeTransformer
from outrider.models.rows import Segment
from outrider.native.choice import library
from outrider.sampling.pipeline import Logits
from tests.support.exactness import VOCABULARY, make_engine, planted_pair

pytestmark = pytest.mark.skipif(library() is None, reason="the native step is off")

CPU = "cpu"
PROMPT = [5, 9, 77, 210, 5, 4]
HIDDEN = 64
# Of a head in bf16, packed: 14 units of 16 rows.
PACKED = 14 * 16 * HIDDEN * 2
EMBEDDING = VOCABULARY * HIDDEN * 2


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    return planted_pair(tmp_path)


def opened(
    folder: Path,
    beside: NativeTransformer | None = None,
    quantization: str | None = None,
    dtype: str = "bfloat16",
) -> NativeTransformer:
    model = load_model(
        open_checkpoint(folder), dtype, CPU, 64, quantization, share_weights_with=beside
    )
    assert isinstance(model, NativeTransformer)
    return model


def logits(model: NativeTransformer) -> Logits:
    segment = Segment(PROMPT, 0, [1], len(PROMPT), len(PROMPT))
    found = model.run([segment], model.new_store(2, 16)).logits
    assert found is not None
    return found


def change(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def shared(drafter: Any, target: Any) -> int:
    """Return the bytes of the drafter's matrices that the target holds too."""
    return int(drafter.added_bytes(None) - drafter.added_bytes(target))


def test_embedding_and_head_are_held_once(pair: Path) -> None:
    expected = logits(opened(pair / "drafter"))
    target = opened(pair)
    drafter = opened(pair / "drafter", target)
    assert drafter.embedding is target.embedding
    assert shared(drafter, target) == EMBEDDING + PACKED
    assert np.array_equal(logits(drafter), expected)


@pytest.mark.engine
@pytest.mark.parametrize("text", ["int8", "int8-g32", "int4-zp"])
def test_so_they_are_when_both_are_quantised_alike(pair: Path, text: str) -> None:
    expected = logits(opened(pair / "drafter", None, text))
    target = opened(pair, None, text)
    drafter = opened(pair / "drafter", target, text)
    groups = -(-HIDDEN // min(HIDDEN, Recipe.parse(text).head.group or HIDDEN))
    assert shared(drafter, target) == 2 * 14 * 16 * (HIDDEN + 2 * groups)
    assert np.array_equal(logits(drafter), expected)
    other = "int8" if text == "int8-g32" else "int8-g32"
    for beside, own in ((target, other), (target, None), (opened(pair), text)):
        assert shared(opened(pair / "drafter", beside, own), beside) == 0


def test_what_differs_in_one_bit_is_not_shared(pair: Path) -> None:
    def one_bit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"][-1, -1] *= 1.01

    change(pair / "drafter", one_bit)
    target = opened(pair)
    drafter = opened(pair / "drafter", target)
    assert shared(drafter, target) == EMBEDDING
    assert np.array_equal(logits(drafter), logits(opened(pair / "drafter")))

    def zero_below_zero(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][3, 3] = 0.0

    change(pair, zero_below_zero)
    change(pair / "drafter", lambda t: t["model.embed_tokens.weight"][3, 3].copy_(-0.0))
    for target in (opened(pair), opened(pair, dtype="float32")):
        assert shared(opened(pair / "drafter", target), target) == 0


@pytest.mark.parametrize("tied", ["target", "drafter", "both"])
def test_tied_ones_share_what_is_the_same(pair: Path, tied: str) -> None:
    def tie(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["lm_head.weight"]

    for name, folder in (("target", pair), ("drafter", pair / "drafter")):
        if tied in (name, "both"):
            config = folder / "config.json"
            text = config.read_text()
            assert '"tie_word_embeddings": false' in text
            config.write_text(text.replace('embeddings": false', 'embeddings": true'))
            change(folder, tie)
    expected = logits(opened(pair / "drafter"))
    target = opened(pair)
    drafter = opened(pair / "drafter", target)
    assert shared(drafter, target) == (0 if tied == "drafter" else PACKED)
    assert np.array_equal(logits(drafter), expected)


@pytest.mark.engine
@pytest.mark.parametrize("text", [None, "int8"])
def test_either_may_go_first(pair: Path, text: str | None) -> None:
    target = opened(pair, None, text)
    drafter = opened(pair / "drafter", target, text)
    expected = logits(drafter)
    del target
    gc.collect()
    opened(pair, None, "int4")  # into the memory that was freed, had it been
    assert np.array_equal(logits(drafter), expected)
    target = opened(pair, drafter, text)
    expected = logits(target)
    del drafter
    gc.collect()
    assert np.array_equal(logits(target), expected)


@pytest.mark.engine
def test_an_engine_shares(pair: Path) -> None:
    engine = make_engine(pair, "model", dtype="bfloat16", drafter_quantization="none")
    assert shared(engine.drafter.model, engine.model) == EMBEDDING + PACKED


def test_a_drafter_has_half_of_the_targets_bits_unless_told_otherwise(pair: Path) -> None:
    def drafting(**options: str) -> Logits:
        drafter = make_engine(pair, "model", dtype="bfloat16", **options).drafter
        return logits(drafter.model)  # type: ignore[attr-defined]

    whole, coarse, coarsest = (
        logits(opened(pair / "drafter", None, text)) for text in (None, "int8-a8", "int4-a8")
    )
    assert not np.array_equal(whole, coarse)
    assert not np.array_equal(coarse, coarsest)
    assert np.array_equal(drafting(), coarse)
    assert np.array_equal(drafting(quantization="int8"), coarsest)
    assert np.array_equal(drafting(quantization="int4", drafter_quantization="int8-a8"), coarse)
    assert np.array_equal(drafting(drafter_quantization="none"), whole)
    export(pair / "drafter", pair / "few", Recipe.parse("int4"))
    few = load_model(open_checkpoint(pair / "few"), "bfloat16", CPU, 64, "auto")
    assert np.array_equal(logits(few), logits(opened(pair / "few")))  # type: ignore[arg-type]


PEAK = """
import sys
from pathlib import Path
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.models.load import load_model

def status(name):
    return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0]) << 10

def load(folder):
    return load_model(open_checkpoint(Path(folder)), "bfloat16", "cpu", 64)

load(sys.argv[1])  # what Python brings in
before = status("VmRSS")
model = load(sys.argv[2])
print(status("VmHWM") - before)
"""


def large(folder: Path, small: Path) -> int:
    """Save a checkpoint of 24 layers in bf16; its bytes."""
    config = json.loads((small / "config.json").read_text())
    config |= {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 24}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    found: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(small / "model.safetensors").items():
        wide = [{64: 512, 96: 1024}.get(n, n) for n in tensor.shape]
        if "self_attn" in name:  # 4 query and 2 key heads of 16
            wide = [n if n < 512 or i == (0 if "o_proj" in name else 1) else 64
                    for i, n in enumerate(wide)]  # fmt: skip
        for layer in range(24) if ".layers.0." in name else [0]:
            if ".layers.1." not in name:
                found[name.replace(".0.", f".{layer}.")] = torch.ones(wide, dtype=torch.bfloat16)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.nbytes for tensor in found.values())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_loading_takes_what_the_weights_take(pair: Path, tmp_path: Path) -> None:
    """Not twice that: files are read, packed and let go tensor by tensor."""
    weights = large(tmp_path / "large", pair)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(pair), str(tmp_path / "large")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    # The kernel may have taken back pages of what was there before.
    assert 0.8 * weights < int(done.stdout) < 1.5 * weights
