"""Heads on the target's hidden states change nothing, and keep what they say they have kept."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import time
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import exactness
import pytest
import torch
from exactness import VOCABULARY, make_engine, make_fickle, planted_pair
from heads import Eagle, agreeing_head, agreeing_medusa, save_head
from products import OPTIONS, Product, dealt, prompts, rest
from safetensors.torch import load_file, save_file

from outrider.drafters import eagle
from outrider.drafters.base import Drafter
from outrider.drafters.eagle import EagleDrafter
from outrider.engine.costs import Costs, Curve, DraftCosts
from outrider.engine.engine import Engine
from outrider.models.base import Model
from outrider.models.rows import Segment
from outrider.native import choice as native
from outrider.types import Request, SamplingParams, SequenceState

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(native.library() is None, reason="the native step is off"),
]
DRAFTERS = (
    "eagle3", "eagle3 tree", "peagle", "peagle tree", "medusa", "medusa tree", "choices",
    "eagle3+ngram", "peagle+ngram", "medusa+ngram", "medusa+suffix", "auto+eagle3", "auto+peagle",
    "auto+medusa",
)  # fmt: skip
CHOICES = {"medusa_choices": [[0], [2], [1], [0, 0], [0, 1], [2, 0], [0, 1, 0], [0, 1, 1]]}
KINDS = {
    "eagle3": Eagle(layers=(0, -1, 0), drafted=180, kv_heads=4, state_normed=True),
    "peagle": Eagle(
        layers=(-1, 0, 1), drafted=VOCABULARY, kv_heads=4, state_normed=True, parallel=True
    ),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose layers say little, so that heads without training can agree with it."""
    folder = planted_pair(tmp_path_factory.mktemp("heads") / "target", head_dim=16)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if "o_proj" in name or "down_proj" in name:
            weight.mul_(0.03)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for kind, about in KINDS.items():
        save_head(agreeing_head(about, folder), folder / kind)
    agreeing_medusa(folder / "medusa", folder)
    config = json.loads((folder / "medusa" / "config.json").read_text())
    shutil.copytree(folder / "medusa", folder / "choices")
    (folder / "choices" / "config.json").write_text(json.dumps({**config, **CHOICES}))
    return folder


def engine_of(target: Path, drafter: str, length: int = 4, **options: Any) -> Engine:
    name, _, tree = drafter.partition(" ")
    parts = [str(target / p) if (target / p).is_dir() else p for p in name.split("+")]
    nodes = 3 * length if tree else None
    engine = make_engine(
        target, "+".join(parts), num_speculative_tokens=length, max_draft_nodes=nodes, **options
    )
    if name.startswith("auto"):
        make_fickle(engine, random.Random(length))
    return engine


PRODUCT = Product(engine_of, prompts(), tokens=24, pages=26)


@pytest.mark.equality
@pytest.mark.parametrize("case", dealt(DRAFTERS), ids=lambda case: "-".join(map(str, case)))
def test_heads_change_nothing(target: Path, case: Any) -> None:
    PRODUCT.holds(target, *case)


@pytest.mark.slow
@pytest.mark.equality
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("option", OPTIONS)
def test_heads_change_nothing_in_the_full_product(target: Path, drafter: str, option: str) -> None:
    for each in rest():
        PRODUCT.holds(target, drafter, option, *each)


def test_medusas_choices_are_drafted_whole(target: Path) -> None:
    engine = engine_of(target, "choices")
    engine.add(Request("a", tuple(prompts()[0]), SamplingParams(max_tokens=16, temperature=0), 1))
    sizes: set[int] = set()
    drafter = engine.speculator.drafters["medusa"]
    assert (drafter.max_length, drafter.max_nodes) == (3, 8)
    propose = drafter.propose

    def watched(*args: Any) -> Any:
        draft = propose(*args)
        sizes.update(map(len, draft.tokens))
        return draft

    drafter.propose = watched  # type: ignore[method-assign]
    while engine.has_work:
        engine.step()
    assert max(sizes) == len(CHOICES["medusa_choices"])


