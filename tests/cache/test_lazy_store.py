"""A cache takes memory as it is used: none when it is made, and zeros until then."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.models.kv_store import lazy_zeros
from outrider.models.load import load_model
from outrider.models.rows import Segment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
CPU = "cpu"
MIB = 1 << 20


def resident() -> int:
    """Bytes of anonymous memory that this process holds."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def test_a_native_cache_is_resident_page_by_page(tiny_llama: Path) -> None:
    model = load_model(open_checkpoint(tiny_llama), "auto", CPU, 64)
    pages = 2048 * MIB // model.page_bytes(16)
    before = resident()
    store = model.new_store(pages, 16)
    made = resident()
    assert made - before < 64 * MIB
    ids = [3, 9, 4, 11, 7]
    far, near = (
        model.run([Segment(ids, 0, (page,), 5, 5, (), (), "a")], store).logits
        for page in (pages - 1, 1)
    )
    assert far is not None
    assert near is not None
    assert np.array_equal(far, near)  # what pads a page was never written, and is zero
    assert resident() - made < 64 * MIB


def test_zeros_are_resident_when_they_are_written() -> None:
    before = resident()
    zeros = lazy_zeros((256, MIB), torch.float32, torch.device(CPU))
    assert resident() - before < 16 * MIB
    assert not zeros[::16].any()
    zeros[:64] = 1
    assert 256 * MIB <= resident() - before < 384 * MIB
