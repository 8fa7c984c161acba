"""Fits a linear prediction of a target's next state, with which a new EAGLE-3 head begins."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..models.base import Model
from .samples import Sample
from .teacher import Teacher

FITTED_ROWS = 16_384
"""Approximate number of rows that it is fitted to."""
RIDGE = 1e-3
"""Ridge, as a share of the mean square of the inputs."""


def fitted_fuse(
    model: Model, samples: Sequence[Sample], layers: Sequence[int], context: int
) -> NDArray[np.float32]:
    """Return the matrix that best turns a token's states into the last state of the next token.

    It is fp32 [width, layers * width], by ridge regression between normalised rows. Norms follow in
    a head, so only directions count, and the matrix has the scale of one that is drawn at random.
    """
    wide, width = len(layers) * model.hidden_size, model.hidden_size
    teacher = Teacher(model, context, (*layers, model.hidden_layers - 1), np.arange(1))
    square, product, rows = torch.zeros(wide, wide), torch.zeros(wide, width), 0
    for sample in samples:
        hidden = teacher.teach(sample).hidden.float()
        inputs = unit(hidden[:-1, :-1].transpose(0, 1).flatten(1))
        square += inputs.T @ inputs
        product += inputs.T @ unit(hidden[-1, 1:])
        rows += len(inputs)
        if rows >= FITTED_ROWS:
            break
    square.diagonal().add_(RIDGE * square.diagonal().mean() + 1e-6)
    fuse = torch.linalg.solve(square, product).T
    scaled: NDArray[np.float32] = (fuse / (fuse.std() * wide**0.5 + 1e-9)).numpy()
    return scaled


def unit(rows: Tensor) -> Tensor:
    """Return rows with a root mean square of 1."""
    return rows * rows.square().mean(-1, keepdim=True).clamp(min=1e-12).rsqrt()
