"""Grammars that are too much for the parser end their own request and nobody else's."""

import gc
import itertools
import json
import random
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from outrider import LLM, SamplingParams
from outrider.checkpoints.tokenizers import read_codec
from outrider.errors import ConfigError, GenerationError, RequestError
from outrider.params import StructuredOutputsParams
from outrider.pocket import PATH
from outrider.sampling import grammar as limits
from outrider.sampling.grammar import Grammar, Grammars
from tests.support.pages import check_engine

BOMB = "start: s\ns: s s | s s s | A |\nA: /.|\\n/"
MANY = "start: s\ns: " + " | ".join(f"A{i} s" for i in range(20)) + " |\n"
MANY += "\n".join(f"A{i}: /[a-z \\n(=]/" for i in range(20))
AMBIGUOUS = 'start: a\na: a a | "x" | "(" | /[a-z]/ | " " | "\\n" | /[0-9=:,()_]/'


@pytest.mark.parametrize("text", [BOMB, AMBIGUOUS])
def test_a_bomb_ends_its_request_only(text: str) -> None:
    params = SamplingParams(
        max_tokens=60, temperature=1.3, seed=1, structured_outputs={"grammar": text}
    )
    plain = SamplingParams(max_tokens=30, seed=2)
    llm = LLM(PATH, drafter="ngram")
    (expected,) = llm.generate("def f(", plain)
    with pytest.raises((GenerationError, ValueError), match="simplify the grammar") as caught:
        llm.generate(["x = x\n" * 20, "def f("], [params, plain])
    assert "Tokens:" not in str(caught.value)  # the parser's state tells of the output
    if isinstance(caught.value, GenerationError):
        assert caught.value.outputs[1].outputs[0].text == expected.outputs[0].text
    check_engine(llm.engine)
    assert llm.generate("def f(", plain)[0].outputs[0].text == expected.outputs[0].text


@pytest.mark.parametrize("form", [{"grammar": BOMB}, {"regex": "a{2147483648}"}, {"regex": "ab"}])
def test_grammars_go_with_their_request(form: dict[str, str]) -> None:
    """A parser that failed may take 100 MB: nothing holds it, even before garbage is collected."""
    llm = LLM(PATH, drafter="ngram")
    params = SamplingParams(max_tokens=60, temperature=1.3, seed=1, structured_outputs=form)
    gc.collect()
    gc.disable()
    try:
        with suppress(GenerationError):
            llm.generate(["def f("], params)
        assert not llm.engine.grammars._compiled
    finally:
        gc.enable()


def test_what_the_parser_says_of_drafts_reaches_no_output() -> None:
    """Behind drafted tokens it may give up: the grammar goes on from the committed ones."""
    codec = read_codec(Path(PATH))
    grammar = compiled(Grammars(lambda: codec.backend, 4096, frozenset([0])), grammar=BOMB)
    ids = codec.encode("abcdefgh" * 8)
    first, behind = grammar.masks([[], ids])
    assert isinstance(first, np.ndarray)
    assert isinstance(behind, str)
    (after,) = grammar.masks([ids[:1]])
    (fresh,) = grammar.copy().masks([ids[:1]])
    assert isinstance(after, np.ndarray)
    assert np.array_equal(after, fresh)
    grammar.advance(ids[:1])
    assert grammar.accepts(ids[1:2]) == 1


JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
array  ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]*)) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws     ::= ([ \t\n] ws)?
"""
"""As llama.cpp's users write it: whitespace that recurses costs the parser most."""
BLANKS = [" ", "\n", "\t"]


