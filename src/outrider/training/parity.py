"""Checks that a drafter predicts the same tokens when served as in training."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ..base.config import EngineConfig
from ..checkpoints.checkpoint import open_checkpoint
from ..checkpoints.heads import MEDUSA, read_head
from ..engine.build import load_target
from ..errors import TrainingError
from ..models.native import NativeTransformer
from ..models.native_heads import NativeHead, NativeMedusa
from ..models.rows import Segment
from .distill import DistillTask
from .eagle3 import Rows, rows_of
from .heads import DraftingHead
from .samples import Sample
from .teacher import PAGE_SIZE, Teacher

LEAST = 0.9
"""Least share of rows whose likeliest id must be the same; quantisation changes some."""
NEAR = 0.25
"""Nats below the likeliest id within which another one counts as the same."""
PRECISE = "int8-a8"
"""A quantisation that hardly changes a head's outputs, unlike the one that it is served with."""


def served_head(folder: Path, target: NativeTransformer, context: int) -> NativeHead | NativeMedusa:
    """Return the head in a folder as the native step runs it."""
    head = read_head(folder)
    assert head is not None
    if head.kind == MEDUSA:
        return NativeMedusa(head, target, PRECISE)
    return NativeHead(head, target, context, PRECISE)


def served_logits(model: NativeHead | NativeMedusa, rows: Rows) -> NDArray[np.float32]:
    """Return the first depth's logits of one sample's drafts as the native step computes them."""
    fused, drafts = rows.fused.numpy(), rows.drafts.numpy()
    if isinstance(model, NativeMedusa):
        segments = [model.segment(fused[i : i + 1], str(i)) for i in drafts]
        store = model.new_store(model.num_heads, 1)
        first = (model.run([each], store).logits for each in segments)
        return np.stack([each[0] for each in first if each is not None])
    count = len(fused)
    parts = [np.ascontiguousarray(part) for part in np.split(fused, len(model.target_layers), 1)]
    states, places = np.empty((count, model.hidden_size), np.float32), array("i", range(count))
    model.fuse(parts, places, states, places)
    pages = -(-(count + 1) // PAGE_SIZE)
    segment = Segment(
        rows.tokens.tolist(), 1, range(pages), count, count + 1, first=1, states=states
    )
    logits = model.forward([segment], model.new_store(pages, PAGE_SIZE)).logits
    assert logits is not None
    said: NDArray[np.float32] = logits[drafts]
    return said


@torch.no_grad()
def check_served(
    folder: Path,
    head: DraftingHead,
    target: NativeTransformer,
    teacher: Teacher,
    samples: Sequence[Sample],
) -> float:
    """Return the share of drafts whose first token is the same in training and serving.

    A token within ``NEAR`` of the likeliest counts, too. ``folder`` has the trained ``head``.
    Raises TrainingError: the share is too small.
    """
    model, same, count = served_head(folder, target, teacher.context), 0, 0
    for sample in samples:
        rows = rows_of([teacher.teach(sample)])
        if not len(rows.drafts):
            continue
        trained = head.logits(0, next(iter(head.unroll(rows, 1))))
        served = torch.from_numpy(served_logits(model, rows)).argmax(-1, keepdim=True)
        same += int((trained.gather(-1, served)[:, 0] >= trained.amax(-1) - NEAR).sum())
        count += len(served)
    return _enough(folder, same, count)


@torch.no_grad()
def check_drafter(
    folder: Path, task: DistillTask, context: int, samples: Sequence[Sample]
) -> float:
    """Return the share of tokens that are the likeliest both in training and in serving.

    ``folder`` has the small model of ``task``. Raises TrainingError: the share is too small.
    """
    config = EngineConfig(max_model_len=context)
    served = Teacher(load_target(open_checkpoint(folder), config), context, (), None)
    same = count = 0.0
    for sample in samples:
        lesson = served.teach(sample)
        same += float(task.says(lesson).same.sum())
        count += len(lesson.rows)
    return _enough(folder, same, count)


def _enough(folder: Path, same: float, count: float) -> float:
    """Return the share of places that agree. Raises TrainingError: it is too small."""
    share = same / max(1, count)
    if share < LEAST:
        raise TrainingError(
            f"{folder} says the same as in training in {share:.0%} of {count:.0f} places only; "
            "please report this, and do not serve it."
        )
    return share
