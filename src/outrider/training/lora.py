"""LoRA: low-rank changes to a model's linear layers, merged into their weights at the end.

Hu et al., "LoRA: Low-rank adaptation of large language models", 2022, section 4.1.
"""

from __future__ import annotations

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
        whole: Tensor = self.base(x)
        return whole + F.linear(F.linear(x, self.down), self.up) * self._scale

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


def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters by name, with the changes merged into the weights."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    for name, module in model.named_modules():
        if isinstance(module, LowRank):
            weights[f"{name}.weight"] = module.merged.detach()
            for part in ("base.weight", "down", "up"):
                del weights[f"{name}.{part}"]
            bias = weights.pop(f"{name}.base.bias", None)
            if bias is not None:
                weights[f"{name}.bias"] = bias
    return weights
