"""EAGLE-3 heads beside the code that defines them."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from outrider.base.types import DraftBudget, DraftNodes
from outrider.checkpoints.heads import read_head
from outrider.drafters.forward import draft_limits
from outrider.errors import ModelError
from outrider.models.decide import DraftInput
from outrider.models.native_heads import NativeHead, NativeMedusa
from outrider.models.native_model import words_of
from outrider.models.rows import Segment
from outrider.models.tensors import as_tensor
from outrider.native import choice as native
from outrider.native.checks import Room
from outrider.native.interface import Choices, Planted
from outrider.native.native_sampling import NativeNoise
from outrider.sampling.pipeline import Logits
from tests.support.heads import MASK, Eagle, Reference, make_head, make_medusa, save_head
from tests.support.loading import native_model
from tests.support.native_steps import sequence_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(native.library() is None, reason="the native step is off"),
]
PAGE, LENGTH, MORE = 4, 13, 3
KINDS = {
    "safeailab": (Eagle(), "safeailab"),
    "speculators": (Eagle(state_normed=True, drafted=97), "speculators"),
    "norm before fc": (Eagle(norm_before_fc=True, output_normed=True, kv_heads=4), "speculators"),
    "a norm for each": (Eagle(fc_norm=True, layers=(-1, 0), depth=2), "speculators"),
    "a window": (Eagle(window=4, depth=2), "speculators"),
    "one pass": (Eagle(parallel=True, norm_before_fc=True), "speculators"),
    "one pass and a window": (Eagle(parallel=True, window=6, depth=2), "speculators"),
}


def seen_by(head: Reference, count: int) -> torch.Tensor:
    """Which rows each of ``count`` rows sees: itself and those before, within its window."""
    seen = torch.ones(count, count).tril()
    window = head.about.window
    return (seen if window is None else seen.triu(1 - window)).bool()


def widened(head: Reference, logits: torch.Tensor) -> torch.Tensor:
    """Logits over the target's vocabulary."""
    wide = torch.full((head.vocabulary,), -torch.inf)
    wide[head.d2t + torch.arange(head.about.drafted)] = logits
    return wide


def rows_of(
    head: Reference, tokens: torch.Tensor, hidden: torch.Tensor, more: int
) -> list[torch.Tensor]:
    """Logits over the target's vocabulary behind ``tokens``, and ``more`` of own drafts."""
    count, cache, found = len(tokens) - 1, [], []
    if head.mask_hidden is not None:
        read = torch.cat([tokens[1:], torch.tensor([MASK] * more)])
        masked = head.fused(head.mask_hidden[0]).expand(more, -1)
        states, places = torch.cat([head.fused(hidden[:count]), masked]), torch.arange(len(read))
        logits, _ = head.rows(read, states, places, cache, seen_by(head, len(read)))
        return [widened(head, row) for row in logits[count - 1 :]]
    logits, ended = head.rows(
        tokens[1:], head.fused(hidden[:count]), torch.arange(count), cache, seen_by(head, count)
    )
    for step in range(more + 1):
        found.append(widened(head, logits[-1]))
        token, seen = found[-1].argmax()[None], seen_by(head, count + step + 1)[-1:]
        logits, ended = head.rows(token, ended[-1:], torch.tensor([count + step]), cache, seen)
    return found


def same(found: Logits, expected: torch.Tensor) -> None:
    kept = np.isfinite(expected.numpy())
    assert (np.isfinite(found) == kept).all()
    np.testing.assert_allclose(found[kept], expected[kept], rtol=1e-3, atol=1e-4)


