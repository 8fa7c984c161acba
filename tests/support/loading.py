"""Models of native families, without the choice that ``load_model`` makes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from outrider.base.config import Recipe
from outrider.checkpoints.checkpoint import Checkpoint, open_checkpoint
from outrider.checkpoints.dtypes import choose_dtype, native_dtype
from outrider.models.native import NativeTransformer
from outrider.models.transformer import Transformer
from outrider.native.library import Library


def opened(folder: Path, window: int | None) -> Checkpoint:
    """A checkpoint whose rows see ``window`` positions."""
    checkpoint = open_checkpoint(folder)
    assert checkpoint.architecture is not None
    return replace(checkpoint, shape=checkpoint.architecture.within(window))


def torch_model(
    folder: Path,
    dtype: str,
    device: str,
    max_length: int,
    recipe: Recipe | None = None,
    window: int | None = None,
) -> Transformer:
    checkpoint = opened(folder, window)
    chosen = choose_dtype(dtype, checkpoint.shape.dtype)
    return Transformer(checkpoint, chosen, device, max_length, recipe)


def native_model(
    step: Library,
    folder: Path,
    dtype: str,
    max_length: int,
    recipe: Recipe | None = None,
    window: int | None = None,
    coded_cache: bool = False,
) -> NativeTransformer:
    checkpoint = opened(folder, window)
    chosen = native_dtype(dtype, checkpoint.shape.dtype, step.isa)
    return NativeTransformer(step, checkpoint, chosen, max_length, recipe, coded_cache=coded_cache)
