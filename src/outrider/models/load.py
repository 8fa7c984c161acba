"""Loads a checkpoint as a model: native, by torch, or by transformers."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..base.config import AUTOMATIC, NO_RECIPES, Recipe, free_memory
from ..base.fields import readable
from ..checkpoints.dtypes import choose_dtype, native_dtype
from ..checkpoints.families import Architecture, read_architecture, read_config
from ..checkpoints.files import weight_files
from ..checkpoints.formats.gguf import is_gguf
from ..checkpoints.weights import check_left, open_source
from ..errors import ConfigError, MemoryBudgetError, ModelError
from ..native.choice import library
from ..native.threads import one_thread
from .base import Model
from .native import NativeTransformer, covers
from .transformer import Transformer

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger("outrider")

TABLES = 1 << 30
"""Bytes of rotary tables that every checkpoint may have: a million positions of 128 elements."""
ROUNDED = (torch.float16, torch.bfloat16)
HALF = (
    "%s: a float16 checkpoint, computed in bfloat16: what is not quantised loses 3 of 11 bits. "
    "dtype='float32' keeps them, with twice the memory for it and the cache."
)


def load_model(
    folder: Path,
    dtype: str,
    device: torch.device,
    max_length: int,
    quantization: str | None = None,
    window: int | None = None,
    share_weights_with: Model | None = None,
    model_config: PretrainedConfig | None = None,
) -> Model:
    """Return the model in ``folder``, ready to run.

    The native step runs it if that was built and covers its family and options, else the torch
    path, else transformers.

    Args:
        folder, dtype, device, max_length: see ``Transformer`` and ``Fallback``.
        window: see ``read_architecture``.
        quantization: a recipe's text, or one of ``AUTOMATIC`` for its recipe by the native step.
        share_weights_with: a model; weights that two native models have in common are held once.
        model_config: of the checkpoint, where it was read already.

    Raises:
        ConfigError: ``quantization`` is not a recipe, or see ``check_left``, or
            ``max_length`` needs rotary tables out of proportion.
        MemoryBudgetError: there is no memory for the rotary tables.
        ModelError: the checkpoint cannot be read; or transformers runs the model, which then takes
            no quantization and no window.
    """
    with readable(f"{folder} cannot be loaded", "fetch the checkpoint again."):
        config = model_config or read_config(folder)
        architecture = read_architecture(config, folder, window)
        open_ = (None, *NO_RECIPES, *AUTOMATIC)
        recipe = None if quantization in open_ else Recipe.parse(quantization)
        if architecture is None:
            for option, refused in (
                (recipe, "quantised; leave quantization out"),
                (window, "given a window; leave drafter_window and preset out"),
            ):
                if option is not None:
                    raise ModelError(
                        f"{folder}: a {config.model_type!r} model as configured runs through "
                        f"transformers, and only native models can be {refused}."
                    )
            from .fallback import Fallback  # with most of transformers

            return Fallback(folder, config, dtype, device)
        quantised = is_gguf(folder) or architecture.quantization is not None
        if recipe and quantised:
            check_left(open_source(folder, architecture), recipe)
        _check_tables(folder, architecture, max_length)
        step = library() if device.type == "cpu" else None
        if step is not None:
            chosen = native_dtype(dtype, architecture.dtype, step.isa)
            if covers(config, architecture, chosen):
                if dtype == "auto" and (architecture.dtype, chosen) == ROUNDED:
                    logger.warning(HALF, folder)
                if quantization in AUTOMATIC and not quantised:
                    recipe = Recipe.parse(AUTOMATIC[quantization])
                other = share_weights_with
                native = other if isinstance(other, NativeTransformer) else None
                # A recipe's search multiplies whole matrices, which wants all threads.
                with one_thread() if recipe is None else nullcontext():
                    return NativeTransformer(
                        step, folder, config, architecture, chosen, max_length, recipe, native
                    )
        chosen = choose_dtype(dtype, architecture.dtype)
        return Transformer(folder, config, architecture, chosen, device, max_length, recipe)


def cannot_go_back(folder: Path, model: Model) -> str:
    """Return the beginning of an error about a model whose cache cannot be cut."""
    return (
        f"{folder}: the state of a {model.shape.family!r} model cannot go back to an earlier token"
    )


def _check_tables(folder: Path, architecture: Architecture, max_length: int) -> None:
    """Refuse a ``max_length`` whose rotary tables are too large.

    Raises:
        ConfigError: they exceed both the checkpoint's files and ``TABLES``.
        MemoryBudgetError: they exceed the free memory.
    """
    kinds = len(set(architecture.kinds))
    tables = 2 * kinds * max_length * architecture.head_dim * torch.float32.itemsize
    files = [folder] if folder.is_file() else weight_files(folder)
    stored, free = sum(file.stat().st_size for file in files), free_memory()
    what = f"max_model_len is {max_length}, whose rotary tables take {tables >> 20} MiB"
    if tables > max(TABLES, stored):
        raise ConfigError(f"{what}, out of proportion to {folder} ({stored >> 20} MiB); give less.")
    if tables > free:
        raise MemoryBudgetError(f"{what}, but only {free >> 20} MiB are free; give less.")
