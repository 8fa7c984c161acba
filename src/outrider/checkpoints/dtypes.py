"""The numbers of checkpoints, and each path's arithmetic by the ``dtype`` option."""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

FLOAT32, FLOAT16, BFLOAT16 = map(np.dtype, (np.float32, np.float16, ml_dtypes.bfloat16))
DTYPES: dict[str, np.dtype[Any]] = {
    "float32": FLOAT32,
    "bfloat16": BFLOAT16,
    "float16": FLOAT16,
}
PLAIN = (*DTYPES.values(), np.dtype(np.float64))
"""Dtypes of unquantised numbers."""


def cast(array: Array, dtype: np.dtype[Any]) -> Array:
    """Return ``array`` in ``dtype``, itself if it already is; too large numbers become infinite."""
    with np.errstate(all="ignore"):
        return array.astype(dtype, copy=False)


def choose_dtype(name: str, checkpoint: np.dtype[Any]) -> np.dtype[Any]:
    """Return torch's arithmetic for a ``dtype`` option, given the checkpoint's.

    "auto" takes the checkpoint's, except bfloat16 and float16 on a CPU without instructions for
    them, where they would be several times slower than float32.
    """
    if name != "auto":
        return DTYPES[name]
    if checkpoint not in (BFLOAT16, FLOAT16):
        return checkpoint
    import torch  # which the native step does without

    ops: Any = torch.ops.mkldnn
    bf16 = checkpoint == BFLOAT16
    fast = ops._is_mkldnn_bf16_supported() if bf16 else ops._is_mkldnn_fp16_supported()
    return checkpoint if fast else FLOAT32


def native_dtype(name: str, checkpoint: np.dtype[Any], isa: str | None = None) -> np.dtype[Any]:
    """Return the native step's arithmetic for a ``dtype`` option, given the checkpoint's.

    "auto" takes the checkpoint's, and bfloat16 for float16, which the native step does not have:
    float32 would keep 3 bits more, at twice the memory and half the speed. Norms and biases are
    fp32. A "portable" ``isa``, which cannot widen bfloat16 as fast as it reads, takes float32.
    """
    if name != "auto":
        return DTYPES[name]
    if checkpoint in (FLOAT16, BFLOAT16):
        return FLOAT32 if isa == "portable" else BFLOAT16
    return checkpoint
