"""Steps of training on a device that is not the CPU, as far as a machine without one can tell."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from outrider.base.kept import write_kept
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.checkpoints.heads import EAGLE3, MEDUSA, PEAGLE
from outrider.models.native import NativeTransformer
from outrider.native import choice as native
from outrider.training import precision
from outrider.training.distill import DistillTask
from outrider.training.drafter_files import made_of
from outrider.training.head_files import NewHead, ids_of, load_eagle3, open_head
from outrider.training.heads import HeadTask
from outrider.training.loop import Task, Training
from outrider.training.losses import LOSSES
from outrider.training.medusa import load_medusa, write_new_medusa
from outrider.training.plan import Plan
from outrider.training.samples import Samples
from outrider.training.teacher import Teacher
from tests.support.heads import Eagle, make_head, save_head
from tests.support.loading import native_model
from tests.support.pretended import Elsewhere, placed, pretended
from tests.support.taught import random_samples

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native step is off")
CONTEXT, DEPTH = 64, 3


@pytest.fixture(scope="module")
def target(tiny_llama: Path) -> NativeTransformer:
    return native_model(native.library(), tiny_llama, "float32", CONTEXT)


def head_task(kind: str, tiny_llama: Path, target: NativeTransformer, folder: Path) -> Task:
    checkpoint = open_checkpoint(tiny_llama)
    if kind == MEDUSA:
        everything = np.arange(320)
        write_new_medusa(folder, checkpoint, NewHead(str(tiny_llama), everything, (1,), DEPTH, 0))
    else:
        about = Eagle(parallel=kind == PEAGLE, norm_before_fc=kind == PEAGLE)
        save_head(make_head(about, AutoConfig.from_pretrained(tiny_llama)), folder)
    head = open_head(folder, kind)
    module = (load_medusa if kind == MEDUSA else load_eagle3)(head, checkpoint, CONTEXT)
    teacher = Teacher(target, CONTEXT, head.target_layers(target.hidden_layers), ids_of(head))
    return HeadTask(module, teacher, ids_of(head), DEPTH, LOSSES["hybrid"], 0.9)


def small_task(tiny_llama: Path, target: NativeTransformer) -> Task:
    module = made_of(open_checkpoint(tiny_llama), (0,), None).module
    teacher, loss = Teacher(target, CONTEXT, (), None), LOSSES["reverse-kl"]
    return DistillTask(module, teacher, 320, loss, 0.8, 0.5, DEPTH, 0)


@pytest.mark.parametrize("kind", [EAGLE3, PEAGLE, MEDUSA, "distill"])
def test_a_step_on_another_device_is_the_same(
    kind: str, tiny_llama: Path, target: NativeTransformer, tmp_path: Path
) -> None:
    def task() -> Task:
        if kind == "distill":
            return small_task(tiny_llama, target)
        return head_task(kind, tiny_llama, target, tmp_path / "head")

    here, there, batch = task(), task(), random_samples(4, 24)
    placed(there.module)
    learned = here.learn(batch)
    with torch.no_grad():
        judged = here.judge(batch)
    with pretended():
        assert there.learn(batch) == pytest.approx(learned, rel=1e-5)
        with torch.no_grad():
            assert there.judge(batch) == pytest.approx(judged, rel=1e-5)
    for own, other in zip(here.module.parameters(), there.module.parameters(), strict=True):
        assert isinstance(other, Elsewhere)
        assert (own.grad is None) == (other.grad is None)
        if own.grad is not None:
            torch.testing.assert_close(own.grad, other.grad.inner)


def test_matrices_are_multiplied_in_bf16_if_the_plan_says_so(
    tiny_llama: Path, target: NativeTransformer, tmp_path: Path
) -> None:
    """Weights stay fp32, and gradients are those of fp32 but for rounding."""
    gradients = []
    for bf16 in (False, True):
        task = head_task(EAGLE3, tiny_llama, target, tmp_path / "head")
        plan, data = Plan(steps=1, bf16=bf16, clip=1e6), Samples(random_samples(40, 24))
        training = Training(task, data, plan, tmp_path / str(bf16), {})
        module = task.module
        seen: list[torch.dtype] = []
        hook = module.get_submodule("fc").register_forward_hook(
            lambda *all, seen=seen: seen.append(all[-1].dtype)
        )
        training.run()
        hook.remove()
        assert seen[0] is (torch.bfloat16 if bf16 else torch.float32)
        assert all(p.dtype is torch.float32 for p in module.parameters())
        gradients.append([p.detach().clone() for p in module.parameters() if p.requires_grad])
    for exact, rounded in zip(*gradients, strict=True):
        torch.testing.assert_close(rounded, exact, rtol=0.1, atol=1e-3)


def test_the_precision_is_kept_for_the_rest_of_a_training(
    tiny_llama: Path, target: NativeTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is faster later, so that going on gives the same bits."""
    data, plan, file = Samples(random_samples(40, 24)), Plan(steps=1), tmp_path / "t" / "run.json"
    for gains in (True, False):
        monkeypatch.setattr("outrider.training.loop.gains_from_bf16", lambda kind, g=gains: g)
        task = head_task(EAGLE3, tiny_llama, target, tmp_path / "head")
        assert Training(task, data, plan, tmp_path / "t", {}).plan.bf16
    kept = json.loads(file.read_text())
    del kept["bf16"]  # as written before
    kept["plan"]["bf16"] = plan.bf16
    write_kept(file, kept)
    task = head_task(EAGLE3, tiny_llama, target, tmp_path / "head")
    assert Training(task, data, plan, tmp_path / "t", {}).plan.bf16 is False


@pytest.mark.parametrize(
    ("known", "takes", "bf16"),
    [
        ({}, 0.5, False),
        ({"avx512_bf16": True}, 0.5, True),
        ({"avx512_bf16": True}, 2.0, False),
        ({"amx_bf16": True}, 0.1, True),
    ],
)
def test_a_cpu_multiplies_in_bf16_if_that_is_faster(
    known: dict[str, bool], takes: float, bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``takes`` times as long as in fp32; without instructions for it nothing is timed."""
    clock = 0.0

    def multiply(*tensors: torch.Tensor) -> None:
        nonlocal clock
        clock += takes if torch.is_autocast_enabled("cpu") else 1.0

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known)
    monkeypatch.setattr(precision, "F", SimpleNamespace(linear=multiply))
    monkeypatch.setattr(precision, "time", SimpleNamespace(perf_counter=lambda: clock))
    gains = precision.gains_from_bf16.__wrapped__
    assert gains("cpu") is bf16
    assert gains("cuda")
