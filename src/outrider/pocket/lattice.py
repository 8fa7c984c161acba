"""Rounding of the pocket pair's weights, so that a wheel's deflate halves them."""

import torch

STEPS = 12
"""Steps of the lattice in a standard deviation of a matrix."""
BITS = 5
"""Significant bits of a multiple of the step. The step has three, so bf16 holds their product."""


@torch.no_grad()
def round_matrices(model: torch.nn.Module) -> None:
    """Round every matrix of ``model`` to few values, which bf16 holds exactly."""
    for matrix in model.parameters():
        if matrix.ndim == 2:
            matrix.copy_(_rounded(matrix))


def _rounded(matrix: torch.Tensor) -> torch.Tensor:
    """Return the nearest multiples of a step, with at most ``BITS`` significant bits each."""
    step = _significant(matrix.double().std() / STEPS, 3)
    return _significant(torch.round(matrix.double() / step), BITS) * step


def _significant(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Return ``x`` rounded to ``bits`` significant bits, and integers to integers."""
    fraction, exponent = torch.frexp(x)
    return torch.ldexp(torch.round(fraction * 2**bits), exponent - bits)
