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


def queued() -> list[Request]:
    prompts = [[11, 12, 13, 14, 15] * 5, [40, 50], [(7 * i) % 190 + 5 for i in range(19)]]
    return requests(prompts, SamplingParams(max_tokens=40, **SAMPLING["late"]))


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
