"""Heads that draft a block in one pass: the defining modules, and drafts that change no token."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.checkpoints.heads import DFLASH, DFLASH2, DSPARK, read_head
from outrider.drafters import likely
from outrider.models.native_block import NativeBlock
from outrider.models.rows import Segment
from outrider.native import choice as native
from tests.support.blocks import BlockReference
from tests.support.commands import outrider
from tests.support.head_checks import Change, add, changes_no_token, drop, is_refused, put
from tests.support.loading import native_model
from tests.support.native_steps import HERE, step
from tests.support.tiny import build_checkpoint

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
    rest = Segment(ids[17:-1], 17, pages, 0, 40, states=states[17:].numpy())
    depth = masks + mine.block.from_anchor
    found = mine.run([mine.behind(rest, depth, ids[-1])], store, (mine.hidden_layers,))
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


@pytest.mark.parametrize("causal", [False, True])
def test_a_head_in_the_layout_of_its_authors(
    causal: bool, tiny_llama: Path, tmp_path: Path
) -> None:
    reference = BlockReference(tiny_llama, DFLASH, window=12, reads=(0,))
    folder = reference.save(tmp_path / "head", put(is_causal=causal), "zlab")
    reference.everywhere, reference.as_target = causal, True
    agrees(reference, folder, tiny_llama)


@pytest.mark.parametrize("layout", ["speculators", "zlab"])
@pytest.mark.parametrize("family", ["gemma3_text", "granite"])
def test_tokens_are_looked_up_as_heads_were_trained(
    family: str, layout: str, tmp_path: Path
) -> None:
    """Authors of DFlash call the target's own embedding, others read its weights."""
    target = build_checkpoint(tmp_path / "target", family, tokenizer=True, embedding_multiplier=3.0)
    reference = BlockReference(target, DFLASH, reads=(0,))
    reference.as_target = layout == "zlab"
    agrees(reference, reference.save(tmp_path / "head", layout=layout), target)


def test_a_head_with_biases(tiny_llama: Path, tmp_path: Path) -> None:
    reference = BlockReference(tiny_llama, DFLASH, biased=True)
    agrees(reference, reference.save(tmp_path / "head"), tiny_llama)


def test_its_codebooks_count_as_memory(tiny_llama: Path, tmp_path: Path) -> None:
    model = native_model(step(HERE[-1]), tiny_llama, "float32", 256)
    sizes = []
    for kind in (DFLASH, DSPARK):
        head = read_head(BlockReference(tiny_llama, kind).save(tmp_path / kind))
        assert head is not None
        sizes.append(NativeBlock(head, model, 256, None).added_bytes(model))
    assert sizes[1] - sizes[0] == 2 * 4 * 6 * model.shape.vocab_size


@pytest.mark.parametrize(("size", "page_size", "longest"), [(7, 1, 64), (8, 16, 6), (64, 4, 64)])
def test_any_block_is_timed(
    size: int, page_size: int, longest: int, tiny_llama: Path, tmp_path: Path
) -> None:
    """Also one that is longer than any sequence, and on pages of one token."""
    head = read_head(BlockReference(tiny_llama, DFLASH).save(tmp_path / "h", put(block_size=size)))
    assert head is not None
    target = native_model(step(HERE[-1]), tiny_llama, "float32", longest)
    mine = NativeBlock(head, target, longest, None)
    for count in (1, 2, 7, 64):
        mine.try_rows(count, mine.new_store(count + 1, page_size))


def test_blocks_of_several_sequences_do_not_meet(tiny_llama: Path, tmp_path: Path) -> None:
    reference = BlockReference(tiny_llama, DFLASH2, window=12)
    head = read_head(reference.save(tmp_path / "head"))
    assert head is not None
    mine = NativeBlock(head, native_model(step(HERE[-1]), tiny_llama, "float32", 256), 256, None)
    rng, segments, alone = np.random.default_rng(4), list[Segment](), list[Any]()
    for number, count in enumerate((7, 1, 20)):
        ids, pages = rng.integers(3, 200, count).tolist(), range(3 * number, 3 * number + 3)
        states = rng.normal(size=(count - 1, mine.hidden_size)).astype(np.float32)
        known = Segment(ids[:-1], 0, pages, 0, 40, states=states)
        segments.append(mine.behind(known, 1 + number, ids[-1]))
        alone.append(mine.run(segments[-1:], mine.new_store(9, 16)).logits)
    found = mine.run(segments, mine.new_store(9, 16)).logits
    assert np.array_equal(found, np.concatenate(alone))


