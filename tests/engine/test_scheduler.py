"""The scheduler with a made-up model: no tensors, every invariant asserted at every step."""

from __future__ import annotations

import random

import pytest

from outrider.base.types import Draft, DraftNodes, Origin, Plan, SequenceState, Verdict
from outrider.errors import MemoryBudgetError
from outrider.sampling.acceptance import NOT_FINITE
from tests.support import scheduling
from tests.support.scheduling import (
    EOS,
    VOCABULARY,
    House,
    Propose,
    assert_outputs,
    chain,
    make,
    nothing,
    ragged,
)


def depths_of(plan: Plan) -> list[int]:
    return [item.budget.depth for item in plan.batch]


def test_a_long_prompt_comes_in_chunks() -> None:
    house = House(rows=16)
    house.add(make("a", [1] * 40, max_tokens=3, eos=()))
    counts = [[(i.start, i.count, i.samples) for i in house.step().batch] for _ in range(4)]
    assert counts == [[(0, 16, False)], [(16, 16, False)], [(32, 8, True)], [(40, 1, True)]]


def test_decoding_goes_on_beside_a_prompt() -> None:
    house = House(rows=8)
    first, second = make("a", [1, 2], max_tokens=20, eos=()), make("b", [3] * 20, max_tokens=5)
    house.add(first)
    house.step()
    house.add(second)
    for start, count in [(0, 7), (7, 7), (14, 6)]:
        batch = house.step().batch
        assert [(i.sequence, i.count) for i in batch] == [(first, 1), (second, count)]
        assert batch[1].start == start
    assert [i.count for i in house.step().batch] == [1, 1]
    house.run()
    assert_outputs(house, [first, second])


def test_no_more_than_max_num_seqs_run() -> None:
    house = House(max_num_seqs=2)
    sequences = [make(str(i), [i], max_tokens=2 + i, eos=()) for i in range(5)]
    house.add(*sequences)
    assert [i.sequence for i in house.step().batch] == sequences[:2]
    house.run()
    assert_outputs(house, sequences)


def test_a_prompt_waits_until_it_fits_whole() -> None:
    house = House(num_pages=5, page_size=4)
    first, second = make("a", [1] * 8, max_tokens=4, eos=()), make("b", [2] * 10, max_tokens=4)
    house.add(first, second)
    assert [i.sequence for i in house.step().batch] == [first]
    assert list(house.scheduler.waiting) == [second]
    house.run()
    assert house.preemptions == 0
    assert_outputs(house, [first, second])


@pytest.mark.parametrize("propose", [nothing, chain(9), chain(2), chain(0)])
def test_preemption_by_recompute(propose: Propose) -> None:
    house = House(num_pages=13, page_size=4, propose=propose)
    sequences = [make(str(i), [i] * 5, max_tokens=30, eos=(), seed=i) for i in range(6)]
    house.add(*sequences)
    house.run()
    assert house.preemptions > 0
    assert_outputs(house, sequences)


def test_the_youngest_is_preempted() -> None:
    house = House(num_pages=7, page_size=2)
    sequences = [make(str(i), [i] * 2, max_tokens=8, eos=()) for i in range(3)]
    house.add(*sequences)
    while True:
        plan = house.step()
        if plan.preempted:
            break
    assert plan.preempted[0] is sequences[2]
    assert house.scheduler.waiting[0] is sequences[2] or plan.preempted[-1] is sequences[1]
    house.run()
    assert_outputs(house, sequences)


def test_drafts_take_free_pages_only() -> None:
    house = House(num_pages=5, page_size=4, length=4, propose=chain(0))
    first = make("a", [1] * 7, max_tokens=9, eos=())
    second = make("b", [2] * 6, max_tokens=2, eos=())
    house.add(first, second)
    house.step()  # both prompts: all four pages are taken
    assert house.pool.num_free == 0
    plan = house.step()
    assert plan.preempted == []
    # Position 8 would need a page more; the second is at its last token anyway.
    assert depths_of(plan) == [0, 0]
    assert [s.request.id for s in house.scheduler.running] == ["a"]
    assert depths_of(house.step()) == [4]  # the second has left


def test_drafts_shrink_to_the_pages_left() -> None:
    house = House(num_pages=4, page_size=4, length=9, max_nodes=9, propose=chain(0))
    house.add(make("a", [1] * 5, max_tokens=7, eos=()))
    house.step()
    assert depths_of(house.step()) == [5]
    house = House(num_pages=4, page_size=4, length=9, max_nodes=9, propose=chain(0))
    house.add(make("a", [1] * 5, max_tokens=7, eos=()))
    house.step()
    table: list[int] = []
    assert house.pool.grow(table, 4)  # somebody else's: two pages of four are left
    assert depths_of(house.schedule()) == [2]


