"""Drafts change nothing in any family: windows, caps, experts, and what transformers runs."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.audit.adversary import AdversarySpec
from outrider.base.types import SamplingParams
from outrider.errors import ConfigError
from outrider.models.fallback import Fallback, SequenceStore
from outrider.native import choice as native
from tests.support.exactness import (
    HYBRIDS,
    SAMPLING,
    VOCABULARY,
    adversary,
    alone,
    in_batches,
    make_engine,
    make_fickle,
    planted_pair,
    requests,
)

NATIVE = ("mistral", "gemma2", "qwen3_moe")
OTHERWISE = ("olmo2", "phi3", "smollm3", "gpt_oss")
"""Norms behind, ropes by length, layers without a rope, sinks and experts with biases."""
FALLBACK = ("starcoder2", "qwen2_moe")
STEP = native.library() is not None
DRAFTED = tuple(family for family in HYBRIDS if STEP or family != "falcon_h1")
"""Those whose first layer alone can draft: in the native step it may have a state, too."""
LOOKUPS = ("ngram", "suffix")
CERTAIN = ("wrong", "right")
PROMPTS = [
    [(7 * i) % 190 + 5 for i in range(19)],  # longer than a window
    [11, 12, 13, 14, 15] * 5,
    [40, 50],
]


def _params(temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return functools.cache(lambda family: planted_pair(tmp_path_factory.mktemp(family), family))


@pytest.fixture(scope="module")
def plain(pair: Callable[[str], Path]) -> Callable[[str, float], dict[str, list[Any]]]:
    """Plain decoding, by family and temperature."""
    return functools.cache(
        lambda family, temperature: alone(pair(family), requests(PROMPTS, _params(temperature)))
    )


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("family", "drafter"),
    [
        *[(family, drafter) for family in NATIVE for drafter in (*LOOKUPS, "model", "ragged")],
        *[(family, drafter) for family in OTHERWISE for drafter in ("ngram", "ragged")],
        # One of the lookups: to a model both are chains, and the native families have the other.
        *[(family, drafter) for family in FALLBACK for drafter in ("none", "ngram", "model")],
        *[(family, drafter) for family in HYBRIDS for drafter in LOOKUPS],
        *[(family, "model") for family in DRAFTED],
        *[(family, drafter) for family in ("starcoder2", *HYBRIDS) for drafter in CERTAIN],
    ],
)
def test_drafts_change_nothing(
    family: str,
    drafter: str,
    temperature: float,
    batch: int,
    pair: Callable[[str], Path],
    plain: Callable[[str, float], dict[str, list[Any]]],
) -> None:
    expected = plain(family, temperature)
    queued = requests(PROMPTS, _params(temperature))
    engine = make_engine(
        pair(family),
        adversary(drafter, queued, expected, 4),
        pages=18 if batch == 3 else None,  # tight: some are preempted and computed anew
        max_num_batched_tokens=7 if batch == 3 else 512,
        num_speculative_tokens=4,
    )
    assert isinstance(engine.model, Fallback) == (family in FALLBACK)
    assert in_batches(engine, queued, batch) == expected
    counts = engine.counts
    if drafter == "wrong":
        assert counts.accepted == 0 < counts.drafted
    elif drafter == "right":
        assert counts.accepted == counts.drafted > 0
    elif drafter in ("model", "ragged"):
        assert 0 < counts.accepted < counts.nodes
    if isinstance(engine.verifier.store, SequenceStore):
        assert engine.verifier.store.kept == {}  # nothing outlives its sequence


@pytest.mark.parametrize("option", ["n", "logprobs", "penalties", "json", "regex", "bias", "late"])
@pytest.mark.parametrize("family", DRAFTED)
def test_states_follow_every_option(family: str, option: str, pair: Callable[[str], Path]) -> None:
    queued = requests(PROMPTS, SamplingParams(max_tokens=16, **SAMPLING[option]))
    expected = alone(pair(family), queued)
    engine = make_engine(pair(family), "model", pages=26, max_num_batched_tokens=7)
    assert in_batches(engine, queued, 3) == expected
    assert 0 < engine.counts.accepted < engine.counts.drafted + (option == "late")  # short outputs


@pytest.mark.skipif(not STEP, reason="such a model drafts in the native step alone")
@pytest.mark.parametrize("option", ["greedy", "0.7", "n", "penalties", "json", "processor", "late"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_model_with_states_drafts_for_itself(
    family: str, option: str, pair: Callable[[str], Path]
) -> None:
    """All is accepted, or a state has something in it that was not committed, or lacks it."""
    formed = "structured_outputs" in SAMPLING[option]
    params = SamplingParams(max_tokens=16, ignore_eos=not formed, **SAMPLING[option])
    queued = requests(PROMPTS, params)
    expected = alone(pair(family), queued)
    for batch, more in ((1, {}), (3, {"pages": 30, "max_num_batched_tokens": 7})):
        engine = make_engine(pair(family), str(pair(family)), drafter_quantization="none", **more)
        assert in_batches(engine, queued, batch) == expected
        cut = 4 * len(expected) if formed else 0  # where a form ends
        assert engine.counts.drafted > 0
        assert engine.counts.drafted - engine.counts.accepted <= cut


@pytest.mark.skipif(not STEP, reason="such a model drafts in the native step alone")
@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("{}", {"drafter_window": 8}),  # of its attention: states are of all tokens
        ("{}+ngram", {}),  # nodes that it leaves to the lookup
        ("auto+{}", {"num_speculative_tokens": None}),
    ],
    ids=["window", "merged", "fickle"],
)
@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1"])
def test_a_drafter_with_states_never_goes_back(
    family: str, drafter: str, options: dict[str, Any], pair: Callable[[str], Path]
) -> None:
    """Beside others, of long prompts, and where drafts are cut: it reads each token once."""
    prompts = [*PROMPTS, [(7 * i) % 190 + 5 for i in range(60)]]
    queued = requests(prompts, _params(0.8))
    expected = alone(pair("mistral"), queued)
    engine = make_engine(pair("mistral"), drafter.format(pair(family)), **options)
    if "auto" in drafter:
        make_fickle(engine, random.Random(5))
    store = engine.drafting.drafters["model"]._store  # type: ignore[attr-defined]
    released = Counter[str]()
    release = store.release
    store.release = lambda key: (released.update([key]), release(key))
    assert in_batches(engine, queued, 3) == expected
    assert engine.counts.drafted > 0
    assert set(released.values()) == {1}


@pytest.mark.parametrize(
    "options",
    [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4-g32"}],
    ids=lambda options: "-".join(options.values()),
)
@pytest.mark.parametrize("drafter", ["suffix", "model"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_states_are_exact_in_every_dtype(
    family: str, drafter: str, options: dict[str, Any], pair: Callable[[str], Path]
) -> None:
    """Eight sequences, of which some are preempted and prompts come in chunks."""
    prompts = [[(k * i) % 190 + 5 for i in range(5 + 3 * k)] for k in range(3, 11)]
    drafter = drafter if family in DRAFTED else "suffix"
    queued = requests(prompts, _params(0.8))
    expected = alone(pair(family), queued, **options)
    engine = make_engine(
        pair(family), drafter, pages=50, max_num_batched_tokens=23, max_num_seqs=8, **options
    )
    assert in_batches(engine, queued, 8) == expected
    assert (engine.counts.accepted if drafter == "model" else engine.counts.drafted) > 0


@pytest.mark.parametrize("drafter", ["none", "model"])
@pytest.mark.parametrize("family", DRAFTED)
def test_a_prefix_that_is_found_changes_nothing(
    family: str, drafter: str, pair: Callable[[str], Path]
) -> None:
    """Prompts again, what was said about them and more, and several samples of each."""
    prompts = [[(7 * i) % 190 + 5 for i in range(61)], [11, 12, 13, 14, 15] * 5]
    params = SamplingParams(temperature=0.8, max_tokens=20, ignore_eos=True, n=3)
    first = requests(prompts, params)
    said = alone(pair(family), first)
    longer = [prompt + said[f"r{i}/0"] + [9, 8, 7] for i, prompt in enumerate(prompts)]
    then = requests(longer, params)
    expected = alone(pair(family), then, enable_prefix_caching=False)
    engine = make_engine(pair(family), drafter, max_num_batched_tokens=13)
    assert in_batches(engine, first, 2) == said
    found = engine.scheduler.hit
    assert in_batches(engine, first, 1) == said
    assert in_batches(engine, then, 2) == expected
    if native.library() is not None:
        assert engine.scheduler.hit > found + 60
        assert engine.scheduler.snapshots


@pytest.mark.parametrize("family", HYBRIDS)
def test_an_aborted_sequence_leaves_no_state(family: str, pair: Callable[[str], Path]) -> None:
    queued = requests(PROMPTS, _params(0.8))
    expected = alone(pair(family), queued)
    engine = make_engine(pair(family), "suffix")
    for request in queued:
        engine.add(request)
    for _ in range(6):
        engine.step()
    engine.abort(queued[0].id)
    while engine.has_work:
        engine.step()
    assert in_batches(engine, queued, 3) == expected
    assert not getattr(engine.verifier.store, "_slots", {})


def test_trees_are_refused_without_a_native_path(pair: Callable[[str], Path]) -> None:
    for family in ("starcoder2", *HYBRIDS):
        with pytest.raises(ConfigError, match=rf"'{family}' model cannot verify the trees of"):
            make_engine(pair(family), AdversarySpec("ragged"))
    make_engine(pair("mistral"), AdversarySpec("ragged"))


def test_a_plain_draw_uses_much_of_the_vocabulary(
    plain: Callable[[str, float], dict[str, list[Any]]],
) -> None:
    """Else equal outputs would say little."""
    for family in (*NATIVE, *FALLBACK):
        outputs = [ids for name, ids in plain(family, 0.8).items() if name.endswith("/0")]
        assert len({t for ids in outputs for t in ids}) > 15, family
        assert all(0 <= t < VOCABULARY for ids in outputs for t in ids)
