"""Muon in fp32: the update of a matrix is its momentum, made orthogonal.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. ``torch.optim.Muon``
computes in bf16, which is five times as slow on CPUs without bf16 instructions: a quarter of a
step.
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
"""Approximate root mean square of AdamW's updates, to which Muon's are scaled (Liu et al., "Muon is
scalable for LLM training", 2025, section 2.2)."""
BLOCK = 288
"""Rows or columns, about, that are orthogonalised by themselves, like the shards of Khaled et al.,
"MuonBP: Faster Muon via block-periodic orthogonalization", 2025: time rises with their cube."""


def orthogonal(matrix: Tensor, block: int | None = None) -> Tensor:
    """Return U V^T of a matrix's singular value decomposition U S V^T, approximately.

    With ``block`` the shorter side is cut into equal parts of about that size, each made orthogonal
    by itself. An iteration is X <- P X, where P is a polynomial of X X^T. So all P are computed
    from that square matrix, and X is multiplied once, by their product.
    """
    a, b, c = COEFFICIENTS
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x = x.unflatten(0, (num_parts(len(x), block), -1))
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    square = x @ x.mT
    factor: Tensor | None = None
    for left in reversed(range(ITERATIONS)):
        step = torch.baddbmm(square, square, square, beta=b, alpha=c)
        step.diagonal(dim1=1, dim2=2).add_(a)
        factor = step if factor is None else step @ factor
        if left:
            square = step @ (step @ square)
    assert factor is not None
    made: Tensor = (factor @ x).flatten(0, 1)
    return made if wide else made.T


def num_parts(length: int, block: int | None) -> int:
    """Return how many equal parts a length is cut into, of about ``block`` each."""
    parts = 1 if block is None else max(1, round(length / block))
    while length % parts:
        parts -= 1
    return parts


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov's momentum and decoupled weight decay, for parameters of two dimensions.

    It takes AdamW's learning rates, since updates are scaled to be as large as AdamW's. They are
    made orthogonal in blocks of about ``block`` rows or columns, or whole if None.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float,
        block: int | None = BLOCK,
    ) -> None:  # fmt: skip
        options = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "block": block,
        }  # fmt: skip
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
                update = orthogonal(gradient.lerp(mean, momentum), group["block"])
                scale = MATCHED * max(parameter.shape) ** 0.5
                parameter.mul_(1 - rate * group["weight_decay"])
                parameter.add_(update, alpha=-rate * scale)