@pytest.fixture(scope="module")
def large() -> Grammars:
    """Of 100,000 tokens: bytes, runs of blanks, words with punctuation before and after."""
    rng, letters = random.Random(0), "etaoinshrdlucmfwypvbgk"
    words = {"<|end|>": 0, **{chr(b): b for b in range(1, 128)}}
    for length in range(2, 100):
        for _ in range(30):
            words.setdefault("".join(rng.choices(BLANKS, (8, 2, 1), k=length)), len(words))
    while len(words) < 100_000:
        word = "".join(rng.choices(letters, k=rng.randint(2, 9)))
        words.setdefault(rng.choice(["", " ", " ", "(", '"']) + word, len(words))
    coded = {"".join("Ċ" if c == "\n" else "ĉ" if c == "\t" else "Ġ" if c == " " else c
                     for c in word): i for word, i in words.items()}  # fmt: skip
    tokenizer = Tokenizer(models.BPE(coded, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    found = Grammars(lambda: tokenizer, 100_000, frozenset([0]))
    compiled(found, regex="b")  # reads the vocabulary
    return found


def has(grammar: Grammar, id: int) -> bool:
    """Whether a token may come next."""
    (mask,) = grammar.masks([[]])
    assert isinstance(mask, np.ndarray)
    return bool(mask[id // 8] >> id % 8 & 1)


def spelled(grammar: Grammar, text: str) -> bool:
    """Whether the grammar lets a text come letter by letter, and end."""
    ids = [ord(letter) for letter in text]
    for count, id in enumerate(ids):
        grammar.advance(ids[:count])
        if not has(grammar, id):
            return False
    grammar.advance(ids)
    return has(grammar, 0)


def compiled(grammars: Grammars, **form: object) -> Grammar:
    found = grammars.compile(SamplingParams(structured_outputs=form))
    assert found is not None
    return found


def test_json_with_a_large_vocabulary(large: Grammars) -> None:
    text = json.dumps({"a b": [1, -2.5, {"c": None}], "d": "x\ny"}, indent=3)
    assert spelled(compiled(large, grammar=JSON), text)
    assert not spelled(compiled(large, grammar=JSON), text[:-1])


@pytest.mark.parametrize("text", [BOMB, AMBIGUOUS, MANY])
def test_bombs_with_a_large_vocabulary(large: Grammars, text: str) -> None:
    with pytest.raises(RequestError, match="simplify the grammar"):
        spelled(compiled(large, grammar=text), "for (a = b; c)" * 20)


def test_thousands_of_choices(large: Grammars) -> None:
    texts = [f"option {i}" for i in range(3000)] + ["a", "ab", 'q"u\\o\n/', "%ignore /a/"]
    grammar = compiled(large, choice=texts)
    for text in ("option 7", "option 2999", *texts[-4:]):
        assert spelled(grammar.copy(), text), text
    assert not spelled(grammar.copy(), "option 3000")
    assert compiled(large, choice=["option 7"]).forced([])


def pocket() -> Grammars:
    return Grammars(lambda: read_codec(Path(PATH)).backend, 4096, frozenset([0]))


def test_masks_that_take_long_end_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FEW_ITEMS", 1)
    grammars = pocket()
    grammar, ids = compiled(grammars, grammar=JSON), read_codec(Path(PATH)).encode("{\n")
    (expected,) = grammar.masks([[]])
    times = iter([0.0, 1.0, 1.0, 2.0])  # the first mask is known
    monkeypatch.setattr(time, "thread_time", lambda: next(times, 0.0))
    first, behind = grammar.masks([[], ids])
    assert isinstance(behind, str)
    assert "takes too long" in behind  # behind a draft it is told, and nothing is lost
    (again,) = grammar.masks([ids])
    assert np.array_equal(first, expected)
    (fresh,) = grammar.copy().masks([ids])
    assert isinstance(fresh, np.ndarray)
    assert np.array_equal(again, fresh)
    monkeypatch.setattr(limits, "SLOWEST_MASK_SECONDS", -1.0)
    with pytest.raises(RequestError, match="takes too long"):
        grammar.copy().masks([[]])
    with pytest.raises(RequestError, match="takes too long"):
        compiled(grammars, grammar=JSON.replace("true", "yes"))


def test_a_busy_machine_refuses_no_grammar(
    monkeypatch: pytest.MonkeyPatch, large: Grammars
) -> None:
    """Where neighbours and page faults lengthen CPU time, work is counted and timed again."""
    grammar = compiled(large, grammar=JSON)
    ticks = itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: float(next(ticks)))  # a second each call
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {}}}}
    assert spelled(compiled(large, json=schema), '{"a": [1, {"b": null}]}')
    times = iter([0.0, 1.0])  # the first mask is slow, the same again is not
    monkeypatch.setattr(time, "thread_time", lambda: next(times, 1.0))
    assert spelled(grammar, '{"a":   [1]}')
    assert next(times, None) is None


def test_a_refused_grammar_is_freed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the cyclic collector runs next: a grammar may hold 60 MB."""
    made: list[weakref.ref[Grammar]] = []

    class Watched(Grammar):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(weakref.ref(self))

    monkeypatch.setattr(limits, "Grammar", Watched)
    monkeypatch.setattr(limits, "SLOWEST_MASK_SECONDS", -1.0)
    monkeypatch.setattr(limits, "FEW_ITEMS", 1)
    grammars = pocket()
    gc.disable()
    try:
        with pytest.raises(RequestError):
            compiled(grammars, grammar=JSON)
        assert len(made) == 1
        assert made[0]() is None
    finally:
        gc.enable()


def test_a_tokenizer_that_cannot_be_read_is_said() -> None:
    grammars = Grammars(lambda: Tokenizer(models.WordLevel({"a": 0, "b": 1})), 2, frozenset([0]))
    with pytest.raises(RequestError, match="this model's tokenizer cannot be used"):
        compiled(grammars, regex="b")


def test_prompts_of_one_call_compile_their_form_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0

    def counted(*args: object, **more: object) -> LLMatcher:
        nonlocal made
        made += 1
        return LLMatcher(*args, **more)

    monkeypatch.setattr(limits, "LLMatcher", counted)
    grammars = Grammars(lambda: read_codec(Path(PATH)).backend, 4096, frozenset([0]))
    first, second = (compiled(grammars, regex="[a-z]+") for _ in range(2))
    assert made == 1
    assert first is not second
    assert np.array_equal(first.masks([[]])[0], second.masks([[]])[0])
    del first, second  # a form is kept for as long as a request uses it
    compiled(grammars, regex="[a-z]+")
    assert made == 2


@pytest.mark.parametrize("form", [{"regex": "\ud800"}, {"choice": ["a", "\udfff"]}])
def test_lone_surrogates_are_refused(form: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="give a text without lone surrogates"):
        StructuredOutputsParams(**form)


@pytest.mark.parametrize(
    "form", [{"json": {"type": "\x1b]0;title\x07"}}, {"grammar": f"root ::= a{'0' * 5000}"}]
)
def test_what_the_parser_says_is_one_printable_line(form: dict[str, Any]) -> None:
    grammars = Grammars(lambda: read_codec(PATH).backend, 5000, frozenset({0}))
    with pytest.raises(RequestError, match="correct it") as refused:
        grammars.compile(SamplingParams(structured_outputs=form))
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 500
