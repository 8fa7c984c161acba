"""Lists and objects in bodies, none without a bound, and the refusal of what is out of bounds.

A list fails at its first wrong member: an error for each would take a thousand times its memory.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import from_json

from ..errors import RequestError
from ..params import LARGEST_IDS, LARGEST_STOP

MOST_PROMPTS = 128
MOST_MESSAGES = 4096
MOST_BIASES = 1024
MOST_CHOICES = 1 << 14
MOST_PARTS = 1 << 12
MOST_TOOLS = 128
DEEPEST_SCHEMA = 64
LARGEST_SCHEMA = 1 << 16
SHOWN = 80
"""Characters of a wrong value that its error tells."""


class Refusal(RequestError):
    """A request that cannot be served, and the field at fault."""

    def __init__(self, message: str, param: str | None = None, code: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


def check_schema(schema: str | dict[str, Any] | None, name: str) -> int:
    """Refuse a JSON schema that is too large or too deep.

    Returns:
        Characters of its text.

    Raises:
        Refusal: it is.
    """
    text = schema if isinstance(schema, str) else json.dumps(schema)
    if len(text) > LARGEST_SCHEMA:
        raise Refusal(
            f"the schema has {len(text)} characters; give at most {LARGEST_SCHEMA}.", name
        )
    try:
        deep = _nests_below(from_json(text), DEEPEST_SCHEMA)
    except ValueError as error:  # other mistakes are StructuredOutputsParams' to explain
        deep = "recursion limit" in str(error)
    if deep:
        raise Refusal(f"the schema nests more than {DEEPEST_SCHEMA} deep; flatten it.", name)
    return len(text)


def _nests_below(value: Any, most: int) -> bool:
    """True when lists and objects nest more than ``most`` deep."""
    level = [value]
    for _ in range(most + 1):
        level = [part for part in level if isinstance(part, dict | list)]
        if not level:
            return False
        parts = [part.values() if isinstance(part, dict) else part for part in level]
        level = [inner for part in parts for inner in part]
    return True


Ids = Annotated[list[int], Field(fail_fast=True)]
OptionIds = Annotated[list[int], Field(fail_fast=True, max_length=LARGEST_IDS)]
Words = Annotated[list[str], Field(fail_fast=True, max_length=LARGEST_STOP)]
Texts = Annotated[list[str], Field(fail_fast=True, max_length=MOST_PROMPTS)]
IdLists = Annotated[list[Ids], Field(fail_fast=True, max_length=MOST_PROMPTS)]
Choices = Annotated[list[str], Field(fail_fast=True, max_length=MOST_CHOICES)]
Parts = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MOST_PARTS)]
Messages = Annotated[
    list[dict[str, Any]], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)
]


def _few(given: Any) -> Any:
    """An object with few fields; otherwise each field that is wrong would be an error."""
    if isinstance(given, dict) and len(given) > MOST_BIASES:
        raise ValueError(f"it has {len(given)} ids; give at most {MOST_BIASES}")
    return given


def _counted(given: Any) -> Any:
    """The prompts of a call, not too many; each kind of prompt would count them anew."""
    many = isinstance(given, list) and len(given) > MOST_PROMPTS
    if many and not isinstance(given[0], int):
        raise ValueError(f"there are {len(given)} prompts; give 1 to {MOST_PROMPTS}")
    return given


Prompts = Annotated[str | Ids | Texts | IdLists, BeforeValidator(_counted)]
Biases = Annotated[dict[str, float], Field(max_length=MOST_BIASES), BeforeValidator(_few)]


def shortened(value: object) -> str:
    """A value as an error tells it."""
    shown = repr(value)
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."
