"""Every sampling option against a float64 reference, inside drafts, and against transformers."""

from __future__ import annotations

import itertools
import json
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.audit import oracle
from outrider.base.types import Request
from outrider.errors import ConfigError, RequestError
from outrider.params import SamplingParams, StructuredOutputsParams
from outrider.sampling.arrays import softmax
from outrider.sampling.grammar import Grammar, Grammars, keep
from outrider.sampling.pipeline import Logits, RequestPipeline, SequencePipeline
from tests.support.exactness import VOCABULARY, tiny_tokenizer

WIDTH = 50
END = 3
BAD_WORDS = [[7], [8, 9], [5, 6, 7]]
CHOICES: dict[str, list[Any]] = {
    "temperature": [0.0, 0.6, 1.0, 1.7],
    "top_k": [0, 1, 7],
    "top_p": [1.0, 0.7],
    "min_p": [0.0, 0.1],
    "repetition_penalty": [1.0, 1.4, 0.8],
    "presence_penalty": [0.0, 0.7, -1.5],
    "frequency_penalty": [0.0, 0.3, -0.4],
    "logit_bias": [None, {4: 3.5, 11: -100.0, 12: 100.0}],
    "allowed_token_ids": [None, list(range(2, 30))],
    "min_tokens": [0, 4],
}


def pipeline_of(
    params: SamplingParams, prompt: list[int], bad_words: list[list[int]] | None = None
) -> SequencePipeline:
    request = Request("r", tuple(prompt), params, 0, frozenset([END]))
    return SequencePipeline(RequestPipeline(request, WIDTH, bad_words or []))


def reference(
    raw: Logits,
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    bad_words: list[list[int]],
) -> oracle.Distribution:
    """The distribution of one position in float64."""
    z = oracle.processed(
        raw, prompt, output,
        allowed=params.allowed_token_ids or (), bad_words=bad_words, ends=[END],
        min_tokens=params.min_tokens, logit_bias=params.logit_bias,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty, presence_penalty=params.presence_penalty,
    )  # fmt: skip
    return oracle.distribution(z, params.temperature, params.top_k, params.top_p, params.min_p)


def normalised(z: Logits, params: SamplingParams) -> oracle.Distribution:
    """What the engine draws from."""
    if params.greedy:
        return np.asarray(np.arange(len(z)) == int(z.argmax()), np.float64)
    return softmax(z.astype(np.float64))


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=pytest.mark.engine) if n % 4 == 0 else n for n in range(40)]
)
def test_every_position_of_a_draft_has_the_law_of_the_reference(seed: int) -> None:
    """Random options together; rows of a random tree, each as if its path were output."""
    rng = random.Random(seed)
    generator = np.random.default_rng(seed)
    for _ in range(5):
        params = SamplingParams(**{name: rng.choice(list(c)) for name, c in CHOICES.items()})
        bad_words = rng.choice([[], BAD_WORDS])
        # Few different ids, so that penalties and bad words meet them again and again.
        prompt = [rng.randrange(4, 10) for _ in range(rng.randint(1, 6))]
        output = [rng.randrange(4, 12) for _ in range(rng.randint(0, 6))]
        paths: list[list[int]] = [[]]
        for _ in range(rng.randint(0, 7)):
            paths.append([*rng.choice(paths), rng.randrange(4, 12)])
        raw = generator.standard_normal((len(paths), WIDTH), np.float32) * 2
        together = pipeline_of(params, prompt, bad_words)
        z = together.apply(raw.copy(), prompt + output, paths)
        for row, path in enumerate(paths):
            expected = reference(raw[row], params, prompt, [*output, *path], bad_words)
            got = normalised(z[row], params)
            assert oracle.total_variation(expected, got) < 1e-5, (params, path)
            # The same bits as plain decoding has after the same tokens.
            alone = pipeline_of(params, prompt, bad_words)
            plain = alone.apply(raw[row : row + 1].copy(), prompt + output + path, [[]])[0]
            assert np.array_equal(plain, z[row])


