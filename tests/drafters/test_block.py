"""Heads that draft a block in one pass: the defining modules, and drafts that change no token."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider import LLM, SamplingParams
from outrider.checkpoints.heads import DFLASH, DFLASH2, DSPARK, read_head
from outrider.errors import ConfigError, ModelError
from outrider.models.native_block import NativeBlock
from outrider.models.rows import Segment
from outrider.native import choice as native
from tests.support.blocks import BlockReference, Change
from tests.support.commands import outrider
from tests.support.loading import native_model
from tests.support.native_steps import HERE, step

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native step is off")


def agrees(reference: BlockReference, folder: Path, target: Path, isa: str = HERE[-1]) -> None:
    """A head computes what its reference does, of states in one part or several."""
    ids = np.random.default_rng(1).integers(3, 200, 41).tolist()
    states, masks, head = reference.states(ids)[:-1], 5, read_head(folder)
    assert head is not None
    expected, after = reference(ids, states, masks)
    model = native_model(step(isa), target, "float32", 256)
    mine = NativeBlock(head, model, 256, None)
    store, pages = mine.new_store(9, 16), range(1, 8)
    first = Segment(ids[:17], 0, pages, 0, 40, states=states[:17].numpy())
    mine.run([first], store)
    rest = Segment(ids[17:], 17, pages, 0, 40, states=states[17:].numpy())
    depth = masks + mine.block.from_anchor
    found = mine.run([mine.behind(rest, depth)], store, (mine.hidden_layers,))
    own = expected[-depth:]
    logits = found.logits if reference.ids is None else found.logits[:, reference.ids]
    np.testing.assert_allclose(logits, own, atol=5e-4, rtol=1e-4)
    np.testing.assert_allclose(found.hidden[mine.hidden_layers], after, atol=5e-4, rtol=1e-4)
    layers = mine.target_layers
    own = model.run([Segment(ids, 0, pages, 1, 40)], model.new_store(9, 16), layers)
    made, every = np.empty((len(ids) - 1, mine.hidden_size), np.float32), array("i", range(40))
    mine.fuse([own.hidden[layer] for layer in layers], every, made, every)
    np.testing.assert_allclose(made, states, atol=2e-4, rtol=0)


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize(
    ("kind", "ids", "window", "causal"),
    [
        (DFLASH, None, 0, None), (DFLASH, 120, 0, None), (DFLASH, None, 12, None),
        (DFLASH, None, 12, False), (DSPARK, 120, 12, None), (DSPARK, None, 0, None),
        (DFLASH2, None, 12, None), (DFLASH2, None, 12, True),
    ],
)  # fmt: skip
def test_a_head_computes_what_the_defining_code_does(
    isa: str, kind: str, ids: int | None, window: int, causal: bool | None, tiny_llama: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    reference = BlockReference(tiny_llama, kind, ids, window, causal)
    agrees(reference, reference.save(tmp_path / "head"), tiny_llama, isa)


@pytest.mark.parametrize("kind", [DFLASH, DSPARK, DFLASH2])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_change_no_token(
    kind: str, temperature: float, tiny_llama: Path, tmp_path: Path
) -> None:
    folder = BlockReference(tiny_llama, kind, window=12).save(tmp_path / "head")
    assert outrider("drafters", "check", tiny_llama, "--drafter", folder).exit_code == 0
    prompts = ["for word in the", "def greet(name): return f", "abc abc abc", "x"]
    params = [
        SamplingParams(temperature=temperature, max_tokens=40, seed=i, ignore_eos=True)
        for i in range(len(prompts))
    ]

    def outputs(drafter: str | None, **options: Any) -> tuple[list[list[int]], int]:
        llm = LLM(tiny_llama, drafter, max_model_len=128, memory=2**24, **options)
        found = llm.generate(prompts, params)
        return [[*each.outputs[0].token_ids] for each in found], found[0].metrics.drafted

    plain, _ = outputs("none")
    for options in ({"num_speculative_tokens": 4}, {"max_num_batched_tokens": 16}):
        tokens, drafted = outputs(str(folder), **options)
        assert tokens == plain
        assert drafted > 0
    said = {"method": kind, "model": str(folder), "num_speculative_tokens": 3}
    assert outputs(None, speculative_config=said)[0] == plain
