"""An engine that chooses how to draft: batches of many kinds of requests, and switches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams, Speculation
from outrider.engine.control.choices import PLAIN, Choice
from outrider.engine.control.switch import SpeculationState

pytestmark = pytest.mark.engine
PROMPTS = ["the quick brown fox", "lazy dogs sleep", "jumps over the lazy dog", "hello world"]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def texts(llm: LLM, speculation: list[Speculation] | None = None) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, GREEDY, speculation=speculation)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> list[list[int]]:
    return texts(LLM(tiny_llama, drafter="none", memory=2**24))


def test_drafters_with_and_without_margins_share_a_batch(
    tiny_llama: Path, tiny_drafter: Path, plain: list[list[int]]
) -> None:
    llm = LLM(tiny_llama, drafter=f"auto+{tiny_drafter}", memory=2**24)
    predicted = [Speculation(prediction=tuple(ids)) for ids in plain]
    wishes = [
        predicted[0],
        Speculation(),
        Speculation(drafter="model", num_speculative_tokens=3),
        Speculation(enabled=False),
    ]
    for _ in range(4):
        assert texts(llm, wishes) == plain
        wishes = wishes[1:] + wishes[:1]
        wishes = [predicted[i] if w.prediction else w for i, w in enumerate(wishes)]


def test_lookups_and_another_drafter_take_turns(
    tiny_llama: Path, tiny_drafter: Path, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever drafts for a sequence in a step, the output stays, and events say who it was."""
    llm = LLM(tiny_llama, drafter=f"auto+{tiny_drafter}", memory=2**24)
    controller = llm.engine.controller
    assert controller is not None
    monkeypatch.setattr(controller, "steady", lambda streams: False)
    monkeypatch.setattr(
        controller, "decide", lambda streams: [Choice("suffix or model", 4)] * len(streams)
    )
    events = [*llm.stream(PROMPTS, GREEDY)]
    said = {event.request_id: list[int]() for event in events}
    for event in events:
        said[event.request_id].append(event.token_id)
    assert sorted(said.values()) == sorted(plain)
    assert {e.drafted.drafter for e in events if e.drafted} == {"suffix", "model"}


def test_a_switch_reaches_requests_that_run(
    tiny_llama: Path, tiny_drafter: Path, plain: list[list[int]]
) -> None:
    llm = LLM(tiny_llama, drafter=f"auto+{tiny_drafter}", memory=2**24)
    off = SpeculationState(True, "none", None)
    # With a length: without one the controller may find that plain decoding is faster.
    switches = {10: SpeculationState(True, "model", 3), 25: off}
    llm.set_speculation(off)
    drafted: list[bool] = []
    ids: list[int] = []
    for event in llm.stream(PROMPTS[:1], GREEDY):
        drafted.append(event.drafted is not None)
        ids.append(event.token_id or 0)
        if state := switches.get(len(ids)):
            llm.set_speculation(state)
    assert ids == plain[0]
    assert not any(drafted[:10])
    assert any(drafted[10:25])
    assert not any(drafted[29:])  # a step of four tokens may have been under way


def test_a_drafter_says_how_much_it_has_to_read(tiny_llama: Path, tiny_drafter: Path) -> None:
    llm = LLM(tiny_llama, drafter=tiny_drafter, num_speculative_tokens=3, memory=2**24)
    drafter = llm.engine.drafter
    llm.start([PROMPTS[0]], GREEDY)
    (sequence,) = llm.engine.scheduler.waiting
    prompt = len(sequence.tokens)
    assert drafter.num_unread(sequence) == prompt
    llm.engine.step()  # the prompt's, in which nothing is drafted
    assert drafter.num_unread(sequence) == prompt + 1
    for _ in range(3):
        llm.engine.step()
        assert 1 <= drafter.num_unread(sequence) <= 2


def test_a_switch_counts_from_the_next_step_on(
    tiny_llama: Path, tiny_drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between two reviews, where the choices of the last step would go on."""
    llm = LLM(tiny_llama, drafter=f"auto+{tiny_drafter}", memory=2**24)
    drafter = llm.engine.drafting.drafters["model"]
    depths: list[int] = []
    propose = drafter.propose

    def watched(batch: Any, budgets: Any, noise: Any) -> Any:
        depths.extend(budget.depth for budget in budgets)
        return propose(batch, budgets, noise)

    monkeypatch.setattr(drafter, "propose", watched)
    llm.set_speculation(SpeculationState(True, "model", 1))
    llm.start([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    for _ in range(25):  # past the reviews of every step
        llm.engine.step()
    before = len(depths)
    llm.set_speculation(SpeculationState(True, "model", 4))
    llm.engine.step()
    assert depths[before:] == [4]


def test_every_sequence_of_a_batch_is_looked_up_beside_plain_decoding(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only the first: it may be the one in which nothing repeats."""
    llm = LLM(tiny_llama, memory=2**24)
    controller = llm.engine.controller
    monkeypatch.setattr(controller, "decide", lambda streams: [PLAIN] * len(streams))
    suffix, seen = llm.engine.drafting.drafters["suffix"], set[str]()
    peek = suffix.peek

    def watched(sequence: Any, depth: int) -> Any:
        seen.add(sequence.id)
        return peek(sequence, depth)

    monkeypatch.setattr(suffix, "peek", watched)
    texts(llm)
    assert len(seen) == len(PROMPTS)
