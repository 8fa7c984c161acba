"""Drafts from another vocabulary change nothing, are accepted as theory says, and leak no page."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from outrider.base.types import Request, SamplingParams
from outrider.drafters.retokenize import RetokenizeDrafter
from outrider.engine.engine import Engine
from outrider.models.rows import Segment
from outrider.native import choice as native
from outrider.sampling.arrays import softmax
from outrider.sampling.ratio import Floats
from tests.support.exactness import VOCABULARY, make_engine, make_fickle, planted_pair, run
from tests.support.pages import check_pool
from tests.support.products import OPTIONS, Product, dealt, prompts, rest
from tests.support.retokenizing import other_tokenizer, save_other

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native step is off")
DRAFTERS = ("{}", "{} tree", "{}+ngram", "auto+{}")
KEPT = (0.1, 0.9)
"""Shares of the target's tokens for two letters that another tokenizer has too: with the least,
half of the target's vocabulary is shared."""
PROMPTS = prompts(1, (110, 12, 113, 14, 150))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = planted_pair(tmp_path_factory.mktemp("retokenize") / "target")
    save_other(folder, folder / "other", other_tokenizer())
    return folder


@pytest.fixture(scope="module")
def agreeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose law rests on the last token, so that another tokenizer's drafter agrees."""
    folder = planted_pair(tmp_path_factory.mktemp("agreeing") / "target")
    for file in (folder / "model.safetensors", folder / "drafter" / "model.safetensors"):
        weights = load_file(file)
        for name, weight in weights.items():
            if "o_proj" in name or "down_proj" in name:
                weight.mul_(0.2)
        save_file(weights, file, {"format": "pt"})
    for kept in KEPT:
        save_other(folder, folder / f"other {kept}", other_tokenizer(kept))
    return folder


def engine_of(
    target: Path, drafter: str, length: int = 4, other: str = "other", **options: Any
) -> Engine:
    name, _, tree = drafter.partition(" ")
    nodes = 3 * length if tree else None
    name = name.format(f"retokenize:{target / other}")
    engine = make_engine(
        target, name, num_speculative_tokens=length, max_draft_nodes=nodes, **options
    )
    if name.startswith("auto"):
        make_fickle(engine, random.Random(length))
    return engine


def drafter_of(engine: Engine) -> RetokenizeDrafter:
    drafter = engine.drafting.drafters["retokenize"]
    assert isinstance(drafter, RetokenizeDrafter)
    return drafter


def check_drafter(engine: Engine) -> None:
    drafter = drafter_of(engine)
    check_pool(drafter._pool, [state.table for state in drafter._states.values()])
    for state in drafter._states.values():
        assert state.num_computed <= drafter._pool.page_size * len(state.table)


PRODUCT = Product(engine_of, PROMPTS, tokens=24, pages=26)


def holds(target: Path, *case: Any) -> None:
    engine = PRODUCT.holds(target, *case, between=check_drafter)
    assert not drafter_of(engine)._states


@pytest.mark.equality
@pytest.mark.parametrize("case", dealt(DRAFTERS), ids=lambda case: "-".join(map(str, case)))
def test_another_vocabulary_changes_nothing(target: Path, case: Any) -> None:
    holds(target, *case)


@pytest.mark.slow
@pytest.mark.equality
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("option", OPTIONS)
def test_another_vocabulary_changes_nothing_in_the_full_product(
    target: Path, drafter: str, option: str
) -> None:
    for each in rest():
        holds(target, drafter, option, *each)


def text_of(target: Engine, sequence_tokens: list[int]) -> str:
    tokenizer = drafter_of(target)._reencoder._theirs
    return b"".join(tokenizer.tokens[id] for id in sequence_tokens).decode(errors="replace")


def context_text(drafter: RetokenizeDrafter, ids: list[int]) -> str:
    return b"".join(drafter._reencoder._ours.tokens[id] for id in ids).decode(errors="replace")


