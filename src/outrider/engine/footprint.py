"""Computes the memory that a checkpoint takes once it is loaded, without loading it."""

from __future__ import annotations

from typing import NamedTuple

from ..base.config import EngineConfig
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.dtypes import choose_dtype, native_dtype
from ..checkpoints.families import Architecture
from ..native.choice import library
from .memory import usual_pages, working_bytes

LANES = 16
"""The native step's cache pads slots of a block and elements of a head to a multiple of this."""


class Footprint(NamedTuple):
    """Bytes of a checkpoint in use: ``weights`` as they are held, and ``working`` of a step.

    The cache takes ``page`` bytes a page and has ``usual`` pages by default. Both are 0 if
    transformers runs the model, whose cache is as large as its sequences.
    """

    weights: int
    working: int
    page: int
    usual: int


def footprint(checkpoint: Checkpoint, native: bool, drafts: bool = False) -> Footprint:
    """Return the memory that a checkpoint takes with the default options of a server.

    ``native``: the native step runs it. ``drafts``: it is a drafter, whose weights that step gives
    8 bits.
    """
    config, shape, architecture = EngineConfig(), checkpoint.shape, checkpoint.architecture
    step = library() if native else None
    if step is None:
        size = choose_dtype("auto", shape.dtype).itemsize
    else:
        size = native_dtype("auto", shape.dtype, step.isa).itemsize
    few = drafts and step is not None and not checkpoint.quantised
    held = checkpoint.tensors.held(1 if few else size, step is not None)
    if architecture is not None and architecture.tied:
        held.pop("lm_head.weight", None)  # a stored head is not loaded
    weights = sum(held.values())
    if architecture is None:
        return Footprint(weights, working_bytes(config, shape.vocab_size, 0, ()), 0, 0)
    if step is None:  # torch dequantises all weights
        weights = max(weights, size * num_weights(architecture))
    usual = usual_pages(config, config.model_length(shape.context), ())
    pads = LANES if step is not None else 1
    working = working_bytes(config, shape.vocab_size, architecture.hidden_size, ())
    return Footprint(weights, working, cache_page(architecture, config, size, pads), usual)


def cache_page(architecture: Architecture, config: EngineConfig, size: int, pads: int) -> int:
    """Return the bytes of a page of the cache, of numbers of ``size`` bytes; see ``LANES``."""
    a = architecture
    slots, width = (-(-n // pads) * pads for n in (config.page_size, a.head_dim))
    return 2 * a.num_layers * a.num_kv_heads * slots * width * size


def num_weights(architecture: Architecture) -> int:
    """Return the elements of a model's matrices."""
    a = architecture
    heads = a.hidden_size * a.head_dim * 2 * (a.num_heads + a.num_kv_heads)
    dense = 3 * a.hidden_size * a.intermediate_size
    experts = a.num_experts * (3 * a.expert_size + 1) * a.hidden_size
    layers = sum(heads + (experts if sparse else dense) for sparse in a.sparse)
    return layers + a.vocab_size * a.hidden_size * (1 if a.tied else 2)
