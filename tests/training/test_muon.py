"""Muon beside torch's, which computes in bf16."""

from __future__ import annotations

import pytest
import torch

from outrider.training.muon import Muon, orthogonal


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)])
def test_it_is_muon(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    begun, gradients = torch.randn(shape), torch.randn(6, *shape)
    ours, theirs = (torch.nn.Parameter(begun.clone()) for _ in range(2))
    options = {"lr": 0.01, "momentum": 0.95, "weight_decay": 0.1}
    pairs = [
        (ours, Muon([ours], **options)),
        (theirs, torch.optim.Muon([theirs], **options, adjust_lr_fn="match_rms_adamw")),
    ]
    for gradient in gradients:
        for parameter, optimiser in pairs:
            parameter.grad = gradient.clone()
            optimiser.step()
    moved = [(parameter.detach() - begun).flatten() for parameter, _ in pairs]
    assert torch.cosine_similarity(*moved, dim=0) > 0.999
    assert moved[0].norm().item() == pytest.approx(moved[1].norm().item(), rel=0.01)


def test_it_makes_matrices_orthogonal() -> None:
    torch.manual_seed(1)
    values = torch.linalg.svdvals(orthogonal(torch.randn(32, 64)))
    assert values.min() > 0.6
    assert values.max() < 1.3
