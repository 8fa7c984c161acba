"""Grammars that are too much for the parser end their own request and nobody else's."""

from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.outputs import GenerationError
from outrider.pocket import PATH
from outrider.sampling.grammar import Grammars
from outrider.text.template import TextCodec

BOMB = "start: s\ns: s s | s s s | A |\nA: /.|\\n/"
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
    llm.engine.check()
    assert llm.generate("def f(", plain)[0].outputs[0].text == expected.outputs[0].text


def test_what_the_parser_says_of_drafts_reaches_no_output() -> None:
    """Behind drafted tokens it may give up: the grammar goes on from the committed ones."""
    import torch

    codec = TextCodec(Path(PATH))
    size = codec.backend.get_vocab_size()
    form = SamplingParams(structured_outputs={"grammar": BOMB})
    grammar = Grammars(codec.backend, size, frozenset([0])).compile(form)
    assert grammar is not None
    ids = codec.encode("abcdefgh" * 8)
    logits = torch.zeros(2, size)
    error = grammar.restrict(logits, [[], ids])
    assert error is not None
    assert logits[1].isnan().all()
    clean = torch.zeros(1, size)
    assert grammar.restrict(clean, [[]]) is None
    assert torch.equal(clean[0], logits[0])
    grammar.advance(ids[:1])
    assert grammar.accepts(ids[1:2]) == 1
