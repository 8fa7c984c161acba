"""Models of native families, without the choice that ``load_model`` makes."""

from __future__ import annotations

from pathlib import Path

import torch

from outrider.base.config import Recipe
from outrider.checkpoints.dtypes import choose_dtype, native_dtype
from outrider.checkpoints.families import read_architecture, read_config
from outrider.models.native import NativeTransformer
from outrider.models.transformer import Transformer
from outrider.native.library import Library


def torch_model(
    folder: Path,
    dtype: str,
    device: torch.device,
    max_length: int,
    recipe: Recipe | None = None,
    window: int | None = None,
) -> Transformer:
    config = read_config(folder)
    architecture = read_architecture(config, folder, window)
    assert architecture is not None
    chosen = choose_dtype(dtype, architecture.dtype)
    return Transformer(folder, config, architecture, chosen, device, max_length, recipe)


def native_model(
    step: Library,
    folder: Path,
    dtype: str,
    max_length: int,
    recipe: Recipe | None = None,
    window: int | None = None,
) -> NativeTransformer:
    config = read_config(folder)
    architecture = read_architecture(config, folder, window)
    assert architecture is not None
    chosen = native_dtype(dtype, architecture.dtype, step.isa)
    return NativeTransformer(step, folder, config, architecture, chosen, max_length, recipe)
