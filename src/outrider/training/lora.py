"""LoRA: low-rank changes to a model's linear layers, merged into their weights at the end.

Hu et al., "LoRA: Low-rank adaptation of large language models", 2022, section 4.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LowRank(nn.Module):
    """A frozen linear layer, and a change of its weight that begins as 0: scale * up @ down."""

    def __init__(self, base: nn.Linear, rank: int, scale: float, draw: torch.Generator) -> None:
        super().__init__()
        rank = min(rank, *base.weight.shape)
        rows, width = base.weight.shape
        self.base, self._scale = base, scale
        self.down = nn.Parameter(torch.randn(rank, width, generator=draw) / sqrt(width))
        self.up = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Return the changed layer's output for ``x`` [..., inputs]."""
        rows = x.flatten(0, -2)
        whole: Tensor = self.base(rows)
        # In place: separate sums would take three times the memory of a layer's output.
        whole.addmm_(F.linear(rows, self.down), self.up.t().to(whole.dtype), alpha=self._scale)
        shaped: Tensor = whole.unflatten(0, x.shape[:-1])
        return shaped

    @property
    def merged(self) -> Tensor:
        """The weight of the one linear layer that computes the same."""
        return self.base.weight + self._scale * (self.up @ self.down)


def add_low_rank(model: nn.Module, rank: int, alpha: float, seed: int) -> None:
    """Freeze a model, and give the linear layers in its decoder layers changes of a ``rank``.

    The change is scaled by ``alpha`` / ``rank``.
    """
    model.requires_grad_(False)
    draw = torch.Generator().manual_seed(seed)
    for name, module in [*model.named_modules()]:
        if isinstance(module, nn.Linear) and ".layers." in name:
            parent, _, own = name.rpartition(".")
            changed = LowRank(module, rank, alpha / rank, draw)
            setattr(model.get_submodule(parent), own, changed)


def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's parameters and their names, with the changes merged into the weights.

    One at a time, since merged weights are copies.
    """
    changed = {n: m for n, m in model.named_modules() if isinstance(m, LowRank)}
    for name, parameter in model.named_parameters():
        owner, _, own = name.rpartition(".")
        layer = owner.removesuffix(".base")
        if layer not in changed:
            yield name, parameter.detach()
        elif own == "weight":
            yield f"{layer}.weight", changed[layer].merged.detach()
        elif own == "bias":
            yield f"{layer}.bias", parameter.detach()
