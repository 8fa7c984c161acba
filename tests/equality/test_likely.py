"""Whatever ids a drafter draws from, the output is that of plain decoding."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from outrider.base.types import SamplingParams
from outrider.drafters import likely
from outrider.drafters.likely import LikelyIds
from outrider.drafters.model import ModelDrafter
from outrider.models.native import NativeTransformer
from outrider.native.choice import library
from tests.support.exactness import (
    SAMPLING,
    VOCABULARY,
    alone,
    in_batches,
    make_engine,
    planted_pair,
    requests,
)
from tests.support.products import prompts, some_for_engines

SIZE = 48
CPUS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []

pytestmark = pytest.mark.skipif(library() is None, reason="the native step is off")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A list for any model, which nothing takes out of use."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(likely, "pays", lambda shape: True)
    monkeypatch.setattr(likely, "SIZE", SIZE)
    monkeypatch.setattr(likely, "MOST_MISSED", 1.0)


class AnyIds(LikelyIds):
    """A list that has other ids at each draft, some of them twice."""

    def __init__(self, model: NativeTransformer, file: Path | None) -> None:
        super().__init__(model, file)
        self._rng = random.Random(1)

    def choose(self, sequences: Iterable[str]) -> None:
        super().choose(sequences)
        ids = [self._rng.randrange(VOCABULARY) for _ in range(SIZE)]
        self._model.library.set_likely(self._model.handle, SIZE, range(SIZE), ids)


class UnsaidIds(LikelyIds):
    """A list without any id that is said."""

    def __init__(self, model: NativeTransformer, file: Path | None) -> None:
        super().__init__(model, file)
        model.library.set_likely(model.handle, SIZE, range(SIZE), [VOCABULARY - 1] * SIZE)

    def learn(self, sequence: Any) -> None:
        return


LISTS = {"learned": LikelyIds, "any": AnyIds, "unsaid": UnsaidIds}
CASES = [
    [option, [*LISTS][i % 3], (1, 4, 7)[(i // 2) % 3], i % 4 == 1, (1, 4)[i % 2], i % 5 == 2]
    for i, option in enumerate(SAMPLING)
]


@pytest.mark.equality
@pytest.mark.parametrize(
    ("option", "kind", "length", "tree", "batch", "own"), some_for_engines(CASES)
)
def test_no_list_of_ids_changes_the_output(
    pair: Path,
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    kind: str,
    length: int,
    tree: bool,
    batch: int,
    own: bool,
) -> None:
    monkeypatch.setattr(likely, "LikelyIds", LISTS[kind])
    queued = requests(prompts(), SamplingParams(max_tokens=24, **SAMPLING[option]))
    nodes = 3 * length if tree else None
    options: dict[str, Any] = {"num_speculative_tokens": length, "max_draft_nodes": nodes}
    if own and len(CPUS) > 1:
        options |= {"drafter_cpus": str(CPUS[-1]), "draft_ahead": 5}
    engine = make_engine(pair, "model", **options)
    assert in_batches(engine, queued, batch) == alone(pair, queued)
    drafter = engine.drafting.drafters["model"]
    assert isinstance(drafter, ModelDrafter)
    assert isinstance(drafter.model, NativeTransformer)
    assert drafter.model.likely == SIZE
    if kind == "learned" and option not in ("grammar", "choice"):
        assert engine.counts.accepted


def test_a_said_id_is_drafted_from_then_on(pair: Path) -> None:
    """The same request again is drafted for as if by all ids, but for what was not listed once."""
    queued = requests([[11, 12, 13, 14, 15] * 4], SamplingParams(max_tokens=24, temperature=0.0))
    engine = make_engine(pair, "model")
    in_batches(engine, queued, 1)
    before = engine.counts.accepted
    in_batches(engine, queued, 1)
    listed = engine.counts.accepted - before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(likely, "pays", lambda shape: False)
        whole = make_engine(pair, "model")
    in_batches(whole, queued, 1)
    assert listed == whole.counts.accepted


def test_rules_that_need_distributions_draft_from_all_ids(pair: Path) -> None:
    engine = make_engine(pair, "model", acceptance_rule="rejection")
    drafter = engine.drafting.drafters["model"]
    assert isinstance(drafter, ModelDrafter)
    assert isinstance(drafter.model, NativeTransformer)
    assert not drafter.model.likely
