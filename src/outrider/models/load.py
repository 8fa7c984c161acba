"""From a checkpoint's folder to a model that runs."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from ..config import NO_RECIPES, Recipe
from ..errors import ConfigError, ModelError
from ..gguf import is_gguf
from ..native.choice import library
from .base import Model
from .fallback import Fallback
from .families import read_architecture, read_config
from .native import NativeTransformer, covers, native_dtype
from .transformer import Transformer

logger = logging.getLogger("outrider")

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
    beside: Model | None = None,
) -> Model:
    """The checkpoint in ``folder``, ready to run.

    By the native step where that covers its family and options and was built, else by the torch
    path, else by transformers. Arguments and errors are those of ``Transformer`` and ``Fallback``;
    ``quantization`` is a recipe's text, or "auto" for int8 by the native step, and what native
    models have in common with ``beside`` is held once.

    Raises:
        ConfigError: ``quantization`` is no recipe, or given for a checkpoint that is quantised.
        ModelError: transformers runs the model, and it is to be quantised or given a window.
    """
    config = read_config(folder)
    architecture = read_architecture(config, folder)
    recipe = None if quantization in (None, *NO_RECIPES) else Recipe.parse(quantization)
    stored = is_gguf(folder) or getattr(config, "quantization_config", None) is not None
    if recipe and stored:
        raise ConfigError(
            f"quantization is {quantization!r}, but the weights in {folder} are quantised already; "
            "leave it out, or give the checkpoint they were made from."
        )
    if architecture is None:
        if recipe:
            raise ModelError(
                f"{folder}: a {config.model_type!r} model as configured runs through transformers, "
                "and only native models can be quantised; leave quantization out."
            )
        if window is not None:
            raise ModelError(
                f"{folder}: a {config.model_type!r} model as configured runs through transformers, "
                "and only native models can be given a window; leave drafter_window and preset out."
            )
        return Fallback(folder, dtype, device)
    chosen = native_dtype(dtype, architecture.dtype)
    if device.type == "cpu" and covers(config, architecture, chosen):
        step = library()
        if step is not None:
            if dtype == "auto" and (architecture.dtype, chosen) == ROUNDED:
                logger.warning(HALF, folder)
            if quantization == "auto" and not stored:
                recipe = Recipe.parse("int8")
            near = beside if isinstance(beside, NativeTransformer) else None
            return NativeTransformer(step, folder, dtype, max_length, recipe, window, near)
    return Transformer(folder, dtype, device, max_length, recipe, window)
