"""The controller's draft lengths inside another engine: for its scheduler, and for our proposer."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.plugins.common.lengths import Lengths, StepDraft
from outrider.plugins.vllm import scheduler

Seconds = Callable[[int, int], float]
"""Of a step of so many sequences that draft so many tokens each."""


def run(lengths: Lengths, batch: int, rate: float, seconds: Seconds, steps: int) -> list[int]:
    """The longest draft of each step, where a token is accepted with some probability."""
    rng = random.Random(0)
    contexts = {f"r{i}": 100 for i in range(batch)}
    found = []
    for _ in range(steps):
        asked = lengths.choose(contexts, 8)
        drafts = []
        for id, length in zip(contexts, asked, strict=True):
            accepted = 0
            while accepted < length and rng.random() < rate:
                accepted += 1
            drafts.append(StepDraft(id, length, length, accepted))
        found.append(max(asked))
        lengths.observe(drafts, seconds(batch, found[-1]) * rng.uniform(0.95, 1.05))
    return found


def memory_bound(batch: int, length: int) -> float:
    """Rows are free; a drafted token costs a twentieth of a step."""
    return 0.02 * (1 + 0.05 * length)


def compute_bound(batch: int, length: int) -> float:
    """Every row costs as much as the first."""
    return 0.004 * batch * (1 + length)


def mean(values: list[int]) -> float:
    return sum(values) / len(values)


def test_good_drafts_are_long_where_rows_are_free() -> None:
    for batch in (1, 6):
        found = run(Lengths(8, "draft_model"), batch, 0.95, memory_bound, 300)
        assert mean(found[-100:]) > 6


def test_drafts_that_are_refused_stop() -> None:
    found = run(Lengths(8, "draft_model"), 4, 0.02, memory_bound, 300)
    assert mean(found[-100:]) < 0.5


def test_drafts_stop_where_every_row_costs_a_step() -> None:
    found = run(Lengths(8, "ngram"), 4, 0.7, compute_bound, 400)
    assert mean(found[-100:]) < 1


def test_trials_that_lose_bar_nobody() -> None:
    lengths = Lengths(8, "draft_model")
    assert any(run(lengths, 1, 0.0, compute_bound, 60))  # six trials lose three steps each
    (controller,) = lengths._controllers.values()
    assert not controller.pauses


def test_drafting_starts_again_when_drafts_become_right() -> None:
    lengths = Lengths(8, "eagle3")
    assert mean(run(lengths, 2, 0.02, memory_bound, 200)[-50:]) < 0.5
    assert mean(run(lengths, 2, 0.95, memory_bound, 3000)[-100:]) > 4


@pytest.mark.parametrize(("pass_seconds", "most"), [(0.003, 3.0), (0.006, 0.5)])
def test_a_step_that_drafts_for_the_next_one_is_not_dear_itself(
    pass_seconds: float, most: float
) -> None:
    """vLLM verifies what the step before drafted; rows are nearly free, a drafter's pass is not.

    Over eight runs: one in sixty has the bad luck to stop drafting.
    """
    batch, rate, found = 4, 0.8, []
    for seed in range(8):
        rng, lengths = random.Random(seed), Lengths(8, "draft_model")
        contexts, before = dict.fromkeys("abcd", 100), 0
        for step in range(400):
            asked = max(lengths.choose(contexts, 8))
            kept = [
                next((i for i in range(before) if rng.random() > rate), before) for _ in contexts
            ]
            drafts = [
                StepDraft(id, before, before, n) for id, n in zip(contexts, kept, strict=True)
            ]
            seconds = 0.008 + 0.0001 * batch * (1 + before) + pass_seconds * asked
            lengths.observe(drafts, seconds * rng.uniform(0.95, 1.05), asked - before)
            before = asked
            if step >= 200:
                found.append(asked)
    assert mean(found) < most
    assert (mean(found) > 1) == (pass_seconds == 0.003)  # two tokens are best there


def test_batches_learn_their_own_costs() -> None:
    lengths = Lengths(8, "draft_model")

    def seconds(batch: int, length: int) -> float:
        return (memory_bound if batch == 1 else compute_bound)(batch, length)

    for _ in range(3):
        alone = run(lengths, 1, 0.8, seconds, 200)
        many = run(lengths, 16, 0.8, seconds, 200)
    assert mean(alone[-100:]) > 2
    assert mean(many[-100:]) < 1


def test_nothing_to_choose() -> None:
    lengths = Lengths(8, "ngram")
    assert lengths.choose({}, 8) == []
    assert lengths.choose({"a": 1, "b": 2}, 0) == [0, 0]
    lengths.observe([], 0.1)
    lengths.observe([StepDraft("a", 2, 2, 1)], None)
    lengths.release("never seen")


class Scheduler:
    """vLLM's, as far as the controller sees it."""

    def __init__(self, lookup: list[int] | None) -> None:
        self.dynamic_sd_lookup: Any = lookup
        self.vllm_config = SimpleNamespace(speculative_config=SimpleNamespace(method="ngram"))
        self.running = [SimpleNamespace(request_id=f"r{i}", num_tokens=9) for i in range(3)]
        self.updates: list[Any] = []

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> str:
        self.updates.append((scheduler_output, model_runner_output))
        return "outputs"


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> type[Scheduler]:
    made = scheduler.scheduler_init(Scheduler.__init__)
    monkeypatch.setattr(Scheduler, "__init__", made)
    updated = scheduler.update_from_output(Scheduler.update_from_output)
    monkeypatch.setattr(Scheduler, "update_from_output", updated)
    return Scheduler


