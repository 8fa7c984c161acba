"""Muon in fp32: the update of a matrix is its momentum, made orthogonal.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. ``torch.optim.Muon``
computes in bf16, which takes five times as long on CPUs without instructions for it: a quarter of
a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

COEFFICIENTS = 3.4445, -4.775, 2.0315
"""Coefficients of the Newton-Schulz iteration, as Muon's authors chose them."""
ITERATIONS = 5
MATCHED = 0.2
"""Root mean square of AdamW's updates, about, to which updates are scaled (Liu et al., "Muon is
scalable for LLM training", 2025, section 2.2)."""


def orthogonal(matrix: Tensor) -> Tensor:
    """Return U V^T of a matrix's singular value decomposition U S V^T, approximately.

    An iteration is X <- P X, where P is a polynomial of X X^T. So all of them are made from that
    square matrix, and X is multiplied once, by the product of all P.
    """
    a, b, c = COEFFICIENTS
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x = x / x.norm().clamp(min=1e-7)
    square = x @ x.T
    factor = torch.eye(len(x), dtype=x.dtype, device=x.device)
    for left in reversed(range(ITERATIONS)):
        step = torch.addmm(square, square, square, beta=b, alpha=c)
        step.diagonal().add_(a)
        factor = step @ factor
        if left:
            square = step @ (step @ square)
    made: Tensor = factor @ x
    return made if wide else made.T


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov's momentum and decoupled weight decay, for parameters of two dimensions.

    It takes AdamW's learning rates, since updates are scaled to be as large as AdamW's.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(parameters, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters."""
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(gradient)
                mean = state["momentum"].lerp_(gradient, 1 - momentum)
                update = orthogonal(gradient.lerp(mean, momentum))
                scale = MATCHED * max(parameter.shape) ** 0.5
                parameter.mul_(1 - rate * group["weight_decay"])
                parameter.add_(update, alpha=-rate * scale)
