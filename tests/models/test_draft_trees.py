"""Trees of a drafter's model: the native step against Python, and against their definition."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.base.types import SequenceState
from outrider.models.decide import DraftInput, DraftNodes
from outrider.models.native import NativeTransformer
from outrider.models.python_step import PythonStep
from outrider.models.rows import Segment
from outrider.native.interface import Choices, DraftBudget
from outrider.native.native_sampling import NativeNoise
from outrider.native.rates import BINS, DEPTHS, RANKS, Rates
from outrider.sampling.grammar import Mask
from tests.support.loading import native_model
from tests.support.native_steps import HERE, sequence_of, step

pytestmark = pytest.mark.engine
CPU = "cpu"
PAGE = 7
CHOICES = Choices([[0], [9], [2], [0, 0], [0, 3], [9, 1], [0, 3, 2]])


@pytest.fixture(params=HERE)
def model(
    request: pytest.FixtureRequest, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> NativeTransformer:
    folder = make_checkpoint(tmp_path, "llama")
    return native_model(step(request.param), folder, "float32", 128)


def drafts(
    model: NativeTransformer,
    sequences: list[SequenceState],
    limits: list[DraftBudget],
    draft: Callable[..., list[DraftNodes]],
) -> list[DraftNodes]:
    each = 80 // PAGE
    tables = [list(range(1 + each * i, 1 + each * (i + 1)))[::-1] for i in range(len(sequences))]
    segments = [
        Segment(s.tokens, 0, pages, 1, s.prompt_length, (), (), s.id)
        for s, pages in zip(sequences, tables, strict=True)
    ]
    asked = [DraftInput(s, limit) for s, limit in zip(sequences, limits, strict=True)]
    store = model.new_store(1 + each * len(sequences), PAGE)
    noise = NativeNoise(model.shape.vocab_size, model.library)
    return draft(model, segments, store, asked, noise)


def random_rates(seed: int) -> Rates:
    rates = np.random.default_rng(seed).uniform(0.05, 0.95, (DEPTHS, RANKS, BINS))
    return Rates(np.sort(rates.astype(np.float32), axis=1)[:, ::-1])


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0, "top_k": 40}])
def test_native_trees_are_those_of_python(
    model: NativeTransformer, options: dict[str, Any]
) -> None:
    sequences = [sequence_of(model, i, **options) for i in range(7)]
    rates = random_rates(3)
    limits = [
        DraftBudget(1, 4, 1, 4, rates=rates),
        DraftBudget(3, 3),
        DraftBudget(4, 16, 5, 4, rates=rates),
        DraftBudget(6, 9, 2, 3, 0.02, 0.1, random_rates(4)),
        DraftBudget(9, 40, 8, 8, rates=rates),
        DraftBudget(3, len(CHOICES), 7, CHOICES.branches, choices=CHOICES),
        DraftBudget(2, 4, 7, CHOICES.branches, rates=rates, choices=CHOICES),
    ]
    native = drafts(model, sequences, limits, NativeTransformer.draft)
    python = drafts(model, sequences, limits, PythonStep.draft)
    for ours, theirs, limit in zip(native, python, limits, strict=True):
        assert (ours.tokens, ours.parents, ours.runs) == (
            theirs.tokens,
            theirs.parents,
            theirs.runs,
        )
        assert ours.margins == pytest.approx(theirs.margins, abs=1e-4)
        assert 1 <= len(ours.tokens) <= limit.nodes
    assert max(native[2].parents) < 15
    assert min(native[3].survivals) >= 0.1
    assert len(native[2].tokens) == 16
    assert len(native[5].tokens) == len(CHOICES)
    assert len(native[6].tokens) == 4


def masks(sequence: SequenceState, paths: list[list[int]]) -> list[Mask | str | None]:
    """A grammar of a third of the vocabulary at each place, that ends or fails at some."""
    found: list[Mask | str | None] = []
    for path in paths:
        rng = np.random.default_rng([*map(ord, sequence.id), *path])
        size = -(-sequence.pipeline.vocab_size // 8)  # type: ignore[attr-defined]
        bits = rng.integers(0, 256, size, np.uint8) & rng.integers(0, 256, size, np.uint8)
        choice = rng.random() if path else 1.0
        found.append("failed" if choice < 0.1 else None if choice < 0.2 else bits * (choice > 0.3))
    return found


def test_masks_of_drafted_tokens(model: NativeTransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar's drafts are made in C++, which calls back, and are those of Python."""
    sequences = [sequence_of(model, i, temperature=1.0) for i in range(6)]
    for sequence in sequences[1:]:
        pipeline: Any = sequence.pipeline
        pipeline.has_grammar = True
        pipeline.masks = lambda _, paths, sequence=sequence: masks(sequence, paths)
    tree = DraftBudget(4, 12, 3, 3, rates=random_rates(5))
    limits = [tree, tree, DraftBudget(6, 6), DraftBudget(6, 6), tree, DraftBudget(3, 3)]
    python = drafts(model, sequences, limits, PythonStep.draft)
    with monkeypatch.context() as patch:
        patch.setattr(NativeTransformer, "_in_python", None)  # no sequence is left to Python
        native = drafts(model, sequences, limits, NativeTransformer.draft)
    for ours, theirs in zip(native, python, strict=True):
        assert (ours.tokens, ours.parents) == (theirs.tokens, theirs.parents)
    for sequence, nodes in zip(sequences[1:], native[1:], strict=True):
        paths: list[list[int]] = []
        for token, parent in zip(nodes.tokens, nodes.parents, strict=True):
            before = paths[parent] if parent >= 0 else []
            (mask,) = masks(sequence, [before])
            assert not isinstance(mask, str)
            assert mask is None or mask[token // 8] >> token % 8 & 1
            paths.append([*before, token])
    assert sum(len(nodes.tokens) for nodes in native[1:]) > 12


def test_what_masks_a_draft_is_freed_at_once(model: NativeTransformer) -> None:
    """Not when the cyclic collector runs next: a grammar may hold 60 MB."""
    sequence, asked = sequence_of(model, 0), 0
    every = np.full(model.shape.vocab_size, 255, np.uint8)

    def allowed(_: object, paths: list[list[int]]) -> list[Mask]:
        nonlocal asked
        asked += len(paths)
        return [every] * len(paths)

    pipeline: Any = sequence.pipeline
    pipeline.has_grammar, pipeline.masks = True, allowed
    gone = weakref.ref(sequence)
    gc.disable()
    try:
        drafts(model, [sequence], [DraftBudget(3, 3)], NativeTransformer.draft)
        del sequence
        assert asked == 3
        assert gone() is None
    finally:
        gc.enable()


def test_a_trees_first_branch_is_the_chain(model: NativeTransformer) -> None:
    """The likeliest child is the coupled draw, so that a tree accepts whatever a chain does."""
    sequences = [sequence_of(model, i, temperature=0.9) for i in range(4)]
    chain = drafts(model, sequences, [DraftBudget(4, 4)] * 4, NativeTransformer.draft)
    rates = np.zeros((DEPTHS, RANKS, BINS), np.float32)
    rates[:, 0], rates[:, 1:] = 0.9, 0.05
    wide = [DraftBudget(4, 12, 3, 3, rates=Rates(rates))] * 4
    tree = drafts(model, sequences, wide, NativeTransformer.draft)
    for one, other in zip(chain, tree, strict=True):
        assert one.tokens == other.tokens[:4]
        assert other.parents[:4] == [-1, 0, 1, 2]
        siblings = [t for t, p in zip(other.tokens, other.parents, strict=True) if p == -1]
        assert len(set(siblings)) == len(siblings)
