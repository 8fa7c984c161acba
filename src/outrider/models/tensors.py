"""Turns arrays into torch's tensors and back, without a copy where both are on the CPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

FOREIGN = {
    np.dtype(ml_dtypes.bfloat16): (torch.bfloat16, torch.uint16, np.uint16),
    np.dtype(ml_dtypes.float8_e4m3fn): (torch.float8_e4m3fn, torch.uint8, np.uint8),
    np.dtype(ml_dtypes.float8_e5m2): (torch.float8_e5m2, torch.uint8, np.uint8),
}
"""Dtypes that torch and numpy cannot exchange: torch's own, and integers of that size in both."""
OF_TORCH = {theirs: (ours, between) for ours, (theirs, between, _) in FOREIGN.items()}


def as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """Return ``array`` as a tensor on the CPU, in the same memory where that can be written to."""
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    if array.dtype not in FOREIGN:
        return torch.from_numpy(array)
    theirs, _, between = FOREIGN[array.dtype]
    return torch.from_numpy(array.view(between)).view(theirs)


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """Return ``tensor`` as an array, in the same memory if that is on the CPU."""
    tensor = tensor.detach().cpu()
    if tensor.dtype not in OF_TORCH:
        array: NDArray[Any] = tensor.numpy()
        return array
    ours, between = OF_TORCH[tensor.dtype]
    return tensor.view(between).numpy().view(ours)


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """Return torch's dtype for one of NumPy."""
    return as_tensor(np.empty(0, dtype)).dtype