def test_draft_lengths_stop_short_of_the_limit() -> None:
    house = House(max_len=12, propose=chain(0))
    house.add(make("a", [1] * 5, max_tokens=4, eos=()), make("b", [2] * 8, max_tokens=None, eos=()))
    house.step()
    lengths = [depths_of(house.step()) for _ in range(3)]
    # After the first token three more are wanted: two of them can be drafted before the bonus.
    assert lengths == [[2, 2], [1, 1], [0, 0]]
    assert not house.arrived


@pytest.mark.parametrize("max_nodes", [4, 11])
def test_a_wide_tree_has_pages_for_its_nodes(max_nodes: int) -> None:
    draw = random.Random(max_nodes)
    for num_pages in (10, 14, 40):
        house = House(
            num_pages=num_pages,
            page_size=2,
            max_nodes=max_nodes,
            propose=ragged(draw, max_nodes),
        )
        sequences = [make(str(i), [i] * 3, max_tokens=12, seed=i) for i in range(4)]
        house.add(*sequences)
        house.run()
        assert_outputs(house, sequences)


def rig(monkeypatch: pytest.MonkeyPatch, *says: int) -> None:
    """Let the target say these tokens, one after the other, whatever came before."""

    def say(sequence: SequenceState, tokens: list[int]) -> int:
        return says[(len(tokens) - sequence.prompt_length) % len(says)]

    monkeypatch.setattr(scheduling, "next_token", say)


def counts_of(sequence: SequenceState) -> tuple[int, ...]:
    counts = sequence.counts
    return (counts.steps, counts.drafts, counts.drafted, counts.accepted, counts.emitted)


def test_eos_inside_an_accepted_block(monkeypatch: pytest.MonkeyPatch) -> None:
    rig(monkeypatch, 0, 1, 2, EOS, 3, 4)
    house = House(propose=chain(9))
    sequence = make("a", [5, 5], max_tokens=50)
    house.add(sequence)
    house.run()
    assert house.ids("a") == [0, 1, 2, EOS]
    assert house.text("a") == "abc"
    assert [e.origin for e in house.events["a"]] == [Origin.PLAIN] + [Origin.ACCEPTED] * 3
    assert house.events["a"][-1].finish_reason == "stop"
    # Four were drafted, but the fourth lay beyond the end: it never was.
    assert counts_of(sequence) == (1, 1, 3, 3, 3)
    assert sequence.counts.drafted_by_position == [1, 1, 1]
    assert sequence.counts.accepted_by_position == [1, 1, 1]


def test_eos_as_the_bonus_token(monkeypatch: pytest.MonkeyPatch) -> None:
    rig(monkeypatch, 0, 1, EOS)
    house = House(propose=chain(1))
    sequence = make("a", [5, 5], max_tokens=50)
    house.add(sequence)
    house.run()
    assert [e.origin for e in house.events["a"]] == [Origin.PLAIN, Origin.ACCEPTED, Origin.BONUS]
    # The second was drafted and refused where EOS came; the others lay beyond.
    assert counts_of(sequence) == (1, 1, 2, 1, 2)


def test_max_tokens_inside_a_block() -> None:
    """A drafter that goes beyond its length is cut all the same."""
    house = House(propose=lambda s, n: chain(9)(s, 6 if n else 0), num_pages=200)
    sequence = make("a", [5, 5], max_tokens=4, eos=())
    house.add(sequence)
    house.step()
    plan = house.schedule()
    assert depths_of(plan) == [2]
    house.pool.grow(sequence.pages, 20)
    tokens, parents = chain(9)(sequence, 6)
    draft = Draft([DraftNodes(tokens, parents)])
    events = house.scheduler.commit(plan, draft, house.verify(plan, draft)).events
    assert [e.finish_reason for e in events] == [None, None, "length"]
    assert sequence.num_output == 4
    assert counts_of(sequence) == (1, 1, 3, 3, 3)
    assert house.pool.num_free == house.pool.num_usable


def test_the_counts_of_a_whole_run() -> None:
    house = House(propose=chain(2), length=3, max_nodes=3)
    sequence = make("a", [5, 5], max_tokens=11, eos=())
    house.add(sequence)
    house.run()
    # One token by the prompt, then 3 + 3 + 3, then the last one alone.
    assert counts_of(sequence) == (4, 3, 9, 6, 10)
    assert sequence.counts.drafted_by_position == [3, 3, 3]
    assert sequence.counts.accepted_by_position == [3, 3, 0]
    assert sequence.counts.acceptance_length == 3.0
    assert [e.origin.value[0] for e in house.events["a"]] == list("paabaabaabp")


