"""Typed reading of the values in a checkpoint's files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from .errors import ModelError, shown
from .limits import LARGEST_FLOAT, LARGEST_INT

ITEMS = {int: "whole numbers", str: "texts"}


def one_line(error: BaseException) -> str:
    """The first paragraph of the message of ``error``, on one line; its type if it has none."""
    words = " ".join(str(error).strip().split("\n\n")[0].split())
    return words[:300].rstrip(". ") or type(error).__name__


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``.

    Raises:
        ModelError: the file cannot be read, or holds no JSON object.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file} cannot be read ({error.strerror}).") from None
    except (ValueError, RecursionError, MemoryError) as error:
        reason = one_line(error)
        raise ModelError(f"{file} is damaged; fetch the checkpoint again ({reason}).") from None
    if not isinstance(found, dict):
        raise ModelError(f"{file} is damaged; fetch the checkpoint again (no JSON object).")
    return found


class Fields:
    """Named values of one file, each checked for its type and range when it is read.

    Every method returns ``default`` for a value that is missing or null, and refuses it when there
    is no default.

    Args:
        values: the values by name.
        where: the file and, inside it, the section, for messages.

    Raises:
        ModelError: a value is missing, of another type, or out of range.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def refuse(self, name: str, wanted: str) -> ModelError:
        """The error for the value of ``name``; ``wanted`` says what fits."""
        value = self._values.get(name)
        said = "missing" if value is None else shown(value)
        return ModelError(f"{self.where}: {name} is {said}; {wanted} is needed.")

    def whole(
        self, name: str, low: int = 0, high: int = LARGEST_INT, default: int | None = None
    ) -> int:
        """A whole number from ``low`` to ``high``."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            raise self.refuse(name, f"a whole number from {low} to {high}")
        return value

    def number(
        self,
        name: str,
        default: float | None = None,
        low: float = -LARGEST_FLOAT,
        positive: bool = False,
    ) -> float:
        """A finite number of at least ``low``, and above 0 if ``positive``."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if not is_number(value) or value < low or (positive and value <= 0):
            least = " above 0" if positive else "" if low < 0 else f" of at least {low:g}"
            raise self.refuse(name, f"a finite number{least}")
        return float(value)

    def text(self, name: str, default: str | None = None) -> str:
        """A text."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.refuse(name, "a text")
        return value

    def listed(self, name: str, kind: type) -> list[Any]:
        """A list whose items are all of ``kind``, empty where it is missing."""
        value = self._values.get(name)
        if value is None:
            return []
        if not isinstance(value, list | tuple) or any(type(item) is not kind for item in value):
            raise self.refuse(name, f"a list of {ITEMS[kind]}")
        return list(value)

    def section(self, name: str) -> Fields:
        """The object ``name``, empty where it is missing."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.refuse(name, "an object")
        return Fields(value or {}, f"{self.where}: {name}")

    def sections(self, name: str) -> list[Fields]:
        """The objects that the object ``name`` holds."""
        inner = self.section(name)
        return [inner.section(each) for each in inner._values]


def is_number(value: object) -> TypeGuard[int | float]:
    """True for a finite number that fp32 can hold, and no boolean."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= LARGEST_FLOAT  # false for NaN
