"""Types of fields in bodies: every list and object has a bound.

A list fails at its first wrong member: an error for each would take a thousand times its memory.
"""

import json
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, Strict

from ..base.limits import BIAS, LARGEST_DRAFT, LARGEST_INT, MOST_IDS, MOST_WORDS
from ..params import SAMPLING
from .bodies import value_of
from .errors import Refusal

MOST_PROMPTS = 128
MOST_MESSAGES = 4096
MOST_BIASES = 1024
MOST_CHOICES = 1 << 14
MOST_PARTS = 1 << 12
MOST_TOOLS = 128
MOST_TAGS = 16
"""Keys of metadata, as with OpenAI."""
DEEPEST_SCHEMA = 64
LARGEST_SCHEMA = 1 << 16
LONGEST_TIMEOUT = 10**7
"""Seconds."""


def check_schema(schema: str | dict[str, Any] | None, name: str) -> int:
    """Return the characters of a JSON schema. Raises Refusal: it is too large or too deep."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    if len(text) > LARGEST_SCHEMA:
        raise Refusal(
            f"the schema has {len(text)} characters; give at most {LARGEST_SCHEMA}.", name
        )
    try:
        deep = _nests_below(value_of(text), DEEPEST_SCHEMA)
    except ValueError as error:  # StructuredOutputsParams explains other mistakes
        deep = "recursion limit" in str(error)
    if deep:
        raise Refusal(f"the schema nests more than {DEEPEST_SCHEMA} deep; flatten it.", name)
    return len(text)


def _nests_below(value: Any, most: int) -> bool:
    """Return True when lists and objects nest more than ``most`` deep."""
    level = [value]
    for _ in range(most + 1):
        level = [part for part in level if isinstance(part, dict | list)]
        if not level:
            return False
        parts = [part.values() if isinstance(part, dict) else part for part in level]
        level = [inner for part in parts for inner in part]
    return True


def no_switch(value: Any) -> Any:
    """Return the value; refuse true and false, which pydantic takes for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("give a number, not true or false")
    return value


NoSwitch = BeforeValidator(no_switch)
Whole = Annotated[int, NoSwitch]
Real = Annotated[float, NoSwitch]
# Bounds come before the validator; else they are not published.
Samples = Annotated[int, Field(ge=1, le=SAMPLING["n"].most), NoSwitch]
DraftLength = Annotated[int, Field(ge=0, le=LARGEST_DRAFT), NoSwitch]
Timeout = Annotated[float, Field(gt=0, le=LONGEST_TIMEOUT), NoSwitch]
TokenId = Annotated[int, Strict(), Field(json_schema_extra={"minimum": 0, "maximum": LARGEST_INT})]
Ids = Annotated[list[TokenId], Field(fail_fast=True)]
OptionIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=MOST_IDS)]
Words = Annotated[list[str], Field(fail_fast=True, max_length=MOST_WORDS)]
Texts = Annotated[list[str], Field(fail_fast=True, max_length=MOST_PROMPTS)]
IdLists = Annotated[list[Ids], Field(fail_fast=True, max_length=MOST_PROMPTS)]
Choices = Annotated[list[str], Field(fail_fast=True, max_length=MOST_CHOICES)]
Parts = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MOST_PARTS)]
Messages = Annotated[
    list[dict[str, Any]], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)
]


def _few(most: int, what: str) -> BeforeValidator:
    """Return a check that refuses too many fields at once, since each could add an error."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"it has {len(value)} {what}; give at most {most}")
        return value

    return BeforeValidator(check)


def _counted(value: Any) -> Any:
    """Return the prompts; refuse too many once, not for each kind of prompt."""
    many = isinstance(value, list) and len(value) > MOST_PROMPTS
    if many and not isinstance(value[0], int):
        raise ValueError(f"there are {len(value)} prompts; give 1 to {MOST_PROMPTS}")
    return value


Prompts = Annotated[str | Ids | Texts | IdLists, BeforeValidator(_counted)]
# Checked where the vocabulary is known, so that one message names all wrong entries.
Bias = Annotated[
    Any, Field(json_schema_extra={"type": "number", "minimum": BIAS.least, "maximum": BIAS.most})
]
Biases = Annotated[dict[str, Bias], Field(max_length=MOST_BIASES), _few(MOST_BIASES, "ids")]
Metadata = Annotated[dict[str, str], Field(max_length=MOST_TAGS), _few(MOST_TAGS, "keys")]
