"""Rows of models with random weights, read in chunks of any size: logits that must not differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from outrider.models.base import Model, Store
from outrider.models.rows import Segment
from tests.support.loading import native_model, torch_model
from tests.support.native_steps import HERE, step

PAGE = 16


def vary(folder: Path) -> Path:
    """``folder``, with random vectors where a random checkpoint leaves them near one value."""
    tensors = load_file(folder / "model.safetensors")
    random = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if name.endswith("A_log"):
            tensor.copy_(torch.rand(tensor.shape, generator=random) * 3 - 1)
        elif name.endswith("dt_bias"):
            tensor.copy_(torch.rand(tensor.shape, generator=random) * 5 - 4)
        elif name.endswith((".D", "mamba.norm.weight", "mixer.norm.weight")):
            tensor.copy_(torch.rand(tensor.shape, generator=random) + 0.5)
        elif name.endswith((".sinks", "router.bias", "_proj_bias")):
            tensor.copy_(torch.randn(tensor.shape, generator=random))
        elif name.endswith(("expert_bias", "e_score_correction_bias")):
            tensor.copy_(torch.rand(tensor.shape, generator=random) - 0.5)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def models(folder: Path, dtypes: Sequence[str] = ("float32",), **options: Any) -> Iterator[Model]:
    """The models of torch and of every instruction set."""
    for dtype in dtypes:
        yield torch_model(folder, dtype, "cpu", 256, **options)
        for isa in HERE:
            yield native_model(step(isa), folder, dtype, 256, **options)


def ids_of(length: int) -> list[int]:
    return np.random.default_rng(0).integers(0, 128, length).tolist()


def logits_of(model: Model, store: Store, segments: list[Segment]) -> NDArray[np.float32]:
    logits = model.run(segments, store).logits
    assert logits is not None
    return logits


def plain(model: Model, ids: list[int], sizes: Sequence[int]) -> NDArray[np.float32]:
    """The logits of a sequence that is read in chunks of ``sizes``, and then one by one."""
    store, parts, start = model.new_store(12, PAGE), [], 0
    while start < len(ids):
        size = sizes[len(parts)] if len(parts) < len(sizes) else 1
        chunk = ids[start : start + size]
        segment = Segment(chunk, start, range(1, 10), len(chunk), len(ids), key="a")
        parts.append(logits_of(model, store, [segment]))
        start += len(chunk)
    return np.concatenate(parts)
