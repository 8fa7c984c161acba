"""Forms that begin behind a token: reasoning is free, and what follows it is held to the form.

The boundary may be committed or drafted, and lie anywhere in a draft (vLLM #44006, #44993).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.base.types import Request, SamplingParams
from outrider.checkpoints.tokenizers import read_codec
from outrider.errors import ConfigError, RequestError
from outrider.pocket import PATH
from outrider.sampling.grammar import Grammars, LateGrammar, Mask
from tests.support.exactness import (
    SAMPLING,
    adversary,
    alone,
    in_batches,
    make_engine,
    planted_pair,
    requests,
    tiny_tokenizer,
)

CODEC = read_codec(PATH)
SIZE = 4096


def ids_of(text: str) -> list[int]:
    return CODEC.encode(text, special=False)


def late(**form: Any) -> LateGrammar:
    grammars = Grammars(lambda: CODEC.backend, SIZE, frozenset({0}))
    made = grammars.compile(SamplingParams(structured_outputs={"after": "(", **form}))
    assert isinstance(made, LateGrammar)
    return made


def allowed(mask: Mask | str | None) -> set[int]:
    assert isinstance(mask, np.ndarray)
    return set(np.flatnonzero(np.unpackbits(mask, count=SIZE, bitorder="little")).tolist())


(OPENS,) = ids_of("(")
ENDS = {0}


def test_all_may_come_before_but_an_end() -> None:
    grammar = late(choice=["yes", "no"])
    (free,) = grammar.masks([[]])
    assert allowed(free) == set(range(SIZE)) - ENDS
    assert grammar.accepts([5, 6, 7]) == 3
    assert grammar.accepts([5, 0, 7]) == 1
    assert grammar.forced([5]) == []


@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("committed", [0, 1, 2, 9])
def test_the_form_begins_behind_the_token(before: int, committed: int) -> None:
    """Wherever the commit ends, before the boundary or behind it."""
    grammar, yes = late(choice=["yes", "no"]), ids_of("yes")
    output = [7] * before + [OPENS] + yes
    committed = min(committed, len(output))
    grammar.advance(output[:committed])
    rest = output[committed:]
    for count in range(len(rest) + 1):
        (mask,) = grammar.masks([rest[:count]])
        said, behind = committed + count, before + 1
        if said < behind:
            assert len(allowed(mask)) == SIZE - len(ENDS)
        elif said == len(output):
            assert allowed(mask) == ENDS
        else:
            assert output[said] in allowed(mask)
            assert len(allowed(mask)) < 20
    assert grammar.accepts(rest) == len(rest)
    left = before - committed
    if left >= 0:
        assert grammar.accepts([7] * left + [OPENS, *ids_of("maybe")]) == left + 1


def test_a_path_before_and_one_behind_are_told_apart() -> None:
    grammar = late(choice=["yes", "no"])
    free, held, again = grammar.masks([[7], [7, OPENS], [8, 9]])
    assert len(allowed(free)) == len(allowed(again)) == SIZE - len(ENDS)
    assert len(allowed(held)) < 20
    copy = grammar.copy()
    grammar.advance([OPENS])
    assert len(allowed(grammar.masks([[]])[0])) < 20
    assert len(allowed(copy.masks([[]])[0])) == SIZE - len(ENDS)


def test_only_the_first_token_counts() -> None:
    grammar = late(regex=r"\(a\(")
    grammar.advance([OPENS, *ids_of("(a(")])
    assert allowed(grammar.masks([[]])[0]) == ENDS


HASH, *_ = ids_of("#")


@pytest.mark.parametrize("committed", [0, 1, 2])
def test_an_output_without_the_opening_has_the_form_at_once(committed: int) -> None:
    """A model may think first, and need not: what its first token says decides."""
    yes, thought = ids_of("yes"), [HASH, 7, 0]
    grammar = late(choice=["yes", "no"], opening="#")
    (first,) = grammar.masks([[]])
    assert HASH in allowed(first)
    assert 2 < len(allowed(first)) < 20
    direct, opened = grammar.copy(), grammar
    direct.advance(yes[:committed])
    rest = yes[committed:]
    assert direct.accepts(rest) == len(rest)
    assert allowed(direct.masks([rest])[0]) == ENDS
    opened.advance(thought[: min(committed, 2)])
    rest = thought[min(committed, 2) :]
    assert opened.accepts(rest) == len(rest) - 1  # no end within thoughts
    assert len(allowed(opened.masks([thought[committed:2]])[0])) == SIZE - len(ENDS)
    opened.advance([HASH, 7, OPENS])
    assert opened.accepts(yes) == len(yes)


@pytest.mark.parametrize("committed", [0, 1, 3])
@pytest.mark.parametrize("form", [{}, {"choice": ["yes"]}])
def test_behind_the_budget_the_token_must_come(committed: int, form: Any) -> None:
    grammar = late(budget=3, **form)
    grammar.advance([7] * committed)
    left = [7] * (3 - committed)
    assert allowed(grammar.masks([left])[0]) == {OPENS}
    assert grammar.forced(left) == [OPENS]
    assert grammar.accepts([*left, 7]) == len(left)
    behind = [*left, OPENS]
    assert grammar.accepts(behind) == len(behind)
    follows = allowed(grammar.masks([behind])[0])
    assert len(follows) < 20 if form else follows == set(range(SIZE))
    if left:
        assert len(allowed(grammar.masks([left[:-1]])[0])) == SIZE - len(ENDS)


def test_a_budget_without_thoughts_asks_for_nothing() -> None:
    grammar = late(budget=1, opening="#")
    assert allowed(grammar.masks([[]])[0]) == set(range(SIZE))
    assert grammar.accepts([7, 7, 0]) == 3
    assert grammar.accepts([HASH, 7]) == 1
    assert grammar.forced([]) == []


@pytest.mark.parametrize(
    "wrong", [{"budget": -1}, {"budget": True}, {"budget": 2**31}, {"after": None, "budget": 1},
              {"after": None, "opening": "#", "choice": ["a"]}, {"opening": "", "choice": ["a"]},
              {"opening": "\ud800", "choice": ["a"]}, {"opening": "two words", "choice": ["a"]}],
)  # fmt: skip
def test_wrong_options_before_the_form_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, RequestError), match=r"(budget|opening).*; give"):
        late(**wrong)


def test_the_option_at_fault_is_named() -> None:
    with pytest.raises(ConfigError, match=r"after is .*lone surrogates"):
        late(choice=["yes"], after="\ud800")


@pytest.mark.parametrize("after", ["", "</think>", "two words", 7])
def test_what_is_no_token_is_refused(after: Any) -> None:
    with pytest.raises((ConfigError, RequestError), match=r"after is .*token"):
        late(choice=["yes"], after=after)


@pytest.fixture(scope="module", params=["llama", "qwen3_5_text"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted_pair(tmp_path_factory.mktemp(request.param), request.param)


def queued(**before: Any) -> list[Request]:
    prompts = [[11, 12, 13, 14, 15] * 5, [40, 50], [(7 * i) % 190 + 5 for i in range(19)]]
    options = {**SAMPLING["late"]}
    options["structured_outputs"] = {**options["structured_outputs"], **before}
    return requests(prompts, SamplingParams(max_tokens=40, **options))


def behind(outputs: dict[str, Any]) -> list[str]:
    """The text of each output behind the first token that a form begins after."""
    tokenizer, texts = tiny_tokenizer(), []
    begins = tokenizer.token_to_id("t")
    for name, ids in outputs.items():
        if name.endswith("/0") and begins in ids:
            texts.append(tokenizer.decode([*ids[ids.index(begins) + 1 :]]))
    return texts


@pytest.mark.parametrize("drafter", ["right", "wrong", "model", "suffix"])
@pytest.mark.parametrize("length", [1, 3, 6])
def test_drafts_across_the_boundary_change_nothing(drafter: str, length: int, pair: Path) -> None:
    """Oracle drafts hold the token and what follows it at every place of a draft."""
    expected = alone(pair, queued())
    engine = make_engine(
        pair, adversary(drafter, queued(), expected, length), num_speculative_tokens=length
    )
    assert in_batches(engine, queued(), 3) == expected
    said = behind(expected)
    assert any(re.fullmatch("[a-d]{2,9}", text) for text in said)
    assert all(re.fullmatch("[a-d]{0,9}", text) for text in said)
    if drafter == "right":
        assert engine.counts.accepted == engine.counts.drafted > 0


@pytest.mark.parametrize("before", [{"budget": 5}, {"budget": 0}, {"opening": "e"}])
@pytest.mark.parametrize("length", [1, 3, 6])
def test_drafts_change_nothing_of_a_budget(before: dict[str, Any], length: int, pair: Path) -> None:
    """The budget may end within a draft, and an output may begin with the form or with thoughts."""
    expected = alone(pair, queued(**before))
    drafter = adversary("right", queued(**before), expected, length)
    engine = make_engine(pair, drafter, num_speculative_tokens=length)
    assert in_batches(engine, queued(**before), 3) == expected
    assert engine.counts.accepted == engine.counts.drafted > 0
    tokenizer = tiny_tokenizer()
    begins = tokenizer.token_to_id("t")
    for name, ids in expected.items():
        if not name.endswith("/0"):
            continue
        if "budget" in before:
            assert begins in ids[: before["budget"] + 1]
        elif tokenizer.decode([ids[0]]) != "e":
            assert re.fullmatch("[a-d]{0,9}", tokenizer.decode([*ids]))
