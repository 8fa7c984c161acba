"""The prefix cache: what is found is what would be computed, for target and drafter alike."""

import random
from pathlib import Path
from typing import Any

import pytest

from outrider.base.types import SAMPLE, Event, Request, SamplingParams, grouped_by
from outrider.cache.pages import PagePool, extend_keys
from tests.support.exactness import END, VOCABULARY, make_engine, planted_pair, run
from tests.support.pages import check_engine, check_pool

SIZE = 4  # of a page, in make_engine


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted_pair(tmp_path_factory.mktemp("pair"))


def request(id: str, prompt: list[int], seed: int = 1, **options: Any) -> Request:
    salt = options.pop("cache_salt", "")
    params = SamplingParams(**{"max_tokens": 20, "temperature": 0.8, **options})
    return Request(id, tuple(prompt), params, seed, frozenset([END]), cache_salt=salt)


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(4, VOCABULARY) for _ in range(length)]


def served(engine: Any, *requests: Request) -> dict[str, list[Event]]:
    for one in requests:
        engine.add(one)
    found: dict[str, list[Event]] = {}
    while engine.has_work:
        for event in engine.step():
            found.setdefault(event.request_id, []).append(event)
    check_engine(engine)
    return found


def test_keys_stand_for_all_tokens_before() -> None:
    keys: dict[str, list[bytes]] = {}
    for name, tokens, salt in (
        ("one", prompt(48), ""), ("same", prompt(48), ""), ("salted", prompt(48), "x"),
        ("late", [*prompt(48)[: 2 * SIZE], *prompt(SIZE, 9)], ""),
        ("early", [9, *prompt(48)[1:]], ""),
    ):  # fmt: skip
        extend_keys(keys.setdefault(name, []), tokens, 3, SIZE, salt)
    assert keys["one"] == keys["same"]
    assert not set(keys["one"]) & set(keys["salted"])
    assert keys["late"][:2] == keys["one"][:2]
    assert keys["late"][2] != keys["one"][2]
    assert not set(keys["one"]) & set(keys["early"])


