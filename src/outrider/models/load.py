"""From a checkpoint's folder to a model that runs."""

from __future__ import annotations

from pathlib import Path

import torch

from ..native.library import library
from .base import Model
from .fallback import Fallback
from .families import read_architecture, read_config
from .native import NativeTransformer, covers
from .transformer import Transformer, choose_dtype


def load_model(folder: Path, dtype: str, device: torch.device, max_length: int) -> Model:
    """The checkpoint in ``folder``, ready to run.

    By the native step where that covers its family and options and was built, else by the torch
    path, else by transformers. Arguments and errors are those of ``Transformer`` and ``Fallback``.
    """
    config = read_config(folder)
    architecture = read_architecture(config, folder)
    if architecture is None:
        return Fallback(folder, dtype, device)
    if device.type == "cpu" and covers(
        config, architecture, choose_dtype(dtype, architecture.dtype)
    ):
        step = library()
        if step is not None:
            return NativeTransformer(step, folder, dtype, max_length)
    return Transformer(folder, dtype, device, max_length)
