"""Loads a checkpoint as a model: native, by torch, or by transformers."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..base.config import AUTOMATIC, NO_RECIPES, Recipe, free_memory
from ..base.extras import torch_for
from ..base.fields import readable
from ..checkpoints.architecture import Architecture
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.dtypes import BFLOAT16, FLOAT16, choose_dtype, native_dtype
from ..checkpoints.formats.gguf_weights import GGUFTensors
from ..checkpoints.matrices import check_left
from ..checkpoints.rope import STILL
from ..errors import ConfigError, MemoryBudgetError, ModelError
from ..native.choice import library, placed
from .base import Model
from .kept_weights import place_of
from .native import NativeTransformer, covers

logger = logging.getLogger("outrider")

TABLE_BYTES = 1 << 30
"""Bytes of rotary tables that every checkpoint may have: a million positions of 128 elements."""
FLOAT16_ROUNDED = (FLOAT16, BFLOAT16)
FLOAT16_WARNING = (
    "%s: a float16 checkpoint, computed in bfloat16: what is not quantised loses 3 of 11 bits. "
    "dtype='float32' keeps them, with twice the memory for it and the cache."
)


def load_model(
    checkpoint: Checkpoint,
    dtype: str,
    device: str,
    max_length: int,
    quantization: str | None = None,
    window: int | None = None,
    share_weights_with: Model | None = None,
    activations: str = "auto",
    keeps: bool = False,
    cpus: frozenset[int] | None = None,
    coded_cache: bool = False,
) -> Model:
    """Return the model of a checkpoint: by the native step, else by torch, else by transformers.

    Args:
        checkpoint, dtype, device, max_length: see ``Transformer`` and ``Fallback``.
        quantization: a recipe's text, or one of ``AUTOMATIC`` for its recipe by the native step.
        window: positions that a row of any layer sees, itself included.
        share_weights_with: a model; weights that two native models have in common are held once.
        activations: bits of activations beside few-bit weights, "16", "8" or "auto".
        keeps: packed weights are taken from disk, and may be kept there, see ``kept_weights``.
        cpus: where its passes run, in a pool of threads of their own; None for the process's.
        coded_cache: keys and values are codes of 8 bits; only the native step has them.

    Raises:
        ConfigError: ``quantization`` is no recipe, or leaves weights out that it may not; or
            ``cpus`` or ``coded_cache`` are given and the native step does not run the model.
        ConfigError, MemoryBudgetError: rotary tables for ``max_length`` take too much.
        ModelError: the checkpoint cannot be read, or transformers runs it and an option does not
            fit that.
    """
    folder, config, architecture = checkpoint.folder, checkpoint.config, checkpoint.architecture
    with readable(f"{folder} cannot be loaded", "fetch the checkpoint again."):
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
            _refuse_cpus(checkpoint, cpus)
            _needs_step(folder, coded_cache)
            with torch_for(f"{folder}: a {config.model_type!r} model, as configured,"):
                from .fallback import Fallback  # with most of transformers

            return Fallback(checkpoint, dtype, device)
        checkpoint = replace(checkpoint, shape=architecture.within(window))
        if recipe and checkpoint.quantised:
            check_left(checkpoint.tensors, recipe)
        _check_tables(checkpoint, architecture, max_length)
        step = library() if device == "cpu" else None
        if step is not None:
            chosen = native_dtype(dtype, architecture.dtype, step.isa)
            if covers(config, architecture, chosen):
                if dtype == "auto" and (architecture.dtype, chosen) == FLOAT16_ROUNDED:
                    logger.warning(FLOAT16_WARNING, folder)
                if quantization in AUTOMATIC and not checkpoint.quantised:
                    recipe = Recipe.parse(AUTOMATIC[quantization])
                coarse = _coarse(checkpoint, recipe, activations)
                step = step if cpus is None else placed(step, cpus)
                other = share_weights_with
                native = other if isinstance(other, NativeTransformer) else None
                kept = place_of(checkpoint, str(chosen), recipe, step) if keeps else None
                return NativeTransformer(
                    step, checkpoint, chosen, max_length, recipe, native, coarse, kept,
                    coded_cache,
                )  # fmt: skip
        _refuse_cpus(checkpoint, cpus)
        _needs_step(folder, coded_cache)
        why = "as configured here, the model has no native step; it"
        if step is None and device == "cpu":
            why = "the native step is off or not built (it takes a C++ compiler), so the model"
        with torch_for(f"{folder}: {why}"):
            from .transformer import Transformer

        chosen = choose_dtype(dtype, architecture.dtype)
        return Transformer(checkpoint, chosen, device, max_length, recipe)


def _refuse_cpus(checkpoint: Checkpoint, cpus: frozenset[int] | None) -> None:
    """Raise ConfigError if CPUs are given for a model that the native step does not run."""
    if cpus is not None:
        raise ConfigError(
            f"drafter_cpus places models that the native step runs, and it does not run "
            f"{checkpoint.folder}; leave it out."
        )


def _needs_step(folder: Path, coded_cache: bool) -> None:
    if coded_cache:
        raise ConfigError(
            f"{folder}: kv_cache_dtype is int8, which needs the native step, and this model runs "
            "without it; leave kv_cache_dtype out."
        )


def _coarse(checkpoint: Checkpoint, recipe: Recipe | None, activations: str) -> bool:
    """Return True if activations get 8 bits beside few-bit weights, not 16."""
    if activations != "auto":
        return activations == "8"
    if recipe is not None:
        return recipe.coarse
    return isinstance(checkpoint.tensors, GGUFTensors)


def check_drafts(folder: Path, model: Model, chains: bool = True) -> None:
    """Raise ModelError for a whole model that cannot draft.

    A model whose layers have states drafts only ``chains``, and only in the native step.
    """
    why = None
    if not model.truncates:
        why = cannot_go_back(folder, model)
    elif model.shape.stateful and not (chains and isinstance(model, NativeTransformer)):
        why = f"{folder}: layers of a {model.shape.family!r} model keep states"
        if chains:
            why += ", and the native step is off"
    if why is not None:
        raise ModelError(f"{why}, so it cannot draft; give another or drafter='ngram'.")


def cannot_go_back(folder: Path, model: Model) -> str:
    """Return the beginning of an error about a model whose cache cannot be cut."""
    return (
        f"{folder}: the state of a {model.shape.family!r} model cannot go back to an earlier token"
    )


def _check_tables(checkpoint: Checkpoint, architecture: Architecture, max_length: int) -> None:
    """Refuse rotary tables beyond the files and ``TABLE_BYTES``, or beyond the free memory."""
    kinds = len(set(architecture.kinds) - {STILL})
    tables = 2 * kinds * max_length * architecture.head_dim * np.dtype(np.float32).itemsize
    folder, stored, free = checkpoint.folder, checkpoint.tensors.file_bytes, free_memory()
    what = f"max_model_len is {max_length}, whose rotary tables take {tables >> 20} MiB"
    if tables > max(TABLE_BYTES, stored):
        raise ConfigError(f"{what}, out of proportion to {folder} ({stored >> 20} MiB); give less.")
    if tables > free:
        raise MemoryBudgetError(f"{what}, but only {free >> 20} MiB are free; give less.")
