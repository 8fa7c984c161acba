"""JSON schemas: which keys and blanks an output may have, whatever the schema is made of."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from outrider import SamplingParams
from outrider.checkpoints.tokenizers import read_codec
from outrider.errors import RequestError
from outrider.params import StructuredOutputsParams
from outrider.pocket import PATH
from outrider.sampling import schemas
from outrider.sampling.grammar import Grammar, Grammars

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
B: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}}}
DEFS = {"A": A, "B": B}
CODEC = read_codec(Path(PATH))
GRAMMARS = Grammars(lambda: CODEC.backend, 4096, frozenset([0]))


def compiled(**form: Any) -> Grammar:
    found = GRAMMARS.compile(SamplingParams(structured_outputs=form))
    assert found is not None
    return found


def allows(grammar: Grammar, text: str) -> bool:
    """Whether a whole output may be ``text``."""
    ids = CODEC.encode(text, False)
    own = grammar.copy()
    if own.accepts(ids) < len(ids):
        return False
    own.advance(ids)
    (mask,) = own.masks([[]])
    assert isinstance(mask, np.ndarray)
    return bool(mask[0] & 1)


def fits(schema: dict[str, Any], value: Any) -> bool:
    return allows(compiled(json=schema), json.dumps(value))


CLOSED: list[tuple[str, dict[str, Any], list[Any], list[Any]]] = [
    ("plain", A, [{"a": 1}, {}], [{"c": 1}, {"a": 1, "c": 2}]),
    ("nested", {"properties": {"x": A}, "type": "object"}, [{"x": {"a": 1}}], [{"x": {"c": 1}}]),
    ("items", {"type": "array", "items": A}, [[{"a": 1}]], [[{"a": 1, "c": 1}]]),
    ("tuple", {"type": "array", "prefixItems": [A]}, [[{"a": 1}]], [[{"c": 1}]]),
    ("map", {"type": "object", "additionalProperties": A}, [{"k": {"a": 1}}], [{"k": {"c": 1}}]),
    ("reference", {"$ref": "#/$defs/A", "$defs": DEFS}, [{"a": 1}], [{"c": 1}]),
    ("definition of old", {"$ref": "#/definitions/A", "definitions": DEFS}, [{"a": 1}], [{"c": 1}]),
    ("union", {"anyOf": [A, B, {"type": "null"}]}, [{"a": 1}, {"b": 1}, None],
     [{"c": 1}, {"a": 1, "b": 1}]),
    ("intersection", {"allOf": [A, B]}, [{"a": 1, "b": 2}, {"b": 2}], [{"a": 1, "c": 1}]),
    ("inheritance", {"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": DEFS}, [{"a": 1, "b": 2}],
     [{"a": 1, "b": 2, "c": 3}]),
    ("reference and more", {"$ref": "#/$defs/A", "properties": {"b": {}}, "$defs": DEFS},
     [{"a": 1, "b": 2}], [{"a": 1, "c": 3}]),
    ("one of a list", {"allOf": [{"$ref": "#/$defs/A"}], "title": "t", "$defs": DEFS},
     [{"a": 1}], [{"c": 1}]),
    ("union beside properties", {"type": "object", "properties": {"k": {"type": "integer"}},
     "anyOf": [A, {"required": ["z"]}]}, [{"k": 1, "a": 1}, {"k": 1, "z": 2}],
     [{"k": 1, "c": 1}, {"k": 1, "a": 1, "c": 1}]),
    ("recursive", {"type": "object", "properties": {"n": {"items": {"$ref": "#"}}}},
     [{"n": [{"n": []}]}], [{"n": [{"c": 1}]}]),
    ("recursive by inheritance", {"$ref": "#/$defs/D", "$defs": {"A": A, "D": {
     "allOf": [{"$ref": "#/$defs/A"}], "properties": {"next": {"$ref": "#/$defs/D"}}}}},
     [{"a": 1, "next": {"a": 2, "next": {}}}], [{"next": {"c": 1}}]),
    ("required besides", {"type": "object", "properties": {"a": {"type": "integer"}},
     "required": ["a", "z"]}, [{"a": 1, "z": "any"}], [{"a": 1, "z": 1, "c": 1}]),
    ("patterns", {"type": "object", "patternProperties": {"^x": {"type": "integer"}}},
     [{"x1": 1}, {}], [{"y": 1}]),
    ("unevaluated", {"allOf": [A, B], "unevaluatedProperties": False}, [{"a": 1, "b": 2}],
     [{"c": 1}]),
    ("tagged", {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "$defs": DEFS,
     "discriminator": {"propertyName": "a"}}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "right", "wrong"), [c[1:] for c in CLOSED], ids=[c[0] for c in CLOSED]
)
def test_objects_have_no_keys_but_those_of_the_schema(
    schema: dict[str, Any], right: list[Any], wrong: list[Any]
) -> None:
    before = json.dumps(schema)
    assert [value for value in right if not fits(schema, value)] == []
    assert [value for value in wrong if fits(schema, value)] == []
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    "schema",
    [
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": {"type": "integer"}},
        {**A, "unevaluatedProperties": True},
        {"allOf": [{**A, "additionalProperties": True}, B]},
        {"anyOf": [{**A, "additionalProperties": True}, B]},
        {"type": "object"},
    ],
)
def test_objects_that_say_so_are_open(schema: dict[str, Any]) -> None:
    assert fits(schema, {"a": 1, "c": 1})


def test_all_are_open_where_the_caller_says_so() -> None:
    for schema in (A, {"anyOf": [A, B]}, {"allOf": [A, B]}, {"$ref": "#/$defs/A", "$defs": DEFS}):
        grammar = compiled(json=schema, disable_additional_properties=False)
        assert allows(grammar, '{"a": 1, "c": 1}')
        assert not allows(compiled(json=schema, disable_additional_properties=True), '{"c": 1}')
    closed = {**A, "additionalProperties": False}
    assert not allows(compiled(json=closed, disable_additional_properties=False), '{"c": 1}')
    with pytest.raises(ValueError, match="give True or False"):
        StructuredOutputsParams(json=A, disable_additional_properties=None)  # type: ignore[arg-type]


def test_values_are_no_schemas() -> None:
    odd = {"properties": {"a": 1}, "c": [{"properties": {}}]}
    for schema in ({"const": odd}, {"enum": [odd]}):
        assert fits({"type": "object", "properties": {"v": schema}}, {"v": odd})
    named = {"type": "object", "properties": {"properties": {"type": "integer"}}}
    assert fits(named, {"properties": 1})


LAYOUTS = [
    '{"a": 1, "b": [{"c": null}]}', '{"a":1,"b":[{"c":null}]}', '{ "a" : 1 , "b" : [ { } ] }',
    json.dumps({"a": 1, "b": [{"c": [1, {}]}]}, indent=4),
    json.dumps({"a": 1, "b": [{"c": [1, {}]}]}, indent="\t"),
]  # fmt: skip
ANY_PAIR = {"type": "object", "properties": {"a": {}, "b": {}}}


@pytest.mark.parametrize("form", [
    {"json": ANY_PAIR}, {"json": {"type": "object"}},
    {"grammar": f"start: %json {json.dumps(ANY_PAIR)}"},
    {"json": ANY_PAIR | {"x-guidance": {"whitespace_flexible": True}}},
])  # fmt: skip
def test_blanks_are_as_people_write_them_and_bounded(form: dict[str, Any]) -> None:
    grammar = compiled(**form)
    assert [text for text in LAYOUTS if not allows(grammar, text)] == []
    for blanks in ("  ", "\n\n", "\n" + " " * 33, "\t\t"):
        assert not allows(grammar, f'{{"a":{blanks}1}}'), blanks
    rng = random.Random(1)
    for begin in ("{", '{"a"', '{"a": 1'):  # whatever blanks come, they come to an end
        own, output = grammar.copy(), CODEC.encode(begin, False)
        for _ in range(40):
            own.advance(output)
            allowed = [id for id in BLANK_IDS if own.accepts([id])]
            if not allowed:
                break
            output = [*output, rng.choice(allowed)]
        assert not allowed


BLANK_IDS = [i for t, i in CODEC.backend.get_vocab().items() if t and not t.strip("ĠĊĉč")]


def test_a_schema_may_choose_its_own_blanks() -> None:
    compact = ANY_PAIR | {"x-guidance": {"whitespace_flexible": False}}
    assert allows(compiled(json=compact), '{"a":1}')
    assert not allows(compiled(json=compact), '{"a": 1}')
    own = ANY_PAIR | {"x-guidance": {"whitespace_pattern": " {3}"}}
    assert allows(compiled(json=own), '{   "a":   1   }')
    assert not allows(compiled(json=own), '{"a": 1}')


NAMED = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
EMPTY: list[dict[str, Any]] = [
    NAMED | {"patternProperties": {"^a$": {}}, "additionalProperties": False},
    NAMED | {"patternProperties": {"^a$": {}}},
    NAMED | {"patternProperties": {"[^\\s\\S]": {}, "^a{1}$": {"type": "number"}}},
    NAMED | {"patternProperties": {".*": {"type": "integer"}}, "additionalProperties": True,
             "properties": {"a": {}}, "maxProperties": 1},
    {"allOf": [NAMED, {"patternProperties": {"^a$": {}}}]},
    {"type": "object", "properties": {"a": {}}, "patternProperties": {"^b": False},
     "required": ["a"]},
    {"type": "object", "properties": {"a": {}}, "patternProperties": {"^a$": {"maximum": 1}}},
]  # fmt: skip


@pytest.mark.parametrize("schema", EMPTY)
def test_patterns_that_leave_no_key_end_the_object(schema: dict[str, Any]) -> None:
    grammar = compiled(json=schema)
    assert allows(grammar, '{"a": 1}')
    assert not allows(grammar, '{"a": "s", "b": 1}')
    ids = CODEC.encode('{"a": 1,', False)
    grammar.advance(ids[:-1])
    assert grammar.accepts(CODEC.encode(",", False)) == 0


def test_no_other_key_is_left_beside_all() -> None:
    schema = {"type": "object", "patternProperties": {".*": False}, "additionalProperties": True}
    assert fits(schema, {})
    assert not fits(schema, {"k": 1})
    grammar = compiled(json=schema)
    grammar.advance(CODEC.encode("{", False))
    assert grammar.accepts(CODEC.encode('"', False)) == 0
    with pytest.raises(RequestError, match="cannot be used"):
        compiled(json=schema | {"minProperties": 1})


def chain(length: int, wide: int) -> dict[str, Any]:
    """Definitions of which each names the next one twice."""
    made = {
        f"D{i}": {"allOf": [{"$ref": f"#/$defs/D{i + 1}"}] * 2, "properties": {f"p{i}": {}}}
        for i in range(length)
    }
    last = {"type": "object", "properties": {f"{'k' * 99}{i}": {} for i in range(wide)}}
    return {"$ref": "#/$defs/D0", "$defs": {**made, f"D{length}": last}}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize("schema", [
    chain(40, 1), chain(5, 2_000), deep(400),
    {"properties": {f"{'k' * 999}{i}": {} for i in range(99)}, "anyOf": [{"required": ["z"]}] * 99},
])  # fmt: skip
def test_schemas_that_grow_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"too large|too deep|cannot be used"):
        compiled(json=schema)


@pytest.mark.parametrize("schema", [
    {"$ref": "#"}, {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}},
    {"allOf": [{"$ref": "#/$defs/A"}], "properties": {"x": {}},
     "$defs": {"A": {"allOf": [{"$ref": "#/$defs/A"}]}}},
    {"$ref": "#/nowhere", "properties": {"a": {}}}, {"$ref": ["#"]}, {"$ref": "http://x.y/z"},
    {"properties": [1]},
    {"properties": [1], "patternProperties": {}, "required": ["a"]},
    {"properties": {"a": 1}}, {"allOf": {"a": 1}}, {"anyOf": [1, None]},
    {"patternProperties": {"(": {}}}, {"patternProperties": {"(?=a)": {}}}, {"required": [1, None]},
    {"type": 7, "properties": {}}, {"x-guidance": 5}, {"x-guidance": {"whitespace_pattern": 5}},
    {"$defs": 4, "allOf": [{"$ref": "#/allOf/1"}, A]}, {"properties": {"\ud800": {}}},
    {"$ref": "#/allOf/99999999999999999999", "allOf": [A]}, {"items": [A, 3], "type": "array"},
])  # fmt: skip
def test_odd_schemas_are_refused_in_a_sentence_or_served(schema: dict[str, Any]) -> None:
    said = ""
    try:
        compiled(json=schema)
    except RequestError as error:
        said = str(error)
    assert len(said.splitlines()) <= 1


def test_few_patterns_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0

    def counted(*args: Any, **more: Any) -> LLMatcher:
        nonlocal made
        made += 1
        return LLMatcher(*args, **more)

    monkeypatch.setattr(schemas, "LLMatcher", counted)
    many = {"type": "object", "patternProperties": {f"^{i}$": {} for i in range(500)}}
    schemas.held({"type": "object", "properties": {"a": many, "b": many}})
    assert made == schemas.MOST_TRIES


def test_added_tokens_that_are_not_special_are_text() -> None:
    """As <think> and <tool_call> are in Qwen's tokenizers."""
    vocabulary = {chr(code): code - 32 for code in range(33, 127)} | {"<|end|>": 0, "Ġ": 95}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(["<think>", "<a b>"])
    tokenizer.add_special_tokens(["<|end|>", "<|start|>"])
    think, odd, start = map(tokenizer.token_to_id, ("<think>", "<a b>", "<|start|>"))
    grammars = Grammars(lambda: tokenizer, tokenizer.get_vocab_size() + 3, frozenset([0]))
    for form in ({"regex": "(.|\n)*"}, {"choice": ["<think>", "<a b>"]}):
        grammar = grammars.compile(SamplingParams(structured_outputs=form))
        assert grammar is not None
        assert grammar.accepts([think]) == grammar.accepts([odd]) == 1
        assert grammar.accepts([start]) == 0
