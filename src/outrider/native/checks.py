"""Checks before numbers and pointers go to C: what does not fit is refused."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch

from ..base.limits import LARGEST_FLOAT
from ..errors import ModelError, shown

_BITS = {
    ctypes.c_int32: (-(2**31), 2**31 - 1),
    ctypes.c_uint32: (0, 2**32 - 1),
    ctypes.c_int64: (-(2**63), 2**63 - 1),
    ctypes.c_uint64: (0, 2**64 - 1),
}
_FLOATS = (ctypes.c_float, ctypes.c_double)


def at(numbers: array[int] | array[float]) -> int:
    """Return the address of an array; NumPy's own way takes longer than some calls."""
    return numbers.buffer_info()[0]


def free_with(owner: object, free: Callable[[str, int], None], kind: str, handle: int) -> None:
    """Free what ``owner`` holds when it goes, but not at exit: threads may still run with it."""
    weakref.finalize(owner, free, kind, handle).atexit = False


def expect(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
    """Refuse what is not a whole CPU tensor of that shape and dtype."""
    fits = tuple(tensor.shape) == shape and tensor.is_contiguous() and tensor.device.type == "cpu"
    if not fits or tensor.dtype != dtype:
        raise ModelError(f"the native step cannot read a tensor of {list(tensor.shape)}.")


def same_length(first: Sequence[object], second: Sequence[object]) -> None:
    """Refuse lists of which one is longer."""
    if len(first) != len(second):
        raise ModelError(f"lists of {len(first)} and {len(second)} do not belong together.")


def wide_bias(bias: torch.Tensor | None, out: int) -> torch.Tensor | None:
    """Return a bias [out] in fp32."""
    if bias is None:
        return None
    wide = bias.float().contiguous()
    expect(wide, (out,), torch.float32)
    return wide


class Room:
    """A tensor that calls write to: fp32 [rows, width], checked once.

    Args:
        tensor: on the CPU, contiguous.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.rows, self.width = tensor.shape
        expect(tensor, (self.rows, self.width), torch.float32)
        self.tensor = tensor
        self.pointer = tensor.data_ptr()


class LayerRoom:
    """A tensor that calls write hidden states to: fp32 [layers, rows, width], checked once.

    Args:
        tensor: on the CPU, contiguous.
        layers: whose states they are.
    """

    def __init__(self, tensor: torch.Tensor, layers: Sequence[int]) -> None:
        count, self.rows, self.width = tensor.shape
        expect(tensor, (count, self.rows, self.width), torch.float32)
        same_length(layers, range(count))
        self.tensor, self.layers = tensor, int32s("layers", layers)
        self.pointer = tensor.data_ptr()


def within(name: str, value: int, least: int, most: int) -> int:
    """Return ``value``, a whole number from ``least`` to ``most``.

    Raises:
        ModelError: it is not.
    """
    if not isinstance(value, int) or not least <= value <= most:
        raise ModelError(f"{name} is {shown(value)}; give a whole number from {least} to {most}.")
    return value


def as_float32(name: str, value: float) -> float:
    """Return ``value``, a finite number that float32 can hold.

    Raises:
        ModelError: it is not.
    """
    if not isinstance(value, int | float) or not abs(value) <= LARGEST_FLOAT:
        raise ModelError(f"{name} is {shown(value)}; give a number within {LARGEST_FLOAT:.7g}.")
    return float(value)


def int32s(name: str, values: Iterable[int], code: str = "i") -> array[int]:
    """Return ``values`` as an array of int32, or of uint32 by the ``code`` "I".

    Raises:
        ModelError: one of them does not fit.
    """
    try:
        return array(code, values)
    except (OverflowError, TypeError) as error:
        raise ModelError(f"{name} has a number that is not of 32 bits ({error}).") from None


class Whole:
    """The type of a function's argument in ctypes: a whole number with a name and a range.

    Args:
        name: of the argument, for the error's sentence.
        kind: its type in C.
    """

    def __init__(self, name: str, kind: Any = ctypes.c_int32) -> None:
        self.name, self.kind = name, kind
        self.least, self.most = _BITS[kind]
        self._plain = kind is ctypes.c_int32  # ctypes passes a Python number as an int

    def from_param(self, value: int) -> object:
        """Return what ctypes hands over for ``value``; ``refused`` translates its exceptions."""
        within(self.name, value, self.least, self.most)
        return value if self._plain else self.kind(value)


def refused(error: ctypes.ArgumentError) -> ModelError:
    """Return the error of an argument that does not fit, without what ctypes puts before it."""
    return ModelError(str(error).split(": ", 2)[-1])


class Fields(ctypes.Structure):
    """A structure whose numbers are checked as they are set; those left out are 0."""

    _kinds: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        cls._kinds = {field[0]: field[1] for field in cls._fields_}

    def __setattr__(self, name: str, value: Any) -> None:  # ctypes' constructor calls it, too
        kind = self._kinds[name]
        if kind in _BITS:
            value = within(name, value, *_BITS[kind])
        elif kind in _FLOATS:
            value = as_float32(name, value)
        super().__setattr__(name, value)
