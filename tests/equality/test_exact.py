"""The same seed gives the same tokens, whatever drafts, however the work is cut up (fp32)."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.audit.adversary import AdversarySpec
from outrider.audit.sweep import unlike_before
from outrider.base.types import SamplingParams
from outrider.engine.engine import Engine
from tests.support.exactness import (
    VOCABULARY,
    make_engine,
    make_fickle,
    planted_pair,
    requests,
    run,
)
from tests.support.pages import check_engine
from tests.support.products import some_for_engines

DRAFTERS = (
    "none", "ngram", "model", "tree", "wrong", "right", "ragged", "suffix", "suffix tree",
    "model+suffix", "auto",
)  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "on": {"type": "boolean"}},
    "required": ["a", "on"],
    "additionalProperties": False,
}


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "0.7": {"temperature": 0.7},
    "1.3": {"temperature": 1.3},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 0.9, "min_p": 0.05},
    "all": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "min_tokens": {"temperature": 1.0, "min_tokens": 12},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "greedy penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    "bias": {"logit_bias": {9: 4.0, 33: -100.0}, "bad_words": ["an", "re l", "x"]},
    "allowed": {"allowed_token_ids": [3, *range(40, 120)], "stop": ["a", "q"], "min_p": 0.001},
    "stops": {"stop_token_ids": [40, 41], "stop": ["e"], "include_stop_str_in_output": True},
    "n": {"temperature": 0.8, "n": 3},
    "logprobs": {"temperature": 0.8, "logprobs": 3, "prompt_logprobs": 2, "top_k": 30},
    "json": {"structured_outputs": {"json": SCHEMA}, "repetition_penalty": 1.1},
    "grammar": {"structured_outputs": {"grammar": 'root ::= ("ab" | "c" root)'}},
    "regex": {"structured_outputs": {"regex": "[a-d]+(-[a-d]+){2,}"}, "min_tokens": 5},
    "choice": {"structured_outputs": {"choice": ["tea and toast", "tea", "coffee"]}},
    "processor": {"temperature": 0.9, "logits_processors": [unlike_before]},
}
BATCHES = (1, 5)
LENGTHS = (1, 4, 7)
CHUNKS = (3, 16, 512)
POOLS = ("ample", "tight")
FAMILIES = ("llama", "qwen3")


def _prompts() -> list[list[int]]:
    """Prompts of many lengths, some repetitive so that ngram has something to find."""
    rng = random.Random(0)
    prompts = [[rng.randrange(4, VOCABULARY) for _ in range(n)] for n in (1, 7, 19, 40)]
    return [*prompts, [11, 12, 13, 14, 15] * 6]


class Reference:
    """Plain decoding, one request at a time, whole prompts: what everything else must equal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, dict[str, list[Any]]] = {}

    def __call__(self, option: str) -> dict[str, list[Any]]:
        if option not in self._known:
            engine = make_engine(self.folder, "none")
            found: dict[str, list[Any]] = {}
            for request in requests(_prompts(), _params(option)):
                found |= run(engine, [request])
            self._known[option] = found
        return self._known[option]


def _params(option: str) -> SamplingParams:
    return SamplingParams(max_tokens=24, **OPTIONS[option])


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """The reference of a family."""

    @functools.cache
    def of(family: str) -> Reference:
        return Reference(planted_pair(tmp_path_factory.mktemp(family), family))

    return of


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request: pytest.FixtureRequest, references: Callable[[str], Reference]) -> Reference:
    return references(request.param)


@pytest.fixture(scope="module")
def pair(reference: Reference) -> Path:
    return reference.folder


def _engine(
    reference: Reference, drafter: str, option: str, length: int, chunk: int, pool: str
) -> Engine:
    branches = drafter.endswith("tree")
    spec: str | AdversarySpec = {"tree": "model", "suffix tree": "suffix"}.get(drafter, drafter)
    if drafter in ("wrong", "right", "ragged"):
        answers = {
            (1000 + i, sample): reference(option)[f"r{i}/{sample}"]
            for i in range(len(_prompts()))
            for sample in range(_params(option).n)
        }
        spec = AdversarySpec(drafter, answers, random.Random(length))
    engine = make_engine(
        reference.folder,
        spec,
        pages=26 if pool == "tight" else None,
        max_num_batched_tokens=chunk,
        num_speculative_tokens=length,
        max_draft_nodes=3 * length if branches else None,
        suffix_store=300 if drafter == "suffix tree" else 0,
    )
    if drafter == "auto":
        make_fickle(engine, random.Random(length))
    return engine


