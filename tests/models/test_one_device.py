"""No operation of the torch path mixes devices: run on one that computes nothing, "meta"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.checkpoints.dtypes import BFLOAT16
from outrider.models import transformer
from outrider.models.kv_store import KVStore
from outrider.models.rows import Segment
from outrider.models.transformer import Transformer
from outrider.plugins.common import draws
from outrider.plugins.common.gumbel import gumbel_of_tensors
from tests.support.exactness import planted_pair

PROMPT = Segment([*range(5, 25)], 0, [1, 2, 3], 1, 20, key="a")
OTHER = Segment([7], 0, [5], 1, 1, key="b")
CHAIN = Segment([9], 20, [1, 4, 3], 3, 20, nodes=[1, 2], parents=[-1, 0], key="a")
TREE = Segment([9], 20, [1, 2, 3], 4, 20, nodes=[1, 2, 3], parents=[-1, 0, 0], key="a")


class OneDevice(TorchDispatchMode):
    """Refuses an operation on tensors of two devices; numbers may come from any."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        tensors = (t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
        devices = {t.device.type for t in tensors if t.dim()}
        assert len(devices) < 2, f"{func} mixes {devices}"
        return func(*args, **(kwargs or {}))


@contextmanager
def without_numbers() -> Iterator[None]:
    """Stand in for what reads numbers of tensors."""

    def as_array(tensor: torch.Tensor) -> Any:
        assert tensor.device.type == "meta"
        return np.zeros(tuple(tensor.shape), np.float32)

    with (
        patch.object(transformer, "float", lambda norm: 0.0, create=True),
        patch.object(transformer, "as_array", as_array),
        patch.object(transformer, "row_unit", lambda weights: 8),
        patch.object(KVStore, "mark", lambda self, slots, harmed: self.harmed[slots].copy_(harmed)),
    ):
        yield


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2"])
def test_the_torch_path_stays_on_its_device(family: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(planted_pair(tmp_path / "pair", family))
    with without_numbers():
        model = Transformer(checkpoint, BFLOAT16, "meta", 128)
        store = model.new_store(20, 16)
        with OneDevice() as mode:
            output = model.run([PROMPT, OTHER], store, (-1, 0))
            assert output.logits is not None
            assert output.logits.shape == (2, model.shape.vocab_size)
            for segments in ([TREE], [CHAIN, OTHER]):
                model.run(segments, store)
            store.move([3], [4])
            store.any_harmed = True
            model.run([CHAIN, OTHER], store)
    assert mode.count > 400


def test_a_tensor_of_another_device_is_seen(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(planted_pair(tmp_path / "pair", "llama"))
    with without_numbers():
        model = Transformer(checkpoint, BFLOAT16, "meta", 128)
        store = model.new_store(20, 16)
        for rope in model._ropes.values():
            rope._unturned = torch.zeros(2, 16, dtype=torch.bfloat16)
        with OneDevice(), pytest.raises((AssertionError, RuntimeError), match=r"mixes|devices"):
            model.run([PROMPT], store)


def test_draws_and_acceptance_stay_on_their_device() -> None:
    with OneDevice() as mode:
        seeds = torch.zeros(3, dtype=torch.int64, device="meta")
        z = torch.zeros(3, 77, device="meta")
        drawn = seeds[:, None].expand(3, 4)
        found = [
            gumbel_of_tensors(seeds, seeds, 77),
            draws.draw(z, seeds, seeds, None),
            draws.draw(z, seeds, seeds, seeds == 0),
            draws.truncate(z, seeds, z[:, 0]),
            *draws.follow(drawn, drawn[:, :-1], seeds),
        ]
    assert {tensor.device.type for tensor in found} == {"meta"}
    assert mode.count > 100
