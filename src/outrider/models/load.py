"""From a checkpoint's folder to a model that runs."""

from __future__ import annotations

from pathlib import Path

import torch

from .base import Model
from .fallback import Fallback
from .families import read_architecture, read_config
from .transformer import Transformer


def load_model(folder: Path, dtype: str, device: torch.device, max_length: int) -> Model:
    """The checkpoint in ``folder``, ready to run: natively if its family and options allow it.

    Arguments and errors are those of ``Transformer`` and ``Fallback``.
    """
    if read_architecture(read_config(folder), folder) is None:
        return Fallback(folder, dtype, device)
    return Transformer(folder, dtype, device, max_length)