@pytest.mark.parametrize("drafter", ["none", "ngram", "suffix", "model"])
def test_a_repeated_prompt_is_found_and_says_the_same(pair: Path, drafter: str) -> None:
    long = prompt(70)
    for length in (64, 65, 70):
        asked = [request(f"r{i}", long[:length], seed=i) for i in range(4)]
        plain = make_engine(pair, "none", enable_prefix_caching=False)
        expected = [run(plain, [one]) for one in asked]
        engine = make_engine(pair, drafter)
        assert [run(engine, [one]) for one in asked] == expected
        assert engine.scheduler.hit == 3 * ((length - 1) // SIZE) * SIZE
        together = run(make_engine(pair, drafter), asked)
        assert together == {name: ids for one in expected for name, ids in one.items()}


def test_the_drafter_finds_its_pages_too(pair: Path) -> None:
    """As many tokens stand after a hit as without one, and the drafter computes less."""
    engine = make_engine(pair, "model")
    rows: list[int] = []
    model = engine.drafter.model  # type: ignore[attr-defined]
    own = model.draft

    def counted(segments: Any, *rest: Any) -> Any:
        rows.append(sum(len(s.tokens) for s in segments))
        return own(segments, *rest)

    model.draft = counted
    first = served(engine, request("a", prompt(64), temperature=0))["a"]
    cold = rows[0]
    rows.clear()
    again = served(engine, request("b", prompt(64), temperature=0))["b"]
    assert (cold, rows[0]) == (65, 65 - 60)
    assert first[-1].counts == again[-1].counts


def test_an_answer_is_found_when_it_comes_back_as_prompt(pair: Path) -> None:
    engine = make_engine(pair, "model")
    found = served(engine, request("a", prompt(20), max_tokens=60, ignore_eos=True))["a"]
    said = [e.token_id for e in found if e.token_id is not None]
    more = [*prompt(20), *said, 5]
    events = served(engine, request("b", more))["b"]
    assert events[0].start is not None
    assert events[0].start.cached_tokens == 76


def test_salts_and_prompt_logprobs_share_nothing(pair: Path) -> None:
    engine = make_engine(pair, "none")
    served(engine, request("a", prompt(64)))
    for i, options in enumerate(({"cache_salt": "x"}, {"prompt_logprobs": 1})):
        events = served(engine, request(f"b{i}", prompt(64), **options))[f"b{i}"]
        assert events[0].start is not None
        assert events[0].start.cached_tokens == 0
    assert len(events[0].prompt_logprobs or []) == 64


def test_pages_go_in_the_order_they_were_left_and_nothing_leaks(pair: Path) -> None:
    engine = make_engine(pair, "model", pages=24)
    draw, prompts = random.Random(3), [prompt(40, i % 3 % 2) for i in range(12)]
    alone = make_engine(pair, "none", enable_prefix_caching=False)
    for i, one in enumerate(prompts):
        asked = request(f"r{i}", one[: draw.randint(16, 40)], seed=i)
        expected = run(alone, [asked])
        assert run(engine, [asked]) == expected
        check_engine(engine)
    assert engine.scheduler.hit > 0


def test_the_pool_keeps_the_longest_used_beginnings() -> None:
    pool = PagePool(6, SIZE)
    tables: list[list[int]] = [[], []]
    for number, table in enumerate(tables):
        pool.grow(table, 2 * SIZE)
        for i, page in enumerate(table):
            pool.name(page, b"%d%d" % (number, i))
    pages = [list(table) for table in tables]
    for table in tables:
        pool.free(table)
    assert pool.num_free == 5
    assert pool.find([b"10", b"11", b"99"]) == pages[1]
    other: list[int] = []
    assert pool.grow(other, 2 * SIZE)  # the blank one, and the end of what was left first
    assert pool.find([b"00", b"01"]) == pages[0][:1]
    assert pool.find([b"10", b"11"]) == pages[1]
    held = pool.share(pages[1])
    check_pool(pool, [other, held])
    assert not pool.grow(other, 5 * SIZE)
    assert pool.grow(other, 3 * SIZE)
    assert pool.find([b"00"]) == []
    pool.free(other)
    with pytest.raises(ValueError, match="blank"):
        pool.share([1, 2, 3, 4, 5])


def test_samples_and_alike_requests_compute_their_prompt_once(pair: Path) -> None:
    """While one computes the pages the others wait; whoever begins otherwise does not."""
    engine = make_engine(pair, "ngram", max_num_batched_tokens=16)
    asked = [
        request("a", prompt(64), n=3, max_tokens=4), request("b", [*prompt(64), 5], max_tokens=4),
        request("c", prompt(10, 7), max_tokens=4),
    ]  # fmt: skip
    alone: dict[str, Any] = {}
    for one in asked:
        alone |= run(make_engine(pair, "none"), [one])
    assert run(engine, asked) == alone
    # Of 64 tokens 60 lie on pages that may be shared, of 65 all 64.
    assert engine.scheduler.hit == 60 + 60 + 64
    engine = make_engine(pair, "none", max_num_batched_tokens=24)
    first = {name: found[0].start for name, found in served(engine, *asked).items()}
    assert first["b"] is not None
    assert first["c"] is not None
    assert first["c"].scheduled < first["b"].scheduled


@pytest.mark.parametrize("drafter", ["none", "model"])
def test_samples_compute_a_scored_prompt_once(pair: Path, drafter: str) -> None:
    """The first sample scores the prompt, and the others share its pages."""

    def of(**options: Any) -> list[Event]:
        return served(make_engine(pair, drafter), request("r", prompt(40), **options))["r"]

    def said(events: list[Event]) -> dict[int, list[int | None]]:
        return {n: [e.token_id for e in found] for n, found in grouped_by(events, SAMPLE).items()}

    (scored,) = (e.prompt_logprobs for e in of(prompt_logprobs=2) if e.prompt_logprobs)
    found = of(n=4, prompt_logprobs=2)
    assert said(found) == said(of(n=4))
    assert [e.prompt_logprobs for e in found if e.prompt_logprobs] == [scored]
    starts = {e.sample_index: e.start.cached_tokens for e in found if e.start is not None}
    assert starts == {0: 0, 1: 36, 2: 36, 3: 36}