@pytest.mark.engine
def test_a_law_follows_its_sequence_step_by_step() -> None:
    """What was drafted and refused leaves nothing behind."""
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2)
    generator = np.random.default_rng(0)
    rng = random.Random(0)
    distribution, tokens = pipeline_of(params, [4, 5]), [4, 5]
    for _ in range(20):
        draft = [rng.randrange(4, 9) for _ in range(3)]
        raw = generator.standard_normal((4, WIDTH), np.float32)
        z = distribution.apply(raw.copy(), tokens, [draft[:i] for i in range(4)])
        for i in range(4):
            output = tokens[2:] + draft[:i]
            expected = reference(raw[i], params, [4, 5], output, [])
            assert oracle.total_variation(expected, normalised(z[i], params)) < 1e-5
        tokens += [rng.randrange(4, 9) for _ in range(rng.randint(1, 3))]


THEIRS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "temperature": ({"temperature": 0.6}, [TemperatureLogitsWarper(0.6)]),
    "top_k": ({"top_k": 7}, [TopKLogitsWarper(7)]),
    "top_p": ({"top_p": 0.7}, [TopPLogitsWarper(0.7)]),
    "min_p": ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
    "repetition_penalty": (
        {"repetition_penalty": 1.4},
        [RepetitionPenaltyLogitsProcessor(1.4)],
    ),
    "logit_bias": (
        {"logit_bias": {4: 3.5, 11: -7.0}},
        [SequenceBiasLogitsProcessor({(4,): 3.5, (11,): -7.0})],
    ),
    "bad_words": ({}, [NoBadWordsLogitsProcessor([[7], [8, 9]], eos_token_id=END)]),
    "min_tokens": ({"min_tokens": 5}, [MinNewTokensLengthLogitsProcessor(3, 5, END)]),
    "all in one order": (
        {"repetition_penalty": 1.2, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
        [
            RepetitionPenaltyLogitsProcessor(1.2),
            TemperatureLogitsWarper(0.8),
            TopKLogitsWarper(20),
            TopPLogitsWarper(0.9),
        ],
    ),
}


@pytest.mark.engine
@pytest.mark.parametrize("name", THEIRS)
def test_parity_with_transformers(name: str) -> None:
    options, processors = THEIRS[name]
    generator = torch.Generator().manual_seed(1)
    prompt, output = [4, 5, 6], [7, 8]
    for _ in range(20):
        raw = torch.randn(1, WIDTH, generator=generator) * 2
        bad_words = [[7], [8, 9]] if name == "bad_words" else []
        z = pipeline_of(SamplingParams(**options), prompt, bad_words).apply(
            raw.numpy().copy(), prompt + output, [[]]
        )
        ids = torch.tensor([prompt + output])
        theirs = LogitsProcessorList(processors)(ids, raw.clone())
        np.testing.assert_allclose(softmax(z), theirs.softmax(-1), atol=1e-6, rtol=1e-5)


@pytest.mark.engine
def test_min_p_comes_before_top_p_as_in_vllm() -> None:
    """transformers has top_k, top_p, min_p; vLLM has min_p first. The two differ here."""
    raw = torch.tensor([[3.0, 2.0, 1.0, 0.0, *[-1.0] * (WIDTH - 4)]])
    params = SamplingParams(min_p=0.2, top_p=0.8)
    ours = np.isfinite(pipeline_of(params, [4]).apply(raw.numpy().copy(), [4], [[]])).sum()
    both = [TopPLogitsWarper(0.8), MinPLogitsWarper(0.2)]
    theirs = LogitsProcessorList(both)(torch.tensor([[4]]), raw.clone()).isfinite().sum()
    assert (int(ours), int(theirs)) == (2, 2)
    raw[0, 2:] = 0.6
    ours = np.isfinite(pipeline_of(params, [4]).apply(raw.numpy().copy(), [4], [[]])).sum()
    theirs = LogitsProcessorList(both)(torch.tensor([[4]]), raw.clone()).isfinite().sum()
    assert int(ours) < int(theirs) or int(ours) == 2


