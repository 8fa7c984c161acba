"""Prepares JSON schemas for grammars: closes objects, bounds whitespace, removes dead ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from ..errors import RequestError

Schema = Any
"""A JSON schema: a dict, or true or false."""
BLANKS = r"( |\n[ \t]{0,32})"
"""Whitespace between two tokens of JSON: a space, or a line break and an indent."""
MOST_STEPS = 100_000  # most visited parts of a schema and added keys, with references followed
CHARACTERS_A_STEP = 16  # characters of a key that count as a step
MOST_TRIES = 64  # most patterns of a schema that are tested for whether they allow a key
MOST_NAMES = 256  # most properties beside patterns that are tested
FUEL = 100_000  # limit of the parser's work for one pattern, about 2 ms
QUOTE = ord('"')
BRANCHES = ("anyOf", "oneOf")
IN_PLACE = ("allOf", *BRANCHES)  # keywords with lists of schemas for the value itself
MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("items", "prefixItems")
EVERY_LIST = (*LISTS, *IN_PLACE)
SINGLE = ("items", "additionalItems", "additionalProperties")
"""Keywords with schemas for parts of the value. Objects in ``not`` are not closed."""
OPENINGS = ("additionalProperties", "unevaluatedProperties")


def opened(schema: Schema) -> Schema:
    """Return the schema with objects open unless it says otherwise, as in JSON Schema."""
    if not isinstance(schema, dict):
        return schema
    made = _rebuilt(schema, opened, EVERY_LIST)
    if _shaped(schema) and not any(keyword in schema for keyword in OPENINGS):
        made["additionalProperties"] = True
    return made


def held(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema that outputs must follow.

    Objects with ``properties`` or ``patternProperties`` are closed, as if ``unevaluatedProperties``
    were false, unless the schema says otherwise. Whitespace between tokens is bounded unless the
    schema's ``x-guidance`` gives a pattern. Patterns that no key can match are removed. Raises
    RequestError for a schema that is too deep, or too large with its references followed.
    """
    closer = _Closer(schema)
    try:
        made = closer.close(schema)
        if closer.made:
            definitions = made.get("$defs")
            made["$defs"] = (definitions if isinstance(definitions, dict) else {}) | closer.made
        made = _without_dead_ends(made, iter(range(MOST_TRIES)))
    except RecursionError:
        raise RequestError("the schema is nested too deeply; flatten it.") from None
    own = made.get("x-guidance", {})
    if isinstance(own, dict) and own.get("whitespace_flexible", True):
        made["x-guidance"] = {"whitespace_pattern": BLANKS} | own
    return dict(made)


def _shaped(schema: dict[str, Any]) -> bool:
    return any(isinstance(schema.get(k), dict) for k in ("properties", "patternProperties"))


def _rebuilt(
    schema: dict[str, Any], change: Callable[[Schema], Schema], lists: tuple[str, ...] = LISTS
) -> dict[str, Any]:
    """Return the schema with ``change`` applied to the schemas for parts of its value."""
    made = dict(schema)
    for keyword, value in schema.items():
        if keyword in MAPS and isinstance(value, dict):
            made[keyword] = {name: change(part) for name, part in value.items()}
        elif keyword in lists and isinstance(value, list):
            made[keyword] = [*map(change, value)]
        elif keyword in SINGLE:
            made[keyword] = change(value)
    return made


