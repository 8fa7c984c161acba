"""Gated delta nets in torch, row by row: the reference of the native step's.

Yang et al., "Gated delta networks: improving Mamba2 with delta rule", 2025.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..checkpoints.families import Delta
from .states import Tensors, Walks, alike, convolved
from .torch_weights import TorchDelta

SMALLEST = 1e-6
"""Added to the squares of a query or key before their root is taken."""


def unit(x: torch.Tensor) -> torch.Tensor:
    """Return vectors [..., size] of length 1, in fp32."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + SMALLEST)


def delta_net(
    walks: Walks,
    layer: int,
    inputs: torch.Tensor,
    rates: torch.Tensor,
    taps: torch.Tensor,
    weights: TorchDelta,
    shape: Delta,
    eps: float,
) -> torch.Tensor:
    """Return what a gated delta net makes of each sequence's rows, [padded rows, values].

    ``inputs`` [padded rows, .] are queries, keys and values, and gates, ``rates`` [padded rows, 2 *
    value heads] strengths and decays. The state of a head is fp32 [key_dim, value_dim].
    """
    s, dtype = shape, inputs.dtype
    mixed, gates = inputs.split((s.conv_width, s.values), -1)
    strengths, steps = rates.chunk(2, -1)
    strengths = alike(torch.sigmoid, strengths).float()
    decays = alike(F.softplus, steps.float() + weights.dt_bias)
    decays = alike(torch.exp, weights.decay * decays)
    keys, places = s.key_heads * s.key_dim, torch.arange(s.value_heads, device=inputs.device)
    sharing = places % s.key_heads if s.tiled_heads else places // (s.value_heads // s.key_heads)

    def advance(state: Tensors, rows: Tensors) -> tuple[torch.Tensor, Tensors]:
        past, memory = state
        line, past = convolved(past, rows[0], taps, None)
        line = alike(F.silu, line).float()
        parts = line[:, :keys], line[:, keys : 2 * keys]
        units = [unit(each.view(len(line), s.key_heads, s.key_dim)) for each in parts]
        queries, own = (each.index_select(1, sharing) for each in units)
        queries = queries / s.key_dim**0.5
        values = line[:, 2 * keys :].view(len(line), s.value_heads, s.value_dim)
        out = []
        for q, k, v, strength, decay in zip(queries, own, values, *rows[1:], strict=True):
            memory = memory * decay[:, None, None]
            known = (memory * k[:, :, None]).sum(1)
            update = (v - known) * strength[:, None]
            memory = memory + k[:, :, None] * update[:, None]
            out.append((memory * q[:, :, None]).sum(1))
        return torch.stack(out).to(dtype), (past, memory)

    zero = (
        mixed.new_zeros(len(taps) - 1, s.conv_width),
        inputs.new_zeros(s.value_heads, s.key_dim, s.value_dim, dtype=torch.float32),
    )
    out = walks.run(layer, (mixed, strengths, decays), zero, advance).float()
    normed = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + eps)
    gated = weights.norm * normed.to(dtype) * alike(F.silu, gates.reshape(normed.shape).float())
    return gated.to(dtype).flatten(1)
