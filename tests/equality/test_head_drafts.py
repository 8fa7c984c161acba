"""Heads on the target's hidden states change nothing, and keep what they say they have kept."""

from __future__ import annotations

import itertools
import random
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import VOCABULARY, make_engine, make_fickle, planted_pair, requests, run
from heads import Eagle, agreeing_head, agreeing_medusa, save_head
from pages import check_engine
from safetensors.torch import load_file, save_file

from outrider.drafters.eagle import EagleDrafter
from outrider.engine.engine import Engine
from outrider.models.rows import Segment
from outrider.native import choice as native
from outrider.types import Request, SamplingParams, SequenceState

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(native.library() is None, reason="the native step is off"),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "0.8": {"temperature": 0.8},
    "n": {"temperature": 0.8, "n": 3},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.3},
    "logprobs": {"temperature": 0.8, "logprobs": 3, "prompt_logprobs": 2, "min_p": 0.02},
    "regex": {"structured_outputs": {"regex": "[a-d]+(-[a-d]+){2,}"}, "min_tokens": 5},
}
DRAFTERS = (
    "eagle3", "eagle3 tree", "peagle", "peagle tree", "medusa", "medusa tree", "eagle3+ngram",
    "medusa+suffix", "auto+eagle3", "auto+medusa",
)  # fmt: skip
LENGTHS, CHUNKS, POOLS = (1, 4, 7), (3, 16, 512), ("ample", "tight")
NUMBERS: dict[str, dict[str, Any]] = {
    "float32": {}, "bfloat16": {"dtype": "bfloat16"}, "int8": {"quantization": "int8"},
}  # fmt: skip
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
    return folder


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    found = [[rng.randrange(4, VOCABULARY) for _ in range(n)] for n in (1, 2, 19, 40)]
    return [*found, [*found[-1][:32], 9, 8], [11, 12, 13, 14, 15] * 6]


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


PLAIN: dict[tuple[str, str], dict[str, list[Any]]] = {}


def plain(target: Path, option: str, numbers: str) -> dict[str, list[Any]]:
    if (option, numbers) not in PLAIN:
        engine = make_engine(target, "none", **NUMBERS[numbers])
        params = SamplingParams(max_tokens=24, **OPTIONS[option])
        found: dict[str, list[Any]] = {}
        for request in requests(prompts(), params):
            found |= run(engine, [request])
        PLAIN[option, numbers] = found
    return PLAIN[option, numbers]


def holds(
    target: Path, drafter: str, option: str, batch: int, length: int, chunk: int, pool: str,
    numbers: str,
) -> None:  # fmt: skip
    options = {"pages": 26 if pool == "tight" else None, "max_num_batched_tokens": chunk}
    engine = engine_of(target, drafter, length, **options, **NUMBERS[numbers])
    expected = plain(target, option, numbers)
    queued = requests(prompts(), SamplingParams(max_tokens=24, **OPTIONS[option]))
    found: dict[str, list[Any]] = {}
    for first in range(0, len(queued), batch):
        found |= run(engine, queued[first : first + batch])
    assert found == expected
    assert not engine.speculator.switched_off
    check_engine(engine)
    if option in ("greedy", "0.8", "n") and length > 1 and pool == "ample":
        assert 0 < engine.counts.accepted < engine.counts.nodes


CASES = [
    # Every drafter under every option, the other dimensions dealt out over them.
    (*each, (1, 4)[i % 2], LENGTHS[i % 3], CHUNKS[i // 2 % 3], POOLS[i // 3 % 2], [*NUMBERS][i % 3])
    for i, each in enumerate(itertools.product(DRAFTERS, OPTIONS))
]


@pytest.mark.equality
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_heads_change_nothing(target: Path, case: Any) -> None:
    holds(target, *case)


@pytest.mark.slow
@pytest.mark.equality
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("option", OPTIONS)
def test_heads_change_nothing_in_the_full_product(target: Path, drafter: str, option: str) -> None:
    for rest in itertools.product((1, 4), LENGTHS, CHUNKS, POOLS, NUMBERS):
        holds(target, drafter, option, *rest)


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


@pytest.mark.parametrize("chunk", [5, 64])
def test_what_a_head_keeps_is_what_it_would_compute(target: Path, chunk: int) -> None:
    """After random adds, aborts, preemptions and shared beginnings, bit for bit."""
    rng = random.Random(chunk)
    engine = engine_of(target, "eagle3", pages=30, max_num_batched_tokens=chunk)
    drafter = engine.speculator.drafters["eagle3"]
    assert isinstance(drafter, EagleDrafter)
    base = prompts()[3]
    live: dict[str, int] = {}
    seen = shared = cut = 0
    for turn in range(240):
        if rng.random() < 0.25 and len(live) < 5:
            prompt = [*base[: rng.choice((0, 8, 13, 24, 40))], rng.randrange(4, VOCABULARY)]
            name = f"t{turn}"
            engine.add(Request(name, tuple(prompt), SamplingParams(max_tokens=30), turn))
            live[name] = turn
        if live and rng.random() < 0.05:
            name = rng.choice([*live])
            engine.abort(name)
            del live[name]
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
    assert seen > 20
    assert shared > 5
