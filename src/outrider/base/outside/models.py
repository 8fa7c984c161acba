"""Checks documents of known form with pydantic, with error messages of our own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, TypeVar, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model

from ...errors import ConfigError, no_option, shown
from .text import printable

T = TypeVar("T")
KINDS = {
    "float": "a number", "int": "a whole number", "bool": "true or false", "string": "a text",
    "tuple": "a list", "list": "a list", "dict": "a table", "model": "a table",
    "dataclass": "a table", "finite": "a finite number",
}  # fmt: skip
"""What is expected, keyed by the first word of pydantic's error type."""
UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
FIELDS = ("model_fields", "__dataclass_fields__", "_fields")
"""The fields of a model, of a dataclass and of a named tuple."""
LIMITS = {"greater_than_equal", "greater_than", "less_than_equal", "less_than"}

STRICT = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
"""Nothing is converted, and every key must be known: ``__pydantic_config__`` of a dataclass."""


class Part(BaseModel):
    """A table of a document, under ``STRICT``."""

    model_config = STRICT


class DataPart:
    """The same for a dataclass."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


def checked(kind: type[T], document: Any, what: str) -> T:
    """Return a document as an object of ``kind``, a ``Part`` or a dataclass.

    Errors call it ``what``, as in "The policy guard.toml".
    """
    try:
        # Strict JSON turns lists into tuples and texts into enums, and converts nothing else.
        of: Any = kind
        value: T = _adapter(of).validate_json(json.dumps(document, default=str), strict=True)
        return value
    except ValidationError as error:
        raise sentence(error, what, kind) from None
    except (ValueError, RecursionError):  # Python writes no number of more than 4,300 digits
        raise ConfigError(f"{what} has a value that JSON cannot hold; shorten it.") from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def check_fields(owner: Any) -> None:
    """Refuse a dataclass with a field that does not match its annotation."""
    model = _model_of(owner.__class__)
    try:
        model.model_validate({name: getattr(owner, name) for name in model.model_fields})
    except ValidationError as error:
        raise sentence(error, "", type(owner)) from None


@cache
def _model_of(kind: type) -> type[BaseModel]:
    config = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
    fields: dict[str, Any] = {
        n: (h, ...) for n, h in get_type_hints(kind, include_extras=True).items()
    }
    return create_model(kind.__name__, __config__=config, **fields)


def sentence(error: ValidationError, what: str, kind: Any = None) -> ConfigError:
    """Return pydantic's first problem as an error of one sentence.

    ``kind`` is the type of the document, for the names and ranges that are known.
    """
    problem = error.errors(include_url=False)[0]
    type_, place = problem["type"], problem["loc"]
    if place[-1:] == ("[key]",):
        place = place[:-2]
    where = printable(".".join(map(str, place)))
    named = ": ".join(filter(None, (what, where)))
    owner = f"{what}, [{where.rpartition('.')[0]}]" if place[1:] else what
    if type_ in UNKNOWN:
        return no_option(owner, str(place[-1]), list(_hints(kind, place[:-1])), where="drop it.")
    if type_.startswith("missing"):
        return ConfigError(f"{owner} has no {place[-1]}; add it.")
    said = problem["msg"].removeprefix("Value error, ").strip()
    if type_ == "value_error":  # a sentence of our own, which may name a place of its own
        return ConfigError(f"{named}{' ' if where else ': '}{said}")
    return ConfigError(f"{named} is {shown(problem['input'])}; {_remedy(problem, kind)}.")


def _remedy(problem: Mapping[str, Any], kind: Any) -> str:
    """Return what to give instead."""
    type_, limits = problem["type"], problem.get("ctx", {})
    if type_ == "literal_error":
        return f"known are {limits['expected'].replace(chr(39), '').replace(' or ', ', ')}"
    if type_ in LIMITS:
        least, most = _range(kind, problem["loc"])
        if least is not None and most is not None:
            return f"give a number from {least:g} to {int(most) if most == int(most) else most:,}"
        (limit,) = limits.values()
        words = type_.replace("_equal", " or equal to").replace("_", " ")
        return f"give {limit:g} or more" if type_ == "greater_than_equal" else (
            f"give a number {words} {limit:g}"
        )  # fmt: skip
    known = KINDS.get(type_.partition("_")[0]) if type_.endswith(("_type", "_number")) else None
    if type_ == "int_from_float":
        known = KINDS["int"]
    return f"give {known}" if known else f"{problem['msg'][0].lower()}{problem['msg'][1:]}"


def _range(kind: Any, place: Sequence[int | str]) -> tuple[Any, Any]:
    """Return the least and the most that a field accepts; None where it has no such limit."""
    hint = _hints(kind, place[:-1]).get(str(place[-1])) if place else None
    notes = [n for part in (hint, *get_args(hint)) for n in getattr(part, "__metadata__", ())]
    limits = [each for note in notes for each in getattr(note, "metadata", [note])]

    def bound(name: str) -> Any:
        return next((getattr(each, name) for each in limits if hasattr(each, name)), None)

    return bound("ge"), bound("le")


def _hints(kind: Any, place: Sequence[int | str]) -> dict[str, Any]:
    """Return the fields, with their types, of the part of a document at a place."""
    for name in place:
        hints = _fields(kind)
        kind = hints.get(str(name), kind) if hints else kind
        kind = next((part for part in _parts(kind) if _fields(part)), None)
    return _fields(kind)


def _parts(hint: Any) -> Iterator[Any]:
    """Yield a type and all types inside of it, such as that of a tuple's members."""
    yield hint
    for each in get_args(hint):
        yield from _parts(each)


def _fields(kind: Any) -> dict[str, Any]:
    """Return the fields, with their types, of a class that has some."""
    if not isinstance(kind, type):
        return {}
    names = next((getattr(kind, name) for name in FIELDS if hasattr(kind, name)), ())
    hints = get_type_hints(kind, include_extras=True) if names else {}
    return {name: hints[name] for name in names}
