"""Suffix decoding: both indices against a count that anyone can read, and the drafter."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.base.config import EngineConfig
from outrider.base.types import Draft, DraftBudget, Request, Scheduled, SequenceState
from outrider.drafters.base import DrafterContext
from outrider.drafters.registry import find_drafter
from outrider.drafters.suffix import SuffixDrafter, SuffixSpec
from outrider.drafters.suffix_index import LEAST, Index, NativeIndex, SuffixIndex, new_index
from outrider.errors import ModelError
from outrider.native.choice import library
from outrider.native.interface import SUFFIX_DEPTH, Followed
from outrider.sampling.shared_noise import SharedNoise
from tests.support.native_hazards import address_space
from tests.support.scheduling import record_of

STEP = library()
KINDS: list[Callable[[int], Index]] = [SuffixIndex]
if STEP is not None:
    KINDS.append(lambda room, step=STEP: NativeIndex(step, room))  # type: ignore[misc]
AMPLE = 10**6
NOTHING = Followed([], [], [], [])
Text = Sequence[int]


@pytest.fixture(params=KINDS, ids=["python", "native"][: len(KINDS)])
def index(request: pytest.FixtureRequest) -> Any:
    return request.param


class Counts:
    """How often tails stand in texts, and what follows them, by looking at every place.

    ``window`` places of a text count, those at its end.
    """

    def __init__(self, texts: Sequence[Text], window: int = AMPLE) -> None:
        self.places: Counter[tuple[int, ...]] = Counter()
        self.next: dict[tuple[int, ...], Counter[int]] = {}
        for text in texts:
            for end in range(max(0, len(text) - window), len(text)):
                for begin in range(max(0, end + 1 - SUFFIX_DEPTH), end + 1):
                    tail = tuple(text[begin : end + 1])
                    self.places[tail] += 1
                    if end + 1 < len(text):
                        self.next.setdefault(tail, Counter())[text[end + 1]] += 1

    def draft(self, text: Text, length: int, depth: int, nodes: int) -> tuple[Followed, float]:
        """The draft of the match of ``length`` tokens, and its score."""
        made, score = Followed([], [], [], []), 0.0
        open: list[tuple[float, int, int, tuple[int, ...], int, int]] = []
        number = 0
        path, p, parent = tuple[int, ...](), 1.0, -1
        while len(made.tokens) < min(nodes, length):
            tail = (*text[len(text) - length :], *path)[-SUFFIX_DEPTH:]
            if len(path) < depth:
                next = self.next.get(tail, Counter[int]())
                ranked = sorted(next.items(), key=lambda item: (-item[1], item[0]))
                for token, count in ranked[: None if nodes > depth else 1]:
                    likely = p * count / self.places[tail]
                    if likely >= LEAST:
                        rest = next.total() - count
                        open.append((-likely, number, parent, (*path, token), count, rest))
                        number += 1
            if not open:
                break
            best = min(open)
            open.remove(best)
            p, _, parent, path, count, rest = -best[0], *best[1:]
            for column, value in zip(made, (path[-1], parent, count, rest), strict=True):
                column.append(value)
            score += p
            parent = len(made.tokens) - 1
        return made, score


def search(text: Text, sources: Sequence[Counts], depth: int, nodes: int) -> Followed:
    """The best draft of all matches, longer matches and earlier sources first.

    Of tails that stand at the same places the longest is the match.
    """
    best, score = NOTHING, 0.0
    for counts in sources:
        places = 0
        for length in range(min(SUFFIX_DEPTH, len(text)), 0, -1):
            fewer, places = places, counts.places[tuple(text[len(text) - length :])]
            if places > fewer:
                found, promised = counts.draft(text, length, depth, nodes)
                if promised > score:
                    best, score = found, promised
    return best


def drafted(index: Any, text: Text, depth: int = 8, nodes: int | None = None) -> Followed:
    made = index(AMPLE)
    made.extend(text)
    found: Followed = made.draft(None, depth, nodes or depth)
    return found


def test_a_match_drafts_as_many_tokens_as_it_has(index: Any) -> None:
    assert drafted(index, [1, 2, 3, 4, 5, 6, 9, 1]).tokens == [2]
    assert drafted(index, [1, 2, 3, 4, 5, 6, 9, 1, 2]).tokens == [3, 4]
    assert drafted(index, [1, 2, 3, 4, 5, 6, 9, 1, 2, 3]).tokens == [4, 5, 6]
    assert drafted(index, [1, 2, 3, 4, 5, 6, 9, 1, 2, 3], depth=2).tokens == [4, 5]


def test_what_followed_most_often_is_drafted(index: Any) -> None:
    text = [1, 2, 7, 1, 2, 8, 1, 2, 8, 9, 3, 1, 2]
    assert drafted(index, text) == Followed([8, 1], [-1, 0], [2, 1], [1, 1])
    # Of the same number the lower token goes first.
    assert drafted(index, [1, 2, 9, 1, 2, 8, 5, 1, 2]).tokens[0] == 8


def test_the_highest_sum_of_probabilities_counts(index: Any) -> None:
    # Of three tokens one match, of one token six: 1/2 + 1/4 + 1/4 against 5/7.
    text = [1, 2, 3, 4, 3, 5, 6, 3, 5, 6, 3, 5, 6, 3, 5, 6, 3, 5, 7, 1, 2, 3]
    counts = Counts([text])
    (one, less), (three, more) = (counts.draft(text, length, 8, 8) for length in (1, 3))
    assert (one.tokens, less) == ([5], 5 / 7)
    assert (three.tokens, more) == ([4, 3, 5], 1.5)
    assert drafted(index, text) == three
    assert drafted(index, text, depth=1) == one


def test_paths_that_are_not_likely_end(index: Any) -> None:
    """One place in ten is enough, one in eleven is not; the last place has no next token yet."""
    for others, found in ((8, [100]), (9, [])):
        text = [t for i in range(others + 1) for t in (1, 100 + i)]
        assert drafted(index, [*text, 1], depth=1).tokens == found


def test_trees_have_the_likeliest_nodes(index: Any) -> None:
    text = [9, 1, 2, 7, 5, 9, 1, 2, 8, 6, 9, 1, 2, 8, 4, 9, 1, 2]
    # The first with 2/4, the others with 1/4, of which those nearer to the root came first.
    found = drafted(index, text, depth=2, nodes=5)
    assert found == Followed([8, 7, 4], [-1, -1, 0], [2, 1, 1], [1, 2, 1])
    assert drafted(index, text, depth=3).tokens == [8, 4, 9]
    assert drafted(index, text, depth=1, nodes=5).tokens == [8, 7]


def test_a_loop_goes_on(index: Any) -> None:
    assert drafted(index, [5] * 30).tokens == [5] * 8
    assert drafted(index, [1, 2, 3] * 9, depth=6).tokens == [1, 2, 3] * 2


def test_nothing_is_drafted_without_a_match(index: Any) -> None:
    for text in ([], [1], [1, 2, 3], [1, 2, 3, 4]):
        assert drafted(index, text) == NOTHING


def scenario(seed: int) -> tuple[random.Random, int, int]:
    draw = random.Random(seed)
    return draw, draw.choice([1, 2, 3, 5]), draw.choice([1, 3, 10, 40, AMPLE])


def more(draw: random.Random, alphabet: int, text: Text) -> list[int]:
    """Random tokens, or a copy of some before."""
    length = draw.choice([1, 1, 2, 5, 30])
    if len(text) > 4 and draw.random() < 0.3:
        begin = draw.randrange(len(text))
        return list(text[begin : begin + 3 * length])
    return [draw.randrange(alphabet) for _ in range(length)]


@pytest.mark.parametrize("seed", range(10))
def test_it_is_the_count(seed: int, index: Any) -> None:
    """In steps, over windows, beside other texts of which the oldest are dropped."""
    draw, alphabet, window = scenario(seed)
    mine, store = index(window), index(AMPLE)
    text: list[int] = []
    stored: list[list[int]] = []
    while len(text) < 130:
        added = more(draw, alphabet, text)
        mine.extend(added)
        text += added
        if draw.random() < 0.4:
            stored.append(more(draw, alphabet, text))
            store.extend(stored[-1], ends=True)
        if len(stored) > 3:
            left = store.drop(len(stored.pop(0)) + 1)
            assert left == sum(len(each) + 1 for each in stored)
        depth = draw.randint(1, 6)
        nodes = draw.choice([depth, 2 * depth, 30])
        sources = [Counts([text], window), Counts(stored)]
        assert mine.draft(store, depth, nodes) == search(text, sources, depth, nodes)
        assert mine.draft(None, depth, nodes) == search(text, sources[:1], depth, nodes)


@pytest.mark.skipif(STEP is None, reason="the native step is off")
@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=pytest.mark.engine) if n % 5 == 0 else n for n in range(30)]
)
def test_both_are_the_same(seed: int) -> None:
    draw, alphabet, window = scenario(seed)
    rooms = window, 50
    python, native = ([kind(room) for room in rooms] for kind in KINDS)
    text: list[int] = []
    for _ in range(150):
        added, drop = more(draw, alphabet, text), draw.choice([0, 0, 0, 3, 90])
        text += added
        depth = draw.randint(1, 70)
        nodes = draw.choice([1, depth, 2 * depth])
        which = draw.random() < 0.3
        ends = draw.random() < 0.2
        found = []
        for pair in (python, native):
            pair[which].extend(added, ends)
            found.append((pair[1].drop(drop), pair[0].draft(pair[1], depth, nodes)))
        assert found[0] == found[1]


def test_what_left_the_window_is_forgotten() -> None:
    tokens = [1, 2, *range(10, 20), 1, 2]
    for window, expected in ((12, [10, 11]), (11, [])):
        drafter = SuffixDrafter(4, window=window)
        assert drafter.draft(sequence("a", tokens), DraftBudget(4, 4)).tokens == expected


def test_an_index_is_bounded(index: Any) -> None:
    """A million tokens with room for 500; without native code fewer."""
    made, draw, native = index(500), random.Random(0), index is not SuffixIndex
    blocks = [[draw.randrange(200) for _ in range(1000)] for _ in range(20)]

    def fill(times: int) -> None:
        for _ in range(times):
            for block in blocks:
                made.extend(block)

    fill(1)
    before = address_space()
    fill(50 if native else 1)
    assert address_space() - before < 2**22
    if not native:
        assert len(made._text) <= 2 * (500 + SUFFIX_DEPTH) + 1


@pytest.mark.skipif(STEP is None, reason="the native step is off")
def test_numbers_that_no_index_takes_are_refused() -> None:
    assert STEP is not None
    for room in (0, -1, 2**26 + 1, 2**31):
        with pytest.raises(ModelError, match=r"places|room is"):
            NativeIndex(STEP, room)
    made = NativeIndex(STEP, 10)
    for token in (-1, 2**31, -(2**40), 1.5):
        with pytest.raises(ModelError, match="token id"):
            made.extend([1, token])  # type: ignore[list-item]
    for depth, nodes in ((0, 1), (1, 0), (-1, 5), (2**31, 1)):
        with pytest.raises(ModelError, match=r"bad size|depth is"):
            made.draft(None, depth, nodes)
    made.extend([1, 2, 1])
    assert made.draft(None, 2**31 - 1, 2**31 - 1).tokens == [2]
    assert made.draft(made, 1, 1).tokens == [2]
    assert made.drop(-5) == 3
    assert made.drop(2**63 - 1) == 0
    with pytest.raises(ModelError, match="places is"):
        made.drop(2**63)
    assert made.draft(None, 4, 4) == NOTHING
    made.extend([1, 2, 1])
    assert made.draft(None, 1, 1).tokens == [2]


def sequence(id: str, tokens: list[int], prompt: int | None = None, salt: str = "") -> Any:
    prompt = len(tokens) if prompt is None else prompt
    request = Request(id, tuple(tokens[:prompt]), SamplingParams(), 0, cache_salt=salt)
    return SequenceState(f"{id}/0", request, 0, text=None, pipeline=None, tokens=tokens)  # type: ignore[arg-type]


def item(state: SequenceState, depth: int, nodes: int = 0) -> Scheduled:
    budget = DraftBudget(depth, max(depth, nodes))
    return Scheduled(state, len(state.tokens) - 1, 1, depth > 0, "suffix", budget)


def proposed(drafter: SuffixDrafter, *items: Scheduled) -> Draft:
    noise = SharedNoise(32)
    return drafter.propose(items, [each.budget for each in items], noise)


def test_the_drafter_keeps_its_sequences_apart() -> None:
    drafter = SuffixDrafter(4, 8)
    assert (drafter.name, drafter.max_length, drafter.max_nodes) == ("suffix", 4, 8)
    batch = [
        item(sequence("a", [1, 2, 3, 1, 2]), 3),
        item(sequence("b", [1, 2, 1, 2, 3, 1, 2]), 2, 8),
        item(sequence("c", [1, 2, 3, 1, 2]), 0),
        item(sequence("d", [1, 2, 3]), 4),
    ]
    draft = proposed(drafter, *batch)
    assert [nodes.tokens for nodes in draft] == [[3, 1], [1, 3], [], []]
    assert [nodes.parents for nodes in draft] == [[-1, 0], [-1, -1], [], []]
    certain, even = log(1.5 / 0.5), log(1.5 / 1.5)
    margins = [[certain, certain], [even, even], [], []]
    assert [[*nodes.margins] for nodes in draft] == margins
    for each in batch:
        each.sequence.tokens += [3, 1]
    assert proposed(drafter, batch[0])[0].tokens == [2, 3, 1]
    for ended in (False, True, True):  # unknown at the third: no error
        drafter.release("a/0", ended)
        assert proposed(drafter, batch[0])[0].tokens == [2, 3, 1]


def test_a_drafter_that_comes_late_drafts_alike() -> None:
    draw = random.Random(5)
    tokens = [draw.randrange(3) for _ in range(40)]
    always, budget = SuffixDrafter(6, 12, window=60), DraftBudget(6, 12)
    for _ in range(120):
        tokens += [draw.randrange(3) for _ in range(3)]
        state = sequence("a", tokens)
        expected = always.draft(state, budget)
        assert SuffixDrafter(6, 12, window=60).draft(state, budget) == expected
    tokens += [draw.randrange(3) for _ in range(500)]  # more than it looks up
    assert always.draft(state, budget) == SuffixDrafter(6, 12, window=60).draft(state, budget)


def finished(drafter: SuffixDrafter, id: str, output: list[int], salt: str) -> None:
    """Let a sequence come and go that another drafter drafts for."""
    state = sequence(id, [90, 91, *output], 2, salt)
    batch = [item(state, 0)]
    drafter.observe(record_of(batch))
    drafter.release(state.id, ended=True)


@pytest.mark.parametrize("native", [False, True])
def test_a_store_holds_past_outputs(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setenv("OUTRIDER_NATIVE_ISA", "off")
    drafter, asked = SuffixDrafter(4, store=12), sequence("x", [50, 1, 2], salt="mine")

    def found() -> list[int]:
        return proposed(drafter, item(asked, 4))[0].tokens

    finished(drafter, "theirs", [1, 2, 6, 7], "another")
    finished(drafter, "everybody's", [1, 2, 8, 9], "")
    assert found() == []
    finished(drafter, "a", [1, 2, 3, 4], "mine")
    assert found() == [3, 4]
    # The sequence itself wins where both promise the same.
    own = sequence("own", [1, 2, 5, 1, 2, 5, 50, 1, 2], salt="mine")
    finished(drafter, "b", [90, 1, 2], "mine")  # theirs goes
    assert proposed(drafter, item(own, 1))[0].tokens == [5]
    finished(drafter, "c", [7] * 9, "mine")  # all of the others go
    assert found() == []
    finished(drafter, "d", [*range(60, 80), 1, 2, 3], "mine")  # of which 12 are kept
    assert found() == [3]
    assert proposed(drafter, item(sequence("y", [66, 67]), 4))[0].tokens == []
    assert proposed(drafter, item(sequence("z", [71, 72], salt="mine"), 4))[0].tokens == [73, 74]


def test_a_store_is_bounded() -> None:
    drafter, draw = SuffixDrafter(4, store=300), random.Random(1)
    for turn in range(400):
        salt = str(draw.randrange(200))
        output = [draw.randrange(9) for _ in range(draw.choice([0, 1, 2, 40, 500]))]
        finished(drafter, str(turn), output, salt)
        store: Any = drafter._store
        assert sum(length for _, length in store._outputs) == store._tokens <= 300
        assert set(store._indices) == {salt for salt, _ in store._outputs}
        assert not drafter._running


def test_without_a_store_nothing_of_others_is_known() -> None:
    drafter = SuffixDrafter(4)
    finished(drafter, "a", [1, 2, 3, 4], "")
    assert proposed(drafter, item(sequence("x", [50, 1, 2]), 4))[0].tokens == []
    assert not drafter._running


def test_without_native_code_it_is_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(new_index(5), SuffixIndex if STEP is None else NativeIndex)
    monkeypatch.setenv("OUTRIDER_NATIVE_ISA", "off")
    assert isinstance(new_index(5), SuffixIndex)


def test_options_reach_the_drafter() -> None:
    class Model:
        trees = True

    def made(trees: bool = True, needs_logits: bool = False, **options: Any) -> SuffixDrafter:
        model: Any = Model()
        model.trees = trees
        config = EngineConfig(**options)
        context = DrafterContext(model, None, config, 64, needs_logits)
        needs = SuffixSpec().needs(context)
        bare = replace(context, config=replace(config, suffix_store=0))
        stored = needs.fixed_bytes - SuffixSpec().needs(bare).fixed_bytes
        assert (stored > 0) == (config.suffix_store > 0)
        return SuffixSpec().make(DrafterContext(model, None, config, 64, needs_logits, 0, needs))

    assert (made().max_length, made().max_nodes) == (8, 8)
    assert made(max_draft_nodes=9).max_nodes == 9
    # What cannot verify trees gets chains.
    assert made(trees=False, max_draft_nodes=9).max_nodes == 8
    assert made(needs_logits=True, max_draft_nodes=9).max_nodes == 8
    tokens = [1, 2, *range(10, 20), 1, 2]
    drafter = made(drafter_window=11)
    assert drafter.draft(sequence("a", tokens), DraftBudget(4, 4)).tokens == []


def test_llm_drafts_by_suffixes(tiny_llama: Path) -> None:
    """Chains and trees, with a store; the same tokens as plain decoding."""
    prompts = ["ab ab ab ab", "the lazy dog"]
    params = SamplingParams(temperature=0.8, max_tokens=24, seed=3, ignore_eos=True)
    plain = LLM(tiny_llama, drafter=None)
    expected = [o.outputs[0].token_ids for o in plain.generate(prompts, params)]
    assert find_drafter("suffix", tiny_llama).name == "suffix"
    for nodes in (None, 12):
        llm = LLM(
            tiny_llama,
            drafter="suffix",
            num_speculative_tokens=4,
            suffix_store=10**4,
            max_draft_nodes=nodes,
        )
        for turn in range(2):
            found = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
            assert found == expected
            counts = llm.engine.counts
            assert counts.drafted > 0
            if turn:  # what was said before is known now
                assert counts.accepted > 20
