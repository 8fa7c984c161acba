"""Forecasts the memory and the disk that a job takes, and refuses what clearly does not fit."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from ..base.config import EngineConfig, free_memory
from ..bench.workload import Item
from ..checkpoints.checkpoint import Checkpoint
from ..engine.memory import working_bytes
from ..engine.probe import footprint
from ..errors import MemoryBudgetError, TrainingError
from ..models.native import is_native
from .answers import BLOCK
from .states import state_bytes

CLEARLY = 0.9
"""Share of a forecast that must be free; forecasts are rough."""
TOKEN_BYTES = 5
"""Bytes of a token in a data folder: its id, and whether the target said it."""
SAMPLE_BYTES = 16
"""Bytes of a sample in addition to its tokens."""
SKIPS_BYTES = 10_000
"""Approximate upper bound on the bytes of a file that names sublayers."""
TEMPLATE_TOKENS = 32
"""Approximate upper bound on the tokens that a template adds to a message."""


class Need(NamedTuple):
    """The bytes that a job takes: of memory, by purpose, and of disk.

    ``files`` remain on disk. ``passing`` are files that will replace others, and exist beside them
    first.
    """

    memory: Mapping[str, int]
    files: int
    passing: int = 0


def check(
    job: str, need: Need, folder: Path, remedy: str, loaded: int = 0, spare: int = 0,
    silent: bool = False,
) -> int:  # fmt: skip
    """Print to stderr what a job in ``folder`` takes; return how much of ``spare`` memory is free.

    ``loaded`` bytes of it are already in memory, and the files of ``folder`` already on disk. If
    ``silent``, nothing is printed. Raises MemoryBudgetError, TrainingError: clearly less is free;
    the message has the ``remedy``.
    """
    memory, free = sum(need.memory.values()), free_memory() + loaded
    disk, room = max(0, need.files - written(folder)) + need.passing, free_disk(folder)
    spare = max(0, min(spare, free - memory))
    parts = [f"{what} {size(count)}" for what, count in need.memory.items() if count]
    parts += [f"and {size(spare)} more for lessons"] if spare else []
    if not silent:
        tqdm.write(
            f"{job} takes about {size(memory)} of the {size(free)} of memory that are free "
            f"({', '.join(parts)}), and up to {size(disk)} of {size(room)} of disk",
            file=sys.stderr,
        )
    if free < CLEARLY * memory:
        raise MemoryBudgetError(
            f"{job} takes about {size(memory)} of memory, and {size(free)} are free; {remedy}, or "
            "free memory."
        )
    if room < CLEARLY * disk:
        raise TrainingError(
            f"{job} takes up to {size(disk)} of disk, and {size(room)} are free at {folder}; free "
            "some, or give another folder."
        )
    return spare


def size(count: int) -> str:
    """Return a number of bytes in words."""
    if count >= 1e9:
        return f"{count / 1e9:.1f} GB"
    return f"{count / 1e6:.0f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


def free_disk(folder: Path) -> int:
    """Return the bytes that may be written to a folder, which need not be there yet."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def written(folder: Path) -> int:
    """Return the bytes of the files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def weight_bytes(checkpoint: Checkpoint) -> int:
    """Return the bytes of a target's weights in memory."""
    return footprint(checkpoint, is_native(checkpoint), False)["weights"]


def check_weights(checkpoint: Checkpoint) -> None:
    """Raise MemoryBudgetError: a target's weights clearly do not fit into the free memory."""
    weights, free = weight_bytes(checkpoint), free_memory()
    if free < CLEARLY * weights:
        raise MemoryBudgetError(
            f"the target's weights take about {size(weights)} of memory, and {size(free)} are "
            "free; take a quantised target (outrider quantize), or free memory."
        )


def data_bytes(items: list[Item], max_tokens: int, context: int, state: int = 0) -> int:
    """Return an upper bound on the bytes of the target's answers: a token has a byte or more.

    Answers may be shorter than ``max_tokens``, and no sample is longer than ``context``. Each token
    has ``state`` bytes of states.
    """
    total = 0
    for item in items:
        texts = [m["content"] for m in item.messages if m["role"] != "assistant"] or [item.prompt]
        turns = max(1, sum(m["role"] == "user" for m in item.messages))
        asked = sum(len(text.encode()) + TEMPLATE_TOKENS for text in texts)
        tokens = min(context, asked + turns * max_tokens)
        total += (TOKEN_BYTES + state) * tokens + SAMPLE_BYTES
    return total


def check_search(checkpoint: Checkpoint, pages: int, out: Path) -> None:
    """Print what a search on windows of ``pages`` KV cache pages takes; see ``check``.

    The target is already loaded, and the native step runs it.
    """
    held = footprint(checkpoint, True, False)
    memory = {"the target": held["weights"], "windows": pages * held["page"]}
    remedy = "make data of a smaller context (outrider train data --context)"
    check("searching", Need(memory, SKIPS_BYTES), out, remedy, held["weights"])


def check_data(
    checkpoint: Checkpoint, items: list[Item], max_tokens: int, context: int, together: int,
    out: Path, layers: Sequence[int] = (),
) -> None:  # fmt: skip
    """Print what answering ``together`` prompts at a time takes; see ``check``.

    The states after ``layers`` are kept, a shard of them in memory, with copies of one layer.
    """
    config = EngineConfig(max_num_seqs=together, max_model_len=context)
    a = checkpoint.architecture
    width = 0 if a is None else a.hidden_size
    memory = {
        "the target": weight_bytes(checkpoint),
        "a step": working_bytes(config, checkpoint.shape.vocab_size, width, ()),
    }
    state = state_bytes(layers, width)
    files = data_bytes(items, max_tokens, context, state)
    if state:
        kept = files - data_bytes(items, max_tokens, context)
        # A shard's, and two more copies of the layer being written: fp32, 2/5 of the bytes.
        memory["states"] = kept * min(BLOCK, len(items)) // len(items) * 9 // 5
    need = Need(memory, files)
    check("answering", need, out, "take a quantised target (outrider quantize)")