def step(drafts: dict[str, int], kept: dict[str, int], asked: int) -> tuple[Any, Any]:
    """A step by request: tokens that were drafted, and that came out."""
    scheduled = SimpleNamespace(
        num_scheduled_tokens={id: 1 + drafted for id, drafted in drafts.items()},
        scheduled_spec_decode_tokens={id: [-1] * n for id, n in drafts.items() if n},
        num_spec_tokens_to_schedule=asked,
        finished_req_ids=set(),
    )
    sampled = SimpleNamespace(
        req_id_to_index={id: i for i, id in enumerate(drafts)},
        sampled_token_ids=[[5] * kept[id] for id in drafts],
    )
    return scheduled, sampled


def test_the_scheduler_asks_the_controller_and_tells_it(hooked: type[Scheduler]) -> None:
    made = hooked([0, 6, 6, 2])
    lookup = made.dynamic_sd_lookup
    assert len(lookup) == 4
    for _ in range(40):
        asked = lookup[3]
        assert 0 <= asked <= 2  # vLLM's schedule is the most
        drafts = dict.fromkeys(("r0", "r1", "r2"), asked)
        kept = {"r0": asked + 1, "r1": asked + 1, "r2": 1}
        assert made.update_from_output(*step(drafts, kept, asked)) == "outputs"
    assert len(made.updates) == 40
    learned = lookup.lengths._survival
    learned.count()
    assert learned.odds("ngram", "", "r0") > 1.5
    assert learned.odds("ngram", "", "r2") < 0.7
    gone = step({"r0": 0}, {"r0": 1}, 0)
    gone[0].finished_req_ids.add("r2")
    made.update_from_output(*gone)
    assert learned.odds("ngram", "", "r2") == 1.0


def test_steps_with_prompts_tell_no_time(hooked: type[Scheduler]) -> None:
    made = hooked([0, 4, 4])
    asked = made.dynamic_sd_lookup[2]
    scheduled, sampled = step({"r0": asked, "r1": 0}, {"r0": 1, "r1": 1}, asked)
    scheduled.num_scheduled_tokens["r1"] = 40  # a prompt
    seen: list[Any] = []
    made.dynamic_sd_lookup.lengths.observe = lambda *each: seen.append(each)
    made.update_from_output(scheduled, sampled)
    ((drafts, seconds, ahead),) = seen
    assert seconds is None
    assert ahead == 0
    assert [each.id for each in drafts] == ["r0"]


def test_without_a_schedule_vllm_s_own_length_stays(hooked: type[Scheduler]) -> None:
    made = hooked(None)
    assert made.dynamic_sd_lookup is None
    assert made.update_from_output(*step({"r0": 0}, {"r0": 1}, 4)) == "outputs"


def test_a_scheduler_without_a_lookup_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    made = scheduler.scheduler_init(lambda self: None)
    with pytest.raises(SystemExit):
        made(SimpleNamespace())
    assert "has no dynamic_sd_lookup" in capsys.readouterr().err
