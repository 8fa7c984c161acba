"""Drafters of other packages: whatever they return or write to, the output stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.base.types import Draft, DraftNodes, Speculation
from outrider.drafters.base import Drafter, DrafterContext, DrafterSpec
from tests.support.pages import check_engine

PROMPTS = [[5, 6, 7, 8] * 6, [9, 10, 11], [5, 6, 7, 8] * 3]
PARAMS = SamplingParams(
    temperature=0.8, seed=7, max_tokens=20, ignore_eos=True, stop_token_ids=[1], logit_bias={4: 1.0}
)
LENGTH = 4

chain = DraftNodes.chain


class Panic(BaseException):
    """As a library in Rust raises it."""


@dataclass(frozen=True)
class Spec(DrafterSpec):
    """A drafter whose behaviour tests set."""

    name = "foreign"

    def make(self, context: DrafterContext) -> Drafter:
        return Foreign(context.config.max_draft_length)


class Foreign(Drafter):
    name = "foreign"
    spoil: Callable[[Any], object] = staticmethod(lambda seen: None)
    answer: Callable[[list[list[int]]], Any] = staticmethod(Draft.chains)

    def __init__(self, length: int) -> None:
        self.max_length = self.max_nodes = length
        self.calls = 0

    def propose(self, batch: Any, budgets: Any, noise: Any) -> Draft:
        self.calls += 1
        again = [[i.sequence.tokens[-1]] * b.depth for i, b in zip(batch, budgets, strict=True)]
        type(self).spoil({"batch": batch, "budgets": budgets})
        return type(self).answer(again)

    def observe(self, record: Any) -> None:
        seen = {"batch": record.plan.batch, "draft": record.draft, "verdict": record.verdict}
        type(self).spoil(seen | {"record": record})

    def peek(self, sequence: Any, depth: int) -> DraftNodes | None:
        type(self).spoil({"sequence": sequence})
        return None

    def num_unread(self, sequence: Any) -> int:
        type(self).spoil({"sequence": sequence})
        return 0


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> LLM:
    return LLM(tiny_llama, drafter=Spec(), num_speculative_tokens=LENGTH, dtype="float32")


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    return said(llm, Speculation(enabled=False))


def said(llm: LLM, speculation: Speculation | None = None) -> list[list[int]]:
    found = llm.generate(PROMPTS, PARAMS, speculation=speculation)
    return [list(each.outputs[0].token_ids) for each in found]


@pytest.fixture(autouse=True)
def afresh(llm: LLM) -> None:
    llm.engine.menu.switched_off.clear()
    llm.engine.drafting.refresh()


def with_logits(made: list[list[int]], logits: Callable[[int], Any]) -> Draft:
    return Draft(
        chain(tokens)._replace(logits=logits(len(tokens)) if tokens else None) for tokens in made
    )


def panics(*_: Any) -> Any:
    raise Panic("a regex")


def leaves(*_: Any) -> Any:
    raise SystemExit(3)


@pytest.mark.parametrize(
    "answer",
    [
        lambda made: Draft.chains([]),
        lambda made: Draft.chains([[] for _ in made][1:]),
        lambda made: Draft.chains([*made, []]),
        lambda made: Draft.chains([*made, [3]]),
        lambda made: Draft(DraftNodes(tokens or [1], []) for tokens in made),
        lambda made: Draft(DraftNodes([], [-1]) for _ in made),
        lambda made: Draft([]),
        lambda made: Draft(chain(tokens)._replace(margins=[0.0] * 9) for tokens in made),
        lambda made: Draft(chain(tokens)._replace(sources=["a"] * 9) for tokens in made),
        lambda made: Draft(chain(tokens)._replace(survivals=1.0) for tokens in made),
        lambda made: with_logits(made, lambda count: np.zeros(count)),
        lambda made: with_logits(made, lambda count: np.zeros((count + 1, 9))),
        lambda made: with_logits(made, lambda count: np.zeros((count, 0))),
        lambda made: with_logits(made, lambda count: np.zeros((count, 9), np.int32)),
        lambda made: with_logits(made, lambda count: ["a"] * count),
        lambda made: Draft.chains([[-1] for _ in made]),
        lambda made: Draft.chains([[3] * 99 for _ in made]),
        lambda made: None,
        lambda made: [[3]],
        lambda made: Draft([None for _ in made]),  # type: ignore[list-item]
        panics,
        leaves,
    ],
)
def test_a_wrong_answer_switches_it_off(
    llm: LLM,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    answer: Callable[[Any], Any],
) -> None:
    monkeypatch.setattr(Foreign, "answer", staticmethod(answer))
    assert said(llm) == expected
    assert set(llm.engine.menu.switched_off) == {"foreign"}
    check_engine(llm.engine)
    caplog.clear()


def tuples(made: list[list[int]]) -> Draft:
    chains = Draft.chains(made)
    return Draft(DraftNodes(tuple(n.tokens), tuple(n.parents)) for n in chains)  # type: ignore[arg-type]


def test_tuples_are_as_good_as_lists(
    llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Foreign, "answer", staticmethod(tuples))
    assert said(llm) == expected
    assert not llm.engine.menu.switched_off


def test_logits_of_any_width_and_type_are_read(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one batch, under a rule that needs them."""
    kinds = [
        lambda count: torch.zeros((count, 40)),
        lambda count: np.zeros((count, 50), ">f8"),
        lambda count: np.broadcast_to(np.float16(0), (count, 500)),
    ]

    def answer(made: list[list[int]]) -> Draft:
        each = zip(made, kinds, strict=False)
        return Draft(draft for tokens, kind in each for draft in with_logits([tokens[:2]], kind))

    monkeypatch.setattr(Foreign, "answer", staticmethod(answer))
    llm = LLM(
        tiny_llama,
        drafter=Spec(),
        num_speculative_tokens=LENGTH,
        dtype="float32",
        acceptance_rule="rejection",
    )
    assert [len(tokens) for tokens in said(llm)] == [PARAMS.max_tokens] * len(PROMPTS)
    assert not llm.engine.menu.switched_off