@pytest.mark.parametrize("drafter", ["{}", "{} tree"])
@pytest.mark.parametrize("chunk", [5, 64])
def test_what_is_kept_is_what_would_be_computed(target: Path, chunk: int, drafter: str) -> None:
    """After random adds, aborts, preemptions and shared beginnings, bit for bit."""
    rng = random.Random(chunk)
    engine = engine_of(target, drafter, pages=34, max_num_batched_tokens=chunk)
    own = drafter_of(engine)
    base = PROMPTS[3]
    live: set[str] = set()
    seen = crowded = 0
    shared: set[int] = set()
    for turn in range(240):
        if rng.random() < 0.25 and len(live) < 5:
            prompt = [*base[: rng.choice((0, 8, 13, 24, 40))], rng.randrange(4, VOCABULARY)]
            name = f"t{turn}"
            engine.add(Request(name, tuple(prompt), SamplingParams(max_tokens=30), turn))
            live.add(name)
        if live and rng.random() < 0.05:
            name = rng.choice(sorted(live))
            engine.abort(name)
            live.remove(name)
        for event in engine.step():
            if event.finish_reason:
                live.discard(event.request_id)
        engine.settle()
        check_drafter(engine)
        tables = [state.table for state in own._states.values()]
        shared |= set.intersection(*map(set, tables[:2])) if len(tables) > 1 else set()
        for sequence in engine.scheduler.running:
            state = own._states.get(sequence.id)
            if state is None:
                continue
            crowded += state.waits
            assert text_of(engine, sequence.tokens[: state.context.taken]) == context_text(
                own, state.context.ids
            ) + state.context.pending.decode(errors="replace")
            ids = state.context.ids
            if len(ids) < 2 or state.num_computed < len(ids) - 1 or len(state.table) * 4 < len(ids):
                continue
            pages = range(1 + len(ids) // 4)
            whole = Segment(ids, 0, pages, 1, 1)
            last = Segment(ids[-1:], len(ids) - 1, state.table, 1, 1)
            expected = own.model.run([whole], own.model.new_store(len(pages), 4)).logits
            kept = own.model.run([last], own._store).logits
            assert expected is not None
            assert kept is not None
            assert np.array_equal(expected, kept)
            seen += 1
    assert seen > 20
    assert shared
    assert crowded


def laws(
    engine: Engine, tokens: list[int], ids: list[int], temperature: float
) -> tuple[Floats, Floats]:
    """What the target says behind a text, and what the drafter says of the shared tokens."""
    own = drafter_of(engine)
    rows = [
        model.run(
            [Segment(known, 0, range(1 + len(known) // 4), 1, 1)],
            model.new_store(1 + len(known) // 4, 4),
        ).logits
        for model, known in ((engine.model, tokens), (own.model, ids))
    ]
    assert rows[0] is not None
    assert rows[1] is not None
    p = softmax(rows[0][0] / np.float64(temperature))
    targets = np.array(own._reencoder.shared.targets)
    q = np.full_like(p, -np.inf)
    q[targets[targets >= 0]] = rows[1][0][targets >= 0] / np.float64(temperature)
    return p, softmax(q)


def expected_acceptance(p: Floats, q: Floats) -> float:
    """P(argmax log p + g = argmax log q + g) for Gumbel noise g.

    With E = exp(-g) both are i where E_j > E_i max(p_j / p_i, q_j / q_i) for all other j, which has
    the chance 1 / sum_j max(p_j / p_i, q_j / q_i), and 0 where p_i or q_i is.
    """
    both = (p > 0) & (q > 0)
    ratios = np.maximum(p / p[both, None], q / q[both, None])
    return float((1 / ratios.sum(1)).sum())


def test_the_expected_acceptance_is_that_of_many_draws() -> None:
    rng = np.random.default_rng(0)
    y = softmax(rng.standard_normal(40) * 2)
    p, z = y, rng.standard_normal(40) + np.log(y)
    z[::2] = -np.inf
    q, noise = softmax(z), rng.gumbel(size=(400_000, 40))
    alike = ((np.log(p) + noise).argmax(1) == (z + noise).argmax(1)).mean()
    assert abs(float(alike) - expected_acceptance(p, q)) < 0.003


@pytest.mark.parametrize(("kept", "temperature"), [(KEPT[0], 0.8), (KEPT[1], 0.4)])
def test_acceptance_is_what_theory_predicts(
    agreeing: Path, kept: float, temperature: float
) -> None:
    """First tokens of drafts: the mean over contexts of the chance that both laws draw alike."""
    engine = engine_of(agreeing, "{}", 1, f"other {kept}")
    own, propose = drafter_of(engine), drafter_of(engine).propose
    of_target, of_drafter = own._reencoder.shared.shares
    assert kept > 0.5 or 0.4 < min(of_target, of_drafter) < max(of_target, of_drafter) < 0.6
    predicted: list[float] = []

    def watching(batch: Any, budgets: Any, noise: Any) -> Any:
        draft = propose(batch, budgets, noise)
        for item, (tokens, *_) in zip(batch, draft, strict=True):
            if tokens:
                state = own._states[item.sequence.id]
                pair = laws(engine, item.sequence.tokens, state.context.ids, temperature)
                predicted.append(expected_acceptance(*pair))
                assert pair[1][tokens[0]] > 0
        return draft

    own.propose = watching  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=16, temperature=temperature, ignore_eos=True)
    for first in range(0, 200, 4):
        run(
            engine,
            [
                Request(f"s{number}", tuple(PROMPTS[number % 6]), params, number)
                for number in range(first, first + 4)
            ],
        )
    counts = engine.counts
    assert counts.drafted == len(predicted)
    assert counts.drafted > 1500
    measured, theory = counts.accepted / counts.drafted, sum(predicted) / len(predicted)
    print(
        f"{of_target:.0%} of the target's tokens are shared: acceptance {measured:.4f} of "
        f"{counts.drafted} drafts; theory {theory:.4f}"
    )
    assert abs(measured - theory) < 0.03
    assert 0.05 < theory < 0.95