@pytest.mark.parametrize("right", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("stop", ["cde", "de", "abcdefgh", "dx", "ef"])
def test_stop_strings_over_accepted_drafts(
    stop: str, right: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig(monkeypatch, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    house = House(propose=chain(right))
    sequence = make("a", [5, 5], max_tokens=9, stop=[stop])
    house.add(sequence)
    house.run()
    assert_outputs(house, [sequence])
    text = "abcdefghi"
    assert house.text("a") == (text[: text.index(stop)] if stop in text else text)
    assert house.events["a"][-1].finish_reason == ("stop" if stop in text else "length")
    assert len(house.ids("a")) == (text.index(stop) + len(stop) if stop in text else 9)
    counts = sequence.counts
    assert counts.emitted == len(house.ids("a")) - 1
    assert counts.accepted <= counts.drafted <= 4 * counts.drafts


@pytest.mark.parametrize("min_tokens", [0, 2, 3, 4])
def test_min_tokens_holds_every_end_back(min_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rig(monkeypatch, 0, 1, 2)
    for params in ({"stop": ["c"]}, {"stop_token_ids": [2]}):
        house = House(propose=chain(9))
        house.add(make("a", [5], max_tokens=20, min_tokens=min_tokens, **params))
        house.run()
        assert len(house.ids("a")) == (3 if min_tokens < 3 else 6)


def test_ignored_eos_is_a_token_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rig(monkeypatch, EOS)
    house = House(propose=chain(9))
    house.add(make("a", [5], max_tokens=7, ignore_eos=True), make("b", [5], max_tokens=7))
    house.run()
    assert house.ids("a") == [EOS] * 7
    assert house.ids("b") == [EOS]


def test_what_can_never_fit_is_refused() -> None:
    house = House(num_pages=4, page_size=4)
    house.add(make("a", [1] * 4, max_tokens=8))
    with pytest.raises(
        MemoryBudgetError,
        match=r"may grow to 13 tokens, which need 4 cache pages, but the cache has 3; "
        r"lower max_tokens or give more memory\.",
    ):
        house.scheduler.add(make("b", [1] * 4, max_tokens=9))
    with pytest.raises(MemoryBudgetError, match="may grow to 60 tokens"):
        house.scheduler.add(make("c", [1], max_tokens=None))
    house.run()


def test_what_just_fits_runs_alone() -> None:
    house = House(num_pages=4, page_size=4, propose=chain(9))
    sequences = [make(str(i), [i] * 4, max_tokens=8, eos=()) for i in range(3)]
    house.add(*sequences)
    house.run()
    assert_outputs(house, sequences)


def test_laws_that_are_no_numbers_end_their_request_alone() -> None:
    house = House(propose=chain(1), poisoned={"b/0"})
    sequences = [make(id, [i], max_tokens=6, eos=()) for i, id in enumerate("abc")]
    house.add(*sequences)
    house.run()
    (event,) = house.events["b"]
    assert (event.token_id, event.finish_reason, event.error) == (None, "error", NOT_FINITE)
    assert_outputs(house, [sequences[0], sequences[2]])


@pytest.mark.parametrize("steps", range(6))
def test_a_sequence_can_leave_at_any_time(steps: int) -> None:
    for leaving in range(3):
        house = House(num_pages=12, rows=6, propose=chain(1))
        sequences = [make(str(i), [i] * 9, max_tokens=20, eos=()) for i in range(3)]
        house.add(*sequences)
        for _ in range(steps):
            house.step()
        house.remove(sequences[leaving])
        house.check()
        house.scheduler.remove(sequences[leaving])  # again: no error
        house.run()
        assert_outputs(house, [s for i, s in enumerate(sequences) if i != leaving])


def test_nothing_to_do() -> None:
    house = House()
    plan = house.schedule()
    assert (plan.batch, plan.preempted, plan.rows) == ([], [], 0)
    assert house.scheduler.commit(plan, Draft(), Verdict([], [], [])).events == []


@pytest.mark.parametrize("seed", range(10))
def test_random_runs(seed: int) -> None:
    """Adds, aborts and preemptions in any order: the same tokens, and nothing leaks."""
    draw = random.Random(seed)
    max_nodes = draw.choice([4, 4, 9])
    house = House(
        num_pages=draw.randint(16, 40),
        page_size=draw.choice([1, 3, 4]),
        max_num_seqs=draw.randint(1, 6),
        rows=draw.choice([1, 5, 30]),
        max_len=draw.choice([15, 40]) if seed % 2 else 15,
        max_nodes=max_nodes,
        propose=ragged(draw, max_nodes),
    )
    served: list[SequenceState] = []
    number = 0
    for _ in range(400):
        if draw.random() < 0.25:
            prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 10))]
            sequence = make(
                str(number),
                prompt,
                seed=number,
                max_tokens=draw.choice([1, 3, 10, None]),
                min_tokens=draw.choice([0, 1]),
                stop=draw.choice([None, ["ab"], ["c", "def"]]),
            )
            number += 1
            try:
                house.add(sequence)
            except MemoryBudgetError:
                needed = house.pool.pages_for(house.limit(sequence))
                assert needed > house.pool.num_usable
            else:
                served.append(sequence)
        if house.arrived and draw.random() < 0.04:
            gone = draw.choice(house.arrived)
            house.remove(gone)
            served.remove(gone)
        if house.arrived:
            house.step()
    house.run()
    house.check()
    assert len(served) > 10
    assert_outputs(house, served)
