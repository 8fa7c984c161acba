"""Checks before numbers and pointers go to C which cffi does not make; it refuses wide integers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..base.limits import LARGEST_FLOAT
from ..errors import ModelError, shown
from ._interface import ffi


def free_with(owner: object, free: Callable[[str, int], None], kind: str, handle: int) -> None:
    """Free what ``owner`` holds when it goes, but not at exit: threads may still run with it."""
    weakref.finalize(owner, free, kind, handle).atexit = False


def expect(tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype | None) -> Any:
    """Return a pointer to a tensor's data, a null pointer for None.

    Raises ModelError: it is no whole CPU tensor of that shape and dtype.
    """
    if tensor is None:
        return ffi.NULL
    fits = tuple(tensor.shape) == shape and tensor.is_contiguous() and tensor.device.type == "cpu"
    if not fits or tensor.dtype != dtype:
        raise ModelError(f"the native step cannot read a tensor of {list(tensor.shape)}.")
    return ffi.cast("void *", tensor.data_ptr())


def floats(tensor: torch.Tensor) -> Any:
    """Return a pointer to a matrix of fp32, see ``expect``."""
    return expect(tensor, tuple(tensor.shape[:2]), torch.float32)


def same_length(first: Sequence[object], second: Sequence[object]) -> None:
    """Refuse lists of which one is longer."""
    if len(first) != len(second):
        raise ModelError(f"lists of {len(first)} and {len(second)} do not belong together.")


class Room:
    """A tensor on the CPU that calls write to: fp32 [rows, width], checked once."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.rows, self.width = tensor.shape
        self.tensor, self.pointer = tensor, floats(tensor)


class LayerRoom:
    """A tensor for the hidden states of some layers: fp32 [layers, rows, width], checked once."""

    def __init__(self, tensor: torch.Tensor, layers: Sequence[int]) -> None:
        count, self.rows, self.width = tensor.shape
        same_length(layers, range(count))
        self.tensor, self.layers = tensor, list(layers)
        self.pointer = expect(tensor, (count, self.rows, self.width), torch.float32)


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
