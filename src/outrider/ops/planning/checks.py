"""Types of inputs with their ranges, checked by ``check_fields`` and readers of documents."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

from pydantic import AfterValidator, Field

from ...errors import shown

MOST_DEVICES, MOST_BATCH, MOST_TOKENS = 1024, 4096, 10_000_000
Devices = Annotated[int, Field(ge=1, le=MOST_DEVICES)]
Batch = Annotated[int, Field(ge=1, le=MOST_BATCH)]
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Share = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0, le=1e12)]
Gibibytes = Annotated[float, Field(gt=0, lt=1e9)]


def one_of(known: Collection[str]) -> AfterValidator:
    """Return a validator that refuses a text that is not in ``known``."""

    def check(text: str) -> str:
        if text not in known:
            raise ValueError(f"is {shown(text)}; give one of {', '.join(known)}.")
        return text

    return AfterValidator(check)


def _line(text: str) -> str:
    if not (text.strip() and text.isprintable()):
        raise ValueError(f"{shown(text)} is not a single line of text.")
    return text


OneLine = Annotated[str, AfterValidator(_line)]