def test_a_processor_sees_what_was_drafted_before_its_position() -> None:
    seen: list[list[int]] = []

    def note(ids: list[int], logits: Logits) -> Logits:
        seen.append(ids)
        assert logits.shape == (WIDTH,)
        logits[ids[-1]] = -math.inf
        return logits

    distribution = pipeline_of(SamplingParams(logits_processors=[note]), [4, 5])
    z = distribution.apply(np.zeros((3, WIDTH), np.float32), [4, 5, 6], [[], [7], [7, 8]])
    assert [list(ids) for ids, _ in itertools.groupby(seen)] == [
        [4, 5, 6],
        [4, 5, 6, 7],
        [4, 5, 6, 7, 8],
    ]
    assert [np.flatnonzero(np.isneginf(row)).tolist() for row in z] == [[6], [7], [8]]


def test_a_processor_fails_only_where_it_is_reached() -> None:
    """Its error after drafted tokens is no error unless they become output."""

    def touchy(ids: list[int], logits: Logits) -> Logits:
        if ids[-1] == 9:
            raise KeyError(9)
        return logits

    distribution = pipeline_of(SamplingParams(logits_processors=[touchy]), [4])
    z = distribution.apply(np.zeros((2, WIDTH), np.float32), [4], [[], [9]])
    assert np.isfinite(z[0]).all()
    assert np.isnan(z[1]).all()
    assert distribution.error == "logits_processors[0] raised KeyError: 9"
    distribution.apply(np.zeros((1, WIDTH), np.float32), [4, 5], [[]])
    assert distribution.error is None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"logit_bias": {WIDTH: 1.0}}, "logit_bias has token id 50, which is out of vocabulary"),
        ({"allowed_token_ids": [1, 99]}, "allowed_token_ids has token id 99"),
        ({"allowed_token_ids": [7]}, "together leave no token to sample"),
        ({"allowed_token_ids": [END], "min_tokens": 2}, "together leave no token to sample"),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused(
    options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RequestError, match=sentence):
        pipeline_of(SamplingParams(**options), [4], [[7]])


# Structured output.


def grammars() -> Grammars:
    return Grammars(tiny_tokenizer, VOCABULARY, frozenset([END]))


def allowed(grammar: Grammar, *paths: list[int]) -> NDArray[np.bool_]:
    """bool [paths, VOCABULARY]"""
    masks = [mask for mask in grammar.masks(paths) if isinstance(mask, np.ndarray)]
    z = np.zeros((len(paths), VOCABULARY), np.float32)
    for row, mask in zip(z, masks, strict=True):
        keep(row, mask)
    return np.isfinite(z)


def texts(form: dict[str, Any], count: int) -> list[str]:
    """Random texts that the grammar lets a flat model write."""
    tokenizer = tiny_tokenizer()
    rng = np.random.default_rng(0)
    found = []
    params = SamplingParams(structured_outputs=form)
    for _ in range(count):
        grammar = grammars().compile(params)
        assert grammar is not None
        tokens: list[int] = []
        while not tokens or tokens[-1] != END:
            grammar.advance(tokens)
            # Short words first, so that texts come to an end.
            choices = np.flatnonzero(allowed(grammar, [])[0]).tolist()
            tokens.append(END if END in choices else int(rng.choice(choices)))
            assert len(tokens) < 200
        found.append(tokenizer.decode(tokens))
    return found


def test_a_schema_gives_json() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "on": {"type": "boolean"}},
        "required": ["a", "on"],
        "additionalProperties": False,
    }
    for text in texts({"json": schema}, 5):
        found = json.loads(text)
        assert set(found) == {"a", "on"}
        assert isinstance(found["a"], int)
        assert isinstance(found["on"], bool)


def test_regex_choice_and_grammar() -> None:
    assert all(t in ("tea", "coffee") for t in texts({"choice": ["tea", "coffee"]}, 5))
    assert all(t.strip("ab") == "" and t for t in texts({"regex": "[ab]+"}, 5))
    gbnf, lark = 'root ::= ("ab" | "c" root)', 'start: "x" | "y" start'
    assert all(t.lstrip("c") == "ab" for t in texts({"grammar": gbnf}, 5))
    assert all(t.lstrip("y") == "x" for t in texts({"grammar": lark}, 5))