@torch.inference_mode()
def agrees(reference: Reference, checkpoint: Path, target_folder: Path) -> None:
    """The head in ``checkpoint`` computes what ``reference`` does."""
    about, config = reference.about, AutoConfig.from_pretrained(target_folder)
    head, step = read_head(checkpoint), native.library()
    assert head is not None
    assert step is not None
    target = native_model(step, target_folder, "float32", 64)
    model = NativeHead(head, target, 64, "none")
    tokens = torch.randint(config.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(1))
    pages = array("i", [5, 1, 4, 2, 3, 6])
    store = target.new_store(8, PAGE)
    output = target.run([Segment(tokens.tolist(), 0, pages, 0, LENGTH)], store, (-1, 0, 1))
    hidden = as_tensor(np.concatenate([output.hidden[layer] for layer in about.layers], -1))
    wanted = rows_of(reference, tokens, hidden, MORE)

    states = np.empty((LENGTH, model.hidden_size), np.float32)
    parts = [output.hidden[layer] for layer in model.target_layers]
    places = array("i", range(LENGTH))
    model.fuse(parts, places, states, places)
    np.testing.assert_allclose(states, reference.fused(hidden), rtol=1e-4, atol=1e-5)
    own = model.new_store(8, PAGE)
    ended = model.shape.num_layers
    # Read in two pieces, and then what it drafts itself.
    first = Segment(tokens[1:6].tolist(), 1, pages, 0, LENGTH, first=1, states=states[:5])
    model.run([first], own)
    rest = Segment(tokens[6:].tolist(), 6, pages, 1, LENGTH, first=1, states=states[5 : LENGTH - 1])
    if model.mask_state is not None:
        found = model.run([model.behind(rest, 1 + MORE, int(tokens[-1]))], own)
        assert found.logits is not None
        for logits, expected in zip(found.logits, wanted, strict=True):
            same(logits, expected)
        return
    for step, expected in enumerate(wanted):
        found = model.run([rest], own, (ended,))
        assert found.logits is not None
        same(found.logits[0], expected)
        token = int(found.logits[0].argmax())
        state = found.hidden[ended][-1:].copy()
        rest = Segment([token], LENGTH + step, pages, 1, LENGTH, first=1, states=state)


@pytest.mark.parametrize("kind", KINDS)
def test_states_and_logits_are_those_of_the_defining_code(
    kind: str, tiny_llama: Path, tmp_path: Path
) -> None:
    about, layout = KINDS[kind]
    reference = make_head(about, AutoConfig.from_pretrained(tiny_llama))
    checkpoint = save_head(reference, tmp_path, layout)
    head = read_head(checkpoint)
    assert head is not None
    assert head.target_layers(2) == about.layers
    agrees(reference, checkpoint, tiny_llama)


