"""Checks before numbers and pointers go to C which cffi does not make; it refuses wide integers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..base.limits import LARGEST_FLOAT
from ..errors import ModelError, shown
from ._interface import ffi


def free_with(owner: object, free: Callable[[str, int], None], kind: str, handle: int) -> None:
    """Free what ``owner`` holds when it goes, but not at exit: threads may still run with it."""
    weakref.finalize(owner, free, kind, handle).atexit = False


def expect(array: NDArray[Any] | None, shape: tuple[int, ...], dtype: DTypeLike | None) -> Any:
    """Return a pointer to an array's data, a null pointer for None.

    Raises ModelError: it is no whole array of that shape and dtype.
    """
    if array is None:
        return ffi.NULL
    fits = array.shape == shape and array.flags.c_contiguous
    if not fits or dtype is None or array.dtype != dtype:
        raise ModelError(f"the native step cannot read an array of {list(array.shape)}.")
    # The second way takes several times as long, but knows bfloat16.
    builtin = array.dtype.isbuiltin == 1
    return ffi.cast("void *", ffi.from_buffer(array) if builtin else array.ctypes.data)


def floats(array: NDArray[np.float32]) -> Any:
    """Return a pointer to a matrix of fp32, see ``expect``."""
    return expect(array, array.shape[:2], np.float32)


def same_length(first: Sequence[object], second: Sequence[object]) -> None:
    """Refuse lists of which one is longer."""
    if len(first) != len(second):
        raise ModelError(f"lists of {len(first)} and {len(second)} do not belong together.")


class Room:
    """An array that calls write to: fp32 [rows, width], checked once."""

    def __init__(self, array: NDArray[np.float32]) -> None:
        self.rows, self.width = array.shape
        self.array, self.pointer = array, floats(array)


class LayerRoom:
    """An array for the hidden states of some layers: fp32 [layers, rows, width], checked once."""

    def __init__(self, array: NDArray[np.float32], layers: Sequence[int]) -> None:
        count, self.rows, self.width = array.shape
        same_length(layers, range(count))
        self.array, self.layers = array, list(layers)
        self.pointer = expect(array, (count, self.rows, self.width), np.float32)


def within(name: str, value: int, least: int, most: int) -> int:
    """Return ``value``, a whole number from ``least`` to ``most``. Raises ModelError: it is not."""
    if not isinstance(value, int) or not least <= value <= most:
        raise ModelError(f"{name} is {shown(value)}; give a whole number from {least} to {most}.")
    return value


def as_float32(name: str, value: float) -> float:
    """Return ``value``, a finite number that float32 can hold. Raises ModelError: it is not."""
    if not isinstance(value, int | float) or not abs(value) <= LARGEST_FLOAT:
        raise ModelError(f"{name} is {shown(value)}; give a number within {LARGEST_FLOAT:.7g}.")
    return float(value)


class CFields:
    """A structure of src/outrider.h by its name there; numbers are checked as they are set.

    CFields that are left out are 0.
    """

    def __init__(self, **values: Any) -> None:
        self.pointer: Any
        object.__setattr__(self, "pointer", ffi.new(f"{type(self).__name__} *"))
        for name, value in values.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pointer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(getattr(self.pointer, name), float):
            value = as_float32(name, value)
        try:
            setattr(self.pointer, name, value)
        except (OverflowError, TypeError):
            kind = dict(ffi.typeof(self.pointer).item.fields)[name].type.cname
            raise ModelError(f"{name} is {shown(value)}; give a number that fits {kind}.") from None
