"""Checks before a pointer goes to C."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Sequence

import torch

from ..errors import ModelError


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
