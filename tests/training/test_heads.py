"""Heads in training beside the native step that serves them."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.checkpoints.heads import EAGLE3, PEAGLE, read_head
from outrider.models.native import NativeTransformer
from outrider.models.native_heads import NativeHead
from outrider.models.rows import Segment
from outrider.native import choice as native
from outrider.training.eagle3 import Eagle3, rows_of
from outrider.training.head_files import (
    NewHead,
    frequent_ids,
    ids_of,
    load_eagle3,
    open_head,
    save_eagle3,
    write_new_eagle3,
)
from outrider.training.heads import ANYWAY, HeadTask
from outrider.training.losses import forward_kl
from outrider.training.samples import Sample
from outrider.training.teacher import KNOWN_IDS, Teacher
from tests.support.heads import Eagle, make_head, save_head
from tests.support.loading import native_model
from tests.support.taught import random_samples

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native step is off")
LENGTH, DEPTH = 24, 4
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm before residual": {"state_normed": True},
    "norm before fc": {"norm_before_fc": True, "output_normed": True},
    "fc norm": {"fc_norm": True},
}


@pytest.fixture(scope="module")
def target(tiny_llama: Path) -> NativeTransformer:
    return native_model(native.library(), tiny_llama, "float32", 64)


def samples(count: int, seed: int = 0) -> list[Sample]:
    return random_samples(count, LENGTH, low=0, seed=seed)


def teacher_of(target: NativeTransformer, head: Any) -> Teacher:
    return Teacher(target, 64, head.target_layers(target.hidden_layers), ids_of(head))


@pytest.mark.parametrize("layout", ["speculators", "safeailab"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_training_computes_what_serving_does(
    kind: str, layout: str, tiny_llama: Path, target: NativeTransformer, tmp_path: Path
) -> None:
    if layout == "safeailab" and KINDS[kind]:
        pytest.skip("its configs have no such flags")
    about = Eagle(**KINDS[kind])
    folder = save_head(
        make_head(about, AutoConfig.from_pretrained(tiny_llama)), tmp_path / "head", layout
    )
    head = open_head(folder, EAGLE3)
    module = load_eagle3(head, open_checkpoint(tiny_llama), 64)
    lessons = [teacher_of(target, head).teach(each) for each in samples(3)]
    rows = rows_of(lessons)
    found = [module.logits(d, x) for d, x in enumerate(module.unroll(rows, DEPTH))]
    model, ids = NativeHead(head, target, 64, "none"), ids_of(head)
    pages = array("i", range(1, 17))
    for number, lesson in enumerate(lessons):
        tokens = lesson.tokens.tolist()
        fused = rows.fused[rows.begins[number] : rows.begins[number + 1]]
        width = target.hidden_size
        hidden = [np.ascontiguousarray(part) for part in fused.split(width, -1)]
        count = len(tokens) - 1
        states, places = np.empty((count, model.hidden_size), np.float32), array("i", range(count))
        model.fuse(hidden, places, states, places)
        for place in (9, 15):
            at = rows.firsts[number] + int((lesson.rows == place).nonzero())
            ended = model.shape.num_layers
            segment = Segment(
                tokens[1 : place + 1], 1, pages, 1, len(tokens), first=1, states=states[:place]
            )
            store = model.new_store(20, 4)
            for depth in range(DEPTH):
                output = model.run([segment], store, (ended,))
                np.testing.assert_allclose(
                    output.logits[0, ids], found[depth][at], rtol=2e-3, atol=2e-4
                )
                after = place + depth + 1
                segment = segment._replace(
                    tokens=tokens[after : after + 1], start=after,
                    states=output.hidden[ended][-1:].copy(),
                )  # fmt: skip


@torch.no_grad()
def test_training_computes_what_serving_does_in_one_pass(
    tiny_llama: Path, target: NativeTransformer, tmp_path: Path
) -> None:
    about = Eagle(parallel=True, norm_before_fc=True, state_normed=True, output_normed=True)
    folder = save_head(make_head(about, AutoConfig.from_pretrained(tiny_llama)), tmp_path / "head")
    head = open_head(folder, PEAGLE)
    module = load_eagle3(head, open_checkpoint(tiny_llama), 64)
    rows = rows_of([teacher_of(target, head).teach(samples(1)[0])])
    found = [module.logits(d, x) for d, x in enumerate(module.unroll(rows, DEPTH))]
    model, ids = NativeHead(head, target, 64, "none"), ids_of(head)
    hidden = [np.ascontiguousarray(part) for part in rows.fused.split(target.hidden_size, -1)]
    count = len(rows.tokens)
    states, places = np.empty((count, model.hidden_size), np.float32), array("i", range(count))
    model.fuse(hidden, places, states, places)
    for place in (9, 15):
        segment = Segment(
            rows.tokens[:place].tolist(), 1, range(1, 17), 1, count + 1, first=1,
            states=states[:place],
        )  # fmt: skip
        logits = model.run(
            [model.behind(segment, DEPTH, segment.tokens[-1])], model.new_store(20, 4)
        ).logits
        at = int((rows.drafts == place - 1).nonzero())
        expected = torch.stack([each[at] for each in found])
        np.testing.assert_allclose(logits[:, ids], expected, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("some", [False, True])
def test_a_lesson_is_what_the_target_says(some: bool, target: NativeTransformer) -> None:
    ids = np.arange(3, 320, 2) if some else np.arange(320)
    teacher = Teacher(target, 64, (0,), ids if some else None, 1 << 20)
    sample = samples(1)[0]
    lesson = teacher.teach(sample)
    assert teacher.teach(sample).hidden is lesson.hidden  # kept
    tokens = sample.tokens.tolist()
    whole = Segment(tokens, 0, range(8), len(tokens), len(tokens), key="test")
    output = target.run([whole], target.new_store(8, 16), (0,))
    log_p = torch.from_numpy(output.logits).log_softmax(-1)[lesson.rows]
    assert lesson.rows.tolist() == (np.flatnonzero(sample.said[1:])).tolist()
    assert torch.equal(lesson.best, log_p.argmax(-1))
    expected = log_p[:, ids].topk(KNOWN_IDS, -1)
    torch.testing.assert_close(lesson.log_p, expected.values.half())
    found = log_p[:, ids].gather(-1, lesson.ids.long())
    torch.testing.assert_close(found, expected.values)
    torch.testing.assert_close(
        lesson.hidden[0], torch.from_numpy(output.hidden[0]).bfloat16(), rtol=0, atol=0
    )


def new_head(folder: Path, tiny_llama: Path, ids: np.ndarray) -> Eagle3:
    checkpoint = open_checkpoint(tiny_llama)
    write_new_eagle3(folder, checkpoint, NewHead(str(tiny_llama), ids, (0, 1, 1), DEPTH, 0))
    return load_eagle3(open_head(folder, EAGLE3), checkpoint, 64)


def test_a_new_head_is_a_checkpoint_that_can_be_served(
    tiny_llama: Path, target: NativeTransformer, tmp_path: Path
) -> None:
    ids = frequent_ids(np.bincount(np.arange(300) % 200, minlength=320), 1.0, 128)
    assert len(ids) == 128
    module = new_head(tmp_path / "new", tiny_llama, ids)
    NativeHead(read_head(tmp_path / "new"), target, 64, "none")
    save_eagle3(module, None, tmp_path / "saved")
    again = load_eagle3(open_head(tmp_path / "saved", EAGLE3), open_checkpoint(tiny_llama), 64)
    for name, weight in module.named_parameters():
        torch.testing.assert_close(again.get_parameter(name), weight.bfloat16().float())
    assert (ids_of(again.head) == ids).all()


def test_a_draft_is_learned_from_as_far_as_it_is_right(
    tiny_llama: Path, target: NativeTransformer, tmp_path: Path
) -> None:
    """The loss of a batch is that of each sample's drafts, one by one."""
    ids = np.arange(2)  # so that a head that knows nothing is right half the time
    module = new_head(tmp_path / "new", tiny_llama, ids)
    task = HeadTask(module, teacher_of(target, module.head), ids, DEPTH, forward_kl, 0.5)
    batch = [each._replace(tokens=each.tokens % 2) for each in samples(3)]
    lessons = [teacher_of(target, module.head).teach(each) for each in batch]
    total, tokens, ends = torch.zeros(()), 0, [0] * (DEPTH + 1)
    begins = rows_of(lessons).begins
    for lesson, begin in zip(lessons, begins, strict=False):
        said = [
            module.logits(d, x).log_softmax(-1)
            for d, x in enumerate(module.unroll(rows_of([lesson]), DEPTH))
        ]
        position = {row: i for i, row in enumerate(lesson.rows.tolist())}
        for row, first in position.items():
            depth = 0
            while depth < DEPTH and (label := position.get(row + depth)) is not None:
                p, log_q = lesson.log_p[label].float().exp(), said[depth][first]
                total = total - 0.5**depth * (p * log_q[lesson.ids[label].long()]).sum()
                right = log_q.argmax() == lesson.tokens[row + depth + 1]
                if not right and (begin + row - 1) % ANYWAY:
                    break
                depth += 1
            ends[depth] += 1
            tokens += 1
    assert all(ends)  # drafts of each length are among them
    result = task.learn(batch)
    assert result.tokens == tokens
    assert result.loss == pytest.approx(total.item() / tokens, rel=1e-4)
    learned = [p for p in module.parameters() if p.requires_grad]
    found = [p.grad.clone() for p in learned]
    assert all(g.isfinite().all() and g.any() for g in found)
    module.zero_grad()
    (total / tokens).backward()
    for gradient, parameter in zip(found, learned, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6)