@pytest.mark.engine
def test_masks_inside_a_draft_are_those_of_plain_decoding() -> None:
    tokenizer = tiny_tokenizer()
    params = SamplingParams(structured_outputs={"json": {"type": "array"}})
    ids = tokenizer.encode('[1,[true,"an"],2]').ids
    whole = grammars().compile(params)
    assert whole is not None
    paths = [ids[:i] for i in range(len(ids) + 1)]
    together = allowed(whole, *paths)
    for i in range(len(paths)):
        alone = grammars().compile(params)
        assert alone is not None
        alone.advance(ids[:i])
        assert np.array_equal(allowed(alone, [])[0], together[i])


@pytest.mark.engine
def test_drafts_are_cut_and_continued() -> None:
    tokenizer = tiny_tokenizer()
    schema = {
        "type": "object",
        "properties": {"name": {"type": "integer"}},
        "required": ["name"],
        "additionalProperties": False,
    }
    params = SamplingParams(structured_outputs={"json": schema})
    request = Request("r", (4,), params, 0, frozenset([END]))
    distribution = SequencePipeline(
        RequestPipeline(request, VOCABULARY, grammar=grammars().compile(params))
    )
    tokens, parents = distribution.fit([4], [], [], 8)
    assert parents == list(range(-1, len(tokens) - 1))
    assert '{"name":'.startswith(tokenizer.decode(tokens))
    assert tokens, "the schema forces how its text begins"
    wrong = tokenizer.encode("[1").ids
    assert (
        distribution.fit([4], [*tokens[:1], *wrong], [-1, 0, 1][: 1 + len(wrong)], 8)[0] == tokens
    )
    # A tree keeps the branches that the grammar has.
    kept, above = distribution.fit([4], [wrong[0], tokens[0], wrong[0]], [-1, -1, 1], 8)
    assert (kept, above) == ([tokens[0]], [-1])


@pytest.mark.parametrize(
    ("form", "sentence"),
    [
        ({"json": "{"}, "it is no JSON"),
        ({"json": "[1]"}, "give a JSON schema"),
        ({"regex": ""}, "give a text that is not empty"),
        ({"choice": []}, "give one text or more"),
        ({}, "has nothing; give exactly one of json, regex, choice, grammar"),
        ({"json": "{}", "regex": "a"}, "has json, regex; give exactly one"),
        ({"jsno": "{}"}, "no option 'jsno'; did you mean 'json'"),
    ],
)
def test_bad_forms_are_refused(form: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        StructuredOutputsParams(**form)


@pytest.mark.parametrize(
    ("form", "sentence"),
    [
        ({"regex": "("}, r"structured_outputs.regex cannot be used: .*correct it"),
        ({"json": {"type": "nonsense"}}, r"structured_outputs.json cannot be used"),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 2}}, r"structured_outputs.json"),
        ({"json": {"$ref": "#/nowhere"}}, r"structured_outputs.json cannot be used"),
        ({"json": False}, "json is False; give a JSON schema"),
        ({"grammar": "root ::= missing"}, r"structured_outputs.grammar cannot be used"),
        ({"grammar": "no grammar at all"}, r"structured_outputs.grammar cannot be used"),
        ({"regex": "\u00e9+"}, r"structured_outputs.regex lets no token of this model begin"),
    ],
)
def test_impossible_grammars_are_refused(form: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ConfigError, RequestError), match=sentence):
        grammars().compile(SamplingParams(structured_outputs=form))


def test_a_grammar_that_no_token_continues_leaves_nothing() -> None:
    """The tokenizer cannot write what must come: no EOS either, the output is not complete."""
    grammar = grammars().compile(SamplingParams(structured_outputs={"regex": "[0-9]\u00e9"}))
    assert grammar is not None
    digit = int(np.flatnonzero(allowed(grammar, [])[0])[0])
    assert not allowed(grammar, [], [digit])[1].any()


def test_a_model_without_text_has_no_structured_output() -> None:
    params = SamplingParams(structured_outputs={"regex": "a"})
    with pytest.raises(RequestError, match="need a model with a tokenizer"):
        Grammars(None, 9, frozenset([1])).compile(params)
    with pytest.raises(RequestError, match="need a model with an end-of-sequence token"):
        Grammars(tiny_tokenizer, VOCABULARY, frozenset()).compile(params)
