"""Computes the memory that a checkpoint takes once it is loaded, without loading it."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple

from ..base.config import EngineConfig
from ..checkpoints.dtypes import choose_dtype, native_dtype
from ..checkpoints.families import Architecture, Shape
from ..checkpoints.files import find_tensors
from ..checkpoints.formats.gguf import is_gguf, open_gguf
from ..checkpoints.formats.gguf_weights import EXACT
from ..native.choice import library
from .memory import usual_pages, working_bytes

FLOATS = ("F64", "F32", "F16", "BF16")
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


def footprint(
    folder: Path,
    shape: Shape,
    architecture: Architecture | None,
    native: bool,
    drafts: bool = False,
) -> Footprint:
    """Return the memory that a checkpoint takes with the default options of a server.

    Args:
        folder: a checkpoint or a GGUF file.
        shape, architecture: its own; ``architecture`` is None if transformers runs it.
        native: whether the native step runs it.
        drafts: whether it is a drafter, whose weights the native step gives 8 bits.
    """
    config = EngineConfig()
    step = library() if native else None
    if step is None:
        size = choose_dtype("auto", shape.dtype).itemsize
    else:
        size = native_dtype("auto", shape.dtype, step.isa).itemsize
    tied = architecture is not None and architecture.tied
    few = drafts and architecture is not None and architecture.quantization is None
    plain = 1 if few and step is not None and not is_gguf(folder) else size
    weights = sum(_held(folder, plain, step is not None, tied))
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


def _held(folder: Path, size: int, keeps: bool, tied: bool) -> Iterator[int]:
    """Yield the bytes that each stored tensor takes once it is loaded.

    Args:
        folder: the checkpoint.
        size: bytes of a number that is not quantised.
        keeps: whether quantised matrices stay quantised.
        tied: whether a stored head is not loaded.
    """
    if is_gguf(folder):
        for stored in open_gguf(folder).tensors.values():
            kept = keeps and stored.kind in EXACT
            yield stored.nbytes if kept else size * prod(stored.shape)
        return
    for name, tensor in find_tensors(folder).items():
        if not (tied and name == "lm_head.weight"):
            yield size * prod(tensor.shape) if tensor.type in FLOATS else tensor.nbytes