def _listed(schema: dict[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


@dataclass
class _Keys:
    """The keys of an object that the schemas for one value know, in order; all values are True.

    ``shaped``: one of the schemas describes an object. ``open``: one of them allows other keys.
    """

    names: dict[str, bool] = field(default_factory=dict)
    patterns: dict[str, bool] = field(default_factory=dict)
    shaped: bool = False
    open: bool = False

    def __or__(self, other: _Keys) -> _Keys:
        return _Keys(
            self.names | other.names,
            self.patterns | other.patterns,
            self.shaped or other.shaped,
            self.open or other.open,
        )


NO_KEYS = _Keys()


class _Closer:
    """Closes the objects of one schema.

    ``additionalProperties`` knows only the properties beside it. So the parts of an intersection
    (``allOf``, ``$ref`` and the keywords beside them) stay open, and the whole is closed with the
    names of all parts. Each branch of a union (``anyOf``, ``oneOf``) is closed with the names
    beside the union. References point into ``root``.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._root, self._steps = root, MOST_STEPS
        self._names: dict[int, str] = {}
        self.made: dict[str, Schema] = {}
        """Open copies of definitions, for references within intersections."""

    def close(self, schema: Schema, beside: _Keys = NO_KEYS) -> Schema:
        """Return the closed schema; other schemas for the same value know the keys ``beside``."""
        if not isinstance(schema, dict):
            return schema
        if "discriminator" in schema and "anyOf" not in schema:
            # The branches differ in a key, so no value fits two, and anyOf means the same.
            schema = {"anyOf" if k == "oneOf" else k: v for k, v in schema.items()}
        every, reference = _listed(schema, "allOf"), schema.get("$ref")
        unions = {k: _listed(schema, k) for k in BRANCHES if k in schema}
        own = self._own(schema) | beside
        if own == NO_KEYS and not unions and len(every) + (reference is not None) == 1:
            made = self._parts(schema)  # definitions are closed in place
            return made | {"allOf": [*map(self.close, every)]} if every else made
        keys = own | self._all(every) | self._referred(reference)
        is_said = keys.open or "additionalProperties" in schema
        made = self._in_place(self._parts(schema), IN_PLACE if is_said else ("allOf",))
        if is_said:
            return made
        if unions:
            for keyword, branches in unions.items():
                known = keys
                for other in unions.keys() - {keyword}:
                    known = known | self._all(unions[other])
                made[keyword] = [self.close(branch, known) for branch in branches]
            return made
        kinds = schema.get("type", "object")
        if not keys.shaped or "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            return made
        for keyword, names in (("properties", keys.names), ("patternProperties", keys.patterns)):
            self._spend(sum(map(len, names)) // CHARACTERS_A_STEP + len(names))
            said = made.get(keyword, {})
            if names and isinstance(said, dict):  # the parser reports other types
                made[keyword] = said | {name: True for name in names if name not in said}
        made["additionalProperties"] = False
        return made

    def _parts(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return the schema with closed objects in the parts of its value."""
        self._spend(1)
        made = _rebuilt(schema, self.close)
        if isinstance(made.get("unevaluatedProperties"), bool):
            del made["unevaluatedProperties"]  # llguidance does not know it
        return made

    def _open(self, schema: Schema) -> Schema:
        """Return the schema with its own keys open and closed objects in its parts."""
        return self._in_place(self._parts(schema)) if isinstance(schema, dict) else schema

    def _in_place(
        self, made: dict[str, Any], keywords: tuple[str, ...] = IN_PLACE
    ) -> dict[str, Any]:
        """Return the schema with the other schemas for the same value opened."""
        for keyword in keywords:
            if isinstance(made.get(keyword), list):
                made[keyword] = [*map(self._open, made[keyword])]
        target = self._target(made.get("$ref"))
        if isinstance(target, dict):
            if id(target) not in self._names:
                known = self._root.get("$defs")
                name = f"open{len(self._names)}"
                while isinstance(known, dict) and name in known:
                    name += "_"
                self._names[id(target)] = name
                self.made[name] = self._open(target)
            made["$ref"] = f"#/$defs/{self._names[id(target)]}"
        return made

    def _own(self, schema: dict[str, Any]) -> _Keys:
        """Return the keys that the schema itself knows."""
        rest = [schema[keyword] for keyword in OPENINGS if keyword in schema]
        keys = _Keys(shaped=_shaped(schema) or bool(rest), open=any(r is not False for r in rest))
        for keyword, known in (("properties", keys.names), ("patternProperties", keys.patterns)):
            if isinstance(schema.get(keyword), dict):
                known.update(dict.fromkeys(schema[keyword], True))
        keys.names |= {n: True for n in _listed(schema, "required") if isinstance(n, str)}
        self._spend(1 + len(keys.names) + len(keys.patterns))
        return keys

    def _all(self, schemas: list[Schema], seen: tuple[int, ...] = ()) -> _Keys:
        """Return the keys that schemas know, including the schemas that they refer to."""
        keys = NO_KEYS
        for schema in schemas:
            if isinstance(schema, dict):
                keys = keys | self._own(schema) | self._referred(schema.get("$ref"), seen)
                for keyword in IN_PLACE:
                    keys = keys | self._all(_listed(schema, keyword), seen)
                self._spend(len(keys.names))
        return keys

    def _referred(self, reference: Any, seen: tuple[int, ...] = ()) -> _Keys:
        """Return the keys that the definition of a reference knows; none if it was visited."""
        target = self._target(reference)
        if reference is None or id(target) in seen:
            return NO_KEYS
        # A definition that cannot be found may have any keys.
        return _Keys(open=True) if target is None else self._all([target], (*seen, id(target)))

    def _target(self, reference: Any) -> Schema:
        """Return the schema that a reference points to; None if there is none."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        target: Any = self._root
        for part in _pointer(reference):
            if isinstance(target, dict) and part in target:
                target = target[part]
            elif isinstance(target, list) and part in map(str, range(len(target))):
                target = target[int(part)]
            else:
                return None
        return target if isinstance(target, dict | bool) else None

    def _spend(self, steps: int) -> None:
        self._steps -= steps
        if self._steps < 0:
            raise RequestError(
                "the schema is too large with its references followed; give a smaller one."
            )


def _pointer(reference: str) -> Iterator[str]:
    """Yield the parts of a reference's JSON pointer."""
    path = unquote(reference[1:])
    if path not in ("", "/"):
        for part in path.removeprefix("/").split("/"):
            yield part.replace("~1", "/").replace("~0", "~")


def _without_dead_ends(schema: Schema, tries: Iterator[int]) -> Schema:
    """Return the schema without patterns, and without other keys, that no key can match.

    A grammar would allow a comma before such a key, and then no token.
    """
    if not isinstance(schema, dict):
        return schema
    made = _rebuilt(schema, lambda part: _without_dead_ends(part, tries), EVERY_LIST)
    patterns, names = made.get("patternProperties"), made.get("properties", {})
    if not isinstance(patterns, dict) or not isinstance(names, dict) or len(names) > MOST_NAMES:
        return made
    left = dict(patterns)
    for pattern, value in patterns.items():
        if value is False or next(tries, None) is None or _has_key(names, {pattern: True}, False):
            continue
        del left[pattern]
        for name in filter(_matching(pattern), names):
            names = names | {name: {"allOf": [names[name], value]}}
    if len(left) < len(patterns):
        made |= {"properties": names, "patternProperties": left}
    said = made.get("additionalProperties", True)
    tried = patterns and said is not False and next(tries, None) is not None
    if tried and not _has_key(names, dict.fromkeys(patterns, False), True):
        made["additionalProperties"] = False
    return made


def _has_key(names: dict[str, Any], patterns: dict[str, bool], rest: bool) -> bool:
    """Return True if an object can have an unnamed key, or if that is not known."""
    matcher = _object(names, patterns, rest)
    if matcher.is_error():
        return True  # the parser of the whole schema reports it
    mask = matcher.compute_bitmask()
    return bool(mask[QUOTE // 8] >> QUOTE % 8 & 1)


def _matching(pattern: str) -> Callable[[str], bool]:
    """Return a function that tells whether the pattern matches a name."""
    begin = _object({}, {pattern: True}, False)

    def matches(name: str) -> bool:
        key = list(f"{json.dumps(name, ensure_ascii=False)}:".encode(errors="replace"))
        return bool(begin.deep_copy().try_consume_tokens(key) == len(key))

    return matches


def _object(names: dict[str, Any], patterns: dict[str, bool], rest: bool) -> LLMatcher:
    """Return a parser of objects without the named keys, after the opening brace."""
    schema = {
        "type": "object", "properties": dict.fromkeys(names, False),
        "patternProperties": patterns, "additionalProperties": rest,
        # A key may also be written with escapes, which patterns do not see.
        "x-guidance": {"whitespace_flexible": False, "json_allowed_escapes": 'nrbtf\\"'},
    }  # fmt: skip
    limits = LLParserLimits(initial_lexer_fuel=FUEL, verbose_errors=False)
    grammar = grammar_from("json", json.dumps(schema))
    matcher = LLMatcher(_octets(), grammar, limits=limits, log_level=0)
    matcher.consume_token(ord("{"))
    return matcher


@lru_cache(maxsize=1)
def _octets() -> LLTokenizer:
    return LLTokenizer("byte")
