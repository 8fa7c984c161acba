"""Checks of single inputs: each raises ``ConfigError`` with one sentence."""

from __future__ import annotations

from collections.abc import Iterable

from ...errors import ConfigError, shown


def one_of(name: str, value: object, known: Iterable[str]) -> None:
    """Raise ``ConfigError`` unless a value is among those that are known."""
    options = list(known)
    if value not in options:
        raise ConfigError(f"{name} is {shown(value)}; give one of {', '.join(options)}.")


def whole(name: str, value: object, most: int) -> None:
    """Raise ``ConfigError`` unless a value is a whole number from 1 to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"{name} is {shown(value)}; give a whole number from 1 to {most:,}.")


def number(name: str, value: object, most: float = 1e12) -> None:
    """Raise ``ConfigError`` unless a value is None or a number from 0 to ``most``."""
    if value is None:
        return
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most
    if not good:  # NaN neither
        raise ConfigError(f"{name} is {shown(value)}; give a number from 0 to {most:g}.")
