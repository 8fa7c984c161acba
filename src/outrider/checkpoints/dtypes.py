"""Chooses each path's arithmetic by the ``dtype`` option and the checkpoint."""

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_dtype(name: str, checkpoint: torch.dtype) -> torch.dtype:
    """Return torch's arithmetic for a ``dtype`` option, given the checkpoint's.

    "auto" takes the checkpoint's, except bfloat16 and float16 on a CPU without instructions for
    them, where they would be several times slower than float32.
    """
    if name != "auto":
        return DTYPES[name]
    if checkpoint == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.float32
    if checkpoint == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return torch.float32
    return checkpoint


def native_dtype(name: str, checkpoint: torch.dtype, isa: str | None = None) -> torch.dtype:
    """Return the native step's arithmetic for a ``dtype`` option, given the checkpoint's.

    "auto" takes the checkpoint's, and bfloat16 for float16, which the native step does not have:
    float32 would keep 3 bits more, at twice the memory and half the speed. Norms and biases are
    fp32. A "portable" ``isa``, which cannot widen bfloat16 as fast as it reads, takes float32.
    """
    if name != "auto":
        return choose_dtype(name, checkpoint)
    if checkpoint in (torch.float16, torch.bfloat16):
        return torch.float32 if isa == "portable" else torch.bfloat16
    return checkpoint
