"""From a checkpoint's folder to a model that runs."""

from __future__ import annotations

from pathlib import Path

import torch

from .base import Model
from .transformer import Transformer


def load_model(folder: Path, dtype: str, device: torch.device, max_length: int) -> Model:
    """The checkpoint in ``folder``, ready to run; arguments and errors as ``Transformer``'s."""
    return Transformer(folder, dtype, device, max_length)
