"""Reads untrusted documents: JSON, YAML and TOML, bounded in size, depth and numbers.

Results consist of dicts with string keys, lists, strings, finite numbers, booleans and None (TOML
also has dates). They share no parts, are nested at most ``DEEPEST`` deep, have no number that
float64 cannot hold, and no lone surrogate: U+FFFD replaces it.

``what`` names the document in messages, as in "The policy guard.toml"; ``limit`` bounds its bytes;
``error`` is the kind of error that a failure raises.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from ...errors import ConfigError, OutriderError, shown
from .text import printable, well_formed
from .yamls import documents

MIB = 1 << 20
MOST_JSON = 16 * MIB
MOST_YAML = 2 * MIB
MOST_TOML = MIB // 4
"""Most bytes of a document, unless a caller sets another limit."""
DEEPEST = 100
"""Most lists and objects inside each other."""
LARGEST = 10**300
MOST_PARTS = 64
"""Most parts of a dotted key of TOML; tomllib's time grows with their square."""
_dotted = re.compile(
    r"""(?<![\w-])(?:(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+)"""
    f"{{{MOST_PARTS}}}"
)
Kind = type[OutriderError]


class _NumberError(ValueError):
    """A number that float64 cannot hold."""


def parse_json(
    text: str | bytes, what: str, *, limit: int = MOST_JSON, error: Kind = ConfigError,
    unique: bool = False,
) -> Any:  # fmt: skip
    """Return the value of a JSON text; with ``unique`` a duplicate key is an error."""
    load = partial(json.loads, object_pairs_hook=_object if unique else None)
    return _parse(text, what, "JSON", limit, error, load)


def parse_yaml(
    text: str | bytes, what: str, *, limit: int = MOST_YAML, error: Kind = ConfigError
) -> list[Any]:
    """Return the documents of a YAML text, None for an empty one.

    Keys are strings as they are written (``on: 1`` has the key "on"), and dates stay strings.
    Aliases and merge keys are expanded, within a bound. Duplicate keys and tags that are not YAML's
    own are refused.
    """
    return list(_parse(text, what, "YAML", limit, error, partial(documents, deepest=DEEPEST)))


def parse_toml(
    text: str | bytes, what: str, *, limit: int = MOST_TOML, error: Kind = ConfigError
) -> dict[str, Any]:
    """Return the document of a TOML text."""

    def load(checked: str) -> Any:
        if _dotted.search(checked):
            raise ValueError(f"a key has more than {MOST_PARTS} parts")
        return tomllib.loads(checked)

    return dict(_parse(text, what, "TOML", limit, error, load))


def read_json(file: Path, what: str, *, limit: int = MOST_JSON, error: Kind = ConfigError) -> Any:
    """Return the value of a JSON file without duplicate keys; see ``parse_json``."""
    return parse_json(
        read(file, what, limit=limit, error=error), what, limit=limit, error=error, unique=True
    )


def read_toml(file: Path, what: str) -> dict[str, Any]:
    """Return the document of a TOML file; see ``parse_toml``."""
    return parse_toml(read(file, what, limit=MOST_TOML), what)


def read(file: Path, what: str, *, limit: int = MOST_JSON, error: Kind = ConfigError) -> bytes:
    """Return the bytes of a file, or of a pipe such as the shell's ``<(...)``."""
    try:
        with file.open("rb") as opened:
            data = opened.read(limit + 1)
    except OSError as failure:
        raise error(f"{what} cannot be read: {failure.strerror}.") from None
    except ValueError:  # a NUL in the path
        raise error(f"{what} cannot be read: a file cannot have such a name.") from None
    if len(data) > limit:
        raise error(_too_large(what, limit))
    return data


def _too_large(what: str, limit: int) -> str:
    return f"{what} has more than {limit / MIB:g} MiB; give a smaller one."


def _parse(
    text: str | bytes, what: str, kind: str, limit: int, error: Kind, load: Callable[[str], Any]
) -> Any:
    """Return the checked result of ``load`` for a text; every failure raises ``error``."""
    try:
        if len(text) > limit:
            raise error(_too_large(what, limit))
        checked = text if isinstance(text, str) else text.decode("utf-8-sig")
        return _clean(load(well_formed(checked)))
    except _NumberError as failure:
        raise error(f"{what}: {failure}.") from None
    except UnicodeDecodeError:
        why = "it is not UTF-8"
    except (RecursionError, MemoryError):
        why = "it is nested too deeply"
    except ValueError as failure:
        long = "int_max_str_digits" in str(failure)  # Python's own message is for programmers
        why = "it has a number of more than 300 digits" if long else printable(failure).rstrip(".")
    raise error(f"{what} cannot be read as {kind}: {why}.")


def _object(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    read: dict[str, Any] = {}
    for name, value in pairs:
        if name in read:
            raise ValueError(f"it has the key {shown(name)} twice in one object")
        read[name] = value
    return read


def _clean(value: Any, path: tuple[object, ...] = ()) -> Any:
    """Return a cleaned copy of a value at ``path``, or raise ValueError beyond a bound."""
    if isinstance(value, str):
        return well_formed(value)
    if isinstance(value, dict | list):
        if len(path) >= DEEPEST:
            raise ValueError("it is nested too deeply")
        if isinstance(value, list):
            return [_clean(each, (*path, place)) for place, each in enumerate(value)]
        return {well_formed(name): _clean(each, (*path, name)) for name, each in value.items()}
    if isinstance(value, float) and not isfinite(value):
        raise _NumberError(f"{_place(path)} is {value}; give a finite number")
    if type(value) is int and abs(value) > LARGEST:
        raise _NumberError(f"{_place(path)} has more than 300 digits; give a smaller number")
    return value


def _place(path: tuple[object, ...]) -> str:
    return printable(".".join(map(str, path)), 100) or "its value"