def spoil_sequence(sequence: Any) -> None:
    sequence.tokens.append(3)
    sequence.tokens[0] = 4
    sequence.num_computed = 0
    sequence.limit = 1
    sequence.finish_reason = "stop"
    sequence.pages[:] = sequence.pages[:0]
    sequence.keys.clear()
    sequence.counts.outcomes.clear()
    sequence.prompt_length = 0
    sequence.request.params.logit_bias.clear()


def spoil_all(seen: dict[str, Any]) -> None:
    for item in seen.get("batch", ()):
        spoil_sequence(item.sequence)
        item.count, item.start, item.samples, item.drafter = 99, 7, False, "none"
    if "sequence" in seen:
        spoil_sequence(seen["sequence"])
    for name in ("batch", "budgets"):
        if name in seen:
            seen[name].clear()
    if "record" in seen:
        for nodes in seen["draft"]:
            nodes.tokens.append(3)
            nodes.parents.clear()
        seen["draft"].clear()
        for rows in (seen["verdict"].tokens, seen["verdict"].path):
            for row in rows:
                row.append(3)
            rows.clear()
        seen["record"].drafters.clear()
        seen["record"].seconds.drafters.clear()


@pytest.mark.parametrize("auto", [False, True])
def test_what_it_writes_to_changes_nothing(
    tiny_llama: Path,
    llm: LLM,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    auto: bool,
) -> None:
    """With ``auto`` the controller also asks it what it would draft."""
    monkeypatch.setattr(Foreign, "spoil", staticmethod(spoil_all))
    mine = LLM(tiny_llama, drafter=Spec(), dtype="float32") if auto else llm
    before = mine.engine.drafter
    assert isinstance(before, Foreign)
    calls = before.calls
    assert said(mine) == expected
    assert before.calls > calls or auto
    assert not mine.engine.menu.switched_off
    check_engine(mine.engine)


@pytest.mark.parametrize("method", ["observe", "peek", "num_unread", "release"])
def test_a_panic_anywhere_switches_it_off(
    tiny_llama: Path,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
) -> None:
    monkeypatch.setattr(Foreign, method, panics)
    llm = LLM(tiny_llama, drafter=Spec(), dtype="float32")
    assert said(llm) == expected
    if method in ("observe", "release"):  # the others are asked as the controller likes
        assert set(llm.engine.menu.switched_off) == {"foreign"}
    drafting = llm.engine.drafting
    sequence = llm.engine.prepare(llm.inputs.request(PROMPTS[0], PARAMS, "again").request)[0]
    assert drafting.num_unread("foreign", sequence) == 0
    assert drafting.peek("foreign", sequence, 2) is None
    check_engine(llm.engine)
    caplog.clear()


def test_an_interruption_is_no_failure(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Foreign, "answer", staticmethod(interrupted))
    with pytest.raises(KeyboardInterrupt):
        said(llm)
    assert not llm.engine.menu.switched_off
    for sequence in [*llm.engine.scheduler.running, *llm.engine.scheduler.waiting]:
        llm.engine.abort(sequence.request.id)