def recomputed(engine: Engine, sequence: SequenceState, first: int) -> torch.Tensor:
    """The logits of the last entry of a sequence's head, with everything computed anew."""
    drafter, target = engine.speculator.drafters["eagle3"], engine.model
    assert isinstance(drafter, EagleDrafter)
    head, tokens = drafter.model, sequence.tokens
    pages = range(1 + len(tokens) // 4)
    whole = Segment(tokens, 0, pages, 0, 1)
    hidden = target.run([whole], target.new_store(len(pages), 4), drafter.target_layers).hidden
    states, rows = torch.empty(len(tokens), head.hidden_size), array("i", range(len(tokens)))
    head.fuse([hidden[layer] for layer in head.target_layers], rows, states, rows)
    count = len(tokens) - first
    mine = Segment(
        tokens[first:], first, pages, 1, 1, first=first, states=states[first - 1 :][:count]
    )
    found = head.run([mine], head.new_store(len(pages), 4)).logits
    last = Segment(
        tokens[-1:], len(tokens) - 1, sequence.pages, 1, 1, first=first, states=states[-2:-1]
    )
    kept = head.run([last], drafter._store).logits
    assert found is not None
    assert kept is not None
    assert torch.equal(found, kept)
    return found


def made_up_costs(
    _: Model, drafters: Mapping[str, Drafter], merging: Sequence[str], *__: Any
) -> Costs:
    passes = Curve((1, 64), (1e-4, 5e-4))
    found = {n: DraftCosts(passes if d.model else None, 2e-5, 5e-6) for n, d in drafters.items()}
    found |= {name: DraftCosts(None, 2e-5, 5e-6) for name in merging}
    return Costs(Curve((1, 64), (1e-3, 5e-3)), found)


@pytest.mark.parametrize(
    ("name", "chunk"), [("eagle3", 5), ("eagle3", 64), ("auto+eagle3", 5), ("auto+peagle", 64)]
)
def test_what_a_head_keeps_is_what_it_would_compute(
    target: Path, name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After random adds, aborts, preemptions and shared beginnings, bit for bit.

    Where the engine chooses, states that a head has not read get lost, and contexts begin anew.
    """
    rng, fickle = random.Random(chunk + 2), name.startswith("auto")
    if fickle:
        monkeypatch.setattr(eagle, "UNREAD", 1)
    # What is drafted and when depends on times, which are the same on every machine here.
    monkeypatch.setattr(time, "perf_counter", itertools.count(0.0, 1e-4).__next__)
    monkeypatch.setattr(exactness, "known_costs", made_up_costs)
    engine = engine_of(target, name, pages=30, max_num_batched_tokens=chunk, max_num_seqs=4)
    drafter = engine.speculator.drafters["eagle3"]
    assert isinstance(drafter, EagleDrafter)
    base = prompts()[3]
    live: dict[str, int] = {}
    seen = shared = cut = 0
    for turn in range(240):
        if rng.random() < 0.25 and len(live) < 5:
            prompt = [*base[: rng.choice((0, 8, 13, 24, 40))], rng.randrange(4, VOCABULARY)]
            id = f"t{turn}"
            engine.add(Request(id, tuple(prompt), SamplingParams(max_tokens=30), turn))
            live[id] = turn
        if live and rng.random() < 0.05:
            id = rng.choice([*live])
            engine.abort(id)
            del live[id]
        for event in engine.step():
            if event.finish_reason:
                live.pop(event.request_id, None)
        for sequence in engine.scheduler.running:
            state = drafter._states.get(sequence.id)
            if (
                state is None
                or state.num_computed != len(sequence.tokens) - 1
                or rng.random() < 0.5
            ):
                continue
            # All but the last entry are there.
            recomputed(engine, sequence, state.first)
            seen += 1
            cut += state.first > 1
            shared += sequence.start is not None and sequence.start.cached_tokens > 0
    assert seen > 10
    assert shared > 5
    assert engine.scheduler.preemptions
    assert not fickle or cut > 0
