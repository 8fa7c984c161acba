"""Muon beside torch's, which computes in bf16."""

from __future__ import annotations

import pytest
import torch

from outrider.training.muon import Muon, num_parts, orthogonal


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)])
def test_it_is_muon(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    begun, gradients = torch.randn(shape), torch.randn(6, *shape)
    ours, theirs = (torch.nn.Parameter(begun.clone()) for _ in range(2))
    options = {"lr": 0.01, "momentum": 0.95, "weight_decay": 0.1}
    pairs = [
        (ours, Muon([ours], **options, block=None)),
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


@pytest.mark.parametrize("shape", [(384, 400), (576, 384), (10, 12)])
def test_blocks_become_orthogonal_by_themselves(shape: tuple[int, int]) -> None:
    torch.manual_seed(2)
    matrix = torch.randn(shape)
    side = shape.index(min(shape))
    expected = [orthogonal(part) for part in matrix.chunk(num_parts(min(shape), 192), side)]
    torch.testing.assert_close(orthogonal(matrix, 192), torch.cat(expected, side))


@pytest.mark.parametrize(("length", "parts"), [(10, 1), (192, 1), (384, 2), (576, 3), (997, 1)])
def test_parts_are_equal(length: int, parts: int) -> None:
    assert num_parts(length, 192) == parts
