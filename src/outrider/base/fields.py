"""Reads values of a checkpoint's files, checked for type and range."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG
from typing import Any, TypeGuard

from ..errors import ModelError, OutriderError, shown
from .limits import LARGEST_FLOAT, LARGEST_INT
from .outside.text import printable

ITEMS = {
    int: "whole numbers", float: "decimal numbers", str: "texts", list: "lists", dict: "objects",
}  # fmt: skip
ADVICE = re.compile(r"trust_remote_code|weights_only|allow_pickle|pip install|force_download")
"""Words of library messages whose advice is unsafe here, or about calls that users do not make."""


def one_line(error: BaseException) -> str:
    """Return the first paragraph of an error's message without ``ADVICE``, or its type's name."""
    words = " ".join(str(error).strip().split("\n\n")[0].split())
    if isinstance(error, KeyError):  # whose message is the key alone
        words = f"there is no {words}"
    said = " ".join(s for s in re.split(r"(?<=[.!?:]) ", words) if not ADVICE.search(s))
    return printable(said).rstrip(".: ") or type(error).__name__


@contextmanager
def readable(what: str, remedy: str) -> Iterator[None]:
    """Raise ModelError "``what`` (the reason); ``remedy``" for any error inside.

    A panic in the tokenizers library, which is written in Rust, is no ``Exception``.
    """
    try:
        yield
    except (OutriderError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise ModelError(f"{what} ({one_line(error)}); {remedy}") from error


def check_plain(file: Path, state: os.stat_result) -> None:
    """Refuse pipes, devices and folders, by their ``state``: reading a pipe may never end."""
    if not S_ISREG(state.st_mode):
        raise ModelError(f"{file} is not a regular file; replace it by the checkpoint's own file.")


def read_object(file: Path, remedy: str = "fetch the checkpoint again") -> dict[str, Any]:
    """Return the JSON object in ``file``; refuse one that cannot be read, or holds none."""
    try:
        check_plain(file, file.stat())
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file} cannot be read ({error.strerror}).") from None
    except (ValueError, RecursionError, MemoryError) as error:
        reason = one_line(error)
        raise ModelError(f"{file} is damaged; {remedy} ({reason}).") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file} is damaged; {remedy} (no JSON object).")
    return value


class Fields:
    """Named values of one file, each checked for type and range when it is read.

    Methods return ``default`` for a value that is missing or null. They raise ModelError where it
    is missing without a default, of another type, or out of range. ``where`` names the file and its
    section in messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def refuse(self, name: str, needed: str) -> ModelError:
        """Return the error for the value of ``name``; ``needed`` describes a valid one."""
        value = self._values.get(name)
        actual = "missing" if value is None else shown(value)
        return ModelError(f"{self.where}: {name} is {actual}; {needed} is needed.")

    def whole(
        self, name: str, low: int = 0, high: int = LARGEST_INT, default: int | None = None
    ) -> int:
        """Return a whole number from ``low`` to ``high``."""
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
        """Return a finite number of at least ``low``, and above 0 if ``positive``."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if not is_number(value) or value < low or (positive and value <= 0):
            least = " above 0" if positive else "" if low < 0 else f" of at least {low:g}"
            raise self.refuse(name, f"a finite number{least}")
        return float(value)

    def text(self, name: str, default: str | None = None) -> str:
        """Return a text."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.refuse(name, "a text")
        return value

    def flag(self, name: str, default: bool | None = None) -> bool:
        """Return true or false."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false")
        return value

    def ids(self, name: str) -> int | list[int] | None:
        """Return an id, or a list of ids."""
        value = self._values.get(name)
        if value is None or type(value) is int:
            return value
        if not isinstance(value, list):
            raise self.refuse(name, "an id, or a list of ids")
        return self.listed(name, int)

    def listed(self, name: str, kind: type) -> list[Any]:
        """Return a list whose items are all of ``kind``; empty if it is missing."""
        value = self._values.get(name)
        if value is None:
            return []
        if not isinstance(value, list | tuple) or any(type(item) is not kind for item in value):
            raise self.refuse(name, f"a list of {ITEMS[kind]}")
        return list(value)

    def numbers(self, name: str, count: int) -> list[float]:
        """Return a list of ``count`` finite numbers."""
        value = self._values.get(name)
        listed = value if isinstance(value, list | tuple) else ()
        if len(listed) != count or not all(map(is_number, listed)):
            raise self.refuse(name, f"a list of {count} finite numbers")
        return [float(each) for each in listed]

    def section(self, name: str) -> Fields:
        """Return the object ``name``; empty if it is missing."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.refuse(name, "an object")
        return Fields(value or {}, f"{self.where}: {name}")

    def sections(self, name: str) -> list[Fields]:
        """Return the objects inside the object ``name``."""
        inner = self.section(name)
        return [inner.section(each) for each in inner._values]


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether ``value`` is a finite number that fp32 can hold, and no boolean."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= LARGEST_FLOAT  # false for NaN