def _holds(
    reference: Reference, drafter: str, option: str, batch: int, length: int, chunk: int, pool: str
) -> None:
    engine = _engine(reference, drafter, option, length, chunk, pool)
    expected = reference(option)
    queued = requests(_prompts(), _params(option))
    found: dict[str, list[Any]] = {}
    for first in range(0, len(queued), batch):
        found |= run(engine, queued[first : first + batch])
    assert found == expected
    counts = engine.counts
    assert counts.drafted == sum(counts.drafted_by_position)
    assert counts.accepted == sum(counts.accepted_by_position)
    # A grammar cuts wrong drafts and adds what it forces, so that neither end is certain.
    formed = "structured_outputs" in OPTIONS[option]
    if drafter == "wrong" and not formed:
        assert counts.accepted == 0
        assert counts.drafted > 0
    if drafter == "right":
        assert counts.accepted == counts.drafted > 0
    if drafter == "model":
        assert 0 < counts.accepted <= counts.drafted
        # In a tight pool, or under a grammar, drafts can be so few that all of them stand.
        assert counts.accepted < counts.drafted or pool == "tight" or formed
    if drafter in ("tree", "ragged"):
        # Depths may all be reached by the right branch; the wrong ones show in the nodes.
        assert 0 < counts.accepted <= counts.nodes
        assert counts.accepted < counts.nodes or formed


SLICE = [
    # Every drafter under every option, the other dimensions dealt out over them.
    [
        FAMILIES[(i // 5) % 2], drafter, option,
        BATCHES[i % 2], LENGTHS[i % 3], CHUNKS[(i // 2) % 3], POOLS[(i // 3) % 2],
    ]
    for i, (drafter, option) in enumerate(itertools.product(DRAFTERS, OPTIONS))
]  # fmt: skip


@pytest.mark.equality
@pytest.mark.parametrize(
    ("family", "drafter", "option", "batch", "length", "chunk", "pool"), some_for_engines(SLICE)
)
def test_drafts_change_nothing(
    references: Callable[[str], Reference],
    family: str,
    drafter: str,
    option: str,
    batch: int,
    length: int,
    chunk: int,
    pool: str,
) -> None:
    _holds(references(family), drafter, option, batch, length, chunk, pool)


@pytest.mark.slow
@pytest.mark.equality
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("option", OPTIONS)
def test_drafts_change_nothing_in_the_full_product(
    reference: Reference, drafter: str, option: str
) -> None:
    for rest in itertools.product(BATCHES, LENGTHS, CHUNKS, POOLS):
        _holds(reference, drafter, option, *rest)


def test_the_tight_pool_preempts(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine(reference, "model", "0.7", 4, 16, "tight")
    taken: list[str] = []
    release = engine.drafter.release
    monkeypatch.setattr(
        engine.drafter, "release", lambda id, ended: (taken.append(id), release(id, ended))[1]
    )
    queued = requests(_prompts(), _params("0.7"))
    found = run(engine, queued)
    assert found == reference("0.7")
    assert len(taken) > len(queued), "every sequence is released once; preemption releases again"


def test_samples_of_one_request_differ_and_repeat(pair: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, n=3, ignore_eos=True)
    queued = requests(_prompts()[:2], params)
    plain = run(make_engine(pair, "none"), queued)
    drafted = run(make_engine(pair, "model"), queued)
    assert plain == drafted
    assert len({tuple(plain[f"r0/{i}"]) for i in range(3)}) == 3


def test_random_adds_and_aborts_leave_nothing_behind(reference: Reference) -> None:
    rng = random.Random(3)
    engine = _engine(reference, "model", "0.7", 4, 5, "tight")
    expected = reference("0.7")
    queued = requests(_prompts(), _params("0.7"))
    ids: dict[str, list[int]] = {}
    live: dict[str, str] = {}
    for turn in range(250):
        if rng.random() < 0.3 and len(live) < 6:
            which = rng.randrange(len(queued))
            name = f"t{turn}"
            request = queued[which]
            engine.add(
                type(request)(
                    name,
                    request.prompt_token_ids,
                    request.params,
                    request.seed,
                    request.eos_token_ids,
                )
            )
            live[name], ids[name] = f"r{which}/0", []
        if rng.random() < 0.05 and live:
            name = rng.choice(list(live))
            free = engine.scheduler.pool.num_free
            engine.abort(name)
            assert engine.scheduler.pool.num_free >= free
            del live[name]
        for event in engine.step():
            if event.token_id is not None:
                ids[event.request_id].append(event.token_id)
            if event.finish_reason is not None:
                assert ids[event.request_id] == expected[live.pop(event.request_id)]
        check_engine(engine)
    for name in live:
        engine.abort(name)
    check_engine(engine)
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_usable
    assert not engine.has_work