def test_a_batch_whose_drafts_all_end_is_learned_from(
    tiny_llama: Path, target: NativeTransformer, tmp_path: Path
) -> None:
    module = new_head(tmp_path / "new", tiny_llama, np.arange(320))
    task = HeadTask(module, teacher_of(target, module.head), np.arange(320), DEPTH, forward_kl, 0.5)
    short = samples(1)[0]._replace(said=np.arange(LENGTH) == LENGTH - 1)
    learned = task.learn([short])
    assert learned.tokens == 1
    assert learned.loss > 0
    assert module.fc.weight.grad.any()


def test_a_rehearsal_is_as_long_as_a_later_step(
    tiny_llama: Path, target: NativeTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that knows nothing is hardly ever right, so that its first steps are short."""
    module = new_head(tmp_path / "new", tiny_llama, np.arange(320))
    task = HeadTask(module, teacher_of(target, module.head), np.arange(320), DEPTH, forward_kl, 0.5)
    rows: list[int] = []
    logits = module.logits

    def counted(depth: int, x: torch.Tensor) -> torch.Tensor:
        rows.append(len(x))
        return logits(depth, x)

    monkeypatch.setattr(module, "logits", counted)
    task.learn(samples(8))
    first = rows.copy()
    rows.clear()
    task.rehearse(samples(8))
    assert len(first) == len(rows) == DEPTH
    assert first[0] == rows[0]
    assert all(
        2 * a < b < c / 2 for a, b, c in zip(first[1:], rows[1:], [rows[0]] * 3, strict=True)
    )
