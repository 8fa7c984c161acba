"""What an engine takes of memory: the size of its cache, and when that becomes resident."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from outrider import LLM
from outrider.base.config import USUAL_LENGTH, EngineConfig
from outrider.base.groups import memory_left
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.drafters.base import Needs
from outrider.engine import memory
from outrider.models.base import Model
from outrider.models.load import load_model
from outrider.models.native import NativeTransformer
from outrider.models.rows import Segment
from outrider.models.transformer import Transformer
from tests.support.tiny import MakeCheckpoint

MIB = 1 << 20
PAGE, LONG = 16, 1 << 16


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def by_torch(folder: Path, length: int) -> Model:
    return Transformer(open_checkpoint(folder), np.dtype(np.float32), "cpu", length)


def by_choice(folder: Path, length: int) -> Model:
    return load_model(open_checkpoint(folder), "float32", "cpu", length)


@pytest.mark.parametrize("load", [by_choice, by_torch])
def test_a_cache_is_resident_where_it_was_written(
    tiny_llama: Path, load: Callable[[Path, int], Model]
) -> None:
    model = load(tiny_llama, 128)
    pages = 512 * MIB // model.page_bytes(PAGE)
    before = resident()
    store = model.new_store(pages, PAGE)
    assert resident() - before < 64 * MIB
    table = [pages // 4, pages // 2, pages - 1]  # far from each other
    model.run([Segment([5] * 40, 0, table, 1, 40)], store)
    assert resident() - before < 80 * MIB


@pytest.mark.parametrize(
    ("context", "sequences", "tokens"),
    [(4 * USUAL_LENGTH, 32, 32 * USUAL_LENGTH), (LONG, 4, LONG), (256, 8, 8 * 256)],
)
def test_the_usual_cache_is_modest(
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    context: int,
    sequences: int,
    tokens: int,
) -> None:
    """It holds the usual length for each sequence and any one of them in full, with drafts."""
    model = by_choice(tiny_llama, 128)
    config = EngineConfig(max_num_seqs=sequences)
    planned = memory.plan_budget(config, context, model, [])
    assert tokens <= planned.tokens < tokens + sequences * 2 * PAGE
    given = EngineConfig(max_num_seqs=sequences, memory="40GiB")
    monkeypatch.setattr(memory, "free_memory", lambda: 2**36)
    assert memory.plan_budget(given, context, model, []).tokens >= sequences * context
    free = memory.working_bytes(config, model.shape.vocab_size, 0, []) + 20 * MIB
    monkeypatch.setattr(memory, "free_memory", lambda: free)
    few = memory.plan_budget(config, context, model, [])
    assert few.target_bytes == min(planned.target_bytes, 10 * MIB)


@pytest.mark.parametrize("length", [2, 8])
def test_a_short_context_has_room(length: int, tiny_llama: Path) -> None:
    engine = LLM(tiny_llama, None, max_model_len=length, max_num_seqs=1).engine
    assert engine.budget.tokens >= length


def test_one_line_tells_the_cache_and_how_to_size_it(tiny_llama: Path) -> None:
    said = str(LLM(tiny_llama, drafter=None).engine.budget)
    assert "MiB once it is full" in said
    assert "option memory sets its size" in said
    assert "\n" not in said


def test_memory_that_control_groups_leave(tmp_path: Path) -> None:
    groups, own = tmp_path / "groups", tmp_path / "own"
    old, new = groups / "memory" / "job", groups / "slice" / "unit"
    for folder in (old, new):
        folder.mkdir(parents=True)
    own.write_text("4:memory:/job\n0::/slice/unit\n")
    assert memory_left(groups, own) is None
    (old / "memory.limit_in_bytes").write_text("9000\n")
    (old / "memory.usage_in_bytes").write_text("5000\n")
    (old / "memory.stat").write_text("inactive_file 7\ntotal_inactive_file 1000\n")
    assert memory_left(groups, own) == 5000
    (new.parent / "memory.max").write_text("4000\n")
    (new.parent / "memory.current").write_text("3500\n")
    (new.parent / "memory.stat").write_text("anon 1\ninactive_file 250\n")
    (new / "memory.max").write_text("max\n")
    (new / "memory.current").write_text("3500\n")
    (new / "memory.stat").write_text("inactive_file 250\n")
    assert memory_left(groups, own) == 750
    (new.parent / "memory.current").write_text("9000\n")
    assert memory_left(groups, own) == 0


def test_states_limit_the_sequences_at_once(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their memory is planned, and fewer sequences run where it is short."""
    layers = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
    folder = make_checkpoint(tmp_path, "lfm2", hidden_size=64, **layers)
    model, config = by_choice(folder, 128), EngineConfig(max_num_seqs=32)
    each = model.state_bytes(memory.most_nodes(config, []))
    planned = memory.plan_budget(config, 128, model, [])
    assert each >= model.kept_state_bytes > 0 or not isinstance(model, NativeTransformer)
    assert (planned.sequences, planned.state_bytes) == (32, 32 * each)
    assert "states of layers" in str(planned)
    beside = memory.plan_budget(config, 128, model, [Needs(state_bytes=1000)])  # a drafter's
    assert beside.state_bytes == 32 * (each + 1000)
    room = int(each * 8 / memory.STATES_SHARE)
    monkeypatch.setattr(memory, "working_bytes", lambda *args: 0)
    monkeypatch.setattr(memory, "free_memory", lambda: room)
    few = memory.plan_budget(config, 128, model, [])
    assert few.sequences == 8
    assert few.snapshot_bytes <= room // 8