@torch.inference_mode()
def test_a_state_that_is_not_finite_spoils_no_other_row(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Also where a row's width is not a multiple of the lanes', so that rows are padded."""
    target_folder = make_checkpoint(tmp_path / "target", "llama", hidden_size=72, head_dim=16)
    reference = make_head(Eagle(), AutoConfig.from_pretrained(target_folder))
    head, step = read_head(save_head(reference, tmp_path / "head")), native.library()
    assert head is not None
    assert step is not None
    target = native_model(step, target_folder, "float32", 64)
    model = NativeHead(head, target, 64, "none")
    states = np.random.default_rng(0).standard_normal((4, model.hidden_size), np.float32)

    def logits(first: Logits) -> list[Logits]:
        store = model.new_store(8, PAGE)
        segments = [
            Segment([number], 1, array("i", [number + 1]), 1, 2, first=1, states=state[None])
            for number, state in enumerate([first, *states[1:]])
        ]
        found = model.run(segments, store).logits
        assert found is not None
        return [*found]

    expected = logits(states[0])
    found = logits(np.full_like(states[0], np.nan))
    assert not np.isfinite(found[0]).any()
    for row, other in zip(found[1:], expected[1:], strict=True):
        assert np.array_equal(row, other)


def swapped(tensors: dict[str, torch.Tensor], first: str, second: str) -> None:
    tensors[first], tensors[second] = tensors[second], tensors[first]


FLIPPED = torch.arange(96, -1, -1) - torch.arange(97)
MUTATIONS: dict[str, Any] = {
    "layer ids": lambda config, tensors: config.update(eagle_aux_hidden_state_layer_ids=[1, 1, 2]),
    "order of layers": lambda config, tensors: config["eagle_aux_hidden_state_layer_ids"].reverse(),
    "residual": lambda config, tensors: config.update(norm_before_residual=False),
    "feedback": lambda config, tensors: config.update(norm_output=True),
    "rope": lambda config, tensors: config["transformer_layer_config"].update(rope_theta=100.0),
    "norms": lambda config, tensors: swapped(
        tensors, "layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight"
    ),
    "ids": lambda config, tensors: tensors.update(d2t=tensors["d2t"].flip(0) + FLIPPED),
    "eps": lambda config, tensors: config["transformer_layer_config"].update(rms_norm_eps=0.5),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_every_convention_counts(mutation: str, tiny_llama: Path, tmp_path: Path) -> None:
    about = Eagle(state_normed=True, drafted=97)
    reference = make_head(about, AutoConfig.from_pretrained(tiny_llama))
    save_head(reference, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["t2d"]  # which would tell
    MUTATIONS[mutation](config, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(AssertionError):
        agrees(reference, tmp_path, tiny_llama)


def test_a_state_is_that_of_the_token_before(tiny_llama: Path, tmp_path: Path) -> None:
    reference = make_head(Eagle(), AutoConfig.from_pretrained(tiny_llama))
    rows = reference.rows

    def shifted(tokens: Any, states: Any, *rest: Any) -> Any:
        return rows(tokens, states.roll(1, 0), *rest)

    reference.rows = shifted  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        agrees(reference, save_head(reference, tmp_path), tiny_llama)


@pytest.mark.parametrize(
    ("heads", "blocks", "borrows"),
    [(3, 1, False), (3, 1, True), (2, 2, False), (2, 2, True), (1, 0, False)],
)
@torch.inference_mode()
def test_medusas_logits_are_those_of_the_defining_code(
    heads: int, blocks: int, borrows: bool, tiny_llama: Path, tmp_path: Path
) -> None:
    config = AutoConfig.from_pretrained(tiny_llama)
    tensors = make_medusa(tmp_path, config.hidden_size, config.vocab_size, heads, blocks, borrows)
    head, step = read_head(tmp_path), native.library()
    assert head is not None
    assert step is not None
    target = native_model(step, tiny_llama, "float32", 64)
    model = NativeMedusa(head, target, "none")
    states = torch.randn(2, config.hidden_size)
    own = load_file(tiny_llama / "model.safetensors")
    norm, output = own["model.norm.weight"].float(), own["lm_head.weight"].float()
    normed = torch.nn.functional.rms_norm(states, norm.shape, norm, config.rms_norm_eps)
    noise = NativeNoise(config.vocab_size, step)
    sequences = [sequence_of(target, number, temperature=0) for number in range(2)]
    segments = [
        model.segment(states[i : i + 1].numpy(), each.id) for i, each in enumerate(sequences)
    ]
    inputs = [DraftInput(each, DraftBudget(heads, heads)) for each in sequences]
    drafts = model.draft(segments, model.new_store(heads, 1), inputs, noise)
    for row, draft in zip(normed, drafts, strict=True):
        expected = []
        for number in range(heads):
            x = row
            for block in range(blocks):
                name = f"{number}.{block}.linear."
                x = x + torch.nn.functional.silu(
                    tensors[f"{name}weight"] @ x + tensors[f"{name}bias"]
                )
            matrix = output if borrows else tensors[f"{number}.{blocks}.weight"]
            expected.append(int((matrix @ x).argmax()))
        assert draft.tokens == expected
        assert draft.parents == [*range(-1, heads - 1)]


@torch.inference_mode()
def test_medusas_choices_are_the_tree(tiny_llama: Path, tmp_path: Path) -> None:
    """The node of path [a, b] is the a-th likeliest of head 0, and behind it the b-th of head 1."""
    config = AutoConfig.from_pretrained(tiny_llama)
    make_medusa(tmp_path, config.hidden_size, config.vocab_size)
    head, step = read_head(tmp_path), native.library()
    assert head is not None
    assert step is not None
    target = native_model(step, tiny_llama, "float32", 64)
    model = NativeMedusa(head, target, "none")
    paths = [(0,), (3,), (9,), (0, 0), (0, 7), (3, 1), (0, 7, 2), (0, 7, 5)]
    noise = NativeNoise(config.vocab_size, step)
    sequence = sequence_of(target, 1, temperature=0)
    some = np.random.default_rng(0).standard_normal((1, config.hidden_size), np.float32)
    segments = [model.segment(some, sequence.id)]
    store = model.new_store(len(paths), 1)
    wanted = model.run(segments, store).logits
    assert wanted is not None
    ranked = np.argsort(-wanted, -1).tolist()
    for depth, most in ((3, 8), (2, 8), (3, 4)):
        budget = DraftBudget(depth, most)
        asked = DraftInput(sequence, draft_limits(budget, Choices(paths)))
        (draft,) = model.draft(segments, store, [asked], noise)
        found: list[tuple[int, ...]] = []
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            found.append((*(found[parent] if parent >= 0 else ()), token))
        expected = {
            tuple(ranked[level][rank] for level, rank in enumerate(path))
            for path in paths
            if len(path) <= depth
        }
        if most < len(expected):
            assert len(found) == most
            assert set(found) < expected
        else:
            assert set(found) == expected
            assert len(found) == len(expected)


@torch.inference_mode()
@pytest.mark.parametrize("nodes", [4, 12])
@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0}, {}, {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.02}],
    ids=["greedy", "all", "truncated"],
)
def test_drafts_among_few_ids_are_those_among_all(
    sampling: dict[str, float], nodes: int, tiny_llama: Path, tmp_path: Path
) -> None:
    """Draws among a head's own logits are those among all ids: the lowest id on a tie, and none
    that a request forbids."""
    config, step = AutoConfig.from_pretrained(tiny_llama), native.library()
    assert step is not None
    target = native_model(step, tiny_llama, "float32", 64)
    rising = make_head(Eagle(drafted=40), config)
    rising.lm_head.weight[1::2] = rising.lm_head.weight[::2]  # every logit is there twice
    mixed, order = deepcopy(rising), torch.randperm(40)
    places = torch.arange(40)
    mixed.lm_head.weight.copy_(rising.lm_head.weight[order])
    mixed.d2t.copy_((rising.d2t + places)[order] - places)

    def drafted(reference: Reference, name: str, **options: Any) -> DraftNodes:
        head = read_head(save_head(reference, tmp_path / name))
        assert head is not None
        model = NativeHead(head, target, 64, "none")
        sequence = sequence_of(target, 3, ignore_eos=True, **sampling, **options)
        count = len(sequence.tokens)
        states = np.random.default_rng(0).standard_normal((count - 1, config.hidden_size))
        segment = Segment(
            sequence.tokens[1:], 1, array("i", range(16)), 1, count, first=1,
            states=states.astype(np.float32),
        )  # fmt: skip
        asked = DraftInput(sequence, draft_limits(DraftBudget(4, nodes)))
        noise = NativeNoise(config.vocab_size, step)
        return model.draft([segment], model.new_store(16, PAGE), [asked], noise)[0]

    found = drafted(rising, "rising")
    assert len(found.tokens) == nodes
    assert drafted(rising, "rising", logit_bias={0: 0.0}) == found
    assert drafted(mixed, "mixed") == found
    forbidden = found.tokens[0]
    other = drafted(rising, "rising", logit_bias={forbidden: -100.0})
    assert forbidden not in other.tokens
    assert other == drafted(mixed, "mixed", logit_bias={forbidden: -100.0})


def test_what_a_head_adds_is_what_the_target_does_not_hold(
    tiny_llama: Path, tmp_path: Path
) -> None:
    config, step = AutoConfig.from_pretrained(tiny_llama), native.library()
    assert step is not None
    target = native_model(step, tiny_llama, "float32", 64)
    theirs = load_file(tiny_llama / "model.safetensors")
    vocabulary, width = config.vocab_size, config.hidden_size
    reference = make_head(Eagle(drafted=vocabulary), config)

    def added(name: str) -> int:
        head = read_head(save_head(reference, tmp_path / name))
        assert head is not None
        return NativeHead(head, target, 64, "none").added_bytes(target)

    own = added("own")
    matrices = [each for each in reference.parameters() if each.dim() == 2]
    assert own >= 4 * sum(each.numel() for each in matrices)
    with torch.no_grad():
        reference.embed_tokens.weight.copy_(theirs["model.embed_tokens.weight"])
    same = added("same embedding")
    assert same == own - 4 * vocabulary * width
    with torch.no_grad():
        reference.lm_head.weight.copy_(theirs["lm_head.weight"])
    both = added("same head too")
    assert same - both >= 4 * vocabulary * width
    agrees(reference, tmp_path / "same head too", tiny_llama)
    make_medusa(tmp_path / "medusa", width, vocabulary, heads=2)
    medusa = read_head(tmp_path / "medusa")
    assert medusa is not None
    heads = NativeMedusa(medusa, target, "none").added_bytes(target)
    assert heads >= 2 * 4 * (width * width + vocabulary * width)
    make_medusa(tmp_path / "borrowing", width, vocabulary, heads=2, borrows=True)
    medusa = read_head(tmp_path / "borrowing")
    assert medusa is not None
    assert NativeMedusa(medusa, target, "none").added_bytes(target) < 4 * vocabulary * width
    assert target.added_bytes(None) > target.added_bytes(target)


def zeros(*shape: int) -> NDArray[np.float32]:
    return np.zeros(shape, np.float32)


def test_what_cannot_be_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(tiny_llama)
    save_head(make_head(Eagle(), config), tmp_path / "eagle")
    make_medusa(tmp_path / "medusa", config.hidden_size, config.vocab_size)
    step, eagle, medusa = (
        native.library(),
        read_head(tmp_path / "eagle"),
        read_head(tmp_path / "medusa"),
    )
    assert step is not None
    assert eagle is not None
    assert medusa is not None
    target = native_model(step, tiny_llama, "float32", 64)
    model, heads = NativeHead(eagle, target, 64, "none"), NativeMedusa(medusa, target, "none")
    noise = NativeNoise(config.vocab_size, step)
    store, none, wide = model.new_store(3, 16), heads.new_store(4, 1), config.hidden_size
    asked = DraftInput(sequence_of(target, 1), DraftBudget(2, 2))
    handle = asked.sequence.pipeline.native_handle
    row = Segment([5], 3, [1], 1, 1, first=1, states=zeros(1, wide))
    one = zeros(1, wide)

    def draft(model: Any, store: Any, segment: Segment, **options: Any) -> Callable[[], object]:
        words, limits = words_of([segment]), [asked.limits]
        given = words, options.pop("vocabulary", model.shape.vocab_size), [handle], limits
        return lambda: step.draft(model.handle, store.handle, *given, **options)

    plain = target.new_store(3, 16)
    step.set_likely(target.handle, 16, range(16), range(16))
    law = Planted(np.zeros((1, 1), np.int64), zeros(1, 1), np.zeros(1, np.float32), 0)
    far = array("i", [2**31 - 1])
    for call, sentence in (
        (lambda: model.run([row._replace(states=None)], store), "begins with no state"),
        (lambda: model.run([row._replace(first=4)], store), "bad size"),
        (lambda: model.run([row._replace(first=-1)], store), "bad size"),
        (lambda: model.run([row._replace(tokens=[config.vocab_size])], store), "no embedding"),
        (draft(model, store, row), "begin with a state"),
        (draft(model, store, row, states=zeros(2, wide)), "as many states"),
        (draft(model, store, row, states=one.astype(np.float64)), "cannot read"),
        (draft(model, store, row, states=zeros(1, wide - 1)), "another width"),
        (draft(target, plain, row, states=one), "begin with a state"),
        (draft(target, plain, row, vocabulary=15), "other logits"),
        (draft(target, plain, row, vocabulary=0), "other logits"),
        (draft(target, plain, row, vocabulary=2**63), "integer|not of|too"),
        (draft(target, plain, row, vocabulary=16, planted=[law]), "go by all ids"),
        (draft(model, store, row, vocabulary=16, states=one), "other logits"),
        (draft(target, plain, row, sublayers=[4]), "no such layer"),
        (draft(target, plain, row, sublayers=[-1]), "no such layer"),
        (draft(target, plain, row, sublayers=[1, 0]), "no such layer"),
        (draft(target, plain, row, sublayers=[2**31]), "sublayers"),
        (draft(target, plain, row, before=[-1]), "out of range"),
        (draft(target, plain, row, before=[2**31]), "positions"),
        (draft(target, plain, row, before=[1, 2]), "belong together"),
        (draft(heads, none, heads.segment(one, "")), "begin with a state"),
        (draft(heads, none, row._replace(start=0, first=0), states=one), "heads as levels"),
        (lambda: heads.run([row._replace(states=None)], none), "begins with no state"),
        (lambda: heads.run([row._replace(start=0, first=0)], none), "as many as announced"),
        (lambda: model.fuse([one], far, one, array("i", [0])), "another shape|no such row"),
        (lambda: model.fuse([one] * 3, far, one, array("i", [0])), "no such row"),
        (lambda: model.fuse([one] * 3, array("i", [0]), one, far), "no such row"),
        (lambda: model.fuse([one] * 3, array("i", [0, 0]), one, array("i", [0])), "together"),
        (lambda: model.fuse([one] * 2, array("i", [0]), one, array("i", [0])), "another shape"),
        (lambda: step.fuse(target.handle, [one] * 3, far, one, far), "another shape"),
        (lambda: step.set_ids(model.handle, [0], ()), "too few ids"),
        (lambda: step.set_ids(model.handle, [-2] * 120, ()), "below -1"),
        (lambda: step.set_ids(model.handle, [0] * 120, [config.vocab_size]), "no embedding"),
        (lambda: step.set_ids(model.handle, [2**31] * 120, ()), "token ids"),
        (lambda: step.decide(model.handle, store.handle, words_of([row]), array("Q", [handle]), 1,
                             Room(zeros(1, 120))), "begin with a state"),
    ):  # fmt: skip
        with pytest.raises(ModelError, match=sentence):
            call()
    assert model.draft([row], store, [asked], noise)[0].tokens


def test_a_copy_of_other_embeddings_is_refused(
    tiny_llama: Path, tmp_path: Path, make_checkpoint: Callable[..., Path]
) -> None:
    other = make_checkpoint(tmp_path / "other", "llama", hidden_size=64)
    step = native.library()
    assert step is not None
    first, second = (native_model(step, each, "float32", 64) for each in (tiny_llama, other))
    with pytest.raises(ModelError, match="other embeddings"):
        step.borrow(first.handle, second.handle)