def scaled(name: str, by: float) -> Change:
    return lambda config, tensors: tensors[name].mul_(by)


MUTATIONS: dict[str, Change] = {
    "order of layers": put(aux_hidden_state_layer_ids=[1, 0]),
    "what layers return": put(aux_hidden_state_layer_ids=[1, 2]),
    "mask": put(mask_token_id=5),
    "windows are causal": put(sliding_window_non_causal=False),
    "windows": lambda config, tensors: config["transformer_layer_config"].update(
        layer_types=["full_attention"] * 2
    ),
    "rope": lambda config, tensors: config["transformer_layer_config"].update(
        rope_parameters={"rope_type": "default", "rope_theta": 50.0}
    ),
    "norm of states": scaled("hidden_norm.weight", 1.1),
    "norm of keys": scaled("layers.0.self_attn.k_norm.weight", 1.3),
    "kernels of all rows": scaled("layers.1.mlp_conv.base_kernel", 1.1),
    "kernels of a row": scaled("layers.0.attention_conv.kernel_projection.weight", 1.1),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_every_convention_counts(mutation: str, tiny_llama: Path, tmp_path: Path) -> None:
    reference = BlockReference(tiny_llama, DFLASH2, window=12)
    folder = reference.save(tmp_path / "head", MUTATIONS[mutation])
    with pytest.raises(AssertionError):
        agrees(reference, folder, tiny_llama)


@pytest.mark.parametrize("kind", [DSPARK, DFLASH2])
def test_tokens_are_scored_behind_others(kind: str, tiny_llama: Path, tmp_path: Path) -> None:
    """As the defining code does, but for ids that are not among the likeliest."""
    reference = BlockReference(tiny_llama, kind, 120 if kind == DSPARK else None)
    head = read_head(reference.save(tmp_path / "head"))
    assert head is not None
    mine = NativeBlock(head, native_model(step(HERE[-1]), tiny_llama, "float32", 256), 256, None)
    rng = np.random.default_rng(6)
    state = rng.normal(size=mine.hidden_size).astype(np.float32)
    logits = np.full(head.vocab_size, -np.inf, np.float32)
    ids = np.arange(len(logits)) if mine.drafted_ids is None else mine.drafted_ids
    logits[ids] = rng.normal(size=len(ids))
    found, expected = mine.scored(logits, 17, state), reference.scores(logits, 17, state)
    kept = np.isfinite(found)
    assert kept.sum() == (5 if kind == DFLASH2 else 120)
    assert set(np.flatnonzero(kept)) == set(np.argsort(-logits)[: kept.sum()])
    np.testing.assert_allclose(found[kept], expected[kept], atol=1e-5)


WRONG: dict[str, tuple[str, str, Change]] = {
    "another vocabulary": (
        "vocabulary of 999", DFLASH,
        lambda c, t: c["transformer_layer_config"].update(vocab_size=999),
    ),
    "no mask": ("mask_token_id", DFLASH, put(mask_token_id=None)),
    "a mask beyond the vocabulary": ("mask_token_id", DFLASH, put(mask_token_id=2**31)),
    "a block of 1": ("block_size", DFLASH, put(block_size=1)),
    "a block of 2**31": ("block_size", DFLASH, put(block_size=2**31)),
    "no layers": ("aux_hidden_state_layer_ids", DFLASH, put(aux_hidden_state_layer_ids=None)),
    "layers that are none": ("layers", DFLASH, put(aux_hidden_state_layer_ids=[1, 9])),
    "a narrow linear": ("fc.weight", DFLASH, add("fc.weight", 64, 64)),
    "no norm of states": ("hidden_norm", DFLASH, drop("hidden_norm.weight")),
    "no norm of queries": ("q_norm", DFLASH, drop("layers.1.self_attn.q_norm.weight")),
    "another width": ("target_hidden_size", DFLASH, put(target_hidden_size=48)),
    "a gated bias": ("markov_head_type", DSPARK, put(markov_head_type="gated")),
    "a rank of 2**31": ("markov_rank", DSPARK, put(markov_rank=2**31)),
    "another rank": ("markov_w1", DSPARK, put(markov_rank=7)),
    "no successors": ("successor_codebook", DFLASH2, drop("candidate_selector.successor_codebook")),
    "no kernels": ("base_kernel", DFLASH2, drop("layers.1.mlp_conv.base_kernel")),
    "more taps than rows": ("conv_kernel_size", DFLASH2, put(conv_kernel_size=8, block_size=4)),
    "windows without a size": (
        "sliding_window",
        DFLASH,
        lambda c, t: c["transformer_layer_config"].update(layer_types=["sliding_attention"] * 2),
    ),
    "groups that do not fit": ("conv_group_size", DFLASH2, put(conv_group_size=7)),
    "taps beyond the block": ("conv_kernel_size", DFLASH2, put(conv_kernel_size=2**31)),
    "no candidates": ("selector_top_k", DFLASH2, put(selector_top_k=0)),
    "an unknown kind": ("speculators_model_type", DFLASH, put(speculators_model_type="xpress")),
    "2**31 layers": (
        "2147483648", DFLASH,
        lambda c, t: c["transformer_layer_config"].update(num_hidden_layers=2**31),
    ),
    "biases": (
        "bias", DFLASH, lambda c, t: c["transformer_layer_config"].update(attention_bias=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_damaged_head_is_refused_in_one_sentence(
    wrong: str, tiny_llama: Path, tmp_path: Path
) -> None:
    named, kind, change = WRONG[wrong]
    folder = BlockReference(tiny_llama, kind).save(tmp_path / "head", change)
    is_refused(tiny_llama, folder, named)


@pytest.mark.parametrize("kind", [DFLASH, DSPARK, DFLASH2])
def test_a_quantised_copy_drafts_the_same(kind: str, tiny_llama: Path, tmp_path: Path) -> None:
    folder = BlockReference(tiny_llama, kind, 120 if kind == DFLASH else None).save(
        tmp_path / "head"
    )
    done = outrider("quantize", folder, tmp_path / "small", "--quantization", "int8")
    assert done.exit_code == 0, done.output
    small, first = read_head(tmp_path / "small"), read_head(folder)
    assert small is not None
    assert first is not None
    model = native_model(step(HERE[-1]), tiny_llama, "float32", 256)
    states = np.random.default_rng(2).normal(size=(9, model.hidden_size)).astype(np.float32)
    kept, made = (
        each.run([each.behind(Segment([*range(5, 14)], 0, range(2), 0, 9, states=states), 4, 14)],
                 each.new_store(2, 16)).logits
        for each in (NativeBlock(small, model, 256, None), NativeBlock(first, model, 256, "int8"))
    )  # fmt: skip
    assert np.array_equal(kept, made)


def test_it_is_neither_exported_nor_trained(tiny_llama: Path, tmp_path: Path) -> None:
    verifier = {"name_or_path": str(tiny_llama), "architectures": []}
    named = put(speculators_config={"verifier": verifier})
    folder = BlockReference(tiny_llama, DFLASH).save(tmp_path / "head", named)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "for word in the"}\n')
    adapt = ("adapt", "--target", tiny_llama, "--drafter", folder, "-o", tmp_path / "work")
    for command in (("export", folder, tmp_path / "other"), (*adapt, "--prompts", prompts)):
        done = outrider("train", *command)
        assert done.exit_code == 2, done.output
        assert "DFlash" in done.stderr
        assert "Traceback" not in done.output


@pytest.mark.parametrize("kind", [DFLASH, DSPARK, DFLASH2])
@pytest.mark.parametrize(("temperature", "listed"), [(0.0, False), (0.8, False), (0.8, True)])
def test_drafts_change_no_token(
    kind: str, temperature: float, listed: bool, tiny_llama: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Whether they come from all ids, or from a list of likely ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(likely, "pays", lambda shape: listed)
    monkeypatch.setattr(likely, "SIZE", 100)
    folder = BlockReference(tiny_llama, kind, window=12).save(tmp_path / "head")
    changes_no_token(tiny_llama, folder, kind, temperature)
